"""What JetStream stores of snapshots.

INIT holds the chunks, and the metas and errors of each table. The object store holds wide rows. The
KV bucket `bridge` holds a record of every active snapshot, see `records`. A snapshot ends with its
meta or its error; then its record is removed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgpack
import nats.errors
import nats.js.errors

from bridge.errors import Retryable, SnapshotError
from bridge.jetstream.dictionaries import DictionaryStore
from bridge.jetstream.readback import stored_headers
from bridge.jetstream.streams import StreamState, api, stream_state
from bridge.schemas.store import read_document
from bridge.snapshot.coordinator.groups import CannotGoOn
from bridge.snapshot.coordinator.records import (
    OVERTAKEN,
    SNAPSHOT_ID,
    Overtaken,
    RecordStore,
    SnapshotRecord,
)
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.calls import DEFAULT_INBOX_PREFIX, ApiCall, consumer_name
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.holds import hold_async
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire import envelope
from consumer_sdk.wire.errors import MISFITS, WireError
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from nats.aio.client import Client
    from nats.js.kv import KeyValue

    from bridge.snapshot.coordinator.jobs import SnapshotJob
    from bridge.snapshot.tables import TableDescription
    from bridge.source import Source

logger = logging.getLogger(__name__)

STOPPED: Final = "the bridge stopped while the snapshot was under way; ask again"
NEW_EPOCH: Final = "a new epoch began while the snapshot was under way; ask again"
CONSUMER_SECONDS: Final = 10.0
PUBLISH_ATTEMPTS: Final = 4
RETRY_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 5.0
SUPERSEDED_SECONDS: Final = 900.0
MOST_METAS: Final = 10_000
MOST_WHERE_METAS: Final = 256
MOST_KEPT_METAS: Final = 256
PURGES_AT_ONCE: Final = 32
JETSTREAM_ERRORS: Final = (nats.errors.Error, OSError, TimeoutError, ApiError, Retryable)


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
    where: bytes | None = None
    """The canonical option, in MessagePack."""


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
        self._meta_turn = asyncio.Lock()
        self._where_metas: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """The newest metas with `where`, by snapshot id; a whole one hides them in the stream."""
        self._where_ends: deque[tuple[float, SnapshotRecord, list[str]]] = deque()
        """When each snapshot with `where` was completed, with its objects; the oldest first."""
        self._schemas: KeyValue
        self.records: RecordStore
        self.dictionaries: DictionaryStore

    async def open(self) -> None:
        """Open the buckets."""
        bucket = await self._js.key_value(self._subjects.bridge_bucket)
        self.records = RecordStore(self._js, bucket, self._source)
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

    async def cdc_now(self) -> StreamState | None:
        """The same, None if there is no such stream; one of JETSTREAM_ERRORS if NATS is away."""
        return await stream_state(self._client, self._subjects.cdc_stream)

    async def publish_meta(self, job: SnapshotJob) -> None:
        """Publish the meta; SnapshotError if a chunk is missing, Overtaken if not ours any more."""
        if job.division is not None:
            await self.records.update(job)
        elif not await self.records.is_held(job):
            raise Overtaken
        stored = await self._count_chunks(job.token, job.snapshot_id)
        if stored > job.next_chunk and job.division is not None:
            # A bridge that was replaced may have stored chunks since the last group was begun.
            found = await self.stored_chunks(job)
            await self.remove_chunks(job, [n for n in found if n >= job.next_chunk])
            stored = await self._count_chunks(job.token, job.snapshot_id)
        if stored != job.next_chunk:
            kind = SnapshotError if job.division is None else CannotGoOn
            raise kind(
                f"stream {self._subjects.init_stream} holds {stored} of {job.next_chunk} chunks; "
                "look at its limits"
            )
        await self.records.complete(job)
        await hold_async("between-chunk-and-meta")
        await self._publish_meta(job, self._meta(job))
        with suppress(*JETSTREAM_ERRORS):
            await self.records.remove(job.snapshot_id)

    def publish_error_later(self, job: SnapshotJob, error: str, *, may_retry: bool = False) -> None:
        """Publish the error of a failed job in the background, and retry while NATS is away.

        Its chunks and objects are purged once no worker can store more of them.
        """
        task = asyncio.create_task(self._end_failed(job, error, may_retry), name="snapshot error")
        self._failures.add(task)
        task.add_done_callback(self._failures.discard)

    async def end_abandoned(self) -> list[SnapshotRecord]:
        """Publish the errors of snapshots that an earlier bridge left active, and purge them.

        Return those in groups, with which this bridge goes on.
        """
        abandoned = []
        resumable = []
        for record in await self.records.all():
            # The bridge may have died after it published the meta or the error.
            if record.is_complete and await self._has_meta(record):
                await self.records.remove(record.snapshot_id)
            elif record.division is not None and record.division.epoch == self._source.epoch:
                resumable.append(record)
            else:
                abandoned.append(record)
        names = await self._object_names() if abandoned else []
        for record in abandoned:
            # First the chunks, so that a full stream has room for the error.
            await self._purge_chunks(record)
            try:
                reason = STOPPED if record.division is None else NEW_EPOCH
                await self._publish_error(record, reason, may_retry=True)
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
            event(
                logger,
                "snapshot of an earlier bridge ended",
                snapshot_id=record.snapshot_id,
                reason=reason,
            )
        return resumable

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
        newest: dict[str, tuple[int, SnapshotRecord]] = {}
        found: dict[str, SnapshotRecord] = {}
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
                record = SnapshotRecord(meta["schema"], meta["table"], meta["snapshot_id"])
                completed_at, has_where = int(meta["timestamp"]), "where" in meta["options"]
            except (WireError, *MISFITS):
                continue
            is_old = completed_at / 1e6 < before
            if SNAPSHOT_ID.match(record.snapshot_id) is None:
                continue
            if has_where:
                # It is of use only to who asked for it, and supersedes nothing.
                if is_old:
                    found[record.snapshot_id] = record
                continue
            other = newest.get(message.subject or "")
            # The same meta, or an older one, may be stored again.
            if other is None or other[0] < completed_at:
                newest[message.subject or ""] = completed_at, record
                if other is not None and is_old:
                    found[other[1].snapshot_id] = other[1]
        return [record for key, record in found.items() if key not in self._removed]

    async def is_foreign(self, token: str) -> bool:
        """Whether another source of the stream publishes this table."""
        try:
            document = read_document((await self._schemas.get(token)).value or b"")
        except (nats.js.errors.KeyNotFoundError, nats.js.errors.InvalidKeyError):
            return False
        return document is not None and document.get("source") != self._source.name

    async def find_reusable(
        self, token: str, wanted: MetaIdentity, *, may_have_pieces: bool = True
    ) -> str | None:
        """Id of the table's newest finished snapshot, if it may be used in place of a new one.

        One with `where` that is no longer the newest meta is stored again, so that it is found.
        """
        newest = await self._newest_meta(token)
        metas = [] if newest is None else [newest]
        if wanted.where is not None:
            metas += [
                meta
                for meta in reversed(self._where_metas.values())
                if table_token(meta["schema"], meta["table"]) == token
            ]
        for meta in metas:
            if not may_have_pieces and "pieces" in meta:
                continue
            try:
                is_usable = self._identity(meta) == wanted and await self._is_whole(meta)
            except (WireError, *MISFITS):
                # Another version of the bridge wrote this meta.
                continue
            if is_usable:
                if meta is not newest:
                    await self._announce(token, meta, f"{time.time_ns():x}")
                return str(meta["snapshot_id"])
        return None

    def _identity(self, meta: dict[str, Any]) -> MetaIdentity:
        where = meta["options"].get("where")
        return MetaIdentity(
            meta["source"],
            meta["epoch"],
            meta["relation_id"],
            meta["schema_version"],
            tuple(column["name"] for column in meta["columns"]),
            meta["row_filter"],
            meta["format"],
            meta["zstd"],
            None if where is None else self.packed_where(where),
        )

    def packed_where(self, where: dict[str, Any]) -> bytes:
        """The option as a meta has it, in which JSON has written some values as text."""
        body = envelope.encode({"v": envelope.WIRE_VERSION, **where}, as_json=self._source.as_json)
        document = envelope.decode_payload({envelope.CONTENT_TYPE: self._source.content_type}, body)
        packed: bytes = msgpack.packb(document)
        return packed

    async def _publish_meta(self, job: SnapshotJob, meta: dict[str, Any]) -> None:
        if job.options.where is None:
            async with self._meta_turn:
                await self._publish(self._subjects.meta(job.token), meta, job.record.meta_id)
            return
        await self._announce(job.token, meta, job.record.meta_id)
        self._where_metas[job.snapshot_id] = meta
        while len(self._where_metas) > MOST_WHERE_METAS:
            self._where_metas.popitem(last=False)
        self._where_ends.append((time.monotonic(), job.record, job.objects))
        with suppress(*JETSTREAM_ERRORS):
            await self._expire_where(job.token)

    async def _announce(self, token: str, meta: dict[str, Any], message_id: str) -> None:
        """Store a meta with `where`, and after it the newest whole one again.

        Readers look at the newest meta of a table before they ask for a snapshot.
        """
        subject = self._subjects.meta(token)
        async with self._meta_turn:
            newest = await self._newest_meta(token)
            await self._publish(subject, meta, message_id)
            if newest is not None and "where" not in newest.get("options", {}):
                await self._publish(subject, newest, f"{message_id}-again")

    async def _expire_where(self, token: str) -> None:
        """Remove old snapshots with `where`, however many were asked for."""
        while self._where_ends and self._where_ends[0][0] < time.monotonic() - SUPERSEDED_SECONDS:
            _, record, objects = self._where_ends[0]
            await self._purge(record, objects)
            self._where_metas.pop(record.snapshot_id, None)
            self._where_ends.popleft()
        await self._js.purge_stream(
            self._subjects.init_stream, subject=self._subjects.meta(token), keep=MOST_KEPT_METAS
        )

    async def _end_failed(self, job: SnapshotJob, error: str, may_retry: bool) -> None:
        if job.division is not None and not await self._end_division(job):
            return
        try:
            await self._publish_error(job.record, error, may_retry)
        except JETSTREAM_ERRORS:
            # The stream may be full of chunks of this snapshot.
            await job.no_more_chunks.wait()
            await _until_stored(lambda: self._purge_chunks(job.record))
            await _until_stored(lambda: self._publish_error(job.record, error, may_retry))
        # A chunk that is stored after the purge would stay.
        await job.no_more_chunks.wait()
        await _until_stored(lambda: self._purge(job.record, job.objects))

    async def _end_division(self, job: SnapshotJob) -> bool:
        """Record that a snapshot in groups ends; False if another bridge goes on with it."""
        plain = replace(job.record, division=None)
        try:
            await _until_stored(lambda: self.records.update(job, plain))
        except Overtaken:
            return False
        return True

    async def _publish_error(
        self, record: SnapshotRecord, error: str, may_retry: bool = False
    ) -> None:
        document = {
            "v": envelope.WIRE_VERSION,
            "source": self._source.name,
            "epoch": self._source.epoch,
            "snapshot_id": record.snapshot_id,
            "table": record.table,
            "schema": record.schema,
            "error": error,
            "retry": may_retry or error in (STOPPED, OVERTAKEN),
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
        await self._delete_objects(objects)
        await self.records.remove(record.snapshot_id)

    async def _purge_chunks(self, record: SnapshotRecord) -> None:
        chunks = self._subjects.chunk(record.token, record.snapshot_id, "*")
        await self._js.purge_stream(self._subjects.init_stream, subject=chunks)

    async def stored_chunks(self, job: SnapshotJob) -> dict[int, list[str]]:
        """The digests of all stored chunks of a snapshot, by number; their rows are not read."""
        chunks = self._subjects.chunk(job.token, job.snapshot_id, "*")
        found: dict[int, list[str]] = {}
        config = {"filter_subject": chunks, "deliver_policy": "all", "headers_only": True}
        async for message in stored_headers(self._client, self._subjects.init_stream, config):
            number = int(message.subject.rpartition(".")[2])
            found.setdefault(number, []).append(
                (message.headers or {}).get(envelope.CHUNK_SHA256, "")
            )
        return found

    async def remove_chunks(self, job: SnapshotJob, numbers: Sequence[int]) -> None:
        """Remove the chunks with these numbers."""
        for start in range(0, len(numbers), PURGES_AT_ONCE):
            await asyncio.gather(
                *(
                    self._js.purge_stream(
                        self._subjects.init_stream,
                        subject=self._subjects.chunk(job.token, job.snapshot_id, number),
                    )
                    for number in numbers[start : start + PURGES_AT_ONCE]
                )
            )

    async def remove_objects(self, job: SnapshotJob, kept_attempts: set[str]) -> None:
        """Remove the wide rows of a snapshot in groups, except those of these attempts."""
        prefix = job.record.object_prefix
        own = [name for name in await self._object_names() if name.startswith(prefix)]
        job.objects = [
            name for name in own if name.removeprefix(prefix).partition("-")[0] in kept_attempts
        ]
        await self._delete_objects(name for name in own if name not in set(job.objects))

    async def _delete_objects(self, names: Iterable[str]) -> None:
        for name in names:
            # The object may already have been deleted.
            with suppress(nats.js.errors.NotFoundError):
                store = await self._js.object_store(self._subjects.objects_bucket)
                await store.delete(name)

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
            **_several_points(job),
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


def _several_points(job: SnapshotJob) -> dict[str, Any]:
    """Of a snapshot in several groups: where it is exact, and which chunks belong to which point.

    A group without rows has no chunks, but its point counts.
    """
    if job.division is None or len(job.division.record.groups) < 2:
        return {}
    groups = job.division.record.groups
    return {
        "exact_lsn": max(group.snapshot_lsn for group in groups),
        "pieces": [
            {"lsn": group.snapshot_lsn, "chunks": [group.first_chunk, group.next_chunk - 1]}
            for group in groups
            if group.next_chunk > group.first_chunk
        ],
    }


def _columns(table: TableDescription, schema_document: dict[str, Any]) -> list[dict[str, Any]]:
    """The copied columns, as the schema document describes them."""
    known = {column["name"]: column for column in schema_document["columns"]}
    return [{**column.to_document(), **known.get(column.name, {})} for column in table.columns]
