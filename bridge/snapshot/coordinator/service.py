"""Snapshots on request: decides which requests share a snapshot and which exports run."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from bridge.errors import BridgeError, ForeignTable, Refused, Retryable, SnapshotError
from bridge.postgres.sessions import ReconnectingSession
from bridge.snapshot.coordinator.admission import SnapshotRates, TokenBucket, TooMany
from bridge.snapshot.coordinator.groups import (
    LONGEST_PAUSE_SECONDS,
    MOST_FAILURES,
    CannotGoOn,
    GroupInterrupted,
    GroupKeeper,
)
from bridge.snapshot.coordinator.jobs import JobRegistry, JobState
from bridge.snapshot.coordinator.records import Overtaken
from bridge.snapshot.coordinator.requests import Admission, RequestListener
from bridge.snapshot.coordinator.run import ExportRun
from bridge.snapshot.coordinator.store import JETSTREAM_ERRORS, MetaIdentity, SnapshotStore
from bridge.snapshot.coordinator.worker_pool import WorkerPool
from bridge.snapshot.keys import resolve
from bridge.snapshot.tables import describe_table
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.holds import hold_async
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from nats.aio.client import Client

    from bridge.schemas.tables import PublishedTables
    from bridge.snapshot.coordinator.jobs import JobKey, SnapshotJob
    from bridge.snapshot.coordinator.requests import SnapshotRequest, SnapshotSettings
    from bridge.snapshot.messages import ServerAccess
    from bridge.snapshot.tables import TableDescription
    from bridge.source import Source
    from bridge.telemetry.stats import BridgeStats

logger = logging.getLogger(__name__)

# Requests that arrive together share an export, so the first one waits a moment for the others.
GATHER_SECONDS: Final = 0.03
GATHER_LIMIT_SECONDS: Final = 0.5
# Requests are checked one at a time, so one locked table must not delay the others for long.
LOCK_SECONDS: Final = 0.5
# A check costs queries to PostgreSQL and JetStream, so their number is limited too.
CHECK_BURST: Final = 128
CHECK_SECONDS: Final = 1 / 16
NATS_PAUSE_SECONDS: Final = 1.0


class SnapshotService:
    """Answers requests while this bridge is the active one."""

    def __init__(
        self,
        client: Client,
        source: Source,
        access: ServerAccess,
        settings: SnapshotSettings,
        *,
        schemas: PublishedTables,
        stats: BridgeStats,
    ) -> None:
        self._source = source
        self._access = access
        self._settings = settings
        self._schemas = schemas
        self._catalog = ReconnectingSession(
            access.login, "tailrace snapshot requests", LOCK_SECONDS
        )
        self._store = SnapshotStore(client, source)
        self._registry = JobRegistry(client, source, self._store, stats)
        self._requests = RequestListener(
            client, source, access.nats, self._admit, zstd=settings.zstd, stats=stats
        )
        self._checks = TokenBucket(CHECK_BURST, CHECK_SECONDS)
        self._rates = SnapshotRates(settings.interval)
        self._groups = GroupKeeper(self._store)
        self._pool = WorkerPool()
        self._admissions: dict[tuple[JobKey, bool], asyncio.Task[Admission]] = {}
        self._runs: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """End or go on with what an earlier bridge left unfinished, then accept requests."""
        await self._store.open()
        for record in await self._store.end_abandoned():
            self._registry.resume(record, self._settings.export_limit, self._settings.chunk_rows)
        self._background = [
            asyncio.create_task(self._schedule(), name="snapshot schedule"),
            asyncio.create_task(self._schedule_groups(), name="snapshot groups"),
            asyncio.create_task(
                self._registry.publish_progress_regularly(), name="snapshot progress"
            ),
        ]
        await self._requests.open()

    async def watch(self) -> None:
        """Raise Retryable if a task ends that must run as long as requests are accepted."""
        await stay_cancelled()
        tasks = (*self._background, self._requests.answering)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and not task.cancelled():
                error = task.exception()
                reason = type(error).__name__ if error is not None else "it returned"
                logger.error("a task of the snapshots ended", exc_info=error)
                raise Retryable(f"{task.get_name()} ended: {reason}") from error

    async def stop(self) -> None:
        """Cancel all active snapshots and publish their errors; then no worker is left.

        The next bridge goes on with those in groups.
        """
        await self._requests.close()
        tasks = (*self._background, *self._admissions.values(), *self._runs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._registry.cancel_all()
        await self._pool.close()
        await self._store.close()
        await self._catalog.close()

    async def _admit(self, schema: str, table: str, request: SnapshotRequest) -> Admission:
        """Return an active, a finished, or a new snapshot."""
        key = (schema, table, request.options)
        job = self._registry.find(key)
        if job is not None:
            return Admission(job.snapshot_id, job.state)
        # Equal requests that arrive meanwhile share this answer.
        shared = (key, request.fresh)
        admission = self._admissions.get(shared)
        if admission is None:
            if not self._checks.take():
                raise TooMany("the bridge checks too many requests at the moment; ask again")
            admission = asyncio.create_task(self._begin(schema, table, request))
            self._admissions[shared] = admission
            admission.add_done_callback(lambda task: self._end_admission(shared, task))
        return await asyncio.shield(admission)

    def _end_admission(self, shared: tuple[JobKey, bool], task: asyncio.Task[Admission]) -> None:
        del self._admissions[shared]
        # Without this, asyncio logs the refusal of a request whose answer was already too late.
        if not task.cancelled():
            task.exception()

    async def _begin(self, schema: str, table: str, request: SnapshotRequest) -> Admission:
        description, request = await self._describe(schema, table, request)
        if not request.fresh:
            finished = await self._find_finished(description, request)
            if finished is not None:
                return Admission(finished, JobState.READY)
        # Another request may have begun the same snapshot meanwhile.
        job = self._registry.find((schema, table, request.options))
        if job is None:
            self._require_room(description, request)
            job = await self._registry.add(schema, table, request)
        return Admission(job.snapshot_id, job.state)

    def _require_room(self, description: TableDescription, request: SnapshotRequest) -> None:
        """Raise TooMany if no new snapshot may begin now; nothing is awaited after this."""
        running = len(self._registry)
        if running >= self._settings.most_running:
            raise TooMany(f"{running} snapshots are under way, which is the limit; ask again later")
        of_table = self._registry.count(description.schema, description.table)
        if of_table >= self._settings.most_of_table:
            raise TooMany(
                f"{of_table} snapshots of {description.name} are under way, which is the limit; "
                "ask again later"
            )
        self._rates.take(
            description.name,
            request.requester,
            fresh=request.fresh,
            is_part=request.options.where is not None,
        )

    async def _describe(
        self, schema: str, table: str, request: SnapshotRequest
    ) -> tuple[TableDescription, SnapshotRequest]:
        """The table, and the request with the values of its `where` checked."""
        where = request.options.where
        try:
            measured = await self._catalog.ask(
                lambda catalog: describe_table(catalog, self._source.publication, schema, table)
            )
            whole = measured.description
            if where is not None:
                unresolved = where
                resolved = await self._catalog.ask(
                    lambda catalog: resolve(catalog, whole.name, whole.key, unresolved)
                )
                request = request.resolved(resolved)
            description = whole.restricted_to(request.options.columns)
        except Refused:
            if await self._store.is_foreign(table_token(schema, table)):
                raise ForeignTable("another source publishes this table") from None
            raise
        if request.options.format == "arrow" and not description.columns:
            raise Refused(f"table {description.name} has no columns; ask for msgpack")
        return description, request

    async def _find_finished(
        self, description: TableDescription, request: SnapshotRequest
    ) -> str | None:
        schema, table = description.schema, description.table
        document = await self._schemas.ensure_schema(schema, table)
        where = request.options.where
        wanted = MetaIdentity(
            self._source.name,
            self._source.epoch,
            description.oid,
            document["schema_version"],
            tuple(column.name for column in description.columns),
            description.row_filter,
            request.options.format,
            request.options.zstd,
            None if where is None else self._store.packed_where(where.document),
        )
        return await self._store.find_reusable(
            table_token(schema, table), wanted, may_have_pieces=request.options.pieces
        )

    async def _schedule(self) -> None:
        """Start an export for all queued jobs whenever one may run."""
        while True:
            await stay_cancelled()
            await self._registry.wait_queued()
            await self._registry.exports.acquire()
            await asyncio.sleep(GATHER_SECONDS)
            if self._admissions:
                # Requests that are still being checked belong to the same export.
                await asyncio.wait(self._admissions.values(), timeout=GATHER_LIMIT_SECONDS)
            run = asyncio.create_task(
                self._perform(self._registry.take_queued()), name="snapshot export"
            )
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)

    async def _schedule_groups(self) -> None:
        """Copy one group of one table at a time, so that other tables always find an export."""
        while True:
            await stay_cancelled()
            job = await self._registry.next_divided()
            async with self._registry.exports:
                # A task of its own: an interrupted group leaves its task marked as cancelled.
                run = asyncio.create_task(self._perform_group(job), name="snapshot export")
                self._runs.add(run)
                run.add_done_callback(self._runs.discard)
                await run

    async def _perform_group(self, job: SnapshotJob) -> None:
        """Copy the next group of a job, or complete it; queue it again if more is to be done."""
        division = job.division
        assert division is not None
        pause = 0.0
        try:
            await self._copy_group(job)
        except Overtaken as error:
            self._registry.leave(job, str(error))
        except CannotGoOn as error:
            await self._registry.fail(job, str(error), may_retry=True)
        except (GroupInterrupted, *JETSTREAM_ERRORS) as error:
            pause = NATS_PAUSE_SECONDS
            self._note_interrupted(job, error)
            if division.failures > MOST_FAILURES:
                await self._registry.fail(job, str(error))
        except BridgeError as error:
            division.failures += 1
            pause = min(2.0**division.failures, LONGEST_PAUSE_SECONDS)
            self._note_interrupted(job, error)
            if division.failures > MOST_FAILURES:
                await self._registry.fail(job, str(error))
        except Exception as error:
            logger.exception("snapshot export failed")
            await self._registry.fail(job, f"internal error: {type(error).__name__}")
        if job.state.is_final:
            job.no_more_chunks.set()
        else:
            self._registry.postpone(job, pause)

    async def _copy_group(self, job: SnapshotJob) -> None:
        division = job.division
        assert division is not None
        await self._groups.prepare(job)
        if not division.record.is_done:
            run = self._run([job])
            await run.perform()
            if not run.owns(job):
                return
            await hold_async("snapshot.group.copied")
            await self._groups.finish(job)
            await hold_async("snapshot.group.finished")
        elif job.description is None:
            await self._run([job]).describe_copied()
        if division.record.is_done:
            await self._registry.complete(job)

    def _note_interrupted(self, job: SnapshotJob, error: Exception) -> None:
        job.wait_for([f"another attempt at this group: {error}"])
        event(
            logger,
            "group of a snapshot interrupted",
            level=logging.WARNING,
            table=job.name,
            snapshot_id=job.snapshot_id,
            error=str(error),
        )

    def _run(self, jobs: list[SnapshotJob]) -> ExportRun:
        return ExportRun(
            self._source,
            self._access,
            self._settings,
            schemas=self._schemas,
            store=self._store,
            pool=self._pool,
            registry=self._registry,
            jobs=jobs,
        )

    async def _perform(self, jobs: list[SnapshotJob]) -> None:
        run = self._run(jobs)
        failure: str | None = None
        try:
            await run.perform()
        except SnapshotError as error:
            failure = str(error)
        except Exception as error:
            logger.exception("snapshot export failed")
            failure = f"internal error: {type(error).__name__}"
        finally:
            self._registry.exports.release()
            for job in filter(run.owns, jobs):
                # Without an error the run was cancelled, because the bridge stops.
                if failure is None:
                    await self._registry.cancel(job)
                else:
                    await self._registry.fail(job, failure)
            for job in jobs:
                if job.state.is_final:
                    job.no_more_chunks.set()
