"""A session for looking at tables when a request comes, opened when first needed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psycopg

from bridge.snapshot.export import connect
from bridge.snapshot.tables import read_shape, set_session
from consumer_sdk.transport.cancellation import stay_cancelled

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from bridge.snapshot.tables import TableShape


# Others ask meanwhile: whoever locks a table for himself must not hold up every request.
LOCK_MILLISECONDS: Final = 500


class CatalogSession:
    """One connection, used by one request at a time, replaced when it is lost."""

    def __init__(self, conninfo: str, publication: str) -> None:
        self._conninfo = conninfo
        self._publication = publication
        self._connection: AsyncConnection[Any] | None = None
        self._lock = asyncio.Lock()

    async def shape(self, schema: str, table: str) -> TableShape:
        """The table as it is now; Refused where there is nothing to copy.

        LockNotAvailable where another session has locked it, or another table of the publication:
        since 16 PostgreSQL opens all of them to list one.
        """
        async with self._lock:
            try:
                return await self._shape(schema, table)
            except psycopg.errors.LockNotAvailable:
                raise
            except psycopg.OperationalError:
                # The server may have been restarted since the last request.
                await self._drop()
                await stay_cancelled()
                return await self._shape(schema, table)
            except BaseException:
                # A statement that was cancelled half-way leaves a session in doubt.
                if self._connection is not None and not self._is_idle(self._connection):
                    await self._drop()
                raise

    async def close(self) -> None:
        async with self._lock:
            await self._drop()

    async def _shape(self, schema: str, table: str) -> TableShape:
        if self._connection is None or self._connection.closed:
            connection = await connect(self._conninfo, "tailrace snapshot requests")
            self._connection = connection
            await set_session(connection)
            await connection.execute(f"SET lock_timeout = {LOCK_MILLISECONDS}".encode())
        shape, _ = await read_shape(self._connection, self._publication, schema, table)
        return shape

    @staticmethod
    def _is_idle(connection: AsyncConnection[Any]) -> bool:
        status = connection.info.transaction_status
        return status == psycopg.pq.TransactionStatus.IDLE

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()
