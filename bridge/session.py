"""One stretch of streaming: from taking the slot to losing or releasing it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import nats.errors
import psycopg
from nats.js.errors import APIError

from bridge.cancellation import stay_cancelled
from bridge.continuity import Continuity, Server, decide
from bridge.errors import (
    DataAtRiskError,
    Retryable,
    SchemaOvertaken,
    SourceError,
    UnknownToLog,
)
from bridge.preflight import raise_if_blocked
from bridge.preflight.postgres import check_postgres
from bridge.publish.batches import FastIngestWriter, PlainWriter
from bridge.publish.compression import EventCompressor
from bridge.publish.encoder import Encoder, JsonEncoder, MsgpackEncoder
from bridge.publish.fence import Fence, Lease, PublishRefused
from bridge.publish.frames import FrameWriter
from bridge.publish.link import server_version
from bridge.publish.objects import ObjectWriter
from bridge.publish.outgoing import Item, SchemaNotice
from bridge.publish.progress import ProgressLog, Stored, load_progress
from bridge.publish.publisher import Limits, Publisher
from bridge.publish.readback import RecordReader
from bridge.publish.streams import ApiError, StreamState, stream_state
from bridge.ring import Ring
from bridge.schemas.catalog import Catalog
from bridge.schemas.registry import Document, SchemaRegistry, Structure
from bridge.schemas.store import SchemaStore
from bridge.snapshot.dictionaries import DictionaryStore
from bridge.snapshot.service import SnapshotService
from bridge.telemetry.logs import event
from bridge.wal.assembler import Assembler, Resume
from bridge.wal.connection import (
    ReplicationConnection,
    ReplicationRefused,
    connect_catalog,
    explain,
)
from bridge.wal.reader import WalReader
from bridge.wal.relations import CompiledRelation
from consumer_sdk.wire.lsn import format_lsn, parse_lsn
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from nats.aio.client import Client
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

    from bridge.config import Settings
    from bridge.publish.record import Record
    from bridge.telemetry.stats import BridgeStats
    from bridge.wal.messages import Relation

log = logging.getLogger("bridge.session")

TABLE_POLL_SECONDS = 5.0
ANSWER_SECONDS = 15.0
SILENCE_SECONDS = 10.0
LONGEST_SILENCE_SECONDS = 60.0
_IN_USE = "55006"
_PREREQUISITE = "55000"


class SlotInUse(Exception):
    """Another bridge streams from the slot: stand by."""


@dataclass(frozen=True, slots=True)
class Broker:
    """What a session needs on the side of NATS."""

    client: Client
    schemas: KeyValue
    bridge: KeyValue
    objects: ObjectStore
    dictionaries: KeyValue


class Session:
    """Streams once; `open` takes slot and fence, `run` streams, `drain` ends in good order."""

    def __init__(
        self,
        settings: Settings,
        conninfo: str,
        broker: Broker,
        stats: BridgeStats,
        known_gap: str | None = None,
    ) -> None:
        self._settings = settings
        self._conninfo = conninfo
        self._broker = broker
        self._stats = stats
        self._known_gap = known_gap
        self._subjects = settings.subjects
        self._stack = AsyncExitStack()
        self._catalog = Catalog(conninfo)
        self._encoder: Encoder = JsonEncoder() if settings.json else MsgpackEncoder()
        self._server_version = 0
        self._utf8 = True
        self.epoch = 0
        self._connection: ReplicationConnection
        self._reader: WalReader
        self._publisher: Publisher
        self._registry: SchemaRegistry
        self._snapshots: SnapshotService
        self._overtaken: SchemaOvertaken | None = None
        self._schemas = SchemaStore(broker.schemas, source=settings.slot, as_json=settings.json)

    async def open(self) -> None:
        """Everything up to the first byte read; raises SlotInUse where another bridge streams."""
        self._stack.push_async_callback(self._catalog.close)
        async with _answering():
            await self._preflight()
        stored_schemas = await self._refuse_taken_tables()
        async with _answering():
            await self._create_missing_slot()
            self._connection = await ReplicationConnection.connect(self._conninfo)
            self._stack.push_async_callback(self._connection.close)
            server = await self._identify()
            await self._take_slot()
        async with self._kept_alive():
            await self._prepare(server, stored_schemas)

    async def _prepare(self, server: Server, stored_schemas: Mapping[str, Document]) -> None:
        """With the slot taken: find out where to go on, and set up the stages."""
        settings = self._settings
        slot_lsn = await self._slot_position()
        stream = await stream_state(self._broker.client, self._subjects.cdc_stream)
        if stream is None:
            raise Retryable(f"stream {self._subjects.cdc_stream} has gone; it is created again")
        fence, lease, records, record = await self._read_record(stream, stored_schemas)
        decision = decide(
            record,
            server,
            publication=settings.pub,
            slot_lsn=slot_lsn,
            stream_created_us=stream.created_us,
            stream_last_seq=max(stream.last_seq, fence.sequence),
            tail_id=await self._tail_id(records, record),
        )
        if self._known_gap is not None and decision.gap is None:
            decision = Continuity(Resume(), gap=self._known_gap)
        self.epoch = self._choose_epoch(record, decision)
        self._stats.epoch = self.epoch
        self._registry = SchemaRegistry(
            source=settings.slot,
            epoch=self.epoch,
            catalog=self._catalog,
            stored=stored_schemas,
            announced=record.schemas,
        )
        await self._build(fence, lease, records, record, decision, server, stream, slot_lsn)
        event(
            log, "streaming starts", slot=settings.slot, publication=settings.pub,
            epoch=self.epoch, slot_lsn=format_lsn(slot_lsn),
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
        except psycopg.Error as error:
            raise explain(error, "PostgreSQL cannot be looked at") from error
        finally:
            await connection.close()
        if settings.origin == "none" and self._server_version < 160000:
            raise SourceError("--origin none needs PostgreSQL 16 or later; leave it out here")

    async def _refuse_taken_tables(self) -> dict[str, Document]:
        """Stop before a slot is made where another source has a table; all schema documents."""
        stored = await self._schemas.load()
        for schema, table in await self._catalog.published_tables(self._settings.pub):
            self._schemas.refuse_foreign(stored.get(table_token(schema, table)))
        return stored

    async def _create_missing_slot(self) -> None:
        settings = self._settings
        if await self._catalog.rows(
            "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = %s", [settings.slot]
        ):
            return
        arguments = "%s, 'pgoutput', false, false"
        if settings.failover:
            if self._server_version < 170000:
                raise SourceError(
                    "--failover needs PostgreSQL 17 or later; leave the flag out on this server"
                )
            arguments += ", true"
        event(log, "creating slot", slot=settings.slot, failover=settings.failover)
        await self._catalog.rows(
            f"SELECT pg_catalog.pg_create_logical_replication_slot({arguments})",
            [settings.slot],
        )

    async def _identify(self) -> Server:
        try:
            row = (await self._connection.command("IDENTIFY_SYSTEM"))[0]
            system_id, timeline, position, database = row
            number = int(timeline or 0)
            forks: tuple[tuple[int, int], ...] = ()
            if number > 1:
                history = (await self._connection.command(f"TIMELINE_HISTORY {number}"))[0][1]
                forks = _parse_history(history or "")
        except ReplicationRefused as error:
            raise Retryable(str(error)) from error
        self._stats.database = database or ""
        return Server(system_id or "", number, database or "", parse_lsn(position or "0/0"), forks)

    async def _take_slot(self) -> None:
        settings = self._settings
        try:
            await self._connection.start_streaming(settings.slot, settings.pub, settings.origin)
        except ReplicationRefused as error:
            if error.sqlstate == _IN_USE:
                raise SlotInUse(error.message) from error
            if error.sqlstate == _PREREQUISITE:
                raise DataAtRiskError(
                    f"slot {settings.slot}: {error.message}; start with --on-gap=new-epoch to "
                    "replace it and have consumers bootstrap again"
                ) from error
            raise self.explain(error) from error
        self._stats.slot_active = True

    def explain(self, error: ReplicationRefused) -> Exception:
        """What a refusal of the walsender means for the operator."""
        settings = self._settings
        if "publication" in error.message and "does not exist" in error.message:
            return UnknownToLog(
                f"publication {settings.pub} is younger than slot {settings.slot}: the log there "
                "does not know it; drop the slot (bridge drop --slot "
                f"{settings.slot} --yes) and start with --on-gap=new-epoch, consumers will "
                "bootstrap again"
            )
        if error.sqlstate in ("42501", "28000", "0A000"):
            return SourceError(f"{error.message}; `bridge check` tells what to grant or set")
        return Retryable(error.message)

    async def _slot_position(self) -> int:
        rows = await self._catalog.rows(
            "SELECT confirmed_flush_lsn::text FROM pg_catalog.pg_replication_slots "
            "WHERE slot_name = %s",
            [self._settings.slot],
        )
        if not rows:
            raise Retryable(f"slot {self._settings.slot} has gone")
        return parse_lsn(rows[0][0])

    async def _read_record(
        self, stream: StreamState, stored_schemas: Mapping[str, Document]
    ) -> tuple[Fence, Lease | None, RecordReader, Record]:
        settings, broker = self._settings, self._broker
        instance = secrets.token_hex(8)
        compares = server_version(broker.client) >= (2, 11, 0)
        fence = Fence(
            broker.client,
            stream=stream.name,
            subject=self._subjects.fence(settings.slot),
            source=settings.slot,
            instance=instance,
            as_json=settings.json,
            compares=compares,
            batched=bool(stream.config.get("allow_batched")),
        )
        lease = None
        try:
            if not compares:
                lease = Lease(broker.bridge, source=settings.slot, instance=instance)
                await lease.take()
            foreign = {
                token
                for token, document in stored_schemas.items()
                if document.get("source") != settings.slot
            }
            records = RecordReader(
                broker.client, self._subjects, settings.slot, foreign.__contains__,
                broker.dictionaries,
            )  # fmt: skip
            kept = await load_progress(broker.bridge, settings.slot)
            record = await records.read(await fence.take(), kept)
        except PublishRefused as error:
            raise Retryable(f"the CDC stream takes no messages: {error}") from error
        except (TimeoutError, nats.errors.Error, APIError) as error:
            raise Retryable(f"the record cannot be read: {error}") from error
        return fence, lease, records, record

    @staticmethod
    async def _tail_id(records: RecordReader, record: Record) -> str | None:
        """Id of the message where the newest progress record says that the stream ended."""
        stream_seq = (record.progress or {}).get("stream_seq")
        return await records.message_id_at(stream_seq) if isinstance(stream_seq, int) else None

    @asynccontextmanager
    async def _kept_alive(self) -> AsyncIterator[None]:
        """Keep the walsender from giving up while the record is read."""

        async def report() -> None:
            while True:
                self._connection.send_status(0, 0)
                await asyncio.sleep(self._settings.status_interval)

        task = asyncio.ensure_future(report())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Retryable):
                await task

    def _choose_epoch(self, record: Record, decision: Continuity) -> int:
        if decision.first:
            return int(time.time())
        if decision.gap is None:
            return record.epoch
        if self._settings.on_gap != "new-epoch":
            raise DataAtRiskError(
                f"continuity of source {self._settings.slot} is lost: {decision.gap}; start with "
                "--on-gap=new-epoch to go on, consumers will bootstrap again"
            )
        event(log, "new epoch", level=logging.WARNING, reason=decision.gap)
        return max(int(time.time()), record.epoch + 1)

    async def _build(
        self,
        fence: Fence,
        lease: Lease | None,
        records: RecordReader,
        record: Record,
        decision: Continuity,
        server: Server,
        stream: StreamState,
        slot_lsn: int,
    ) -> None:
        settings, stats, broker = self._settings, self._stats, self._broker
        headers = f"Content-Type: {self._encoder.content_type}\r\n".encode()
        compress = None
        if settings.zstd_events:
            compress = EventCompressor(DictionaryStore(broker.dictionaries), headers)
            self._stack.push_async_callback(compress.close)
        assembler = Assembler(
            source=settings.slot,
            epoch=self.epoch,
            subjects=self._subjects,
            encoder=self._encoder,
            resume=decision.resume,
            pack=settings.pack,
            max_payload=broker.client.max_payload,
            objects_bucket=self._subjects.objects_bucket,
            headers=headers,
            compress=compress,
        )
        ring: Ring[Item] = Ring(settings.ring_slots, settings.ring_bytes)
        stats.ring_capacity = ring.capacity
        stats.ring_max_bytes = ring.max_bytes
        frames = await FrameWriter.create(broker.client)
        batched = stream.config.get("allow_batched") and lease is None
        writer = (FastIngestWriter if batched else PlainWriter)(
            broker.client, frames, settings.flush_timeout
        )
        await writer.open()
        self._stack.push_async_callback(writer.close)
        stats.mode = "fast-ingest" if batched else "plain"
        progress = ProgressLog(
            broker.bridge, self._subjects.progress(settings.slot), settings.slot, self.epoch,
            server, settings.pub, stream.created_us, settings.json,
        )  # fmt: skip
        continuing = decision.gap is None and not decision.first
        stored = Stored(fence.sequence, fence.msg_id.decode())
        if continuing:
            stored = replace(
                stored, commit_lsn=record.commit_lsn, next_seq=record.next_seq,
                next_ordinal=record.next_ordinal, ts=record.ts,
            )  # fmt: skip
        self._publisher = Publisher(
            client=broker.client,
            ring=ring,
            writer=writer,
            fence=fence,
            lease=lease,
            records=records,
            progress=progress,
            registry=self._registry,
            schemas=self._schemas,
            objects=ObjectWriter(broker.objects),
            subjects=self._subjects,
            stats=stats,
            limits=Limits(settings.batch_events, settings.batch_bytes, settings.nats_away_limit),
            as_json=settings.json,
            idle_lsn=self._idle_lsn,
            confirmed_lsn=slot_lsn,
            stored=stored,
        )
        self._reader = WalReader(
            connection=self._connection,
            assembler=assembler,
            ring=ring,
            stats=stats,
            compile_relation=self._compile_relation,
            confirmed_lsn=lambda: self._publisher.confirmed_lsn,
            status_interval=settings.status_interval,
        )
        gap = None
        if decision.gap is not None:
            gap = {
                "reason": decision.gap,
                "previous_epoch": record.epoch,
                "previous_lsn": record.recorded_lsn,
                "resumes_at": slot_lsn,
            }
        known_lsn = max(record.proven_lsn, slot_lsn) if continuing else slot_lsn
        await self._publisher.announce(known_lsn, server.flushed_lsn, gap)
        self._snapshots = SnapshotService(
            nc=broker.client,
            js=broker.client.jetstream(),
            subjects=self._subjects,
            conninfo=self._conninfo,
            nats_access={
                name: value for name, value in vars(settings).items() if name.startswith("nats_")
            },
            source=settings.slot,
            epoch=self.epoch,
            publication=settings.pub,
            as_json=settings.json,
            zstd=settings.zstd,
            stats=stats,
            ensure_schema=self.ensure_schema,
            workers=settings.snapshot_workers,
            chunk_rows=settings.snapshot_chunk_rows,
            wait_limit=settings.snapshot_wait,
        )
        await self._snapshots.start()
        self._stack.push_async_callback(self._snapshots.stop)

    def _idle_lsn(self) -> tuple[int, int]:
        return self._reader.idle_lsn()

    async def _compile_relation(self, message: Relation, commit_lsn: int) -> CompiledRelation:
        structure = Structure(
            message.relation_id,
            message.namespace,
            message.name,
            message.replica_identity,
            tuple((c.name, c.type_oid, c.type_modifier, c.is_key) for c in message.columns),
        )
        self._catalog.forget_user_types()
        types = await self._catalog.column_types([(c[1], c[2]) for c in structure.columns])
        registry, token = self._registry, structure.token
        document = await registry.version_for(structure, types, lsn=commit_lsn, from_log=True)
        version = document["schema_version"]
        must_store = registry.needs_storing(token, document)
        notice = None
        if must_store or registry.needs_announcement(token, version):
            notice = SchemaNotice(token, document, must_store)
        return CompiledRelation(
            structure, types, version, notice,
            source=self._settings.slot, epoch=self.epoch, subjects=self._subjects,
            encoder=self._encoder, json_messages=self._settings.json, utf8=self._utf8,
        )  # fmt: skip

    async def ensure_schema(self, schema: str, table: str) -> int:
        """The version of the table as the catalog has it now, its document stored in KV."""
        settings = self._settings
        published = await self._catalog.published_columns(
            settings.pub, schema, table, self._server_version
        )
        lsn = self._publisher.confirmed_lsn
        document = await self._registry.from_catalog(schema, table, published, lsn)
        if document is None:
            raise SourceError(f"table {schema}.{table} does not exist")
        token = table_token(schema, table)
        if self._registry.needs_storing(token, document):
            try:
                await self._schemas.put(token, document)
            except SchemaOvertaken as error:
                self._overtaken = error
                raise
            self._registry.note_stored(token, document)
        version: int = document["schema_version"]
        return version

    async def run(self) -> None:
        """Stream until `drain` was called and is done; any trouble ends it with its reason."""
        try:
            async with asyncio.TaskGroup() as group:
                helpers = [
                    group.create_task(self._reader.report()),
                    group.create_task(self._publish_new_schemas()),
                    group.create_task(self._watch_silence()),
                    group.create_task(self._watch_buckets()),
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
            raise self.explain(_first(group_error, ReplicationRefused)) from group_error

    async def _watch_silence(self) -> None:
        """End the session when the server is silent and nobody there serves it any more."""
        while True:
            await stay_cancelled()
            await asyncio.sleep(1.0)
            silent = self._reader.silent_seconds
            if silent < SILENCE_SECONDS:
                continue
            rows = await self._catalog.rows(
                "SELECT active_pid FROM pg_catalog.pg_replication_slots WHERE slot_name = %s",
                [self._settings.slot],
            )
            if self._reader.silent_seconds < silent:
                continue
            # A walsender in the middle of a transaction that is none of ours may be silent.
            if rows != [(self._connection.backend_pid,)] or silent > LONGEST_SILENCE_SECONDS:
                raise Retryable(f"PostgreSQL has sent nothing for {silent:.0f} s")

    async def _watch_buckets(self) -> None:
        """End the session when a bucket was deleted: the next one creates and fills it again."""
        names = self._subjects
        while True:
            await stay_cancelled()
            await asyncio.sleep(TABLE_POLL_SECONDS)
            for name in (names.schemas_bucket, names.bridge_bucket, names.dicts_bucket):
                try:
                    found = await stream_state(self._broker.client, f"KV_{name}")
                except (ApiError, Retryable):
                    # A NATS that is away is noticed by those who write to it.
                    break
                if found is None:
                    raise Retryable(f"bucket {name} has gone; it is created again")

    def connection_lost(self) -> None:
        """NATS has gone, for a moment or for longer."""
        if hasattr(self, "_publisher"):
            self._publisher.connection_lost()

    def drain(self) -> None:
        """Stop reading, publish what was read, confirm it."""
        self._reader.stop()

    async def _publish_new_schemas(self) -> None:
        """Give every published table its schema, also those that never had a change."""
        while True:
            await stay_cancelled()
            try:
                for schema, table in await self._catalog.published_tables(self._settings.pub):
                    if not self._registry.is_stored(table_token(schema, table)):
                        await self.ensure_schema(schema, table)
            except (Retryable, SourceError, nats.errors.Error, APIError, TimeoutError) as error:
                event(log, "schemas not refreshed", level=logging.DEBUG, reason=str(error))
            if self._overtaken is not None:
                raise self._overtaken
            await asyncio.sleep(TABLE_POLL_SECONDS)

    async def close(self, *, orderly: bool) -> None:
        """Release slot and connections."""
        self._stats.slot_active = False
        if orderly and hasattr(self, "_connection"):
            await self._connection.finish()
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


def _parse_history(text: str) -> tuple[tuple[int, int], ...]:
    """Lines of a timeline history file: timeline, LSN at which it was left, reason."""
    forks = []
    for line in text.splitlines():
        parts = line.split()
        if len(parts) >= 2 and parts[0].isdecimal():
            forks.append((int(parts[0]), parse_lsn(parts[1])))
    return tuple(forks)
