"""How snapshots begin and end for everybody else: records, metas, errors, reuse."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import Retryable
from bridge.jetstream.streams import ApiError, StreamState, stream_state
from bridge.snapshot.coordinator.init_stream import BROKER_TROUBLE, InitStream
from bridge.snapshot.coordinator.records import Record, Records
from bridge.snapshot.errors import SnapshotError
from consumer_sdk.transport.holds import hold_async
from consumer_sdk.wire import envelope
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.aio.client import Client
    from nats.js.client import JetStreamContext

    from bridge.snapshot.coordinator.job import Job
    from bridge.snapshot.tables import TableShape
    from consumer_sdk.wire.subjects import Subjects


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a finished snapshot must match to be used again."""

    source: str
    epoch: int
    relation_id: int
    schema_version: int
    columns: tuple[str, ...]
    row_filter: str | None
    format: str
    zstd: bool


class Ledger:
    """Writes and reads what outlives the process; one per active bridge."""

    def __init__(
        self, client: Client, js: JetStreamContext, subjects: Subjects, *, source: str, epoch: int,
        as_json: bool,
    ) -> None:  # fmt: skip
        self._client = client
        self._js = js
        self._subjects = subjects
        self._source = source
        self._epoch = epoch
        self._init = InitStream(js, subjects, as_json=as_json)
        self._opened: Records | None = None

    async def open(self) -> None:
        """Find the bucket that holds the records."""
        name = self._subjects.bridge_bucket
        bucket = await self._js.key_value(name)
        self._opened = Records(self._js, bucket, name, self._source)

    @property
    def _records(self) -> Records:
        assert self._opened is not None
        return self._opened

    async def cdc_state(self) -> StreamState:
        """The CDC stream as its leader has it."""
        try:
            state = await stream_state(self._client, self._subjects.cdc_stream)
        except (ApiError, Retryable) as error:
            raise SnapshotError(f"stream {self._subjects.cdc_stream}: {error}") from error
        if state is None:
            raise SnapshotError(f"there is no stream {self._subjects.cdc_stream}")
        return state

    async def record(self, job: Job) -> None:
        """Remember that a snapshot is under way, before anybody is told its id."""
        await self._records.put(job)

    async def complete(self, job: Job) -> None:
        """Publish the meta; SnapshotError if a chunk is missing or the snapshot was ended."""
        if not await self._records.is_ours(job):
            raise SnapshotError("another bridge has taken over; ask again")
        stored = await self._init.count_chunks(job.token, job.snapshot_id)
        if stored != job.next_chunk:
            raise SnapshotError(
                f"stream {self._subjects.init_stream} holds {stored} of {job.next_chunk} chunks; "
                "look at its limits"
            )
        if not await self._records.mark_complete(job):
            raise SnapshotError("another bridge has taken over; ask again")
        await hold_async("between-chunk-and-meta")
        subject = self._subjects.meta(job.token)
        await self._init.publish(subject, self._meta(job), _meta_id(job.snapshot_id))
        with suppress(*BROKER_TROUBLE):
            await self._records.forget(job.snapshot_id)

    async def announce_failure(self, schema: str, table: str, snapshot_id: str, error: str) -> None:
        """Tell readers that a snapshot will not come."""
        document = {
            "v": envelope.WIRE_VERSION,
            "source": self._source,
            "epoch": self._epoch,
            "snapshot_id": snapshot_id,
            "table": table,
            "schema": schema,
            "error": error,
            "ts": time.time_ns() // 1000,
        }
        subject = self._subjects.error(table_token(schema, table))
        await self._init.publish(subject, document, f"{snapshot_id}-error")

    async def clean_up(
        self, schema: str, table: str, snapshot_id: str, objects: Iterable[str]
    ) -> None:
        """Leave nothing of a failed snapshot behind; its record goes last."""
        await self._init.purge_chunks(table_token(schema, table), snapshot_id)
        await self._init.delete_objects(objects)
        await self._records.forget(snapshot_id)

    async def left_over(self) -> list[tuple[Record, list[str]]]:
        """Snapshots that a bridge of this source left under way, each with its objects."""
        found = []
        for record in await self._records.all():
            subject = self._subjects.meta(table_token(record.schema, record.table))
            # A bridge that died between its last two steps may have taken the first.
            if record.is_complete and await self._init.has_message(
                subject, _meta_id(record.snapshot_id)
            ):
                await self._records.forget(record.snapshot_id)
            else:
                found.append(record)
        names = await self._init.object_names() if found else []
        return [
            (record, [name for name in names if name.startswith(record.object_prefix)])
            for record in found
        ]

    async def reusable(self, schema: str, table: str, wanted: Wanted) -> str | None:
        """Id of the newest finished snapshot, if it still can stand for the table."""
        meta = await self._init.newest_meta(table_token(schema, table))
        if meta is None:
            return None
        try:
            found = Wanted(
                meta["source"],
                meta["epoch"],
                meta["relation_id"],
                meta["schema_version"],
                tuple(column["name"] for column in meta["columns"]),
                meta["row_filter"],
                meta["format"],
                meta["zstd"],
            )
            if found == wanted and await self._still_whole(meta):
                return str(meta["snapshot_id"])
        except (KeyError, TypeError):
            # Written by another version.
            return None
        return None

    async def _still_whole(self, meta: dict[str, Any]) -> bool:
        state = await self.cdc_state()
        if (meta["stream"], meta["stream_created"]) != (state.name, state.created_us):
            return False
        if not state.first_seq <= meta["cdc_seq"] <= state.last_seq + 1:
            return False
        token = table_token(meta["schema"], meta["table"])
        stored = await self._init.count_chunks(token, meta["snapshot_id"])
        return bool(stored == meta["batch_count"])

    def _meta(self, job: Job) -> dict[str, Any]:
        assert job.shape is not None
        return {
            "v": envelope.WIRE_VERSION,
            "snapshot_id": job.snapshot_id,
            "source": self._source,
            "epoch": self._epoch,
            "table": job.table,
            "schema": job.schema,
            "relation_id": job.shape.oid,
            "lsn": job.snapshot_lsn,
            "timestamp": time.time_ns() // 1000,
            "batch_count": job.next_chunk,
            "row_count": job.rows,
            "schema_version": job.described["schema_version"],
            "columns": _columns(job.shape, job.described),
            "options": job.asked,
            "format": job.options.format,
            "zstd": job.options.zstd,
            "row_filter": job.shape.row_filter,
            "stream": self._subjects.cdc_stream,
            "stream_created": job.stream_created,
            "cdc_seq": job.cdc_seq,
            "checksum": job.checksum(),
        }


def _columns(shape: TableShape, described: dict[str, Any]) -> list[dict[str, Any]]:
    """The copied columns, as the schema document describes them."""
    known = {column["name"]: column for column in described["columns"]}
    return [{**column.to_document(), **known.get(column.name, {})} for column in shape.columns]


def _meta_id(snapshot_id: str) -> str:
    return f"{snapshot_id}-meta"
