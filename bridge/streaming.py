"""One streaming session: from taking the slot to losing or releasing it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from bridge.errors import Retryable
from bridge.jetstream.streams import stream_state
from bridge.postgres.errors import ReplicationRefused
from bridge.telemetry.stats import Waiting
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.cancellation import errors_of, stay_cancelled
from consumer_sdk.transport.holds import hold_async
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from bridge.config import Settings
    from bridge.jetstream.broker import Broker
    from bridge.postgres.connection import ReplicationConnection
    from bridge.postgres.slot import Slot
    from bridge.publish.publisher import Publisher
    from bridge.publish.reader import WalReader
    from bridge.publish.resume_point import ResumePoint
    from bridge.schemas.coverage_watch import CoverageWatch
    from bridge.schemas.tables import PublishedTables
    from bridge.snapshot.coordinator.service import SnapshotService
    from bridge.source import Source
    from bridge.telemetry.stats import BridgeStats

log = logging.getLogger("bridge.streaming")

READY_POLL_SECONDS = 0.2
LISTING_SECONDS = 1.0


class Stage(Enum):
    """The stage of a streaming session; stages are never repeated."""

    OPENED = auto()
    STREAMING = auto()
    DRAINING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The parts of one streaming session."""

    source: Source
    slot: Slot
    connection: ReplicationConnection
    reader: WalReader
    publisher: Publisher
    tables: PublishedTables
    coverage: CoverageWatch
    snapshots: SnapshotService


class Streaming:
    """One streaming session: `begin`, `run` until `drain` or an error ends it, `close`."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        stats: BridgeStats,
        resume_point: ResumePoint,
        pipeline: Pipeline,
        resources: AsyncExitStack,
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._stats = stats
        self._resume_point = resume_point
        self._pipeline = pipeline
        self._resources = resources
        self._stage = Stage.OPENED

    async def begin(self) -> None:
        """Write the progress record of the start, and begin to serve snapshot requests."""
        pipeline, point = self._pipeline, self._resume_point
        async with (
            pipeline.slot.dropped_if_at_risk(pipeline.connection, point.slot_created_at),
            pipeline.connection.kept_alive(self._settings.status_interval),
        ):
            await pipeline.publisher.announce(point.known_lsn, point.server.flushed_lsn, point.gap)
            if point.gap is not None:
                await hold_async("new-epoch-announced")
            # Also a start that fails half-way has begun something to be ended.
            self._resources.push_async_callback(pipeline.snapshots.stop)
            await pipeline.snapshots.start()
        resume = point.continuity.resume
        event(
            log, "streaming starts", slot=self._settings.slot, publication=self._settings.pub,
            epoch=pipeline.source.epoch, slot_lsn=format_lsn(point.slot_lsn),
            after=format_lsn(resume.commit_lsn), next_seq=resume.next_seq,
            mode=point.stream.mode,
        )  # fmt: skip
        self._stage = Stage.STREAMING

    async def run(self) -> None:
        """Stream until `drain` has been called and everything read is stored; raises any error."""
        pipeline = self._pipeline
        reader, publisher = pipeline.reader, pipeline.publisher
        interval = self._settings.wal_check_interval
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(reader.report()),
                    group.create_task(pipeline.tables.store_new(interval)),
                    group.create_task(self._become_ready()),
                    group.create_task(pipeline.coverage.run(interval)),
                    group.create_task(
                        pipeline.slot.watch_silence(
                            pipeline.connection, lambda: reader.silent_seconds
                        )
                    ),
                    group.create_task(self._broker.watch()),
                    group.create_task(self._watch_size(interval)),
                    group.create_task(pipeline.snapshots.watch()),
                ]
                publishing = group.create_task(publisher.run())
                await group.create_task(reader.run())
                publisher.drain()
                async with asyncio.timeout(self._settings.drain_timeout):
                    await publishing
                    await publisher.finish()
                for task in helpers:
                    task.cancel()
                reader.send_status()
        except BaseExceptionGroup as group:
            explain = pipeline.slot.explain
            raise BaseExceptionGroup(
                group.message,
                [explain(e) if isinstance(e, ReplicationRefused) else e for e in errors_of(group)],
            ) from group
        self._stage = Stage.FINISHED

    async def _watch_size(self, interval: float) -> None:
        """Warn before the CDC stream refuses changes because of its size limit."""
        while True:
            await stay_cancelled()
            with suppress(ApiError, Retryable):
                state = await stream_state(self._broker.client, self._broker.subjects.cdc_stream)
                if state is not None and state.is_nearly_full:
                    share = state.held_bytes / state.config["max_bytes"]
                    self._stats.warn(
                        "cdc-size",
                        f"stream {state.name} has used {share:.0%} of its size limit; when it is "
                        "full, the bridge waits and PostgreSQL keeps WAL",
                        "raise max_bytes of the stream, or lower its max_age; see `bridge check`",
                    )
                else:
                    self._stats.clear_warning("cdc-size")
            await asyncio.sleep(interval)

    async def _become_ready(self) -> None:
        """Report ready as soon as the schemas of all tables are stored; until then, say why not.

        If PostgreSQL cannot list the tables, because one is locked, the ones known before count.
        """
        tables, stats = self._pipeline.tables, self._stats
        started = time.monotonic()
        while not tables.all_stored.is_set():
            if time.monotonic() - started > LISTING_SECONDS and tables.has_stored_known:
                break
            stats.waiting = Waiting("schemas", tables.missing) if tables.missing else None
            with suppress(TimeoutError):
                async with asyncio.timeout(READY_POLL_SECONDS):
                    await tables.all_stored.wait()
        stats.waiting = None
        stats.is_ready = True

    def connection_lost(self) -> None:
        """The connection to NATS was lost."""
        self._pipeline.publisher.connection_lost()

    def drain(self) -> None:
        """Stop reading, publish what was read, confirm it."""
        if self._stage is Stage.STREAMING:
            self._stage = Stage.DRAINING
            self._pipeline.reader.stop()

    async def close(self) -> None:
        """Release slot and connections."""
        if self._stage is Stage.FINISHED:
            await self._pipeline.connection.finish()
        await self._resources.aclose()
