"""The active snapshots: their states, their queue, and how each of them ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import nats.errors

from bridge.errors import SnapshotError
from bridge.snapshot.coordinator.groups import CopySpeed, divide
from bridge.snapshot.coordinator.records import SnapshotRecord
from bridge.snapshot.coordinator.requests import CopyOptions
from bridge.snapshot.coordinator.store import JETSTREAM_ERRORS, STOPPED
from consumer_sdk.transport.cancellation import stay_cancelled, uninterrupted
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire import envelope
from consumer_sdk.wire.checksums import snapshot_checksum
from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nats.aio.client import Client

    from bridge.snapshot.coordinator.groups import Division
    from bridge.snapshot.coordinator.records import DivisionRecord
    from bridge.snapshot.coordinator.requests import SnapshotRequest
    from bridge.snapshot.coordinator.store import SnapshotStore
    from bridge.snapshot.messages import ChunkFormat
    from bridge.snapshot.tables import HeapSize, Piece, TableDescription
    from bridge.source import Source
    from bridge.telemetry.stats import BridgeStats, SnapshotGauge, SnapshotState

    JobKey: TypeAlias = "tuple[str, str, CopyOptions]"

logger = logging.getLogger(__name__)

MOST_EXPORTS: Final = 2
PROGRESS_SECONDS: Final = 1.0


class JobState(StrEnum):
    """The state of a snapshot, as answers and progress messages name it."""

    WAITING = "waiting"
    """In the queue, or waiting for its export and the lock on its table."""
    COPYING = "copying"
    READY = "ready"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return not _FOLLOWING[self]


_FOLLOWING: Final[Mapping[JobState, frozenset[JobState]]] = {
    JobState.WAITING: frozenset({JobState.COPYING, JobState.FAILED}),
    JobState.COPYING: frozenset({JobState.READY, JobState.FAILED}),
    JobState.READY: frozenset(),
    JobState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ConsistentPoint:
    """Where a snapshot belongs in the WAL and in the CDC stream."""

    snapshot_lsn: int
    cdc_seq: int
    """A reader of the snapshot begins with this sequence."""
    stream_created_us: int


@dataclass(slots=True)
class SnapshotJob:
    """A snapshot of one table with one set of options; equal requests share it."""

    schema: str
    table: str
    options: CopyOptions
    asked: dict[str, Any]
    snapshot_id: str
    progress: SnapshotGauge
    state: JobState = JobState.WAITING
    attempts: int = 0
    record_revision: int = 0
    description: TableDescription | None = None
    """The table as it was before the export."""
    schema_document: dict[str, Any] = field(default_factory=dict)
    point: ConsistentPoint | None = None
    """Set by the export."""
    division: Division | None = None
    """Set if the table is copied in groups."""
    estimated_rows: int | None = None
    started_at: float = field(default_factory=time.time)
    pieces: list[Piece] = field(default_factory=list)
    """The pieces that no worker has been given yet."""
    workers: set[int] = field(default_factory=set)
    """The workers that copy it or still hold rows of it."""
    next_chunk: int = 0
    chunk_digests: dict[int, str] = field(default_factory=dict)
    """The digests of the acknowledged chunks, by number."""
    rows: int = 0
    objects: list[str] = field(default_factory=list)
    waiting_for: list[str] = field(default_factory=list)
    error: str | None = None
    no_more_chunks: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no worker can send another chunk of it."""

    @property
    def key(self) -> JobKey:
        """Requests with the same key share this snapshot."""
        return self.schema, self.table, self.options

    @property
    def record(self) -> SnapshotRecord:
        """Its record in KV while it is active."""
        division = None if self.division is None else self.division.record
        return SnapshotRecord(self.schema, self.table, self.snapshot_id, division=division)

    @property
    def token(self) -> str:
        return table_token(self.schema, self.table)

    @property
    def name(self) -> str:
        """The table as SQL spells it."""
        return format_table_name(self.schema, self.table)

    @property
    def is_copied(self) -> bool:
        """Whether every row is in an acknowledged chunk."""
        return not self.pieces and not self.workers and len(self.chunk_digests) == self.next_chunk

    def begin_export(self, point: ConsistentPoint) -> None:
        """Note the point of its export; a snapshot in groups begins at the point of its first."""
        if self.division is None:
            self.point = point
            return
        self.division.begin(point)
        self.progress.group = self.division.number
        if not self.division.record.groups:
            self.point = point

    def reset_chunks(self, digests: dict[int, str], rows: int) -> None:
        """Forget all chunks but these, which are stored."""
        self.pieces.clear()
        self.workers.clear()
        self.chunk_digests = digests
        self.next_chunk = len(digests)
        self.rows = self.progress.rows = rows
        self.progress.chunks = len(digests)

    def move_to(self, state: JobState) -> None:
        """Enter the next state; ValueError for one that cannot follow."""
        if state not in _FOLLOWING[self.state]:
            raise ValueError(f"a snapshot that is {self.state} cannot become {state}")
        self.state = state

    def wait_for(self, sessions: list[str]) -> None:
        """Note what it waits for; an empty list means nothing."""
        self.waiting_for = self.progress.waiting_for = sessions

    def estimate(self, rows: int) -> None:
        """Note how many rows the catalog estimates; 0 means that it has no estimate."""
        self.estimated_rows = self.progress.total_estimate = rows or None

    def take_number(self) -> int | None:
        """The number of the next chunk, None if no more are wanted."""
        if self.state.is_final:
            return None
        number = self.next_chunk
        self.next_chunk += 1
        return number

    def note_stored(self, number: int, rows: int, digest: str) -> None:
        """Count a chunk that the stream has acknowledged."""
        self.chunk_digests[number] = digest
        self.rows += rows
        self.progress.rows = self.rows
        self.progress.chunks = len(self.chunk_digests)

    def checksum(self) -> str:
        """The checksum of all chunks together, for the meta."""
        return snapshot_checksum(self.chunk_digests, self.next_chunk)


class JobRegistry:
    """All active snapshots by key; adds, queues and ends them."""

    def __init__(
        self, client: Client, source: Source, store: SnapshotStore, stats: BridgeStats
    ) -> None:
        self._client = client
        self._source = source
        self._store = store
        self._stats = stats
        self._jobs: dict[JobKey, SnapshotJob] = {}
        self._queue: list[SnapshotJob] = []
        self._queued = asyncio.Event()
        self._groups: asyncio.Queue[SnapshotJob] = asyncio.Queue()
        self.speed = CopySpeed()
        self.exports = asyncio.Semaphore(MOST_EXPORTS)
        """Limits the number of exports that run at the same time."""

    def __len__(self) -> int:
        return len(self._jobs)

    def count(self, schema: str, table: str) -> int:
        """How many snapshots of a table are active."""
        return sum((job.schema, job.table) == (schema, table) for job in self._jobs.values())

    def find(self, key: JobKey) -> SnapshotJob | None:
        """The active snapshot that a request can share, if there is one."""
        schema, table, options = key
        # A snapshot of one point is good for those who could use several, too.
        return self._jobs.get(key) or self._jobs.get(
            (schema, table, replace(options, pieces=False))
        )

    async def add(self, schema: str, table: str, request: SnapshotRequest) -> SnapshotJob:
        """Begin a snapshot: record it, then queue it."""
        snapshot_id = _new_snapshot_id()
        progress = self._stats.begin_snapshot(snapshot_id, format_table_name(schema, table))
        job = SnapshotJob(schema, table, request.options, request.asked, snapshot_id, progress)
        self._jobs[job.key] = job
        try:
            await self._store.records.put(job)
        except BaseException:
            del self._jobs[job.key], self._stats.snapshots[snapshot_id]
            raise
        event(logger, "snapshot requested", table=job.name, snapshot_id=snapshot_id)
        self._enqueue(job)
        return job

    async def divide(
        self, job: SnapshotJob, record: DivisionRecord, sizes: Sequence[HeapSize], limit: float,
        chunk_rows: int,
    ) -> None:  # fmt: skip
        """Let a job be copied in groups from now on."""
        job.division = divide(record, sizes, limit, chunk_rows)
        await self._store.records.update(job)
        event(logger, "snapshot in groups", table=job.name, snapshot_id=job.snapshot_id)
        self._enqueue(job)

    def resume(self, record: SnapshotRecord, limit: float, chunk_rows: int) -> None:
        """Go on with a snapshot in groups that another bridge began."""
        division = record.division
        assert division is not None
        options = CopyOptions(division.columns, cast("ChunkFormat", division.format), division.zstd)
        name = format_table_name(record.schema, record.table)
        progress = self._stats.begin_snapshot(record.snapshot_id, name)
        job = SnapshotJob(
            record.schema, record.table, options, division.asked, record.snapshot_id, progress
        )
        job.record_revision = record.revision
        job.division = divide(division, (), limit, chunk_rows)
        job.division.has_remains = True
        if division.groups:
            job.point = ConsistentPoint(
                division.groups[0].snapshot_lsn, division.cdc_seq, division.stream_created_us
            )
        self._jobs[job.key] = job
        event(
            logger,
            "snapshot goes on",
            table=job.name,
            snapshot_id=job.snapshot_id,
            groups=len(division.groups),
            rows=division.rows,
        )
        self._enqueue(job)

    async def next_divided(self) -> SnapshotJob:
        """Wait for a job whose next group may be copied; they take turns."""
        while (job := await self._groups.get()).state.is_final:
            pass
        return job

    def postpone(self, job: SnapshotJob, seconds: float) -> None:
        """Queue a job in groups again after a pause."""
        asyncio.get_running_loop().call_later(seconds, self._groups.put_nowait, job)

    def put_back(self, job: SnapshotJob) -> None:
        """Queue a job again for another export."""
        self._enqueue(job)

    def restart(self, job: SnapshotJob) -> None:
        """Queue a job again because its table changed before the first row was copied."""
        event(logger, "snapshot begins again", table=job.name, snapshot_id=job.snapshot_id)
        self._enqueue(job)

    def _enqueue(self, job: SnapshotJob) -> None:
        if job.division is not None:
            self._groups.put_nowait(job)
            return
        if self.exports.locked():
            job.wait_for([f"one of the {MOST_EXPORTS} exports under way to end"])
        self._queue.append(job)
        self._queued.set()

    async def wait_queued(self) -> None:
        """Wait until a job is in the queue."""
        await self._queued.wait()

    def take_queued(self) -> list[SnapshotJob]:
        """Empty the queue."""
        self._queued.clear()
        jobs, self._queue = self._queue, []
        return jobs

    async def begin_copy(self, job: SnapshotJob) -> None:
        """Begin the copy: the table is locked and divided into pieces."""
        # The next groups of a snapshot find it so already.
        if job.state is not JobState.COPYING:
            job.move_to(JobState.COPYING)
        job.progress.state = "copying"
        await self.publish_progress(job)

    async def complete(self, job: SnapshotJob) -> None:
        """Publish the meta of a copied job; the job fails if that is not possible.

        A job in groups raises what went wrong instead, because it may be completed later.
        """
        # Shielded: a cancellation here would revoke a snapshot that readers may have seen.
        await uninterrupted(asyncio.create_task(self._complete(job)))

    async def _complete(self, job: SnapshotJob) -> None:
        try:
            await self._store.publish_meta(job)
        except (SnapshotError, *JETSTREAM_ERRORS) as error:
            if job.division is not None:
                raise
            await self.fail(job, f"the snapshot could not be completed: {error}")
            return
        if job.state is JobState.WAITING:
            # Its last group was copied by an earlier bridge.
            job.move_to(JobState.COPYING)
        job.move_to(JobState.READY)
        self._remove(job, "done")
        event(
            logger,
            "snapshot complete",
            table=job.name,
            snapshot_id=job.snapshot_id,
            rows=job.rows,
            chunks=job.next_chunk,
            seconds=time.time() - job.started_at,
        )
        await self.publish_progress(job)

    async def fail(self, job: SnapshotJob, error: str, *, may_retry: bool = False) -> None:
        """End a job without a result; a job that has ended does not change."""
        await self._fail(job, error, "failed", may_retry)

    def leave(self, job: SnapshotJob, reason: str) -> None:
        """Forget a job in groups without touching what is stored: a bridge goes on with it."""
        if job.state.is_final:
            return
        job.move_to(JobState.FAILED)
        self._remove(job, "cancelled")
        event(
            logger,
            "snapshot left to the next bridge",
            table=job.name,
            snapshot_id=job.snapshot_id,
            reason=reason,
        )

    async def cancel(self, job: SnapshotJob) -> None:
        """End a job because the bridge stops; the next bridge goes on with one in groups."""
        if job.division is not None:
            self.leave(job, "the bridge stops")
        else:
            await self._fail(job, STOPPED, "cancelled")

    async def cancel_all(self) -> None:
        """Cancel all active jobs; no worker may run any more."""
        for job in tuple(self._jobs.values()):
            await self.cancel(job)
            job.no_more_chunks.set()

    async def _fail(
        self, job: SnapshotJob, error: str, shown: SnapshotState, may_retry: bool = False
    ) -> None:
        if job.state.is_final:
            return
        job.move_to(JobState.FAILED)
        job.error = job.progress.error = error
        self._remove(job, shown)
        event(
            logger,
            "snapshot failed",
            level=logging.WARNING,
            table=job.name,
            snapshot_id=job.snapshot_id,
            error=error,
        )
        await self.publish_progress(job)
        self._store.publish_error_later(job, error, may_retry=may_retry)

    def _remove(self, job: SnapshotJob, shown: SnapshotState) -> None:
        job.progress.state = shown
        job.wait_for([])
        job.progress.finished_at = time.time()
        self._jobs.pop(job.key, None)

    async def publish_progress_regularly(self) -> None:
        """Publish the progress of every snapshot once a second, so that readers see it is alive."""
        while True:
            await stay_cancelled()
            await asyncio.sleep(PROGRESS_SECONDS)
            for job in tuple(self._jobs.values()):
                await self.publish_progress(job)

    async def publish_progress(self, job: SnapshotJob) -> None:
        """Publish the progress of a snapshot; the message is not stored."""
        document = {
            "v": envelope.WIRE_VERSION,
            "snapshot_id": job.snapshot_id,
            "table": job.table,
            "schema": job.schema,
            "state": job.state.value,
            "rows": job.rows,
            "chunks": len(job.chunk_digests),
            "pieces_left": len(job.pieces),
            "group": None if job.division is None else job.division.number,
            "estimated_rows": job.estimated_rows,
            "waiting_for": job.waiting_for,
            "error": job.error,
            "ts": time.time_ns() // 1000,
        }
        # Progress messages are not stored, so a snapshot does not fail if one cannot be sent.
        with suppress(nats.errors.Error, OSError):
            await self._client.publish(
                self._source.subjects.snapshot_progress(job.token, job.snapshot_id),
                envelope.encode(document, as_json=self._source.as_json),
                headers={envelope.CONTENT_TYPE: self._source.content_type},
            )


def _new_snapshot_id() -> str:
    """A unique id, valid as a token of a subject."""
    return f"{time.time_ns() // 1_000_000:x}-{secrets.token_hex(6)}"
