"""One export and everything copied under it.

Order is what makes a snapshot exact: look at the tables, read the last sequence of CDC, make the
consistent point, let every worker import it and lock the tables, look again. Only then does the
first row travel; the locks keep the tables as they are until the last has.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from bridge.errors import BridgeError, Retryable
from bridge.snapshot.errors import Refused, SnapshotError
from bridge.snapshot.export import connect, exported_snapshot, problem, reported_wait
from bridge.snapshot.tables import cut, read_shape, set_session, shape_document, useful_workers
from consumer_sdk.transport.holds import hold_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from psycopg import AsyncConnection

    from bridge.jetstream.dictionaries import DictionaryStore
    from bridge.jetstream.streams import StreamState
    from bridge.snapshot.coordinator.job import Job
    from bridge.snapshot.coordinator.worker_pool import WorkerPool, WorkerProcess
    from bridge.snapshot.export import Export
    from bridge.snapshot.tables import Size, TableShape
    from consumer_sdk.wire.subjects import Subjects

logger = logging.getLogger(__name__)

MOST_ATTEMPTS: Final = 5
WORKER_START_SECONDS: Final = 60.0
# Somebody who wants a table for himself waits for the first of our locks on it, and everybody
# after him waits for him. PostgreSQL sees no deadlock there: we must not wait for each other.
CROWDED_SECONDS: Final = 1.0
# Longer than a worker waits for NATS, the one thing that lets it rest within its transaction.
UNTOLD_SECONDS: Final = 120.0
STARTING: Final = "the snapshot's worker processes to start"


@dataclass(frozen=True, slots=True)
class RunContext:
    """What every run needs and none changes."""

    conninfo: str
    nats_access: Mapping[str, Any]
    subjects: Subjects
    source: str
    epoch: int
    publication: str
    workers: int
    chunk_rows: int
    wait_limit: float
    pool: WorkerPool
    dictionaries: DictionaryStore
    cdc_state: Callable[[], Awaitable[StreamState]]
    ensure_schema: Callable[[str, str], Awaitable[dict[str, Any]]]
    changed: Callable[[Job], Awaitable[None]]
    succeed: Callable[[Job], Awaitable[None]]
    fail: Callable[[Job, str], Awaitable[None]]
    begin_again: Callable[[Job], None]


class Run:
    """Copies several tables under one exported snapshot."""

    def __init__(self, context: RunContext, jobs: Sequence[Job]) -> None:
        self._context = context
        self._jobs = list(jobs)
        self._gone: set[str] = set()
        self._sizes: dict[str, Sequence[Size]] = {}

    def holds(self, job: Job) -> bool:
        """Whether a job is still this run's, neither over nor back in the queue."""
        return not job.is_over and job.snapshot_id not in self._gone

    async def perform(self) -> None:
        """Bring every job to its end, or back into the queue where its table changed meanwhile.

        SnapshotError means that the jobs which are not over yet have failed.
        """
        try:
            conninfo = self._context.conninfo
            async with await connect(conninfo, "tailrace snapshot catalog") as catalog:
                await set_session(catalog)
                await self._perform(catalog)
        except psycopg.Error as error:
            raise SnapshotError(problem(error)) from error

    async def _perform(self, catalog: AsyncConnection[Any]) -> None:
        context = self._context
        jobs = self._jobs = [job for job in self._jobs if await self._look_before(catalog, job)]
        if not jobs:
            return
        sizes = [size for job in jobs for size in self._sizes[job.snapshot_id]]
        async with context.pool.crew(useful_workers(sizes, context.workers)) as crew:
            cdc = await context.cdc_state()
            async with exported_snapshot(
                context.conninfo,
                catalog,
                wait_limit=context.wait_limit,
                report=self._report_waiting,
            ) as export:
                await hold_async("snapshot.exported")
                for job in jobs:
                    job.snapshot_lsn = export.snapshot_lsn
                    job.cdc_seq = cdc.last_seq + 1
                    job.stream_created = cdc.created_us
                failed, crowded = await self._import(catalog, crew, export)
            await catalog.execute(f"SET lock_timeout = {int(CROWDED_SECONDS * 1000)}".encode())
            for index, job in enumerate(jobs):
                await self._look_after(catalog, job, failed.get(index), index in crowded)
            await self._copy(crew)

    async def _look_before(self, catalog: AsyncConnection[Any], job: Job) -> bool:
        try:
            job.shape, sizes = await self._look(catalog, job)
        except Refused as refusal:
            await self._context.fail(job, str(refusal))
            return False
        self._sizes[job.snapshot_id] = sizes
        job.attempts += 1
        job.waiting_for = job.progress.waiting_for = []
        job.progress.total_estimate = sum(size.rows_estimate for size in sizes) or None
        return True

    async def _look(
        self, catalog: AsyncConnection[Any], job: Job
    ) -> tuple[TableShape, tuple[Size, ...]]:
        shape, sizes = await read_shape(catalog, self._context.publication, job.schema, job.table)
        return shape.restricted_to(job.options.columns), sizes

    async def _report_waiting(self, sessions: list[str]) -> None:
        for job in filter(self.holds, self._jobs):
            if job.waiting_for != sessions:
                job.waiting_for = job.progress.waiting_for = sessions
                await self._context.changed(job)

    async def _import(
        self, catalog: AsyncConnection[Any], crew: Sequence[WorkerProcess], export: Export
    ) -> tuple[dict[int, str], set[int]]:
        """Let every worker import the snapshot and lock the tables.

        Gives the tables that cannot be locked, and those that somebody else came to wait for
        between the first worker's lock and another's.
        """
        task = await self._task(export)
        backend_pids: list[int] = []
        crowded: set[int] = set()

        async def begin(worker: WorkerProcess) -> None:
            await worker.tell({**task, "worker": worker.number})
            backend_pids.append((await worker.expect("connected"))["pid"])

        async def lock(worker: WorkerProcess, patience: float) -> dict[int, str]:
            await worker.tell({"lock_seconds": patience, "idle_seconds": UNTOLD_SECONDS})
            ready = await worker.expect("ready")
            return {int(index): text for index, text in ready["failed"].items()}

        async def follow(worker: WorkerProcess) -> None:
            crowded.update(await lock(worker, CROWDED_SECONDS))

        # Not at once on a busy machine, because they give way to everything else.
        await self._report_waiting([STARTING])
        try:
            async with asyncio.timeout(WORKER_START_SECONDS):
                await asyncio.gather(*map(begin, crew))
        except TimeoutError as error:
            raise SnapshotError(
                f"the snapshot's workers were not ready within {WORKER_START_SECONDS:g} s; "
                "is the machine overloaded? ask again later"
            ) from error
        await self._report_waiting([])
        limit = self._context.wait_limit
        async with reported_wait(
            catalog, backend_pids, limit, self._report_waiting, "a lock on the table"
        ):
            failed = await lock(crew[0], limit)
            await asyncio.gather(*map(follow, crew[1:]))
        return failed, crowded

    async def _look_after(
        self,
        catalog: AsyncConnection[Any],
        job: Job,
        lock_failure: str | None,
        crowded: bool,
    ) -> None:
        """Compare with the first look, now that the locks hold; then plan the copy."""
        context = self._context
        shape: TableShape | None
        sizes: Sequence[Size]
        try:
            shape, sizes = await self._look(catalog, job)
        except psycopg.errors.LockNotAvailable:
            shape, sizes, crowded = None, (), True
        except Refused as error:
            await context.fail(job, str(error))
            return
        if shape is not None and shape != job.shape:
            await self._try_again(job, f"the structure of {job.name} changed")
        elif lock_failure is not None:
            await context.fail(job, f"{job.name} cannot be locked: {lock_failure}")
        elif shape is None or crowded:
            await self._try_again(job, f"another session waited for a lock on {job.name}")
        else:
            await self._plan(job, shape, sizes)

    async def _try_again(self, job: Job, reason: str) -> None:
        if job.attempts < MOST_ATTEMPTS:
            self._gone.add(job.snapshot_id)
            self._context.begin_again(job)
            return
        await self._context.fail(
            job, f"{reason} during each of {MOST_ATTEMPTS} attempts; ask again when it is at rest"
        )

    async def _plan(self, job: Job, shape: TableShape, sizes: Sequence[Size]) -> None:
        context = self._context
        try:
            job.described = await context.ensure_schema(job.schema, job.table)
        except (BridgeError, Retryable) as error:
            await context.fail(job, str(error))
            return
        job.pieces = cut(shape, sizes)
        job.state = job.progress.state = "copying"
        await context.changed(job)

    async def _copy(self, crew: Sequence[WorkerProcess]) -> None:
        for job in self._jobs:
            await self._settle(job)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in crew:
                    group.create_task(self._serve(worker))
        except* SnapshotError as errors:
            raise SnapshotError(str(_first(errors))) from errors

    async def _serve(self, worker: WorkerProcess) -> None:
        """Answer a worker until it has nothing more to do."""
        await worker.tell({"go": True})
        while True:
            message = await worker.hear()
            match message["say"]:
                case "next":
                    await worker.tell(self._next_piece(worker))
                case "number":
                    number = self._jobs[message["table"]].take_number()
                    await worker.tell({"number": number})
                case "done":
                    return
                case _:
                    await self._note(worker, self._jobs[message["table"]], message)

    async def _note(self, worker: WorkerProcess, job: Job, message: dict[str, Any]) -> None:
        match message["say"]:
            case "stored":
                job.note_stored(message["chunk"], message["rows"], message["sha256"])
            case "object":
                job.objects.append(message["name"])
            case "finished":
                job.workers.discard(worker.number)
                await self._settle(job)
            case "failed":
                job.workers.discard(worker.number)
                job.pieces.clear()
                await self._context.fail(job, message["error"])
            case "dictionary":
                content = base64.b64decode(message["content"])
                await self._context.dictionaries.add(job.token, job.options.format, content)

    def _next_piece(self, worker: WorkerProcess) -> dict[str, Any]:
        for index, job in enumerate(self._jobs):
            # One that began again has a snapshot of its own by now, and other workers.
            if self.holds(job) and job.pieces:
                piece = job.pieces.pop(0)
                job.workers.add(worker.number)
                return {"table": index, "piece": [piece.storage, piece.start, piece.end]}
        return {"table": None}

    async def _settle(self, job: Job) -> None:
        if self.holds(job) and job.is_copied:
            await self._context.succeed(job)

    async def _task(self, export: Export) -> dict[str, Any]:
        context = self._context
        return {
            "conninfo": context.conninfo,
            "nats": dict(context.nats_access),
            "snapshot_name": export.snapshot_name,
            "snapshot_lsn": export.snapshot_lsn,
            "source": context.source,
            "epoch": context.epoch,
            "prefix": context.subjects.prefix,
            "stream": context.subjects.init_stream,
            "objects_bucket": context.subjects.objects_bucket,
            "chunk_rows": context.chunk_rows,
            "tables": [await self._table_task(job) for job in self._jobs],
        }

    async def _table_task(self, job: Job) -> dict[str, Any]:
        assert job.shape is not None
        dictionary = None
        # An Arrow chunk is columns, which have no beginning in common with other chunks.
        trainable = job.options.zstd and job.options.format != "arrow"
        if trainable:
            known = await self._context.dictionaries.current(job.token, job.options.format)
            if known is not None:
                content = base64.b64encode(known[1]).decode("ascii")
                dictionary = {"id": known[0], "content": content}
        return {
            "shape": shape_document(job.shape),
            "snapshot_id": job.snapshot_id,
            "format": job.options.format,
            "zstd": job.options.zstd,
            "dictionary": dictionary,
            "train": trainable and dictionary is None,
        }


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
