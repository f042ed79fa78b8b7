"""Checks whether the bridge would continue without a gap, as it decides at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import APIError, NotFoundError

from bridge.errors import BridgeError, DataAtRiskError, Retryable
from bridge.jetstream.readback import RecordReader
from bridge.jetstream.record import StreamRecord, load_progress
from bridge.jetstream.streams import stream_state
from bridge.postgres.connection import ReplicationConnection, Server
from bridge.preflight.findings import Finding, Severity, ok, problem
from bridge.publish.continuity import Continuity, decide
from bridge.schemas.store import SchemaStore
from consumer_sdk.transport.api import ApiError
from consumer_sdk.wire.position import format_lsn, parse_lsn

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.kv import KeyValue

    from bridge.jetstream.streams import StreamState
    from bridge.postgres.connection import CatalogConnection
    from consumer_sdk.wire.subjects import Subjects

_FIX = (
    "start the bridge once with --on-gap=new-epoch\n"
    "# it announces the gap, and consumers bootstrap again"
)
_WHY = "changes in between may be missing: the bridge exits with code 4 rather than pass over them"
_WHY_ACCEPTED = "--on-gap=new-epoch is set: a new epoch begins, and consumers bootstrap again"


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """The position of a slot; `confirmed_lsn` is None if there is no such slot."""

    confirmed_lsn: int | None
    active: bool


async def read_slot_position(connection: CatalogConnection, slot: str) -> SlotPosition:
    """Read the slot before the record, because a running bridge advances the record first."""
    cursor = await connection.execute(
        "SELECT confirmed_flush_lsn::text, active FROM pg_catalog.pg_replication_slots "
        "WHERE slot_name = %s",
        [slot],
    )
    row = await cursor.fetchone()
    if row is None:
        return SlotPosition(None, active=False)
    return SlotPosition(parse_lsn(row[0] or "0/0"), bool(row[1]))


async def check_continuity(
    client: Client,
    conninfo: str,
    *,
    subjects: Subjects,
    slot: str,
    publication: str,
    position: SlotPosition,
    accepts_gap: bool = False,
) -> list[Finding]:
    """What a start would decide for this slot, stream and server; nothing is written.

    The end of the stream and of the server's log are read after the record, because a running
    bridge may advance all of them meanwhile.
    """
    try:
        records = await _reader(client, subjects, slot)
        record = await _record(client, records, subjects, slot)
        stream = await stream_state(client, subjects.cdc_stream)
        tail_id = await records.tail_id(record) if stream is not None else None
    except DataAtRiskError as error:
        what, _, fix = str(error).partition("; ")
        return [problem("nats", "continuity", what, _WHY, fix, blocks=True)]
    except (TimeoutError, Retryable, ApiError, nats.errors.Error, APIError) as error:
        return [_unreadable(error)]
    try:
        server = await _identify(conninfo)
    except (Retryable, BridgeError) as error:
        return [_unreadable(error)]
    decision = _decide(record, server, publication, position, stream, tail_id)
    reason = _gap(decision, record, slot, position, stream, subjects)
    if reason is not None:
        severity: Severity = "warning" if accepts_gap else "problem"
        return [
            Finding(
                severity,
                "nats",
                "continuity",
                f"continuity of source {slot} is lost: {reason}",
                _WHY_ACCEPTED if accepts_gap else _WHY,
                _FIX,
                blocks=not accepts_gap,
            )
        ]
    if decision.first:
        return [ok("nats", "continuity", f"nothing is recorded of source {slot} yet")]
    return [ok("nats", "continuity", f"slot {slot} continues what the stream records")]


def _decide(
    record: StreamRecord,
    server: Server,
    publication: str,
    position: SlotPosition,
    stream: StreamState | None,
    tail_id: str | None,
) -> Continuity:
    """The decision of a start; a missing slot or stream is left out of the comparison."""
    progress = record.progress or {}
    if position.active:
        # A running bridge confirms everything when it stops, so a new publication is no gap.
        publication = str(progress.get("publication") or publication)
    return decide(
        record,
        server,
        publication=publication,
        slot_lsn=record.recorded_lsn if position.confirmed_lsn is None else position.confirmed_lsn,
        stream_created_us=progress.get("stream_created", 0)
        if stream is None
        else stream.created_us,
        stream_last_seq=progress.get("stream_seq", 0) if stream is None else stream.last_seq,
        tail_id=tail_id,
    )


def _gap(
    decision: Continuity,
    record: StreamRecord,
    slot: str,
    position: SlotPosition,
    stream: StreamState | None,
    subjects: Subjects,
) -> str | None:
    """Why a start would not continue: it would create a missing slot or stream elsewhere."""
    if decision.first:
        return None
    recorded = format_lsn(record.recorded_lsn)
    reasons = []
    if position.confirmed_lsn is None:
        reasons.append(f"slot {slot} is gone, its changes are recorded up to {recorded}")
    if stream is None:
        reasons.append(f"stream {subjects.cdc_stream} is gone, it held changes up to {recorded}")
    if decision.gap is not None:
        reasons.append(decision.gap)
    return "; ".join(reasons) or None


async def _reader(client: Client, subjects: Subjects, slot: str) -> RecordReader:
    schemas = await _bucket(client, subjects.schemas_bucket)
    foreign: set[str] = set()
    if schemas is not None:
        store = SchemaStore(schemas, source=slot, as_json=False)
        foreign = store.foreign_tables(await store.load())
    dictionaries = await _bucket(client, subjects.dicts_bucket)
    return RecordReader(client, subjects, slot, foreign.__contains__, dictionaries)


async def _record(
    client: Client, records: RecordReader, subjects: Subjects, slot: str
) -> StreamRecord:
    bucket = await _bucket(client, subjects.bridge_bucket)
    kept = await load_progress(bucket, slot) if bucket is not None else None
    if await stream_state(client, subjects.cdc_stream) is not None:
        return await records.read_unfenced(kept)
    record = StreamRecord()
    if kept is not None:
        record.note_progress(kept)
    return record


async def _bucket(client: Client, name: str) -> KeyValue | None:
    try:
        return await client.jetstream().key_value(name)
    except NotFoundError:
        return None


async def _identify(conninfo: str) -> Server:
    connection = await ReplicationConnection.connect(conninfo)
    try:
        return await connection.identify()
    finally:
        await connection.close()


def _unreadable(error: Exception) -> Finding:
    return problem(
        "nats",
        "continuity",
        f"the record of the source cannot be compared: {str(error) or type(error).__name__}",
        "whether the bridge would continue without a gap is not known",
        "run the check again; see the logs of nats-server and PostgreSQL if it stays so",
        blocks=True,
    )
