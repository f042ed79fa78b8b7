"""One stretch of streaming: from taking the slot to losing or releasing it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import DataAtRiskError, Retryable, SourceError
from bridge.events.assembler import Assembler
from bridge.events.encoder import Encoder, JsonEncoder, MsgpackEncoder
from bridge.events.relations import CompiledRelation
from bridge.jetstream.batches import FastIngestWriter, PlainWriter
from bridge.jetstream.dictionaries import DictionaryStore
from bridge.jetstream.frames import FrameWriter
from bridge.jetstream.objects import ObjectWriter
from bridge.jetstream.streams import ApiError, api
from bridge.postgres.catalog import Catalog
from bridge.postgres.connection import connect_catalog
from bridge.postgres.errors import DriverError, ReplicationRefused, explain
from bridge.postgres.slot import Slot
from bridge.preflight import raise_if_blocked
from bridge.preflight.postgres import check_postgres
from bridge.publish.compression import EventCompressor
from bridge.publish.patience import Patience
from bridge.publish.preparation import Preparation
from bridge.publish.progress import ProgressLog, Stored
from bridge.publish.publisher import Limits, Publisher
from bridge.publish.reader import WalReader
from bridge.publish.ring import Ring
from bridge.schemas.coverage import read_coverage
from bridge.schemas.coverage_watch import CoverageWatch, load_coverage
from bridge.schemas.registry import Document, SchemaRegistry
from bridge.schemas.store import SchemaStore
from bridge.schemas.tables import PublishedTables
from bridge.snapshot.coordinator.service import SnapshotService
from bridge.standing import choose_epoch, look_around
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.lsn import format_lsn
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from bridge.config import Settings
    from bridge.events.outgoing import Item
    from bridge.events.resume import Resume
    from bridge.jetstream.broker import Broker
    from bridge.postgres.slot import Server
    from bridge.publish.continuity import Continuity
    from bridge.standing import Standing
    from bridge.telemetry.stats import BridgeStats
    from bridge.wal.messages import Relation

log = logging.getLogger("bridge.session")

ANSWER_SECONDS = 15.0
SCHEMAS_SECONDS = 3.0
ORIGIN_VERSION = 160000


class Session:
    """Streams once; `open` takes slot and fence, `run` streams, `drain` ends in good order."""

    def __init__(
        self,
        settings: Settings,
        conninfo: str,
        broker: Broker,
        stats: BridgeStats,
        known_gap: str | None = None,
        slot_made_at: int | None = None,
    ) -> None:
        self._settings = settings
        self._conninfo = conninfo
        self._broker = broker
        self._stats = stats
        self._known_gap = known_gap
        self.slot_made_at = slot_made_at
        """Where the slot stood when this bridge created it, if it did."""
        self._subjects = settings.subjects
        self._stack = AsyncExitStack()
        self._catalog = Catalog(conninfo)
        self._onlooker = Catalog(conninfo)
        """For questions that wait while somebody keeps a published table to himself."""
        self._slot = Slot(self._catalog, name=settings.slot, publication=settings.pub)
        self._schemas = SchemaStore(broker.schemas, source=settings.slot, as_json=settings.json)
        self._encoder: Encoder = JsonEncoder() if settings.json else MsgpackEncoder()
        self._server_version = 0
        self._utf8 = True
        self._epoch = 0
        self._reader: WalReader
        self._publisher: Publisher
        self._tables: PublishedTables
        self._coverage: CoverageWatch

    async def open(self) -> None:
        """Everything up to the first byte read; raises SlotInUse where another bridge streams."""
        settings = self._settings
        self._stack.push_async_callback(self._catalog.close)
        self._stack.push_async_callback(self._onlooker.close)
        async with _answering():
            await self._preflight()
            await self._slot.require_free()
        stored_schemas = await self._refuse_taken_tables()
        async with _answering():
            made_at = await self._slot.create_if_missing(
                self._server_version, failover=settings.failover
            )
            if made_at is not None:
                self.slot_made_at = made_at
            await self._slot.connect(self._conninfo)
            self._stack.push_async_callback(self._slot.connection.close)
            server = await self._slot.identify()
            self._stats.database = server.database
            await self._slot.take(settings.origin)
            self._stats.slot_active = True
        try:
            async with self._slot.kept_alive(settings.status_interval):
                await self._prepare(server, stored_schemas)
        except DataAtRiskError:
            made_at = self.slot_made_at
            if made_at is not None and await self._slot.position() == made_at:
                # Nobody reads it before an operator has decided: it would only hold back WAL.
                await self._slot.drop()
            raise

    async def _prepare(self, server: Server, stored_schemas: Mapping[str, Document]) -> None:
        """With the slot taken: find out where to go on, and set up the stages."""
        settings = self._settings
        foreign = {
            token
            for token, document in stored_schemas.items()
            if document.get("source") != settings.slot
        }
        standing = await look_around(
            self._broker, self._subjects, self._slot, server, foreign.__contains__,
            source=settings.slot, as_json=settings.json,
        )  # fmt: skip
        record = standing.record
        decision = await standing.decide(
            settings.pub, slot_made_at=self.slot_made_at, known_gap=self._known_gap
        )
        self._epoch = self._stats.epoch = choose_epoch(
            settings.slot, record, decision, may_begin_anew=settings.on_gap == "new-epoch"
        )
        bucket = self._broker.bridge
        known = await load_coverage(bucket, settings.slot, self._epoch, settings.pub)
        if known is None:
            # The beginning of an epoch: what is covered now is what its snapshots will hold.
            known = await read_coverage(self._catalog, settings.pub, self._server_version)
        registry = SchemaRegistry(
            source=settings.slot,
            epoch=self._epoch,
            catalog=self._catalog,
            stored=stored_schemas,
            announced=record.schemas,
            floors={token: one.schema_version for token, one in known.items() if one.is_gone},
        )
        self._tables = PublishedTables(
            catalog=self._catalog,
            onlooker=self._onlooker,
            registry=registry,
            store=self._schemas,
            publication=settings.pub,
            server_version=self._server_version,
            confirmed_lsn=lambda: self._publisher.confirmed_lsn,
        )
        ring: Ring[Item] = Ring(settings.ring_slots, settings.ring_bytes)
        self._stats.ring_capacity = settings.ring_slots
        self._stats.ring_max_bytes = ring.max_bytes
        self._reader = self._build_reader(ring, decision.resume)
        self._publisher = await self._build_publisher(ring, standing, decision, registry)
        await self._announce(standing, decision)
        self._coverage = CoverageWatch(
            catalog=self._onlooker,
            bucket=bucket,
            registry=registry,
            store=self._schemas,
            writer=self._publisher,
            has_told=self._reader.has_truncated,
            forget_snapshots=self._forget_snapshots,
            source=settings.slot,
            epoch=self._epoch,
            publication=settings.pub,
            server_version=self._server_version,
            known=known,
        )
        await self._start_snapshots()
        event(
            log, "streaming starts", slot=settings.slot, publication=settings.pub,
            epoch=self._epoch, slot_lsn=format_lsn(standing.slot_lsn),
            after=format_lsn(decision.resume.commit_lsn), next_seq=decision.resume.next_seq,
            mode=self._stats.mode,
        )  # fmt: skip

    async def _preflight(self) -> None:
        settings = self._settings
        connection = await connect_catalog(self._conninfo)
        try:
            self._server_version = connection.info.server_version
            # PostgreSQL converts and checks text in every encoding but this one.
            self._utf8 = connection.info.parameter_status("server_encoding") != "SQL_ASCII"
            self._stats.postgres_version = str(
                connection.info.parameter_status("server_version") or ""
            )
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
            raise explain(error, "PostgreSQL cannot be looked at") from error
        finally:
            await connection.close()
        if settings.origin == "none" and self._server_version < ORIGIN_VERSION:
            raise SourceError("--origin none needs PostgreSQL 16 or later; leave it out here")

    async def _refuse_taken_tables(self) -> dict[str, Document]:
        """Stop before a slot is made where another source has a table; all schema documents."""
        stored = await self._schemas.load()
        if all(one.get("source") == self._settings.slot for one in stored.values()):
            return stored
        for schema, table in await self._catalog.published_tables(self._settings.pub):
            self._schemas.refuse_foreign(stored.get(table_token(schema, table)))
        return stored

    def _build_reader(self, ring: Ring[Item], resume: Resume) -> WalReader:
        settings, broker = self._settings, self._broker
        headers = f"Content-Type: {self._encoder.content_type}\r\n".encode()
        compress = None
        if settings.zstd_events:
            compress = EventCompressor(DictionaryStore(broker.dictionaries), headers)
            self._stack.push_async_callback(compress.close)
        assembler = Assembler(
            source=settings.slot,
            epoch=self._epoch,
            subjects=self._subjects,
            encoder=self._encoder,
            resume=resume,
            pack=settings.pack,
            max_payload=broker.client.max_payload,
            objects_bucket=self._subjects.objects_bucket,
            headers=headers,
            compress=compress,
        )
        return WalReader(
            connection=self._slot.connection,
            assembler=assembler,
            ring=ring,
            stats=self._stats,
            compile_relation=self._compile_relation,
            confirmed_lsn=lambda: self._publisher.confirmed_lsn,
            status_interval=settings.status_interval,
        )

    async def _build_publisher(
        self,
        ring: Ring[Item],
        standing: Standing,
        decision: Continuity,
        registry: SchemaRegistry,
    ) -> Publisher:
        settings, stats, broker = self._settings, self._stats, self._broker
        fence, record, stream = standing.fence, standing.record, standing.stream
        frames = await FrameWriter.create(broker.client)
        batched = stream.config.get("allow_batched")
        writer = (FastIngestWriter if batched else PlainWriter)(
            broker.client, frames, settings.flush_timeout
        )
        await writer.open()
        self._stack.push_async_callback(writer.close)
        stats.mode = "fast-ingest" if batched else "plain"
        stats.confirmed_lsn = max(stats.confirmed_lsn, standing.slot_lsn)
        progress = ProgressLog(
            broker.bridge, self._subjects.progress(settings.slot), settings.slot, self._epoch,
            standing.server, settings.pub, stream.created_us, settings.json,
        )  # fmt: skip
        stored = Stored(fence.sequence, fence.msg_id.decode())
        if decision.continues:
            stored = replace(
                stored, commit_lsn=record.commit_lsn, next_seq=record.next_seq,
                next_ordinal=record.next_ordinal, ts=record.ts,
            )  # fmt: skip
        patience = Patience(broker.client, stats, settings.nats_away_limit)
        return Publisher(
            client=broker.client,
            ring=ring,
            writer=writer,
            fence=fence,
            records=standing.records,
            progress=progress,
            preparation=Preparation(
                registry=registry,
                schemas=self._schemas,
                objects=ObjectWriter(broker.objects),
                subjects=self._subjects,
                patience=patience,
                as_json=settings.json,
            ),
            patience=patience,
            subjects=self._subjects,
            stats=stats,
            limits=Limits(settings.batch_events, settings.batch_bytes),
            idle_lsn=self._reader.idle_lsn,
            confirmed_lsn=standing.slot_lsn,
            stored=stored,
        )

    async def _announce(self, standing: Standing, decision: Continuity) -> None:
        """Say in the stream where it goes on, and what is missing before, if anything."""
        record, slot_lsn = standing.record, standing.slot_lsn
        gap = None
        if decision.gap is not None:
            gap = {
                "reason": decision.gap,
                "previous_epoch": record.epoch,
                "previous_lsn": record.recorded_lsn,
                "resumes_at": slot_lsn,
            }
        known_lsn = max(record.proven_lsn, slot_lsn) if decision.continues else slot_lsn
        await self._publisher.announce(known_lsn, standing.server.flushed_lsn, gap)

    async def _start_snapshots(self) -> None:
        settings, client = self._settings, self._broker.client
        snapshots = SnapshotService(
            nc=client,
            js=client.jetstream(),
            subjects=self._subjects,
            conninfo=self._conninfo,
            nats_access={
                name: value for name, value in vars(settings).items() if name.startswith("nats_")
            },
            source=settings.slot,
            epoch=self._epoch,
            publication=settings.pub,
            as_json=settings.json,
            zstd=settings.zstd,
            stats=self._stats,
            ensure_schema=self._tables.ensure_schema,
            workers=settings.snapshot_workers,
            chunk_rows=settings.snapshot_chunk_rows,
            wait_limit=settings.snapshot_wait,
        )
        await snapshots.start()
        self._stack.push_async_callback(snapshots.stop)

    async def _forget_snapshots(self, token: str) -> None:
        """Let nobody begin from a snapshot of a table that was taken before a gap."""
        body = {"filter": self._subjects.meta(token)}
        with suppress(ApiError):
            await api(self._broker.client, f"STREAM.PURGE.{self._subjects.init_stream}", body)

    async def _compile_relation(self, message: Relation, commit_lsn: int) -> CompiledRelation:
        structure, types, version, notice = await self._tables.from_log(message, commit_lsn)
        return CompiledRelation(
            structure, types, version, notice,
            source=self._settings.slot, epoch=self._epoch, subjects=self._subjects,
            encoder=self._encoder, json_messages=self._settings.json, utf8=self._utf8,
        )  # fmt: skip

    async def run(self) -> None:
        """Stream until `drain` was called and is done; any trouble ends it with its reason."""
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self._reader.report()),
                    group.create_task(self._tables.store_new(self._settings.wal_check_interval)),
                    group.create_task(self._become_ready()),
                    group.create_task(self._coverage.run(self._settings.wal_check_interval)),
                    group.create_task(
                        self._slot.watch_silence(lambda: self._reader.silent_seconds)
                    ),
                    group.create_task(self._broker.watch_buckets()),
                ]
                publishing = group.create_task(self._publisher.run())
                await group.create_task(self._reader.run())
                self._publisher.drain()
                async with asyncio.timeout(self._settings.drain_timeout):
                    await publishing
                    await self._publisher.finish()
                for task in helpers:
                    task.cancel()
                self._reader.send_status()
        except* ReplicationRefused as group_error:
            raise self._slot.explain(_first(group_error, ReplicationRefused)) from group_error

    async def _become_ready(self) -> None:
        """Ready means that consumers find the schemas; nobody waits long for a locked table."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SCHEMAS_SECONDS):
                await self._tables.were_stored.wait()
        self._stats.is_ready = True

    def connection_lost(self) -> None:
        """NATS has gone, for a moment or for longer."""
        if hasattr(self, "_publisher"):
            self._publisher.connection_lost()

    def drain(self) -> None:
        """Stop reading, publish what was read, confirm it."""
        self._reader.stop()

    async def close(self, *, orderly: bool) -> None:
        """Release slot and connections."""
        self._stats.slot_active = self._stats.is_ready = False
        if orderly:
            await self._slot.connection.finish()
        await self._stack.aclose()


@asynccontextmanager
async def _answering() -> AsyncIterator[None]:
    """A server that accepts connections and answers nothing is one to try again later."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except TimeoutError as error:
        raise Retryable("PostgreSQL does not answer") from error


def _first(group: BaseExceptionGroup[Any], kind: type[Any]) -> Any:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error, kind)
        if isinstance(error, kind):
            return error
    raise AssertionError(group)
