"""Checks the server: version, settings, free slots and WAL senders, rights of the role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.postgres.connection import conninfo_parts
from bridge.postgres.errors import DriverError
from bridge.preflight.findings import Finding, ok, problem, warning
from bridge.telemetry.wal_monitor import OpenTransaction, format_duration
from consumer_sdk.wire.escaping import sql_identifier

if TYPE_CHECKING:
    from bridge.postgres.connection import CatalogConnection

OLDEST_VERSION = 140000
RESTART = "then restart PostgreSQL"

_FACTS = """
SELECT pg_catalog.current_setting('server_version_num')::int,
       pg_catalog.current_setting('server_version'),
       pg_catalog.current_setting('wal_level'),
       pg_catalog.current_setting('max_wal_senders')::int
           - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication),
       pg_catalog.current_setting('max_wal_senders')::int,
       pg_catalog.current_setting('max_replication_slots')::int
           - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots),
       pg_catalog.current_setting('max_replication_slots')::int,
       pg_catalog.current_setting('max_slot_wal_keep_size'),
       coalesce(pg_catalog.current_setting('idle_replication_slot_timeout', true), '0'),
       pg_catalog.current_setting('server_encoding'),
       pg_catalog.pg_is_in_recovery(),
       current_user::text,
       pg_catalog.current_database()::text,
       r.rolsuper OR r.rolreplication OR EXISTS (
           SELECT FROM pg_catalog.pg_roles p WHERE p.rolname = 'rds_replication'
              AND pg_catalog.pg_has_role(current_user, p.oid, 'USAGE')),
       r.rolsuper OR pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
       EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = %s),
       coalesce((SELECT active FROM pg_catalog.pg_replication_slots WHERE slot_name = %s), false),
       coalesce(pg_catalog.current_setting('synchronized_standby_slots', true), ''),
       coalesce(pg_catalog.current_setting('sync_replication_slots', true), 'off') = 'on',
       pg_catalog.current_setting('hot_standby_feedback') = 'on',
       pg_catalog.current_setting('primary_slot_name'),
       (SELECT setting FROM pg_catalog.pg_settings WHERE name = 'primary_conninfo'),
       coalesce(pg_catalog.current_setting('effective_wal_level', true),
                pg_catalog.current_setting('wal_level'))
  FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""

_OPEN_TRANSACTIONS = """
SELECT pid, NULL, coalesce(usename, ''), coalesce(state, ''),
       extract(epoch FROM pg_catalog.now() - xact_start)::float8
  FROM pg_catalog.pg_stat_activity
 WHERE backend_xid IS NOT NULL AND pid <> pg_catalog.pg_backend_pid()
   AND xact_start <= pg_catalog.now() - pg_catalog.make_interval(secs => %(seconds)s)
UNION ALL
SELECT NULL, gid, owner::text, 'prepared',
       extract(epoch FROM pg_catalog.now() - prepared)::float8
  FROM pg_catalog.pg_prepared_xacts
 WHERE prepared <= pg_catalog.now() - pg_catalog.make_interval(secs => %(seconds)s)
 ORDER BY 5 DESC
 LIMIT 20
"""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about the server, the role and the slot, read by one query."""

    version: int
    version_text: str
    wal_level: str
    senders_free: int
    senders: int
    slots_free: int
    slots: int
    wal_keep: str
    idle_slot_timeout: str
    encoding: str
    in_recovery: bool
    role: str
    database: str
    may_replicate: bool
    sees_statistics: bool
    slot_exists: bool
    slot_active: bool
    awaited_standbys: str
    """synchronized_standby_slots, since version 17."""
    syncs_slots: bool
    """sync_replication_slots, since version 17."""
    has_feedback: bool
    primary_slot: str
    primary_conninfo: str | None
    """None if the role may not see it."""
    effective_wal_level: str
    """What the server writes now; since version 19 it is logical while a logical slot exists."""

    @property
    def major(self) -> int:
        return self.version // 10000


async def read_facts(connection: CatalogConnection, slot: str) -> ServerFacts:
    """Read the facts that the server checks need."""
    cursor = await connection.execute(_FACTS, [slot, slot])
    row = await cursor.fetchone()
    assert row is not None
    return ServerFacts(*row)


def check_server(facts: ServerFacts) -> list[Finding]:
    """Version, settings and rights."""
    if facts.version < OLDEST_VERSION:
        return [
            problem(
                "postgres",
                "pg-version",
                f"PostgreSQL {facts.version_text} is older than 14",
                "the replication protocol of older versions lacks what the bridge relies on",
                "upgrade PostgreSQL to 14 or newer",
                blocks=True,
            )
        ]
    return [
        ok("postgres", "pg-version", f"PostgreSQL {facts.version_text}"),
        _wal_level(facts),
        *_recovery(facts),
        *_slot_sync(facts),
        _senders(facts),
        _slots(facts),
        _wal_keep(facts),
        *_idle_timeout(facts),
        *_encoding(facts),
        _replication_right(facts),
        _statistics_right(facts),
    ]


def _wal_level(facts: ServerFacts) -> Finding:
    if facts.wal_level == "logical":
        return ok("postgres", "wal-level", "wal_level is logical")
    if facts.effective_wal_level == "logical":
        return ok("postgres", "wal-level", "wal_level is logical as long as a logical slot exists")
    if facts.major >= 19 and facts.wal_level == "replica":
        shown = "wal_level is replica and becomes logical with the first logical slot"
        return ok("postgres", "wal-level", shown)
    return problem(
        "postgres",
        "wal-level",
        f"wal_level is {facts.wal_level}, not logical",
        "without it WAL does not hold what logical decoding needs",
        f"ALTER SYSTEM SET wal_level = 'logical';\n-- {RESTART}",
        blocks=True,
    )


def _recovery(facts: ServerFacts) -> list[Finding]:
    if not facts.in_recovery:
        return []
    if facts.major < 16:
        return [
            problem(
                "postgres",
                "standby",
                "this server is a standby",
                "before PostgreSQL 16 a standby cannot decode logically",
                "connect to the primary: set PG_HOST or DATABASE_URL",
                blocks=True,
            )
        ]
    return [
        warning(
            "postgres",
            "standby",
            "this server is a standby",
            "its slot is invalidated when the primary removes rows it needs, and creating slots "
            "waits for activity on the primary",
            "connect to the primary: set PG_HOST or DATABASE_URL",
        )
    ]


def _slot_sync(facts: ServerFacts) -> list[Finding]:
    """What a standby lacks to synchronise the slot from the primary."""
    if not facts.in_recovery or not facts.syncs_slots:
        return []
    reload = "SELECT pg_catalog.pg_reload_conf();"
    missing = []
    if not facts.has_feedback:
        missing.append(
            (
                "hot_standby_feedback is off",
                f"ALTER SYSTEM SET hot_standby_feedback = on;\n{reload}",
            )
        )
    if not facts.primary_slot:
        missing.append(
            (
                "primary_slot_name is not set",
                (
                    f"ALTER SYSTEM SET primary_slot_name = 'standby';\n{reload}\n"
                    "-- a physical slot that exists on the primary"
                ),
            )
        )
    # The value is not repeated here, because it may contain a password.
    if facts.primary_conninfo is not None and not _names_database(facts.primary_conninfo):
        missing.append(
            (
                "primary_conninfo has no dbname",
                (
                    "-- add dbname=postgres, or any other database, to the present value:\n"
                    f"-- ALTER SYSTEM SET primary_conninfo = '…'; {reload}"
                ),
            )
        )
    return [
        problem(
            "postgres",
            "slot-sync",
            f"this standby synchronises slots, but {what}",
            "PostgreSQL then synchronises no slot, and after a failover the bridge's is missing: "
            "new epoch and new snapshots",
            fix,
        )
        for what, fix in missing
    ]


def _names_database(conninfo: str) -> bool:
    try:
        return bool(conninfo_parts(conninfo).get("dbname"))
    except DriverError:
        return False


def _senders(facts: ServerFacts) -> Finding:
    for_bridge = facts.senders_free + int(facts.slot_active)
    if for_bridge >= 2:
        shown = f"{facts.senders_free} of {facts.senders} WAL senders free"
        return ok("postgres", "wal-senders", shown)
    fix = f"ALTER SYSTEM SET max_wal_senders = {facts.senders + 5};\n-- {RESTART}"
    if for_bridge < 1:
        return problem(
            "postgres",
            "wal-senders",
            f"all {facts.senders} WAL senders are taken",
            "the bridge needs one to stream",
            fix,
            blocks=True,
        )
    return warning(
        "postgres",
        "wal-senders",
        f"besides the bridge's own, none of {facts.senders} WAL senders is free",
        "a snapshot needs a second one for its temporary slot",
        fix,
    )


def _slots(facts: ServerFacts) -> Finding:
    for_bridge = facts.slots_free + int(facts.slot_exists)
    if for_bridge >= 2:
        shown = f"{facts.slots_free} of {facts.slots} replication slots free"
        return ok("postgres", "replication-slots", shown)
    fix = (
        f"ALTER SYSTEM SET max_replication_slots = {facts.slots + 5};\n"
        f"-- {RESTART}; or drop an unused slot, see the view pg_replication_slots"
    )
    if for_bridge < 1:
        return problem(
            "postgres",
            "replication-slots",
            f"all {facts.slots} replication slots are taken",
            "the bridge cannot create its slot",
            fix,
            blocks=True,
        )
    return warning(
        "postgres",
        "replication-slots",
        f"besides the bridge's own, none of {facts.slots} replication slots is free",
        "a snapshot needs a temporary slot",
        fix,
    )


def _wal_keep(facts: ServerFacts) -> Finding:
    if facts.wal_keep != "-1":
        return ok(
            "postgres",
            "wal-limit",
            f"max_slot_wal_keep_size is {facts.wal_keep}: a slot further behind is lost, "
            "the disk does not fill",
        )
    return warning(
        "postgres",
        "wal-limit",
        "max_slot_wal_keep_size is unlimited",
        "while the bridge or NATS is away, retained WAL can fill the disk and stop PostgreSQL",
        "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB';\nSELECT pg_catalog.pg_reload_conf();\n"
        "-- choose what the disk can spare and the longest outage needs",
    )


def _idle_timeout(facts: ServerFacts) -> list[Finding]:
    if facts.idle_slot_timeout in ("0", "0s", "0min"):
        return []
    return [
        warning(
            "postgres",
            "idle-slot-timeout",
            f"idle_replication_slot_timeout is {facts.idle_slot_timeout}",
            "a bridge stopped for longer loses its slot, which means a new epoch and new snapshots",
            "ALTER SYSTEM SET idle_replication_slot_timeout = 0;\n"
            "SELECT pg_catalog.pg_reload_conf();",
        )
    ]


def _encoding(facts: ServerFacts) -> list[Finding]:
    if facts.encoding != "SQL_ASCII":
        return []
    return [
        warning(
            "postgres",
            "encoding",
            f"database {facts.database} has encoding SQL_ASCII",
            "nothing guarantees that its text is UTF-8; a value that is not stops the bridge",
            "dump the database and restore it into one created with ENCODING 'UTF8'",
        )
    ]


def _replication_right(facts: ServerFacts) -> Finding:
    if facts.may_replicate:
        return ok("postgres", "role-replication", f"role {facts.role} may replicate")
    return problem(
        "postgres",
        "role-replication",
        f"role {facts.role} lacks the REPLICATION attribute",
        "PostgreSQL refuses the replication connection and the creation of slots",
        f"ALTER ROLE {sql_identifier(facts.role)} REPLICATION;",
        blocks=True,
    )


def _statistics_right(facts: ServerFacts) -> Finding:
    if facts.sees_statistics:
        return ok("postgres", "role-statistics", f"role {facts.role} sees other sessions")
    return warning(
        "postgres",
        "role-statistics",
        f"role {facts.role} cannot see other sessions",
        "the bridge cannot tell which transaction holds the slot back or delays a snapshot",
        f"GRANT pg_read_all_stats TO {sql_identifier(facts.role)};",
    )


async def check_open_transactions(
    connection: CatalogConnection, seconds: float, *, sees_all: bool
) -> list[Finding]:
    """Find long-running writing transactions, which delay every snapshot and keep WAL.

    Without the right to see other sessions, the absence of such transactions is not reported.
    """
    cursor = await connection.execute(_OPEN_TRANSACTIONS, {"seconds": seconds})
    found = []
    for pid, gid, user, state, age in await cursor.fetchall():
        transaction = OpenTransaction(pid, gid)
        found.append(
            warning(
                "postgres",
                "open-transaction",
                f"{transaction.who} of {user} ({state}) has a writing transaction open for "
                f"{format_duration(age)}",
                "a snapshot waits for it to end, and WAL since its start is kept",
                f"{transaction.end_statement};\n-- against the next one: "
                "ALTER SYSTEM SET idle_in_transaction_session_timeout = '10min';",
            )
        )
    if found or not sees_all:
        return found
    return [ok("postgres", "open-transaction", "no writing transaction is open for long")]
