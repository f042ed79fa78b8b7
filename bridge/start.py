"""The start of a streaming session: everything before the first byte is read.

It checks PostgreSQL, takes the slot and the fence, decides continuity, and builds the pipeline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.errors import DataAtRiskError, Retryable, SourceError
from bridge.events.assembler import Assembler
from bridge.events.messages import Packaging, content_headers
from bridge.events.relations import CompiledRelation
from bridge.jetstream.buckets import ObjectWriter
from bridge.jetstream.dictionaries import DictionaryStore
from bridge.postgres.catalog import Catalog
from bridge.postgres.connection import ReplicationConnection, connect_catalog
from bridge.postgres.coverage import read_coverage
from bridge.postgres.errors import DriverError, explain
from bridge.postgres.publication import PublicationReader
from bridge.postgres.slot import Slot
from bridge.preflight import raise_if_blocked
from bridge.preflight.postgres import check_postgres
from bridge.publish.compression import EventCompressor
from bridge.publish.outage import Outage
from bridge.publish.preparation import Preparation
from bridge.publish.publisher import Limits, Publisher
from bridge.publish.reader import WalReader
from bridge.publish.resume_point import ResumePoint
from bridge.publish.ring import Ring
from bridge.schemas.coverage_watch import CoverageStore, CoverageWatch, SavedCoverage
from bridge.schemas.registry import SchemaRegistry
from bridge.schemas.store import SchemaStore
from bridge.schemas.tables import PublishedTables
from bridge.snapshot.coordinator.requests import SnapshotSettings
from bridge.snapshot.coordinator.service import SnapshotService
from bridge.snapshot.messages import ServerAccess
from bridge.source import Source
from bridge.streaming import Pipeline, Streaming
from bridge.telemetry.stats import Waiting
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from bridge.config import Settings
    from bridge.events.messages import Item
    from bridge.jetstream.broker import Broker
    from bridge.publish.resume_point import StartFacts
    from bridge.telemetry.stats import BridgeStats
    from bridge.wal.messages import Relation
    from consumer_sdk.wire.envelope import Document

log = logging.getLogger("bridge.streaming")

ANSWER_SECONDS = 15.0
ORIGIN_VERSION = 160000
SLOT_LOG_SECONDS = 10.0


async def open_streaming(
    settings: Settings, conninfo: str, broker: Broker, stats: BridgeStats, facts: StartFacts
) -> Streaming:
    """Take slot and fence and build the pipeline; SlotInUse if another bridge streams."""
    async with AsyncExitStack() as resources:
        opening = _Opening(settings, conninfo, broker, stats, resources)
        point, pipeline = await opening.open(facts)
        # The streaming session closes the resources later.
        return Streaming(settings, broker, stats, point, pipeline, resources.pop_all())


@dataclass(frozen=True, slots=True)
class _Postgres:
    """Facts about the server that the pipeline needs."""

    version: int
    is_utf8: bool
    """Whether text is valid UTF-8: PostgreSQL does not check or convert text in SQL_ASCII."""


class _Opening:
    """The steps of a start, in order; `resources` closes what they open."""

    def __init__(
        self,
        settings: Settings,
        conninfo: str,
        broker: Broker,
        stats: BridgeStats,
        resources: AsyncExitStack,
    ) -> None:
        self._settings = settings
        self._conninfo = conninfo
        self._broker = broker
        self._stats = stats
        self._resources = resources
        self._catalog = Catalog(conninfo)
        self._slot = Slot(self._catalog, name=settings.slot, publication=settings.pub)
        self._schemas = SchemaStore(broker.schemas, source=settings.slot, as_json=settings.json)

    async def open(self, facts: StartFacts) -> tuple[ResumePoint, Pipeline]:
        settings, stats = self._settings, self._stats
        self._resources.push_async_callback(self._catalog.close)
        async with _answering():
            postgres = await self._check_postgres()
            await self._slot.require_free()
        catalog = Catalog(self._conninfo)
        self._resources.push_async_callback(catalog.close)
        publication = PublicationReader(catalog, settings.pub, postgres.version)
        stored_schemas = await self._load_schemas(publication)
        try:
            created_at = await self._slot.create_if_missing(
                self._conninfo,
                postgres.version,
                failover=settings.failover,
                report=_SlotWait(stats).report,
            )
        finally:
            stats.waiting = None
        if created_at is not None:
            facts.slot_created_at = created_at
        async with _answering():
            connection = await ReplicationConnection.connect(self._conninfo)
            self._resources.push_async_callback(connection.close)
            server = await connection.identify()
            stats.database = server.database
            await self._slot.start(connection, settings.origin)
        stats.slot_active = True
        self._resources.callback(self._note_released)
        foreign = self._schemas.foreign_tables(stored_schemas)
        async with (
            self._slot.dropped_if_at_risk(connection, facts.slot_created_at),
            connection.kept_alive(settings.status_interval),
        ):
            point = await ResumePoint.find(
                self._broker, settings, self._slot, server, foreign.__contains__, facts
            )
            self._resources.push_async_callback(point.stream.close)
            pipeline = await self._build(postgres, connection, publication, point, stored_schemas)
        return point, pipeline

    def _note_released(self) -> None:
        self._stats.slot_active = self._stats.is_ready = False
        self._stats.waiting = None

    async def _check_postgres(self) -> _Postgres:
        """Raise if PostgreSQL cannot be streamed from; drop a lost slot if a gap is accepted."""
        settings = self._settings
        connection = await connect_catalog(self._conninfo)
        try:
            info = connection.info
            postgres = _Postgres(
                info.server_version, info.parameter_status("server_encoding") != "SQL_ASCII"
            )
            self._stats.postgres_version = str(info.parameter_status("server_version") or "")
            findings = await check_postgres(
                connection,
                slot=settings.slot,
                publication=settings.pub,
                warn_bytes=settings.wal_warning,
                try_decoding=False,
            )
            lost = next((f for f in findings if f.code == "slot-lost"), None)
            if lost is not None:
                if settings.on_gap != "new-epoch":
                    raise DataAtRiskError(
                        f"{lost.what}; changes since its position are lost: start with "
                        "--on-gap=new-epoch to replace the slot and have consumers bootstrap again"
                    )
                event(log, "replacing a lost slot", level=logging.WARNING, reason=lost.what)
                await connection.execute(
                    "SELECT pg_catalog.pg_drop_replication_slot(%s)", [settings.slot]
                )
            raise_if_blocked(f for f in findings if f.code != "slot-lost")
        except DriverError as error:
            raise explain(error, "PostgreSQL cannot be checked") from error
        finally:
            await connection.close()
        if settings.origin == "none" and postgres.version < ORIGIN_VERSION:
            raise SourceError("--origin none needs PostgreSQL 16 or later; leave it out here")
        return postgres

    async def _load_schemas(self, publication: PublicationReader) -> dict[str, Document]:
        """All schema documents; TableTaken if one of our tables belongs to another source."""
        stored = await self._schemas.load()
        if self._schemas.foreign_tables(stored):
            for schema, table in await publication.tables():
                self._schemas.refuse_foreign(stored.get(table_token(schema, table)))
        return stored

    async def _build(
        self,
        postgres: _Postgres,
        connection: ReplicationConnection,
        publication: PublicationReader,
        point: ResumePoint,
        stored_schemas: Mapping[str, Document],
    ) -> Pipeline:
        settings, stats, broker = self._settings, self._stats, self._broker
        source = Source(
            name=settings.slot,
            epoch=point.choose_epoch(settings.slot, may_begin_new=settings.on_gap == "new-epoch"),
            publication=settings.pub,
            subjects=settings.subjects,
            as_json=settings.json,
        )
        confirmation = point.confirmation(broker.bridge, source)
        stats.epoch = source.epoch
        stats.mode = point.stream.mode
        stats.confirmed_lsn = max(stats.confirmed_lsn, point.slot_lsn)
        coverage_store = CoverageStore(broker.client, broker.bridge, source)
        known = await coverage_store.load()
        if known is None:
            # A new epoch needs no comparison: its snapshots show what is covered now.
            known = SavedCoverage(await read_coverage(publication))
        registry = SchemaRegistry(
            source=source,
            catalog=self._catalog,
            stored=stored_schemas,
            announced=point.record.schemas,
            floors={
                token: one.schema_version for token, one in known.tables.items() if one.is_gone
            },
        )
        tables = PublishedTables(
            catalog=self._catalog,
            publication=publication,
            registry=registry,
            store=self._schemas,
            confirmed_lsn=lambda: confirmation.lsn,
            known=[token for token, one in known.tables.items() if not one.is_gone],
        )
        ring: Ring[Item] = Ring(settings.ring_slots, settings.ring_bytes)
        stats.ring_capacity = settings.ring_slots
        stats.ring_max_bytes = ring.max_bytes
        packaging = self._packaging(source)
        reader = WalReader(
            connection=connection,
            assembler=Assembler(packaging, point.continuity.resume, pack=settings.pack),
            ring=ring,
            stats=stats,
            compile_relation=_RelationCompiler(tables, packaging, postgres.is_utf8),
            confirmed_lsn=lambda: confirmation.lsn,
            status_interval=settings.status_interval,
        )
        outage = Outage(broker.client, stats, settings.nats_away_limit)
        publisher = Publisher(
            ring=ring,
            reader=reader,
            stream=point.stream,
            confirmation=confirmation,
            preparation=Preparation(
                registry=registry,
                schemas=self._schemas,
                objects=ObjectWriter(broker.objects, broker.client),
                source=source,
                outage=outage,
            ),
            outage=outage,
            limits=Limits(settings.batch_events, settings.batch_bytes),
            stats=stats,
        )
        coverage = CoverageWatch(
            source=source,
            publication=publication,
            store=coverage_store,
            tables=tables,
            writer=publisher,
            log=reader,
            known=known,
        )
        return Pipeline(
            source=source,
            slot=self._slot,
            connection=connection,
            reader=reader,
            publisher=publisher,
            tables=tables,
            coverage=coverage,
            snapshots=self._snapshots(source, tables),
        )

    def _packaging(self, source: Source) -> Packaging:
        broker, compress = self._broker, None
        if self._settings.zstd_events:
            dictionaries = DictionaryStore(broker.dictionaries)
            compress = EventCompressor(dictionaries, content_headers(source))
            self._resources.push_async_callback(compress.close)
        return Packaging(source, broker.client.max_payload, compress)

    def _snapshots(self, source: Source, tables: PublishedTables) -> SnapshotService:
        settings = self._settings
        nats = {name: value for name, value in vars(settings).items() if name.startswith("nats_")}
        has_command = bool(settings.pg_password_command or settings.nats_password_command)
        return SnapshotService(
            self._broker.client,
            source,
            ServerAccess(
                str(self._conninfo),
                nats,
                password_file=settings.pg_password_file,
                password_command=settings.pg_password_command,
                environment=dict(os.environ) if has_command else {},
            ),
            SnapshotSettings(
                workers=settings.snapshot_workers,
                chunk_rows=settings.snapshot_chunk_rows,
                wait_limit=settings.snapshot_wait,
                zstd=settings.zstd,
                interval=settings.snapshot_interval,
                export_limit=settings.snapshot_export_limit,
            ),
            schemas=tables,
            stats=self._stats,
        )


@dataclass(frozen=True, slots=True)
class _RelationCompiler:
    """Compiles a relation of the log, with its schema version and its row writers."""

    tables: PublishedTables
    packaging: Packaging
    is_utf8: bool

    async def __call__(self, message: Relation, commit_lsn: int) -> CompiledRelation:
        versioned = await self.tables.from_log(message, commit_lsn)
        return CompiledRelation(versioned, self.packaging, utf8=self.is_utf8)


class _SlotWait:
    """Shows and logs the transactions that the creation of the slot waits for."""

    def __init__(self, stats: BridgeStats) -> None:
        self._stats = stats
        self._logged_at = -SLOT_LOG_SECONDS

    async def report(self, sessions: list[str]) -> None:
        if not sessions:
            self._stats.waiting = None
            return
        said = "; ".join(sessions)
        self._stats.waiting = Waiting("transactions that run, to create the slot", said)
        if time.monotonic() - self._logged_at >= SLOT_LOG_SECONDS:
            self._logged_at = time.monotonic()
            event(log, "slot creation waits", level=logging.WARNING, waiting_for=said)


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """Raise Retryable if the server accepts connections but does not answer in time."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except TimeoutError as error:
        raise Retryable("PostgreSQL does not answer") from error
