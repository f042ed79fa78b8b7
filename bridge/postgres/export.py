"""The consistent point: a temporary slot whose snapshot other sessions import.

An event is in the snapshot if and only if its commit LSN is below the slot's consistent point.
PostgreSQL first waits for the transactions that are writing; the wait is reported and limited.
https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import psycopg

from bridge.postgres.errors import (
    CONFIGURATION_LIMIT_EXCEEDED,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    StatementFailed,
    primary_message,
)
from bridge.postgres.sessions import connect_session
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.wire.position import parse_lsn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from psycopg import AsyncConnection

    ReportWaiting = Callable[[list[str]], Awaitable[None]]

# Names of sessions, never their statements, which contain values of rows.
BLOCKERS: Final = """
WITH blocker AS (
    SELECT DISTINCT pg_catalog.unnest(pg_catalog.pg_blocking_pids(waiting.pid)) AS pid
    FROM pg_catalog.unnest(%s::int[]) AS waiting(pid)
)
SELECT a.pid, a.usename, a.datname, a.application_name, a.state, a.wait_event,
       extract(epoch FROM pg_catalog.clock_timestamp() - a.xact_start)::float8
FROM blocker b JOIN pg_catalog.pg_stat_activity a ON a.pid = b.pid
ORDER BY a.xact_start
"""

PREPARED: Final = """
SELECT p.gid, p.owner, p.database,
       extract(epoch FROM pg_catalog.clock_timestamp() - p.prepared)::float8
FROM pg_catalog.pg_prepared_xacts p
WHERE 0 = ANY (SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(waiting.pid))
               FROM pg_catalog.unnest(%s::int[]) AS waiting(pid))
ORDER BY p.prepared
"""


REMEDIES: Final = {
    CONFIGURATION_LIMIT_EXCEEDED: "raise max_replication_slots, or drop unused slots",
    OBJECT_NOT_IN_PREREQUISITE_STATE: "set wal_level = logical and restart PostgreSQL",
}
POLL_SECONDS: Final = 0.5
CANCEL_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """A snapshot that other sessions can import while the context that made it is open."""

    snapshot_name: str
    snapshot_lsn: int


async def sessions_waited_for(
    connection: AsyncConnection[Any], backend_pids: Sequence[int]
) -> list[str]:
    """Describe the sessions and prepared transactions that these backends wait for."""
    pids = list(backend_pids)
    names = []
    for pid, user, database, application, state, event, age in await (
        await connection.execute(BLOCKERS, [pids])
    ).fetchall():
        who = " ".join(str(part) for part in (user, application) if part)
        doing = state or "busy"
        if event == "SyncRep":
            doing = "waiting for a synchronous standby"
        names.append(
            f"pid {pid} ({who or 'unknown'}, database {database or '-'}, {doing}, "
            f"open for {age or 0:.0f} s)"
        )
    for gid, owner, database, age in await (await connection.execute(PREPARED, [pids])).fetchall():
        names.append(
            f"prepared transaction {gid!r} ({owner}, database {database}, "
            f"open for {age or 0:.0f} s)"
        )
    return names


@asynccontextmanager
async def exported_snapshot(
    conninfo: str,
    catalog: AsyncConnection[Any],
    *,
    wait_limit: float,
    report: ReportWaiting,
) -> AsyncIterator[ExportedSnapshot]:
    """Create a consistent point; leaving the context drops the slot and ends the export.

    `report` is called with the sessions waited for, and with none when the wait is over.
    """
    async with await connect_session(
        conninfo, "tailrace snapshot export", replication="database"
    ) as connection:
        await connection.execute("SET idle_in_transaction_session_timeout = 0")
        await connection.execute("SET statement_timeout = 0")
        await connection.execute("SET lock_timeout = 0")
        if connection.info.server_version >= 170000:
            # The exported snapshot is an open transaction until every worker has imported it.
            await connection.execute("SET transaction_timeout = 0")
        slot = f"tailrace_snapshot_{secrets.token_hex(8)}"
        # PostgreSQL 14 knows only the older spelling of the option.
        option = (
            "(SNAPSHOT 'export')" if connection.info.server_version >= 150000 else "EXPORT_SNAPSHOT"
        )
        command = f"CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput {option}"
        creation = asyncio.ensure_future(connection.execute(command.encode()))
        try:
            await _wait(creation, connection, catalog, wait_limit, report)
            row = await creation.result().fetchone()
        except psycopg.Error as error:
            raise StatementFailed(_remedied(error)) from error
        finally:
            await abandon(creation, connection)
        if row is None or not row[2]:
            raise StatementFailed("PostgreSQL created a slot without exporting its snapshot")
        yield ExportedSnapshot(row[2], parse_lsn(row[1]))


async def _wait(
    creation: asyncio.Future[Any],
    connection: AsyncConnection[Any],
    catalog: AsyncConnection[Any],
    wait_limit: float,
    report: ReportWaiting,
) -> None:
    pids = [connection.info.backend_pid]
    async with reported_wait(catalog, pids, wait_limit, report, "running transactions to end"):
        await asyncio.shield(creation)


@asynccontextmanager
async def reported_wait(
    catalog: AsyncConnection[Any],
    backend_pids: Sequence[int],
    wait_limit: float | None,
    report: ReportWaiting,
    what: str,
) -> AsyncIterator[None]:
    """Report the sessions that the backends wait for; StatementFailed after the limit, if any.

    `backend_pids` may grow while the body runs: it is read again for every report.
    """
    seen: list[str] = []

    async def watch() -> None:
        nonlocal seen
        while True:
            await stay_cancelled()
            await asyncio.sleep(POLL_SECONDS)
            seen = await sessions_waited_for(catalog, backend_pids)
            await report(seen)

    watcher = asyncio.create_task(watch())
    try:
        async with asyncio.timeout(wait_limit) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        names = "; ".join(seen) or "unknown sessions"
        raise StatementFailed(
            f"waited {wait_limit:g} s for {what}: {names}; end them, or raise --snapshot-wait"
        ) from error
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError, psycopg.Error):
            await watcher
    if seen:
        await report([])


async def abandon(creation: asyncio.Future[Any], connection: AsyncConnection[Any]) -> None:
    """Cancel an abandoned slot creation; PostgreSQL would not notice a closed socket."""
    if creation.done():
        return
    with suppress(psycopg.Error, OSError, TimeoutError):
        await connection.cancel_safe(timeout=CANCEL_SECONDS)
    with suppress(psycopg.Error, OSError, TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await creation


def _remedied(error: psycopg.Error) -> str:
    text = primary_message(error)
    remedy = REMEDIES.get(error.sqlstate or "")
    return f"{text}; {remedy}" if remedy else text
