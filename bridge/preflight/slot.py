"""Checks the replication slot: whether it is a slot of the bridge, is valid and can decode."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.postgres.errors import (
    INSUFFICIENT_PRIVILEGE,
    OBJECT_IN_USE,
    UNDEFINED_OBJECT,
    DriverError,
    sqlstate_of,
)
from bridge.preflight.findings import Finding, ok, problem, warning
from bridge.telemetry.wal_monitor import format_bytes
from consumer_sdk.wire.escaping import sql_literal
from consumer_sdk.wire.subjects import quote_identifier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bridge.postgres.connection import CatalogConnection
    from bridge.preflight.server import ServerFacts

PEEK_TIMEOUT_MS = 10_000

QUERY_CANCELED = "57014"
# The slot is in use, too far behind to decode within the time-out, or not permitted to the role.
_NOT_JUDGED = (OBJECT_IN_USE, QUERY_CANCELED, INSUFFICIENT_PRIVILEGE)

_SLOTS = """
SELECT s.slot_name, s.slot_type, coalesce(s.plugin, ''), coalesce(s.database, ''), s.temporary,
       s.active, coalesce(s.wal_status, ''),
       coalesce({invalidation}, ''),
       {failover},
       greatest(coalesce({wal} - s.confirmed_flush_lsn, 0), 0)::bigint,
       greatest(coalesce({wal} - s.restart_lsn, 0), 0)::bigint
  FROM pg_catalog.pg_replication_slots s
"""
_WAL = (
    "(CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn() "
    "ELSE pg_catalog.pg_current_wal_lsn() END)"
)


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A row of pg_replication_slots; `lag` and `retained` in bytes of WAL."""

    name: str
    kind: str
    plugin: str
    database: str
    temporary: bool
    active: bool
    wal_status: str
    invalidation: str
    failover: bool
    lag: int
    retained: int


async def read_slots(connection: CatalogConnection, major: int) -> list[SlotFacts]:
    """All slots of the server."""
    invalidation = "NULL::text"
    if major >= 17:
        invalidation = "s.invalidation_reason"
    elif major == 16:
        invalidation = "CASE WHEN s.conflicting THEN 'conflict with recovery' END"
    failover = "s.failover" if major >= 17 else "false"
    query = _SLOTS.format(invalidation=invalidation, failover=failover, wal=_WAL)
    cursor = await connection.execute(query)
    return [SlotFacts(*row) for row in await cursor.fetchall()]


def check_slots(
    slots: list[SlotFacts], name: str, facts: ServerFacts, warn_bytes: int
) -> list[Finding]:
    """Check the bridge's slot, and other slots that fill the disk."""
    own = next((slot for slot in slots if slot.name == name), None)
    found = list(_own(own, name, facts, warn_bytes))
    if own is not None and facts.major >= 17:
        found += _failover(own, slots)
    found += _awaited_standbys(own, slots, facts)
    for slot in slots:
        if slot.name != name and not slot.active and slot.retained >= warn_bytes:
            found.append(
                warning(
                    "postgres",
                    "orphan-slot",
                    f"slot {slot.name} is not in use and keeps {format_bytes(slot.retained)} "
                    "of WAL",
                    "no client reads it, and its WAL grows until the disk is full",
                    f"{_drop(slot.name)}\n-- if its reader will not return",
                )
            )
    return found


def _own(
    slot: SlotFacts | None, name: str, facts: ServerFacts, warn_bytes: int
) -> Iterator[Finding]:
    if slot is None:
        yield ok("postgres", "slot", f"slot {name} does not exist and will be created at start")
        return
    if slot.kind != "logical" or slot.plugin != "pgoutput":
        kind = slot.plugin if slot.kind == "logical" else "physical"
        yield problem(
            "postgres",
            "slot-plugin",
            f"slot {name} is a {kind} slot, not one of pgoutput",
            "it belongs to another program or cannot carry what the bridge reads",
            f"{_drop(name)}\n-- only if it is not needed; else choose another name with --slot",
            blocks=True,
        )
        return
    if slot.database != facts.database:
        yield problem(
            "postgres",
            "slot-database",
            f"slot {name} belongs to database {slot.database}, not to {facts.database}",
            "a logical slot serves one database",
            f"{_drop(name)}\n-- only if it is not needed; else choose another name with --slot",
            blocks=True,
        )
        return
    if slot.wal_status == "lost" or slot.invalidation:
        reason = slot.invalidation or "WAL it needs was removed"
        yield problem(
            "postgres",
            "slot-lost",
            f"slot {name} is invalid ({reason})",
            "changes since its position cannot be read any more; a new slot means a new epoch "
            "and new snapshots",
            f"{_drop(name)}\n-- then start the bridge with --on-gap=new-epoch",
            blocks=True,
        )
        return
    if slot.wal_status == "unreserved":
        yield warning(
            "postgres",
            "slot-unreserved",
            f"slot {name} is beyond max_slot_wal_keep_size",
            "the next checkpoint may remove WAL it needs",
            "ALTER SYSTEM SET max_slot_wal_keep_size = '200GB';\n"
            "SELECT pg_catalog.pg_reload_conf();\n"
            "-- choose what the disk can spare",
        )
    if slot.lag >= warn_bytes:
        yield warning(
            "postgres",
            "slot-lag",
            f"slot {name} is {format_bytes(slot.lag)} behind",
            "PostgreSQL keeps that WAL until the bridge has caught up",
            "start the bridge and let it catch up",
        )
    state = "in use now" if slot.active else f"{format_bytes(slot.lag)} behind"
    yield ok("postgres", "slot", f"slot {name} exists, {state}")


def _failover(own: SlotFacts, slots: list[SlotFacts]) -> Iterator[Finding]:
    standbys = [slot.name for slot in slots if slot.kind == "physical"]
    if own.failover:
        yield ok("postgres", "slot-failover", f"slot {own.name} fails over to a standby")
    elif standbys:
        command = f"ALTER_REPLICATION_SLOT {quote_identifier(own.name)} (FAILOVER true)"
        yield warning(
            "postgres",
            "slot-failover",
            f"slot {own.name} is not a failover slot, though there is a standby",
            "after a failover the slot is gone: new epoch and new snapshots",
            f'psql "$DATABASE_URL?replication=database" -c {shlex.quote(command)}\n'
            "-- while the bridge is stopped; the standby needs sync_replication_slots = on and "
            "hot_standby_feedback = on",
        )


def _awaited_standbys(
    own: SlotFacts | None, slots: list[SlotFacts], facts: ServerFacts
) -> Iterator[Finding]:
    """Names in synchronized_standby_slots for which PostgreSQL waits in vain."""
    physical = {slot.name for slot in slots if slot.kind == "physical"}
    logical = {slot.name for slot in slots if slot.kind == "logical"}
    names = [name.strip(' "') for name in facts.awaited_standbys.split(",") if name.strip()]
    wrong = [name for name in names if name not in physical]
    if not wrong:
        return
    kept = ", ".join(name for name in names if name in physical)
    kinds = ", ".join(
        f"{name} ({'a logical slot' if name in logical else 'no slot'})" for name in wrong
    )
    finding = problem if own is not None and own.failover else warning
    yield finding(
        "postgres",
        "synchronized-standby-slots",
        f"synchronized_standby_slots names {kinds}; only physical slots of standbys belong there",
        "PostgreSQL sends nothing from a failover slot until all of these slots have confirmed it, "
        "so a bridge with --failover receives no change",
        f"ALTER SYSTEM SET synchronized_standby_slots = {sql_literal(kept)};\n"
        "SELECT pg_catalog.pg_reload_conf();",
    )


async def check_decoding(
    connection: CatalogConnection, slot: str, publication: str
) -> list[Finding]:
    """Decode one transaction from the slot, as the bridge will, without advancing the slot."""
    query = (
        "SELECT pg_catalog.count(*) "
        "FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, NULL, 1, "
        "'proto_version', '1', 'publication_names', %s)"
    )
    try:
        async with connection.transaction():
            # pgoutput reads names in plain quotes only.
            quoted = '"' + publication.replace('"', '""') + '"'
            await connection.execute(f"SET LOCAL statement_timeout = {PEEK_TIMEOUT_MS}")
            await connection.execute(query, [slot, quoted])
    except DriverError as error:
        state = sqlstate_of(error)
        if state in _NOT_JUDGED:
            return []
        if state != UNDEFINED_OBJECT:
            raise
        return [
            problem(
                "postgres",
                "publication-after-slot",
                f"slot {slot} stands before publication {publication} was created",
                f"decoding fails with: {error.diag.message_primary}; before PostgreSQL 18 the "
                "publication must be older than the changes",
                f"SELECT pg_catalog.pg_replication_slot_advance({sql_literal(slot)}, "
                "pg_catalog.pg_current_wal_lsn());\n"
                "-- skips what was written before; a bridge that has already published under this "
                "name then needs --on-gap=new-epoch",
                blocks=True,
            )
        ]
    return [ok("postgres", "slot-decodes", f"slot {slot} decodes with publication {publication}")]


def _drop(name: str) -> str:
    return f"SELECT pg_catalog.pg_drop_replication_slot({sql_literal(name)});"
