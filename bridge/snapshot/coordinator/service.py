"""Snapshots on request: decides which requests share a snapshot and which exports run."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from bridge.errors import ForeignTable, Refused, SnapshotError
from bridge.postgres.sessions import ReconnectingSession
from bridge.snapshot.coordinator.jobs import JobRegistry, JobState
from bridge.snapshot.coordinator.requests import RequestListener
from bridge.snapshot.coordinator.run import ExportRun
from bridge.snapshot.coordinator.store import MetaIdentity, SnapshotStore
from bridge.snapshot.coordinator.worker_pool import WorkerPool
from bridge.snapshot.tables import describe_table
from consumer_sdk.transport.cancellation import stay_cancelled
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
            access.conninfo, "tailrace snapshot requests", LOCK_SECONDS
        )
        self._store = SnapshotStore(client, source)
        self._registry = JobRegistry(client, source, self._store, stats)
        self._requests = RequestListener(client, source, self._admit, zstd=settings.zstd)
        self._pool = WorkerPool()
        self._admissions: dict[JobKey, asyncio.Task[tuple[str, JobState]]] = {}
        self._runs: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """End the snapshots that an earlier bridge left unfinished, then accept requests."""
        await self._store.open()
        await self._store.end_abandoned()
        self._background = [
            asyncio.create_task(self._schedule(), name="snapshot schedule"),
            asyncio.create_task(
                self._registry.publish_progress_regularly(), name="snapshot progress"
            ),
        ]
        await self._requests.open()

    async def stop(self) -> None:
        """Cancel all active snapshots and publish their errors; then no worker is left."""
        await self._requests.close()
        tasks = (*self._background, *self._admissions.values(), *self._runs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._registry.cancel_all()
        await self._pool.close()
        await self._store.close()
        await self._catalog.close()

    async def _admit(
        self, schema: str, table: str, request: SnapshotRequest
    ) -> tuple[str, JobState]:
        """Return id and state of an active, a finished, or a new snapshot."""
        key = (schema, table, request.options)
        job = self._registry.find(key)
        if job is not None:
            return job.snapshot_id, job.state
        # Equal requests that arrive meanwhile share this answer.
        admission = self._admissions.get(key)
        if admission is None:
            admission = asyncio.create_task(self._begin(schema, table, request))
            self._admissions[key] = admission
            admission.add_done_callback(lambda _: self._admissions.pop(key, None))
        return await asyncio.shield(admission)

    async def _begin(
        self, schema: str, table: str, request: SnapshotRequest
    ) -> tuple[str, JobState]:
        description = await self._describe(schema, table, request)
        if not request.fresh:
            finished = await self._find_finished(description, request)
            if finished is not None:
                return finished, JobState.READY
        if len(self._registry) >= self._settings.most_running:
            raise Refused(
                f"{len(self._registry)} snapshots are under way, which is the limit; "
                "ask again later"
            )
        job = await self._registry.add(schema, table, request)
        return job.snapshot_id, job.state

    async def _describe(
        self, schema: str, table: str, request: SnapshotRequest
    ) -> TableDescription:
        try:
            description, _ = await self._catalog.ask(
                lambda catalog: describe_table(catalog, self._source.publication, schema, table)
            )
            description = description.restricted_to(request.options.columns)
        except Refused:
            if await self._store.is_foreign(table_token(schema, table)):
                raise ForeignTable("another source publishes this table") from None
            raise
        if request.options.format == "arrow" and not description.columns:
            raise Refused(f"table {description.name} has no columns; ask for msgpack")
        return description

    async def _find_finished(
        self, description: TableDescription, request: SnapshotRequest
    ) -> str | None:
        schema, table = description.schema, description.table
        document = await self._schemas.ensure_schema(schema, table)
        wanted = MetaIdentity(
            self._source.name,
            self._source.epoch,
            description.oid,
            document["schema_version"],
            tuple(column.name for column in description.columns),
            description.row_filter,
            request.options.format,
            request.options.zstd,
        )
        return await self._store.find_reusable(table_token(schema, table), wanted)

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

    async def _perform(self, jobs: list[SnapshotJob]) -> None:
        run = ExportRun(
            self._source,
            self._access,
            self._settings,
            schemas=self._schemas,
            store=self._store,
            pool=self._pool,
            registry=self._registry,
            jobs=jobs,
        )
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
