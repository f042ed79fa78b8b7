"""The replication slot: created if missing, streamed from, watched, dropped."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from bridge.errors import DataAtRiskError, PublicationTooNew, Retryable, SourceError
from bridge.postgres.errors import (
    FEATURE_NOT_SUPPORTED,
    INSUFFICIENT_PRIVILEGE,
    INVALID_AUTHORIZATION,
    OBJECT_IN_USE,
    OBJECT_NOT_IN_PREREQUISITE_STATE,
    UNDEFINED_OBJECT,
    DriverError,
    ReplicationRefused,
    explain,
)
from bridge.postgres.export import abandon, reported_wait
from bridge.postgres.sessions import connect_session
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.position import parse_lsn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bridge.postgres.catalog import Catalog
    from bridge.postgres.connection import ReplicationConnection
    from bridge.postgres.export import ReportWaiting

log = logging.getLogger("bridge.slot")

SILENCE_SECONDS = 10.0
LONGEST_SILENCE_SECONDS = 60.0
FAILOVER_VERSION = 170000
RELEASE_ATTEMPTS = 10
RELEASE_PAUSE_SECONDS = 0.2
_FIX_THE_DATABASE = (INSUFFICIENT_PRIVILEGE, INVALID_AUTHORIZATION, FEATURE_NOT_SUPPORTED)


class SlotInUse(Exception):
    """Another bridge streams from the slot: stand by."""


class Slot:
    """One slot of the server, and the publication that is streamed from it."""

    def __init__(self, catalog: Catalog, *, name: str, publication: str) -> None:
        self._catalog = catalog
        self._name = name
        self._publication = publication

    async def require_free(self) -> None:
        """Raise SlotInUse if another bridge streams."""
        rows = await self._catalog.rows(
            "SELECT active_pid FROM pg_catalog.pg_replication_slots "
            "WHERE slot_name = %s AND active_pid IS NOT NULL",
            [self._name],
        )
        if rows:
            raise SlotInUse(f'replication slot "{self._name}" is active for PID {rows[0][0]}')

    async def create_if_missing(
        self, conninfo: str, server_version: int, *, failover: bool, report: ReportWaiting
    ) -> int | None:
        """Create the slot if it is missing; return its position if it was created.

        With `failover`, PostgreSQL copies the slot to standbys. PostgreSQL first waits for the
        transactions that are writing, however long; `report` is called with what it waits for.
        """
        if await self._catalog.rows(
            "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = %s", [self._name]
        ):
            return None
        arguments = "%s, 'pgoutput', false, false"
        if failover:
            if server_version < FAILOVER_VERSION:
                raise SourceError(
                    "--failover needs PostgreSQL 17 or later; leave the flag out on this server"
                )
            arguments += ", true"
        event(log, "creating slot", slot=self._name, failover=failover)
        query = f"SELECT (pg_catalog.pg_create_logical_replication_slot({arguments})).lsn::text"
        try:
            async with (
                await connect_session(conninfo, "tailrace slot creation") as connection,
                await connect_session(conninfo, "tailrace slot creation") as watcher,
            ):
                for setting in ("statement_timeout", "lock_timeout"):
                    await connection.execute(f"SET {setting} = 0".encode())
                creation = asyncio.ensure_future(connection.execute(query.encode(), [self._name]))
                pids = [connection.info.backend_pid]
                try:
                    async with reported_wait(watcher, pids, None, report, "running transactions"):
                        await asyncio.shield(creation)
                    (row,) = await creation.result().fetchall()
                finally:
                    await abandon(creation, connection)
        except DriverError as error:
            raise explain(error, "the slot cannot be created") from error
        return parse_lsn(row[0])

    async def drop(self) -> None:
        """Drop the slot if PostgreSQL permits it; its replication connection must be closed."""
        for _ in range(RELEASE_ATTEMPTS):
            with suppress(Retryable, SourceError):
                await self._catalog.rows(
                    "SELECT pg_catalog.pg_drop_replication_slot(%s)", [self._name]
                )
                event(log, "slot dropped again", slot=self._name)
                return
            # The walsender takes a moment to notice that its client has disconnected.
            await asyncio.sleep(RELEASE_PAUSE_SECONDS)

    @asynccontextmanager
    async def dropped_if_at_risk(
        self, connection: ReplicationConnection, created_at: int | None
    ) -> AsyncIterator[None]:
        """Drop the slot if the body raises DataAtRiskError and the slot is still new.

        It is new as long as it stands where this bridge created it, at `created_at`.
        """
        try:
            yield
        except DataAtRiskError:
            if created_at is not None and await self.position() == created_at:
                # Until an operator decides, no bridge reads the new slot: it would only keep WAL.
                await connection.close()
                await self.drop()
            raise

    async def start(self, connection: ReplicationConnection, origin: str) -> None:
        """Begin to stream; SlotInUse if another bridge streams."""
        try:
            await connection.start_streaming(self._name, self._publication, origin)
        except ReplicationRefused as error:
            if error.sqlstate == OBJECT_IN_USE:
                raise SlotInUse(error.message) from error
            if error.sqlstate == OBJECT_NOT_IN_PREREQUISITE_STATE:
                raise DataAtRiskError(
                    f"slot {self._name}: {error.message}; start with --on-gap=new-epoch to "
                    "replace it and have consumers bootstrap again"
                ) from error
            if error.sqlstate == UNDEFINED_OBJECT:
                # The missing object is the slot: pgoutput looks up the publication only later.
                raise Retryable(error.message) from error
            raise self.explain(error) from error

    def explain(self, error: ReplicationRefused) -> Exception:
        """Convert the error that ended the stream to one with a remedy."""
        if error.sqlstate == UNDEFINED_OBJECT:
            return PublicationTooNew(
                f"publication {self._publication} is younger than slot {self._name}: the log there "
                f"does not know it; drop the slot (bridge drop --slot {self._name} --yes) and "
                "start with --on-gap=new-epoch, consumers will bootstrap again"
            )
        if error.sqlstate in _FIX_THE_DATABASE:
            return SourceError(f"{error.message}; `bridge check` reports what to grant or set")
        return Retryable(error.message)

    async def position(self) -> int:
        """The LSN up to which the slot is confirmed."""
        rows = await self._catalog.rows(
            "SELECT confirmed_flush_lsn::text FROM pg_catalog.pg_replication_slots "
            "WHERE slot_name = %s",
            [self._name],
        )
        if not rows:
            raise Retryable(f"slot {self._name} has gone")
        return parse_lsn(rows[0][0])

    async def watch_silence(
        self, connection: ReplicationConnection, silent_seconds: Callable[[], float]
    ) -> None:
        """Raise Retryable if the server sends nothing and its walsender no longer exists."""
        while True:
            await stay_cancelled()
            await asyncio.sleep(1.0)
            silent = silent_seconds()
            if silent < SILENCE_SECONDS:
                continue
            rows = await self._catalog.rows(
                "SELECT active_pid FROM pg_catalog.pg_replication_slots WHERE slot_name = %s",
                [self._name],
            )
            if silent_seconds() < silent:
                continue
            # A walsender sends nothing while it decodes a transaction without published changes.
            if rows != [(connection.backend_pid,)] or silent > LONGEST_SILENCE_SECONDS:
                raise Retryable(f"PostgreSQL has sent nothing for {silent:.0f} s")
