"""SQL sessions that read tables for snapshots: the coordinator's, and a worker's."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

from bridge.postgres.connection import PIN_SEARCH_PATH, SESSION_SETTINGS, connect, pinned_options
from bridge.postgres.errors import StatementFailed, statement_errors
from bridge.postgres.login import log_in_blocking
from consumer_sdk.transport.cancellation import stay_cancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from psycopg import AsyncConnection

    Answer = TypeVar("Answer")

# The settings of every connection, and those for long reads. With row security off, a table that
# policies would silently filter is an error.
SESSION: Final = {
    **SESSION_SETTINGS,
    "client_encoding": "UTF8",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
}

SESSION_SQL: Final = """
SELECT pg_catalog.set_config(s.name, w.value, false)
FROM ROWS FROM (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) AS w(name, value)
JOIN pg_catalog.pg_settings s ON pg_catalog.lower(s.name) = pg_catalog.lower(w.name)
"""


PRINT_SQL: Final = """
SELECT pg_catalog.format('%%s', v.value::{type_name})
FROM ROWS FROM (pg_catalog.unnest(%s::pg_catalog.text[])) WITH ORDINALITY AS v(value, place)
ORDER BY v.place
"""


async def connect_session(
    conninfo: str, application: str, **parameters: Any
) -> AsyncConnection[Any]:
    """Open a session in which each statement is its own transaction."""
    return await connect(conninfo, application_name=application, **parameters)


async def set_session(connection: AsyncConnection[Any]) -> None:
    """Apply the settings that determine how values are printed."""
    await connection.execute(SESSION_SQL, _session_parameters())


async def print_values(
    connection: AsyncConnection[Any], type_name: str, texts: Sequence[str]
) -> list[str]:
    """Read texts as values of a type and print them again; ValueRefused if one is no such value.

    The name of the type becomes part of the statement, so it must come from the catalog.
    """
    query = PRINT_SQL.format(type_name=type_name.replace("%", "%%"))
    with statement_errors():
        rows = await (await connection.execute(query.encode(), [list(texts)])).fetchall()
    return [row[0] for row in rows]


def _session_parameters() -> list[list[str]]:
    return [list(SESSION), list(SESSION.values())]


class ReconnectingSession:
    """A session for occasional queries: one at a time, opened when first needed.

    A query waits at most `lock_seconds` for a lock, because other queries wait behind it.
    """

    def __init__(self, conninfo: str, application: str, lock_seconds: float) -> None:
        self._conninfo = conninfo
        self._application = application
        self._lock_seconds = lock_seconds
        self._connection: AsyncConnection[Any] | None = None
        self._turn = asyncio.Lock()

    async def ask(self, question: Callable[[AsyncConnection[Any]], Awaitable[Answer]]) -> Answer:
        """Run a query; run it once more if the connection was lost.

        StatementFailed if PostgreSQL cannot answer, LockTimeout if a table stays locked.
        """
        async with self._turn:
            with statement_errors():
                try:
                    return await question(await self._connected())
                except psycopg.errors.LockNotAvailable:
                    raise
                except psycopg.OperationalError:
                    # The server may have been restarted since the last query.
                    await self._disconnect()
                    await stay_cancelled()
                    return await question(await self._connected())
                except BaseException:
                    # After a cancelled statement the state of the session is unknown.
                    if self._connection is not None and not _is_idle(self._connection):
                        await self._disconnect()
                    raise

    async def close(self) -> None:
        """Close the connection, if there is one."""
        async with self._turn:
            await self._disconnect()

    async def _connected(self) -> AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            connection = await connect_session(self._conninfo, self._application)
            self._connection = connection
            await set_session(connection)
            limit = int(self._lock_seconds * 1000)
            await connection.execute(f"SET lock_timeout = {limit}".encode())
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()


def _is_idle(connection: AsyncConnection[Any]) -> bool:
    return connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


class CopySession:
    """The session of a snapshot worker: one read-only transaction in an imported snapshot.

    Every method blocks, and raises StatementFailed if PostgreSQL refuses.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    @classmethod
    def open(cls, conninfo: str, snapshot_name: str) -> CopySession:
        """Connect and import the snapshot that another session exports."""
        with statement_errors():
            connection = log_in_blocking(
                conninfo,
                autocommit=True,
                application_name="tailrace snapshot",
                options=pinned_options(conninfo),
            )
        try:
            with statement_errors():
                connection.execute(PIN_SEARCH_PATH)
                connection.execute(SESSION_SQL, _session_parameters())
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                name = snapshot_name.replace("'", "''")
                connection.execute(f"SET TRANSACTION SNAPSHOT '{name}'".encode())
        except StatementFailed:
            connection.close()
            raise
        return cls(connection)

    def __enter__(self) -> CopySession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                # COMMIT releases the locks before it returns; closing does not guarantee that.
                self._execute("COMMIT")
        finally:
            self.connection.close()

    @property
    def backend_pid(self) -> int:
        """The process id of the session's backend."""
        return self.connection.info.backend_pid

    def set_lock_timeout(self, seconds: float) -> None:
        """Limit how long a statement waits for a lock."""
        self._execute(f"SET lock_timeout = {int(seconds * 1000)}")

    def set_idle_timeout(self, seconds: float) -> None:
        """Limit how long the session keeps its locks without a statement."""
        self._execute(f"SET idle_in_transaction_session_timeout = {int(seconds * 1000)}")

    def lock(self, statement: str) -> None:
        """Take a lock; the transaction stays usable if that fails."""
        self.set_savepoint()
        try:
            self._execute(statement)
        except StatementFailed:
            self.roll_back_to_savepoint()
            raise

    def prefer_indexes(self) -> None:
        """Let ranges of a key be read by its index until the transaction ends."""
        self._execute("SET LOCAL enable_seqscan = off")

    def first_row(self, query: str) -> tuple[Any, ...] | None:
        """The first row of a query, None if there is none."""
        with statement_errors():
            row: tuple[Any, ...] | None = self.connection.execute(query.encode()).fetchone()
        return row

    def set_savepoint(self) -> None:
        """Mark where `roll_back_to_savepoint` returns to."""
        self._execute("SAVEPOINT tailrace")

    def release_savepoint(self) -> None:
        """Keep what was done since the savepoint."""
        self._execute("RELEASE SAVEPOINT tailrace")

    def roll_back_to_savepoint(self) -> None:
        """Undo a statement that failed or was cancelled."""
        self._execute("ROLLBACK TO SAVEPOINT tailrace")

    def _execute(self, statement: str) -> None:
        with statement_errors():
            self.connection.execute(statement.encode())
