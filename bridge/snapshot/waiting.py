"""Whom a session waits for: running transactions, or holders of a table's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg import AsyncConnection

# Names of sessions, never their statements: those hold values of rows.
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


async def sessions_waited_for(
    connection: AsyncConnection[Any], backend_pids: Sequence[int]
) -> list[str]:
    """Describe the sessions and prepared transactions that keep these backends waiting."""
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
