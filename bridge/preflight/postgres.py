"""Checks the PostgreSQL side: server, role, publication and slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import SourceError
from bridge.postgres.connection import connect, conninfo_parts
from bridge.postgres.errors import (
    INVALID_AUTHORIZATION,
    INVALID_PASSWORD,
    TLS_REFUSED,
    UNDEFINED_DATABASE,
    DriverError,
    one_line,
    sqlstate_of,
)
from bridge.postgres.publication import TablesLocked, read_publication
from bridge.preflight.findings import Finding, problem, warning
from bridge.preflight.publication import check_publication
from bridge.preflight.server import check_open_transactions, check_server, read_facts
from bridge.preflight.slot import check_decoding, check_slots, read_slots

if TYPE_CHECKING:
    from bridge.postgres.connection import CatalogConnection
    from bridge.postgres.publication import Publication

LOCKED = "table-locked"
DEFAULT_WARN_BYTES = 512 * 1024**2

_FIX_ADDRESS = "start PostgreSQL, or set PG_HOST and PG_PORT, or DATABASE_URL, to where it is"
_FIXES = {
    INVALID_PASSWORD: "set POSTGRES_BRIDGE_USER and POSTGRES_BRIDGE_PASSWORD, or DATABASE_URL",
    INVALID_AUTHORIZATION: "let the role log in: it must exist and have LOGIN, and pg_hba.conf "
    "needs a line for this host, database and role",
    UNDEFINED_DATABASE: "set PG_DB, or DATABASE_URL, to a database that exists",
    TLS_REFUSED: "set PGSSLMODE, PGSSLROOTCERT, PGSSLCERT and PGSSLKEY, or DATABASE_URL",
}


async def check_postgres(
    connection: CatalogConnection,
    *,
    slot: str,
    publication: str,
    warn_bytes: int = DEFAULT_WARN_BYTES,
    open_transaction_seconds: float = 60.0,
    try_decoding: bool = True,
) -> list[Finding]:
    """All findings about the server, the role, the publication and the slot.

    The connection must be in autocommit mode. Nothing is changed; the slot is not advanced.
    """
    facts = await read_facts(connection, slot)
    found = check_server(facts)
    if any(finding.code == "pg-version" and finding.blocks for finding in found):
        return found
    described = None
    try:
        described = await read_publication(connection, publication, facts.version)
        found += check_publication(described, publication, facts)
    except TablesLocked as error:
        found.append(_locked(error))
    slots = await read_slots(connection, facts.major)
    about_slots = check_slots(slots, slot, facts, warn_bytes)
    found += about_slots
    usable = facts.slot_exists and not any(finding.blocks for finding in about_slots)
    if try_decoding and usable and described is not None and facts.may_replicate:
        found += await check_decoding(connection, slot, publication)
    found += await check_open_transactions(
        connection, open_transaction_seconds, sees_all=facts.sees_statistics
    )
    return found


async def connect_for_check(conninfo: str) -> CatalogConnection | Finding:
    """A connection for the checks, or the finding that says why there is none."""
    try:
        return await connect(
            conninfo,
            connect_timeout=10,
            application_name="bridge check",
            client_encoding="utf8",
        )
    except DriverError as error:
        return _unreachable(conninfo, error)


async def check_replication_connection(conninfo: str) -> list[Finding]:
    """Open a replication connection and close it again."""
    try:
        connection = await connect(conninfo, connect_timeout=10, replication="database")
    except DriverError as error:
        return [
            problem(
                "postgres",
                "replication-connect",
                f"no replication connection: {one_line(error)}",
                "the bridge streams over such a connection",
                "connect to PostgreSQL itself, not through a pooler such as PgBouncer, and let "
                "max_wal_senders leave room",
                blocks=True,
            )
        ]
    await connection.close()
    return []


async def published_tables(connection: CatalogConnection, publication: str) -> Publication | None:
    """The publication with its tables; None if there is none of that name."""
    try:
        return await read_publication(connection, publication, connection.info.server_version)
    except (TablesLocked, DriverError) as error:
        raise SourceError(
            f"publication {publication} cannot be read: {one_line(error)}; try again later"
        ) from error


def _locked(error: TablesLocked) -> Finding:
    return warning(
        "postgres",
        LOCKED,
        str(error),
        "the publication cannot be checked; changes are still streamed, but snapshots wait",
        "\n".join([*error.statements, "-- or check again when its transaction has ended"]),
    )


def unreadable(error: DriverError) -> Finding:
    """The finding that PostgreSQL refused the queries of the check."""
    return problem(
        "postgres",
        "pg-unreadable",
        f"PostgreSQL cannot be checked: {one_line(error)}",
        "the rest of the checks could not be made",
        "-- try again; check the role's statement_timeout and the log of PostgreSQL",
        blocks=True,
    )


def _unreachable(conninfo: str, error: DriverError) -> Finding:
    text = one_line(error)
    fix = _FIXES.get(sqlstate_of(error), _FIX_ADDRESS)
    secret = str(conninfo_parts(conninfo).get("password") or "")
    if secret:
        text = text.replace(secret, "***")
    return problem(
        "postgres",
        "pg-unreachable",
        f"cannot connect to PostgreSQL: {text}",
        "nothing on it could be checked",
        fix,
        blocks=True,
    )
