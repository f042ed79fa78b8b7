"""What JetStream stores of snapshots.

INIT holds the chunks, and the metas and errors of each table. The object store holds wide rows. The
KV bucket `bridge` holds a record of every active snapshot. A snapshot ends with its meta or its
error; then its record is removed. A record that exists when a bridge becomes active was left by a
bridge that died.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import nats.errors
import nats.js.errors

from bridge.errors import Retryable, SnapshotError
from bridge.jetstream.dictionaries import DictionaryStore
from bridge.jetstream.streams import StreamState, api, stream_state
from bridge.schemas.store import read_document
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.calls import DEFAULT_INBOX_PREFIX, ApiCall, consumer_name
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.holds import hold_async
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire import envelope
from consumer_sdk.wire.errors import MISFITS, WireError
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from nats.aio.client import Client
    from nats.js.kv import KeyValue

    from bridge.snapshot.coordinator.jobs import SnapshotJob
    from bridge.snapshot.tables import TableDescription
    from bridge.source import Source

logger = logging.getLogger(__name__)

STOPPED: Final = "the bridge stopped while the snapshot was under way; ask again"
OVERTAKEN: Final = "another bridge has taken over; ask again"
CONSUMER_SECONDS: Final = 10.0
PUBLISH_ATTEMPTS: Final = 4
RETRY_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 5.0
SUPERSEDED_SECONDS: Final = 900.0
MOST_METAS: Final = 10_000
_SNAPSHOT_ID: Final = re.compile(r"[0-9A-Za-z_-]+\Z")
JETSTREAM_ERRORS: Final = (nats.errors.Error, OSError, TimeoutError, ApiError, Retryable)


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """The record of a snapshot that has begun; complete once every chunk is stored."""

    schema: str
    table: str
    snapshot_id: str
    is_complete: bool = False

    @property
    def token(self) -> str:
        return table_token(self.schema, self.table)

    @property
    def meta_id(self) -> str:
        """The message id of its meta."""
        return f"{self.snapshot_id}-meta"

    @property
    def error_id(self) -> str:
        """The message id of its error."""
        return f"{self.snapshot_id}-error"

    @property
    def object_prefix(self) -> str:
        """Common prefix of the names of its objects."""
        return f"snapshot-{self.snapshot_id}-"


@dataclass(frozen=True, slots=True)
class MetaIdentity:
    """The fields of a meta that must match for its snapshot to be reused."""

    source: str
    epoch: int
    relation_id: int
    schema_version: int
    columns: tuple[str, ...]
    row_filter: str | None
    format: str
    zstd: bool


class SnapshotStore:
    """Writes and reads the stored parts of snapshots; one for each active bridge."""

    def __init__(self, client: Client, source: Source) -> None:
        self._client = client
        self._js = client.jetstream()
        self._source = source
        self._subjects = source.subjects
        self._failures: set[asyncio.Task[None]] = set()
        self._removed: set[str] = set()
        """Ids of superseded snapshots whose chunks are removed already."""
        self._bucket: KeyValue
        self._schemas: KeyValue
        self.dictionaries: DictionaryStore

    async def open(self) -> None:
        """Open the buckets."""
        self._bucket = await self._js.key_value(self._subjects.bridge_bucket)
        self._schemas = await self._js.key_value(self._subjects.schemas_bucket)
        self.dictionaries = DictionaryStore(await self._js.key_value(self._subjects.dicts_bucket))

    async def close(self) -> None:
        """Wait a short time for errors that are still being published.

        The next active bridge publishes the others.
        """
        if not self._failures:
            return
        _, late = await asyncio.wait(self._failures, timeout=CLOSE_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def cdc_state(self) -> StreamState:
        """State of the CDC stream, read from its leader."""
        try:
            state = await stream_state(self._client, self._subjects.cdc_stream)
        except (ApiError, Retryable) as error:
            raise SnapshotError(f"stream {self._subjects.cdc_stream}: {error}") from error
        if state is None:
            raise SnapshotError(f"there is no stream {self._subjects.cdc_stream}")
        return state

    async def put_record(self, job: SnapshotJob) -> None:
        """Write the record of a snapshot; this must happen before its id is published."""
        key = _key(job.snapshot_id)
        job.record_revision = await self._bucket.put(key, self._record_value(job.record))

    async def publish_meta(self, job: SnapshotJob) -> None:
        """Publish the meta; SnapshotError if a chunk is missing or another bridge took over."""
        if not await self._holds_record(job):
            raise SnapshotError(OVERTAKEN)
        stored = await self._count_chunks(job.token, job.snapshot_id)
        if stored != job.next_chunk:
            raise SnapshotError(
                f"stream {self._subjects.init_stream} holds {stored} of {job.next_chunk} chunks; "
                "look at its limits"
            )
        await self._complete_record(job)
        await hold_async("between-chunk-and-meta")
        subject = self._subjects.meta(job.token)
        await self._publish(subject, self._meta(job), job.record.meta_id)
        with suppress(*JETSTREAM_ERRORS):
            await self._remove_record(job.snapshot_id)

    def publish_error_later(self, job: SnapshotJob, error: str) -> None:
        """Publish the error of a failed job in the background, and retry while NATS is away.

        Its chunks and objects are purged once no worker can store more of them.
        """
        task = asyncio.create_task(self._end_failed(job, error), name="snapshot error")
        self._failures.add(task)
        task.add_done_callback(self._failures.discard)

    async def end_abandoned(self) -> None:
        """Publish the errors of snapshots that an earlier bridge left active, and purge them."""
        abandoned = []
        for record in await self._records():
            # The bridge may have died after it published the meta or the error.
            if record.is_complete and await self._has_meta(record):
                await self._remove_record(record.snapshot_id)
            else:
                abandoned.append(record)
        names = await self._object_names() if abandoned else []
        for record in abandoned:
            # First the chunks, so that a full stream has room for the error.
            await self._purge_chunks(record)
            try:
                await self._publish_error(record, STOPPED)
            except nats.js.errors.APIError as error:
                # A full INIT stream must not keep the bridge from streaming changes.
                event(
                    logger,
                    "snapshot of an earlier bridge not ended",
                    level=logging.WARNING,
                    snapshot_id=record.snapshot_id,
                    error=str(error),
                )
                continue
            await self._purge(record, [n for n in names if n.startswith(record.object_prefix)])
            event(logger, "snapshot of an earlier bridge ended", snapshot_id=record.snapshot_id)

    async def make_room(self, wanted_bytes: int) -> None:
        """Remove superseded snapshots if INIT has no room for so many bytes.

        A snapshot is superseded by a newer one of its table: only the newest is used again. It is
        kept for a while for those who are reading it.
        """
        state = await stream_state(self._client, self._subjects.init_stream)
        if state is None or state.has_room_for(wanted_bytes):
            return
        superseded = await self._superseded(time.time() - SUPERSEDED_SECONDS)
        names = await self._object_names() if superseded else []
        for record in superseded:
            await self._purge(record, [n for n in names if n.startswith(record.object_prefix)])
            self._removed.add(record.snapshot_id)
        if superseded:
            event(logger, "superseded snapshots removed", count=len(superseded))

    async def _superseded(self, before: float) -> list[SnapshotRecord]:
        """The snapshots with a newer one of the same table that were completed before a time."""
        newest: dict[str, SnapshotRecord] = {}
        found = []
        sequence = 1
        for _ in range(MOST_METAS):
            try:
                message = await self._js.get_msg(
                    self._subjects.init_stream,
                    seq=sequence,
                    subject=self._subjects.meta(">"),
                    next=True,
                )
            except nats.js.errors.NotFoundError:
                break
            sequence = (message.seq or sequence) + 1
            try:
                meta = envelope.decode_payload(message.headers, message.data or b"")
                older = newest.get(message.subject or "")
                newest[message.subject or ""] = SnapshotRecord(
                    meta["schema"], meta["table"], meta["snapshot_id"]
                )
                is_old = meta["timestamp"] / 1e6 < before
            except (WireError, *MISFITS):
                continue
            if older is not None and is_old and _SNAPSHOT_ID.match(older.snapshot_id):
                found.append(older)
        return [record for record in found if record.snapshot_id not in self._removed]

    async def is_foreign(self, token: str) -> bool:
        """Whether another source of the stream publishes this table."""
        try:
            document = read_document((await self._schemas.get(token)).value or b"")
        except (nats.js.errors.KeyNotFoundError, nats.js.errors.InvalidKeyError):
            return False
        return document is not None and document.get("source") != self._source.name

    async def find_reusable(self, token: str, wanted: MetaIdentity) -> str | None:
        """Id of the table's newest finished snapshot, if it may be used in place of a new one."""
        meta = await self._newest_meta(token)
        if meta is None:
            return None
        try:
            found = MetaIdentity(
                meta["source"],
                meta["epoch"],
                meta["relation_id"],
                meta["schema_version"],
                tuple(column["name"] for column in meta["columns"]),
                meta["row_filter"],
                meta["format"],
                meta["zstd"],
            )
            if found == wanted and await self._is_whole(meta):
                return str(meta["snapshot_id"])
        except (KeyError, TypeError):
            # Another version of the bridge wrote this meta.
            return None
        return None

    async def _end_failed(self, job: SnapshotJob, error: str) -> None:
        try:
            await self._publish_error(job.record, error)
        except JETSTREAM_ERRORS:
            # The stream may be full of chunks of this snapshot.
            await job.no_more_chunks.wait()
            await _until_stored(lambda: self._purge_chunks(job.record))
            await _until_stored(lambda: self._publish_error(job.record, error))
        # A chunk that is stored after the purge would stay.
        await job.no_more_chunks.wait()
        await _until_stored(lambda: self._purge(job.record, job.objects))

    async def _publish_error(self, record: SnapshotRecord, error: str) -> None:
        document = {
            "v": envelope.WIRE_VERSION,
            "source": self._source.name,
            "epoch": self._source.epoch,
            "snapshot_id": record.snapshot_id,
            "table": record.table,
            "schema": record.schema,
            "error": error,
            "retry": error in (STOPPED, OVERTAKEN),
            "ts": time.time_ns() // 1000,
        }
        await self._publish(self._subjects.error(record.token), document, record.error_id)

    async def _publish(self, subject: str, document: dict[str, Any], message_id: str) -> None:
        """Publish a document; its message id makes sure that it is stored only once."""
        headers = {
            envelope.MSG_ID: message_id,
            envelope.CONTENT_TYPE: self._source.content_type,
        }
        body = envelope.encode(document, as_json=self._source.as_json)
        stream = self._subjects.init_stream
        for attempt in range(PUBLISH_ATTEMPTS):
            try:
                await self._js.publish(subject, body, stream=stream, headers=dict(headers))
            except (nats.errors.TimeoutError, TimeoutError, nats.js.errors.NoStreamResponseError):
                if attempt + 1 == PUBLISH_ATTEMPTS:
                    raise
            else:
                return

    async def _purge(self, record: SnapshotRecord, objects: Iterable[str]) -> None:
        """Remove everything of a failed snapshot; its record is removed last."""
        await self._purge_chunks(record)
        for name in objects:
            # The object may already have been deleted.
            with suppress(nats.js.errors.NotFoundError):
                store = await self._js.object_store(self._subjects.objects_bucket)
                await store.delete(name)
        await self._remove_record(record.snapshot_id)

    async def _purge_chunks(self, record: SnapshotRecord) -> None:
        chunks = self._subjects.chunk(record.token, record.snapshot_id, "*")
        await self._js.purge_stream(self._subjects.init_stream, subject=chunks)

    async def _object_names(self) -> list[str]:
        try:
            store = await self._js.object_store(self._subjects.objects_bucket)
            listed = await store.list(ignore_deletes=True)
        except nats.js.errors.NotFoundError:
            return []
        return [item.name for item in listed]

    async def _count_chunks(self, token: str, snapshot_id: str) -> int:
        """How many chunks are stored: the pending messages of a consumer that reads none."""
        stream = self._subjects.init_stream
        name = consumer_name(DEFAULT_INBOX_PREFIX)
        config = {
            "name": name,
            "filter_subject": self._subjects.chunk(token, snapshot_id, "*"),
            "deliver_policy": "all",
            "ack_policy": "none",
            "inactive_threshold": int(CONSUMER_SECONDS * 1e9),
            "mem_storage": True,
        }
        body = {"stream_name": stream, "config": config}
        created = await api(self._client, ApiCall.CONSUMER_CREATE.of(stream, name), body)
        with suppress(*JETSTREAM_ERRORS):
            await api(self._client, ApiCall.CONSUMER_DELETE.of(stream, name))
        return int(created["num_pending"])

    async def _newest_meta(self, token: str) -> dict[str, Any] | None:
        """The table's last meta, None if there is none that this version can read."""
        try:
            message = await self._js.get_last_msg(
                self._subjects.init_stream, self._subjects.meta(token)
            )
            return envelope.decode_payload(message.headers, message.data or b"")
        except (nats.js.errors.NotFoundError, WireError):
            return None

    async def _has_meta(self, record: SnapshotRecord) -> bool:
        """Whether the meta of this snapshot is stored."""
        subject = self._subjects.meta(record.token)
        sequence = 1
        while True:
            try:
                message = await self._js.get_msg(
                    self._subjects.init_stream, seq=sequence, subject=subject, next=True
                )
            except nats.js.errors.NotFoundError:
                return False
            if (message.headers or {}).get(envelope.MSG_ID) == record.meta_id:
                return True
            sequence = (message.seq or sequence) + 1

    async def _is_whole(self, meta: dict[str, Any]) -> bool:
        """Whether every chunk is stored, and CDC holds every change since."""
        state = await self.cdc_state()
        if (meta["stream"], meta["stream_created"]) != (state.name, state.created_us):
            return False
        if not state.first_seq <= meta["cdc_seq"] <= state.last_seq + 1:
            return False
        token = table_token(meta["schema"], meta["table"])
        stored = await self._count_chunks(token, meta["snapshot_id"])
        return bool(stored == meta["batch_count"])

    async def _records(self) -> list[SnapshotRecord]:
        """The records of this source."""
        found = []
        for key in await self._record_keys():
            try:
                record = read_record((await self._bucket.get(key)).value, self._source.name)
            except nats.js.errors.KeyNotFoundError:
                continue
            if record is not None:
                found.append(record)
        return found

    async def _record_keys(self) -> list[str]:
        watcher = await self._bucket.watch(_key("*"), ignore_deletes=True, meta_only=True)
        try:
            keys = []
            async for entry in watcher:
                # None follows the last stored key.
                if entry is None:
                    break
                keys.append(entry.key)
            return keys
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]

    async def _holds_record(self, job: SnapshotJob) -> bool:
        """Whether no other bridge has ended this snapshot."""
        try:
            await self._bucket.get(_key(job.snapshot_id), revision=job.record_revision)
        except nats.js.errors.KeyNotFoundError:
            return False
        return True

    async def _complete_record(self, job: SnapshotJob) -> None:
        """Mark the record complete before the meta; SnapshotError if another bridge took over."""
        complete = SnapshotRecord(job.schema, job.table, job.snapshot_id, is_complete=True)
        try:
            await self._bucket.update(
                _key(job.snapshot_id), self._record_value(complete), last=job.record_revision
            )
        except nats.js.errors.KeyWrongLastSequenceError as error:
            raise SnapshotError(OVERTAKEN) from error

    async def _remove_record(self, snapshot_id: str) -> None:
        """Purge the key; deleting it would leave a marker for each snapshot."""
        name = self._subjects.bridge_bucket
        await self._js.purge_stream(f"KV_{name}", subject=f"$KV.{name}.{_key(snapshot_id)}")

    def _record_value(self, record: SnapshotRecord) -> bytes:
        document = {
            "source": self._source.name,
            "schema": record.schema,
            "table": record.table,
            "snapshot_id": record.snapshot_id,
            "is_complete": record.is_complete,
        }
        return json.dumps(document).encode()

    def _meta(self, job: SnapshotJob) -> dict[str, Any]:
        assert job.description is not None
        assert job.point is not None
        return {
            "v": envelope.WIRE_VERSION,
            "snapshot_id": job.snapshot_id,
            "source": self._source.name,
            "epoch": self._source.epoch,
            "table": job.table,
            "schema": job.schema,
            "relation_id": job.description.oid,
            "lsn": job.point.snapshot_lsn,
            "timestamp": time.time_ns() // 1000,
            "batch_count": job.next_chunk,
            "row_count": job.rows,
            "schema_version": job.schema_document["schema_version"],
            "columns": _columns(job.description, job.schema_document),
            "options": job.asked,
            "format": job.options.format,
            "zstd": job.options.zstd,
            "row_filter": job.description.row_filter,
            "stream": self._subjects.cdc_stream,
            "stream_created": job.point.stream_created_us,
            "cdc_seq": job.point.cdc_seq,
            "checksum": job.checksum(),
        }


def read_record(value: bytes | None, source: str) -> SnapshotRecord | None:
    """Read a record of this source; None for any other value.

    The id becomes part of a subject that is purged, so it must not hold a wildcard.
    """
    try:
        document = json.loads(value or b"")
        if document["source"] != source or _SNAPSHOT_ID.match(document["snapshot_id"]) is None:
            return None
        return SnapshotRecord(
            str(document["schema"]),
            str(document["table"]),
            str(document["snapshot_id"]),
            document["is_complete"] is True,
        )
    except MISFITS:
        return None


async def _until_stored(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await stay_cancelled()
        try:
            await work()
        except JETSTREAM_ERRORS:
            logger.debug("end of a snapshot not stored yet", exc_info=True)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return


def _columns(table: TableDescription, schema_document: dict[str, Any]) -> list[dict[str, Any]]:
    """The copied columns, as the schema document describes them."""
    known = {column["name"]: column for column in schema_document["columns"]}
    return [{**column.to_document(), **known.get(column.name, {})} for column in table.columns]


def _key(snapshot_id: str) -> str:
    return f"snapshot.{snapshot_id}"
