"""One export and everything copied under it.

The order of the steps makes a snapshot exact: describe the tables, read the last sequence of CDC,
create the consistent point, let every worker import it and lock the tables, and describe the tables
again. Only then is the first row copied. The locks prevent changes of the tables' structure until
the last row is copied. A table that is copied in groups is the only one of its export.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from bridge.errors import BridgeError, Refused, Retryable, SnapshotError
from bridge.postgres.errors import LockTimeout, StatementFailed, statement_errors
from bridge.postgres.export import exported_snapshot, reported_wait
from bridge.postgres.sessions import connect_session, set_session
from bridge.snapshot.coordinator.groups import (
    CannotGoOn,
    GroupInterrupted,
    fingerprint,
    is_divisible,
)
from bridge.snapshot.coordinator.jobs import ConsistentPoint, JobState
from bridge.snapshot.coordinator.records import DivisionRecord
from bridge.snapshot.coordinator.store import JETSTREAM_ERRORS
from bridge.snapshot.messages import (
    ChunkNumber,
    ChunkNumberWanted,
    ChunkStored,
    Connected,
    CopyDone,
    CopyPiece,
    CopyTask,
    DictionaryTrained,
    LocksTaken,
    LockTables,
    NoMorePieces,
    ObjectAnnounced,
    PieceCut,
    PieceWanted,
    StartCopying,
    TableCancelled,
    TableFailed,
    TableFinished,
    TableTask,
    unexpected,
)
from bridge.snapshot.tables import MeasuredTable, Piece, cut, describe_table, useful_workers
from consumer_sdk.transport.cancellation import errors_of
from consumer_sdk.transport.holds import hold_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from bridge.postgres.connection import CatalogConnection
    from bridge.postgres.export import ExportedSnapshot
    from bridge.schemas.tables import PublishedTables
    from bridge.snapshot.coordinator.jobs import JobRegistry, SnapshotJob
    from bridge.snapshot.coordinator.requests import SnapshotSettings
    from bridge.snapshot.coordinator.store import SnapshotStore
    from bridge.snapshot.coordinator.worker_pool import WorkerPool, WorkerProcess
    from bridge.snapshot.messages import Command, Report, ServerAccess
    from bridge.snapshot.tables import HeapSize, TableDescription
    from bridge.source import Source

MOST_ATTEMPTS: Final = 5
WORKER_START_SECONDS: Final = 60.0
# A session that requests ACCESS EXCLUSIVE waits for the first worker's lock, and the other workers
# wait behind that session. PostgreSQL does not detect this deadlock, so they must not wait long.
LATER_LOCK_SECONDS: Final = 1.0
# Longer than a worker waits for NATS, which is the only reason for it to be idle in a transaction.
IDLE_LOCK_SECONDS: Final = 120.0
STARTING: Final = "the snapshot's worker processes to start"


class ExportRun:
    """Copies several tables under one exported snapshot."""

    def __init__(
        self,
        source: Source,
        access: ServerAccess,
        settings: SnapshotSettings,
        *,
        schemas: PublishedTables,
        store: SnapshotStore,
        pool: WorkerPool,
        registry: JobRegistry,
        jobs: Sequence[SnapshotJob],
    ) -> None:
        self._source = source
        self._access = access
        self._settings = settings
        self._schemas = schemas
        self._store = store
        self._pool = pool
        self._registry = registry
        self._jobs = list(jobs)
        self._restarted: set[str] = set()
        """Ids of the jobs that were put back into the queue."""
        self._sizes: dict[str, Sequence[HeapSize]] = {}
        self._seconds = 0.0
        """How long the copy of all jobs will take."""

    def owns(self, job: SnapshotJob) -> bool:
        """Whether this run still works on the job: it has neither ended nor been restarted."""
        return not job.state.is_final and job.snapshot_id not in self._restarted

    async def perform(self) -> None:
        """Complete every job, or restart it if its table changed meanwhile.

        After SnapshotError, the caller must fail the jobs that have not ended.
        """
        async with self._session() as catalog:
            await self._perform(catalog)

    async def describe_copied(self) -> None:
        """Describe the table of a job whose last group an earlier bridge has copied."""
        (job,) = self._jobs
        async with self._session() as catalog:
            if await self._describe_before_export(catalog, job):
                await self._read_schema(job)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[CatalogConnection]:
        try:
            with statement_errors():
                async with await connect_session(
                    self._access.login, "tailrace snapshot catalog"
                ) as catalog:
                    await set_session(catalog)
                    yield catalog
        except StatementFailed as error:
            raise SnapshotError(str(error)) from error

    async def _perform(self, catalog: CatalogConnection) -> None:
        jobs = self._jobs = [
            job for job in self._jobs if await self._describe_before_export(catalog, job)
        ]
        if not jobs:
            return
        sizes = [size for job in jobs for size in self._sizes[job.snapshot_id]]
        with suppress(*JETSTREAM_ERRORS):
            await self._store.make_room(sum(_bytes_to_store(job, self._sizes) for job in jobs))
        async with self._pool.borrow(useful_workers(sizes, self._settings.workers)) as workers:
            cdc = await self._store.cdc_state()
            async with exported_snapshot(
                self._access.login,
                catalog,
                wait_limit=self._settings.wait_limit,
                report=self._report_waiting,
            ) as export:
                await hold_async("snapshot.exported")
                point = ConsistentPoint(export.snapshot_lsn, cdc.last_seq + 1, cdc.created_us)
                for job in jobs:
                    job.begin_export(point)
                failed, contended = await self._import(catalog, workers, export)
            limit = int(LATER_LOCK_SECONDS * 1000)
            await catalog.execute(f"SET lock_timeout = {limit}".encode())
            for index, job in enumerate(jobs):
                await self._compare_after_locking(
                    catalog, job, failed.get(index), index in contended
                )
            await self._copy_in_time(workers)

    async def _copy_in_time(self, workers: Sequence[WorkerProcess]) -> None:
        """Copy everything; GroupInterrupted if the export of a group is held for too long."""
        began_at = time.monotonic()
        division = self._jobs[0].division
        if division is None:
            await self._copy(workers)
            sizes = [size for job in self._jobs for size in self._sizes[job.snapshot_id]]
            if all(job.state is JobState.READY for job in self._jobs):
                self._registry.speed.note(sizes, time.monotonic() - began_at)
            return
        try:
            async with asyncio.timeout(division.seconds_left) as limit:
                await self._copy(workers)
        except TimeoutError as error:
            if not limit.expired():
                raise
            division.failures += 1
            division.shrink()
            raise GroupInterrupted(
                f"a group took longer than {self._settings.export_limit:g} s"
            ) from error

    async def _describe_before_export(self, catalog: CatalogConnection, job: SnapshotJob) -> bool:
        """Describe a table; False if its job does not belong to this export."""
        try:
            job.description, sizes = await self._describe(catalog, job)
        except Refused as refusal:
            await self._registry.fail(job, str(refusal))
            return False
        self._sizes[job.snapshot_id] = sizes
        if job.division is not None:
            if fingerprint(job.description) != job.division.record.fingerprint:
                raise CannotGoOn(f"the structure of {job.name} changed; ask again")
        elif not await self._belongs_here(job, job.description, sizes):
            self._restarted.add(job.snapshot_id)
            return False
        job.attempts += 1
        job.wait_for([])
        job.estimate(0 if job.options.where else sum(size.rows_estimate for size in sizes))
        return True

    async def _belongs_here(
        self, job: SnapshotJob, description: TableDescription, sizes: Sequence[HeapSize]
    ) -> bool:
        """Whether a job is copied under this export, and not in groups or under a later one."""
        limit = self._settings.export_limit
        seconds = 0.0 if job.options.where else self._registry.speed.seconds(sizes)
        if is_divisible(job, description, seconds, limit):
            record = DivisionRecord(
                epoch=self._source.epoch,
                asked=job.asked,
                columns=job.options.columns,
                format=job.options.format,
                zstd=job.options.zstd,
                fingerprint=fingerprint(description),
                schema_version=0,
                stream_created_us=0,
                cdc_seq=0,
            )
            try:
                await self._registry.divide(job, record, sizes, limit, self._settings.chunk_rows)
            except JETSTREAM_ERRORS as error:
                await self._registry.fail(job, f"the snapshot could not be recorded: {error}")
            return False
        if self._seconds and self._seconds + seconds > limit:
            self._registry.put_back(job)
            return False
        self._seconds += seconds
        return True

    async def _describe(self, catalog: CatalogConnection, job: SnapshotJob) -> MeasuredTable:
        found = await describe_table(catalog, self._source.publication, job.schema, job.table)
        return MeasuredTable(found.description.restricted_to(job.options.columns), found.sizes)

    async def _report_waiting(self, sessions: list[str]) -> None:
        for job in filter(self.owns, self._jobs):
            if job.waiting_for != sessions:
                job.wait_for(sessions)
                await self._registry.publish_progress(job)

    async def _import(
        self,
        catalog: CatalogConnection,
        workers: Sequence[WorkerProcess],
        export: ExportedSnapshot,
    ) -> tuple[dict[int, str], set[int]]:
        """Let every worker import the snapshot and lock the tables.

        Return the tables that cannot be locked, and the tables for which another session requested
        a lock after the first worker had locked them.
        """
        tables = tuple([await self._table_task(job) for job in self._jobs])
        backend_pids: list[int] = []
        contended: set[int] = set()

        async def begin(worker: WorkerProcess) -> None:
            await worker.send(self._task(worker.number, export, tables))
            backend_pids.append((await worker.expect(Connected)).backend_pid)

        async def lock(worker: WorkerProcess, seconds: float) -> dict[int, str]:
            await worker.send(LockTables(seconds, IDLE_LOCK_SECONDS))
            return (await worker.expect(LocksTaken)).errors

        async def lock_later(worker: WorkerProcess) -> None:
            contended.update(await lock(worker, LATER_LOCK_SECONDS))

        # On a busy machine workers start slowly.
        await self._report_waiting([STARTING])
        try:
            async with asyncio.timeout(WORKER_START_SECONDS):
                await asyncio.gather(*map(begin, workers))
        except TimeoutError as error:
            raise SnapshotError(
                f"the snapshot's workers were not ready within {WORKER_START_SECONDS:g} s; "
                "is the machine overloaded? ask again later"
            ) from error
        await self._report_waiting([])
        limit = self._settings.wait_limit
        async with reported_wait(
            catalog, backend_pids, limit, self._report_waiting, "a lock on the table"
        ):
            failed = await lock(workers[0], limit)
            await asyncio.gather(*map(lock_later, workers[1:]))
        return failed, contended

    async def _compare_after_locking(
        self,
        catalog: CatalogConnection,
        job: SnapshotJob,
        lock_error: str | None,
        contended: bool,
    ) -> None:
        """Compare with the first description, now that the locks are held; then plan the copy."""
        description: TableDescription | None
        sizes: Sequence[HeapSize]
        try:
            with statement_errors():
                description, sizes = await self._describe(catalog, job)
        except LockTimeout:
            description, sizes, contended = None, (), True
        except Refused as error:
            await self._registry.fail(job, str(error))
            return
        if description is not None and description != job.description:
            await self._try_again(job, f"the structure of {job.name} changed")
        elif lock_error is not None:
            await self._registry.fail(job, f"{job.name} cannot be locked: {lock_error}")
        elif description is None or contended:
            await self._try_again(job, f"another session waited for a lock on {job.name}")
        else:
            await self._plan(job, description, sizes)

    async def _try_again(self, job: SnapshotJob, reason: str) -> None:
        if job.attempts < MOST_ATTEMPTS:
            self._restarted.add(job.snapshot_id)
            if job.division is None:
                self._registry.restart(job)
            return
        await self._registry.fail(
            job, f"{reason} during each of {MOST_ATTEMPTS} attempts; ask again later"
        )

    async def _plan(
        self, job: SnapshotJob, description: TableDescription, sizes: Sequence[HeapSize]
    ) -> None:
        try:
            await self._read_schema(job)
        except (BridgeError, Retryable) as error:
            if job.division is not None:
                raise
            await self._registry.fail(job, str(error))
            return
        if job.division is None:
            where = job.options.where
            job.pieces = (
                cut(description, sizes) if where is None else [Piece(None, keys=where.keys)]
            )
        await self._registry.begin_copy(job)

    async def _read_schema(self, job: SnapshotJob) -> None:
        """Read the version of the table's schema; CannotGoOn if earlier groups have another."""
        job.schema_document = await self._schemas.ensure_schema(job.schema, job.table)
        record = None if job.division is None else job.division.record
        version = job.schema_document["schema_version"]
        if record is not None and record.groups and record.schema_version != version:
            raise CannotGoOn(f"the structure of {job.name} changed; ask again")

    async def _copy(self, workers: Sequence[WorkerProcess]) -> None:
        for job in self._jobs:
            await self._complete_if_copied(job)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(self._serve(worker))
        except BaseExceptionGroup as group:
            # The first error ended the other tasks.
            raise errors_of(group)[0] from group

    async def _serve(self, worker: WorkerProcess) -> None:
        """Answer a worker's requests until it has finished."""
        await worker.send(StartCopying())
        while not isinstance(report := await worker.receive(), CopyDone):
            match report:
                case PieceWanted():
                    await worker.send(await self._next_piece(worker))
                case ChunkNumberWanted(table):
                    number = self._jobs[table].take_number()
                    await worker.send(TableCancelled() if number is None else ChunkNumber(number))
                case _:
                    await self._note(worker, report)

    async def _note(self, worker: WorkerProcess, report: Report) -> None:
        match report:
            case ChunkStored(table, number, rows, sha256):
                self._jobs[table].note_stored(number, rows, sha256)
            case ObjectAnnounced(table, name):
                self._jobs[table].objects.append(name)
            case DictionaryTrained(table, content):
                job = self._jobs[table]
                await self._store.dictionaries.add(job.token, job.options.format, content)
            case TableFinished(table):
                job = self._jobs[table]
                job.workers.discard(worker.number)
                await self._complete_if_copied(job)
            case PieceCut(table, end):
                division = self._jobs[table].division
                assert division is not None
                division.note_cut(worker.number, end)
            case TableFailed(table, error, is_passing):
                job = self._jobs[table]
                job.workers.discard(worker.number)
                job.pieces.clear()
                if job.division is not None:
                    if is_passing:
                        raise GroupInterrupted(error)
                    job.division.note_failed(worker.number)
                await self._registry.fail(job, error)
            case _:
                raise unexpected(report)

    async def _next_piece(self, worker: WorkerProcess) -> Command:
        for index, job in enumerate(self._jobs):
            # A restarted job belongs to another export with other workers.
            if not self.owns(job):
                continue
            if job.division is not None:
                assert job.description is not None
                piece = await job.division.next_piece(job.description, worker.number)
                if piece is not None:
                    job.workers.add(worker.number)
                    return CopyPiece(index, piece)
            elif job.pieces:
                job.workers.add(worker.number)
                return CopyPiece(index, job.pieces.pop(0))
        return NoMorePieces()

    async def _complete_if_copied(self, job: SnapshotJob) -> None:
        if self.owns(job) and job.is_copied and job.division is None:
            await self._registry.complete(job)

    def _task(
        self, worker: int, export: ExportedSnapshot, tables: tuple[TableTask, ...]
    ) -> CopyTask:
        return CopyTask(
            worker=worker,
            access=self._access,
            snapshot_name=export.snapshot_name,
            snapshot_lsn=export.snapshot_lsn,
            source=self._source.name,
            epoch=self._source.epoch,
            prefix=self._source.subjects.prefix,
            init_stream=self._source.subjects.init_stream,
            chunk_rows=self._settings.chunk_rows,
            tables=tables,
        )

    async def _table_task(self, job: SnapshotJob) -> TableTask:
        assert job.description is not None
        dictionary = None
        # Arrow chunks consist of columns, for which a dictionary of rows is useless.
        trainable = job.options.zstd and job.options.format != "arrow"
        if trainable:
            dictionary = await self._store.dictionaries.current(job.token, job.options.format)
        attempt = None if job.division is None else job.division.attempt
        return TableTask(
            description=job.description,
            snapshot_id=job.snapshot_id,
            format=job.options.format,
            zstd=job.options.zstd,
            dictionary=dictionary,
            train=trainable and dictionary is None,
            attempt=attempt.name if attempt is not None else "",
        )


def _bytes_to_store(job: SnapshotJob, sizes: Mapping[str, Sequence[HeapSize]]) -> int:
    """About how many bytes a job will still store."""
    if job.options.where is not None:
        return 0
    total = sum(size.total_bytes for size in sizes[job.snapshot_id])
    rows = sum(size.rows_estimate for size in sizes[job.snapshot_id])
    return total * max(0, rows - job.rows) // rows if rows else total
