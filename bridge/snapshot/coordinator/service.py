"""Snapshots on request: sharing, queueing, exports, and how every one of them ends."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import nats.errors
import nats.js.errors

from bridge.jetstream.dictionaries import DictionaryStore
from bridge.schemas.store import read_document
from bridge.snapshot.coordinator.catalog_session import CatalogSession
from bridge.snapshot.coordinator.farewells import STOPPED, Farewells
from bridge.snapshot.coordinator.init_stream import BROKER_TROUBLE
from bridge.snapshot.coordinator.job import Job, new_snapshot_id
from bridge.snapshot.coordinator.ledger import Ledger, Wanted
from bridge.snapshot.coordinator.requests import RequestDoor
from bridge.snapshot.coordinator.run import Run, RunContext
from bridge.snapshot.coordinator.worker_pool import WorkerPool, uninterrupted
from bridge.snapshot.errors import ForeignTable, Refused, SnapshotError
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire import envelope
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from nats.aio.client import Client
    from nats.js.client import JetStreamContext
    from nats.js.kv import KeyValue

    from bridge.snapshot.coordinator.job import Key
    from bridge.snapshot.coordinator.requests import Request
    from bridge.telemetry.stats import BridgeStats, SnapshotState
    from consumer_sdk.wire.subjects import Subjects

logger = logging.getLogger(__name__)

MOST_EXPORTS: Final = 2
# Requests that come together share an export, so the first waits a moment for the others.
GATHER_SECONDS: Final = 0.03
GATHER_LIMIT_SECONDS: Final = 0.5
PROGRESS_SECONDS: Final = 1.0


class SnapshotService:
    """Answers requests for as long as this bridge is the active one."""

    def __init__(
        self,
        *,
        nc: Client,
        js: JetStreamContext,
        subjects: Subjects,
        conninfo: str,
        nats_access: Mapping[str, Any],
        source: str,
        epoch: int,
        publication: str,
        as_json: bool,
        zstd: bool,
        stats: BridgeStats,
        ensure_schema: Callable[[str, str], Awaitable[dict[str, Any]]],
        workers: int = 2,
        chunk_rows: int = 10_000,
        wait_limit: float = 300.0,
        max_running: int = 64,
    ) -> None:
        self._client = nc
        self._js = js
        self._subjects = subjects
        self._as_json = as_json
        self._stats = stats
        self._source = source
        self._epoch = epoch
        self._max_running = max_running
        self._ensure_schema = ensure_schema
        self._catalog = CatalogSession(conninfo, publication)
        self._ledger = Ledger(nc, js, subjects, source=source, epoch=epoch, as_json=as_json)
        self._door = RequestDoor(nc, subjects, self._admit, as_json=as_json, zstd=zstd)
        self._pool = WorkerPool()
        self._jobs: dict[Key, Job] = {}
        self._admissions: dict[Key, asyncio.Task[tuple[str, str]]] = {}
        self._queue: list[Job] = []
        self._wake = asyncio.Event()
        self._exports = asyncio.Semaphore(MOST_EXPORTS)
        self._runs: set[asyncio.Task[None]] = set()
        self._farewells = Farewells(self._ledger)
        self._background: list[asyncio.Task[None]] = []
        self._context_settings: dict[str, Any] = {
            "conninfo": conninfo,
            "nats_access": nats_access,
            "subjects": subjects,
            "source": source,
            "epoch": epoch,
            "publication": publication,
            "workers": workers,
            "chunk_rows": chunk_rows,
            "wait_limit": wait_limit,
            "pool": self._pool,
        }
        self._context: RunContext | None = None
        self._schemas: KeyValue | None = None

    async def start(self) -> None:
        """Announce ends of snapshots that an earlier bridge left under way, then take requests."""
        await self._ledger.open()
        self._schemas = await self._js.key_value(self._subjects.schemas_bucket)
        dictionaries = DictionaryStore(await self._js.key_value(self._subjects.dicts_bucket))
        self._context = RunContext(
            **self._context_settings,
            dictionaries=dictionaries,
            cdc_state=self._ledger.cdc_state,
            ensure_schema=self._ensure_schema,
            changed=self._publish_progress,
            succeed=self._succeed,
            fail=self._fail,
            begin_again=self._begin_again,
        )
        await self._farewells.bid_left_over()
        self._background = [
            asyncio.create_task(self._schedule(), name="snapshot schedule"),
            asyncio.create_task(self._tick(), name="snapshot progress"),
        ]
        await self._door.open()

    async def stop(self) -> None:
        """End what is under way and say so; no worker is left when this returns."""
        await self._door.close()
        for task in (*self._background, *self._admissions.values(), *self._runs):
            task.cancel()
        await asyncio.gather(
            *self._background, *self._admissions.values(), *self._runs, return_exceptions=True
        )
        for job in tuple(self._jobs.values()):
            await self._fail(job, STOPPED)
            job.released.set()
        await self._pool.close()
        await self._farewells.finish()
        await self._catalog.close()

    async def _admit(self, schema: str, table: str, request: Request) -> tuple[str, str]:
        """Give snapshot id and state: of one under way, of a finished one, or of a new one."""
        key = (schema, table, request.options)
        job = self._jobs.get(key)
        if job is not None:
            return job.snapshot_id, job.state
        # Whoever asks for the same meanwhile waits for the same answer.
        admission = self._admissions.get(key)
        if admission is None:
            admission = asyncio.create_task(self._begin(key, request))
            self._admissions[key] = admission
            admission.add_done_callback(lambda _: self._admissions.pop(key, None))
        return await asyncio.shield(admission)

    async def _begin(self, key: Key, request: Request) -> tuple[str, str]:
        schema, table, options = key
        try:
            shape = (await self._catalog.shape(schema, table)).restricted_to(options.columns)
        except Refused:
            if await self._is_foreign(table_token(schema, table)):
                raise ForeignTable("another source publishes this table") from None
            raise
        if options.format == "arrow" and not shape.columns:
            raise Refused(f"table {shape.name} has no columns; ask for msgpack")
        if not request.fresh:
            wanted = Wanted(
                self._source,
                self._epoch,
                shape.oid,
                (await self._ensure_schema(schema, table))["schema_version"],
                tuple(column.name for column in shape.columns),
                shape.row_filter,
                options.format,
                options.zstd,
            )
            finished = await self._ledger.reusable(schema, table, wanted)
            if finished is not None:
                return finished, "ready"
        if len(self._jobs) >= self._max_running:
            raise Refused(
                f"{len(self._jobs)} snapshots are under way, which is the limit; ask again later"
            )
        snapshot_id = new_snapshot_id()
        progress = self._stats.begin_snapshot(snapshot_id, shape.name)
        job = Job(schema, table, options, request.asked, snapshot_id, progress)
        self._jobs[key] = job
        try:
            await self._ledger.record(job)
        except BaseException:
            del self._jobs[key], self._stats.snapshots[snapshot_id]
            raise
        event(logger, "snapshot requested", table=job.name, snapshot_id=snapshot_id)
        self._enqueue(job)
        return snapshot_id, job.state

    async def _is_foreign(self, token: str) -> bool:
        assert self._schemas is not None
        try:
            document = read_document((await self._schemas.get(token)).value or b"")
        except (nats.js.errors.KeyNotFoundError, nats.js.errors.InvalidKeyError):
            return False
        return document is not None and document.get("source") != self._source

    def _enqueue(self, job: Job) -> None:
        if self._exports.locked():
            busy = f"one of the {MOST_EXPORTS} exports under way to end"
            job.waiting_for = job.progress.waiting_for = [busy]
        self._queue.append(job)
        self._wake.set()

    def _begin_again(self, job: Job) -> None:
        event(logger, "snapshot begins again", table=job.name, snapshot_id=job.snapshot_id)
        self._enqueue(job)

    async def _schedule(self) -> None:
        """Give whatever waits to the next free export, all of it together."""
        while True:
            await stay_cancelled()
            await self._wake.wait()
            await self._exports.acquire()
            await asyncio.sleep(GATHER_SECONDS)
            if self._admissions:
                # Requests that are being looked at belong to the same export.
                await asyncio.wait(self._admissions.values(), timeout=GATHER_LIMIT_SECONDS)
            self._wake.clear()
            jobs, self._queue = self._queue, []
            run = asyncio.create_task(self._perform(jobs), name="snapshot export")
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)

    async def _perform(self, jobs: list[Job]) -> None:
        assert self._context is not None
        run = Run(self._context, jobs)
        failure = STOPPED
        try:
            await run.perform()
        except SnapshotError as error:
            failure = str(error)
        except Exception as error:
            logger.exception("snapshot export failed")
            failure = f"internal error: {type(error).__name__}"
        finally:
            self._exports.release()
            for job in filter(run.holds, jobs):
                await self._fail(job, failure)
            for job in jobs:
                if job.is_over:
                    job.released.set()

    async def _succeed(self, job: Job) -> None:
        # Once begun it goes through: a stop in the middle would take back what readers have seen.
        await uninterrupted(asyncio.create_task(self._complete(job)))

    async def _complete(self, job: Job) -> None:
        try:
            await self._ledger.complete(job)
        except (SnapshotError, *BROKER_TROUBLE) as error:
            await self._fail(job, f"the snapshot could not be completed: {error}")
            return
        job.state = "ready"
        self._close(job, "done")
        event(
            logger,
            "snapshot complete",
            table=job.name,
            snapshot_id=job.snapshot_id,
            rows=job.rows,
            chunks=job.next_chunk,
            seconds=time.time() - job.progress.started_at,
        )
        await self._publish_progress(job)

    async def _fail(self, job: Job, error: str) -> None:
        """End a job without a result; readers are told now, the rest is cleaned up later."""
        if job.is_over:
            return
        job.state = "failed"
        job.error = job.progress.error = error
        self._close(job, "cancelled" if error == STOPPED else "failed")
        event(
            logger,
            "snapshot failed",
            level=logging.WARNING,
            table=job.name,
            snapshot_id=job.snapshot_id,
            error=error,
        )
        await self._publish_progress(job)
        self._farewells.begin(job, error)

    def _close(self, job: Job, state: SnapshotState) -> None:
        job.progress.state = state
        job.progress.waiting_for = job.waiting_for = []
        job.progress.finished_at = time.time()
        self._jobs.pop(job.key, None)

    async def _tick(self) -> None:
        """Say once a second how far every snapshot is, so that readers can tell slow from dead."""
        while True:
            await stay_cancelled()
            await asyncio.sleep(PROGRESS_SECONDS)
            for job in tuple(self._jobs.values()):
                await self._publish_progress(job)

    async def _publish_progress(self, job: Job) -> None:
        document = {
            "v": envelope.WIRE_VERSION,
            "snapshot_id": job.snapshot_id,
            "table": job.table,
            "schema": job.schema,
            "state": job.state,
            "rows": job.rows,
            "chunks": len(job.digests),
            "pieces_left": len(job.pieces),
            "estimated_rows": job.progress.total_estimate,
            "waiting_for": job.waiting_for,
            "error": job.error,
            "ts": time.time_ns() // 1000,
        }
        headers = {envelope.CONTENT_TYPE: envelope.JSON if self._as_json else envelope.MSGPACK}
        # Progress is for whoever listens now; it is not worth a failure.
        with suppress(nats.errors.Error, OSError):
            await self._client.publish(
                self._subjects.snapshot_progress(job.token, job.snapshot_id),
                envelope.encode(document, as_json=self._as_json),
                headers=headers,
            )
