"""Connections to PostgreSQL.

`ReplicationConnection` uses the streaming replication protocol over libpq in COPY_BOTH mode;
`connect_catalog` opens an ordinary connection for catalog queries.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bridge.errors import Retryable, SettingsError
from bridge.postgres.errors import ReplicationRefused, connection_lost, explain, server_message
from bridge.postgres.login import Conninfo, log_in
from bridge.wal.framing import build_status_update
from consumer_sdk.transport.passwords import PasswordSource
from consumer_sdk.wire.position import parse_lsn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from bridge.config import Settings

# Values must have the same text in events and snapshots, whatever the server's defaults.
SESSION_SETTINGS: Mapping[str, str] = {
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "row_security": "off",
    # Only objects of pg_catalog have short names: nothing that a user created in another schema is
    # called in place of them. regclass, regtype and similar types print qualified names.
    "search_path": "",
}
# A connection pooler may ignore the options of a connection.
PIN_SEARCH_PATH = b"SELECT pg_catalog.set_config('search_path', '', false)"
WAL_SENDER_TIMEOUT_MS = 8000
CONNECT_TIMEOUT_SECONDS = 10

CatalogConnection = psycopg.AsyncConnection[tuple[Any, ...]]
"""An ordinary connection, for catalog queries."""


def conninfo_of(settings: Settings) -> Conninfo:
    """The libpq connection string for these settings, session settings included."""
    parts = {
        "host": "pg_host",
        "port": "pg_port",
        "dbname": "pg_db",
        "user": "pg_user",
        "password": "pg_password",
    }
    parameters: dict[str, Any]
    if settings.database_url:
        where = settings.where("database_url")
        try:
            parameters = conninfo_to_dict(settings.database_url)
        except psycopg.ProgrammingError as error:
            raise SettingsError(
                f"{where} is not a connection string; "
                "write it as postgresql://user:password@host:5432/database"
            ) from error
        _require_ports(str(parameters.get("port") or ""), where)
        _require_hosts(str(parameters.get("host") or ""), where)
        parts = {
            key: name for key, name in parts.items() if settings.outranks(name, "database_url")
        }
    else:
        parameters = {}
    parameters |= {key: getattr(settings, name) for key, name in parts.items()}
    source = PasswordSource(
        file=settings.pg_password_file, command=tuple(settings.pg_password_command)
    )
    if source.changes and parameters.get("password"):
        name = "pg_password_file" if source.file else "pg_password_command"
        raise SettingsError(
            f"{settings.where('database_url')} holds a password, and {settings.where(name)} is "
            "given as well; keep one"
        )
    for key in ("sslmode", "sslrootcert", "sslcert", "sslkey"):
        value = getattr(settings, f"pg_{key}")
        if value:
            parameters.setdefault(key, value)
    given = {key: value for key, value in parameters.items() if value not in ("", None)}
    given.setdefault("connect_timeout", CONNECT_TIMEOUT_SECONDS)
    given.setdefault("application_name", f"tailrace {settings.slot}".strip())
    given["client_encoding"] = "UTF8"
    given["options"] = _options(SESSION_SETTINGS, str(given.get("options", "")))
    return Conninfo(make_conninfo("", **{key: str(value) for key, value in given.items()}), source)


def _require_ports(ports: str, where: str) -> None:
    """Check the ports, one for each host: libpq checks them only when it connects.

    The error does not show the text: if a password contains /, the text is a part of it.
    """
    for port in filter(None, map(str.strip, ports.split(","))):
        if not (port.isdecimal() and 1 <= int(port) <= 65535):
            raise SettingsError(
                f"{where}: its port is not a number from 1 to 65535; write it as "
                "postgresql://user:password@host:5432/database"
            )


def _options(settings: Mapping[str, str], before: str = "") -> str:
    ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
    return f"{before} {ours}".strip()


def _require_hosts(hosts: str, where: str) -> None:
    """Check the hosts: libpq takes everything after the first @ as host, even of a password."""
    # A host that begins with @ is an abstract socket.
    if any("@" in host.strip()[1:] for host in hosts.split(",")):
        raise SettingsError(f"{where}: its host has an @; in a password write it as %40")


def conninfo_parts(conninfo: str) -> dict[str, Any]:
    """The parameters of a connection string, by name."""
    return conninfo_to_dict(conninfo)


async def connect(conninfo: str, **parameters: Any) -> CatalogConnection:
    """Open a connection in autocommit mode and pin its search path; raises the driver's errors."""
    options = parameters.pop("options", None) or pinned_options(conninfo)
    connection = await log_in(
        conninfo, autocommit=True, prepare_threshold=None, options=options, **parameters
    )
    try:
        await connection.execute(PIN_SEARCH_PATH)
    except BaseException:
        await connection.close()
        raise
    return connection


def pinned_options(conninfo: str, **settings: str) -> str:
    """The options of a connection string, with these settings and an empty search path."""
    parameters = conninfo_to_dict(conninfo)
    return _options({**settings, "search_path": ""}, str(parameters.get("options", "")))


async def connect_catalog(conninfo: str) -> CatalogConnection:
    """Open an ordinary connection in autocommit mode; errors name the remedy."""
    try:
        return await connect(conninfo)
    except psycopg.Error as error:
        raise explain(error, "cannot connect to PostgreSQL") from error


@dataclass(frozen=True, slots=True)
class Server:
    """A server as IDENTIFY_SYSTEM and TIMELINE_HISTORY describe it."""

    system_id: str
    timeline: int
    database: str
    flushed_lsn: int
    forks: Mapping[int, int] = field(default_factory=dict)
    """By earlier timeline, the LSN at which the next timeline began."""


class ReplicationConnection:
    """One walsender session: commands first, then streaming in both directions.

    Only one task may call the methods, except `send_status`, which any task of the loop may call.
    """

    def __init__(self, connection: CatalogConnection) -> None:
        self._connection = connection
        pgconn = self._pgconn = connection.pgconn
        self._loop = asyncio.get_running_loop()
        self.get_copy_data = pgconn.get_copy_data
        self._closed = False
        self._waiting: asyncio.Future[None] | None = None
        self._watched: int | None = None
        """The socket while the event loop watches it."""

    @classmethod
    async def connect(cls, conninfo: str) -> ReplicationConnection:
        options = pinned_options(conninfo, wal_sender_timeout=str(WAL_SENDER_TIMEOUT_MS))
        try:
            # psycopg handles timeouts and lists of hosts while connecting.
            connection = await connect(conninfo, replication="database", options=options)
        except psycopg.Error as error:
            raise explain(error, "cannot open a replication connection") from error
        return cls(connection)

    @property
    def backend_pid(self) -> int:
        """Process id of the walsender."""
        return self._pgconn.backend_pid

    async def command(self, text: str) -> list[tuple[str | None, ...]]:
        """Run one replication command that returns rows."""
        result = await self._execute(text)
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise self._failure(result, text.split(maxsplit=1)[0])
        return [
            tuple(
                None if (value := result.get_value(row, column)) is None else value.decode()
                for column in range(result.nfields)
            )
            for row in range(result.ntuples)
        ]

    async def identify(self) -> Server:
        """Identify the server and the history of its timelines."""
        try:
            system_id, timeline, position, database = (await self.command("IDENTIFY_SYSTEM"))[0]
            number = int(timeline or 0)
            forks: Mapping[int, int] = {}
            if number > 1:
                history = (await self.command(f"TIMELINE_HISTORY {number}"))[0][1]
                forks = _parse_history(history or "")
        except ReplicationRefused as error:
            raise Retryable(str(error)) from error
        return Server(system_id or "", number, database or "", parse_lsn(position or "0/0"), forks)

    async def start_streaming(self, slot: str, publication: str, origin: str) -> None:
        """Start replication at the slot's own position."""
        name = publication.replace('"', '""').replace("'", "''")
        options = f"proto_version '1', publication_names '\"{name}\"', messages 'true'"
        if origin == "none":
            options += ", origin 'none'"
        result = await self._execute(f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 ({options})')
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise self._failure(result, "START_REPLICATION")

    async def _execute(self, text: str) -> pq.abc.PGresult:
        pgconn = self._pgconn
        try:
            pgconn.send_query(text.encode())
            while pgconn.flush():
                await self._ready(writable=True)
            while True:
                pgconn.consume_input()
                if not pgconn.is_busy():
                    break
                await self._ready()
            result = pgconn.get_result()
            if result is None:
                raise Retryable("PostgreSQL closed the replication connection")
            if result.status != pq.ExecStatus.COPY_BOTH:
                while pgconn.is_busy():
                    await self._ready()
                    pgconn.consume_input()
                while pgconn.get_result() is not None:
                    pass
        except psycopg.Error as error:
            raise connection_lost(error) from error
        return result

    def _failure(self, result: pq.abc.PGresult, doing: str) -> Exception:
        def field(name: pq.DiagnosticField) -> str:
            return (result.error_field(name) or b"").decode(errors="replace")

        state = field(pq.DiagnosticField.SQLSTATE)
        if not state:
            text = " ".join(result.error_message.decode(errors="replace").split())
            return ReplicationRefused(doing, state, text)
        lines = map(field, (pq.DiagnosticField.MESSAGE_PRIMARY,
                            pq.DiagnosticField.MESSAGE_DETAIL,
                            pq.DiagnosticField.MESSAGE_HINT))  # fmt: skip
        return ReplicationRefused(doing, state, server_message(state, *lines))

    async def _ready(self, *, writable: bool = False) -> None:
        """Wait until the socket can be read, or also written."""
        self.unwatch()
        future: asyncio.Future[None] = self._loop.create_future()
        descriptor = self._pgconn.socket

        def set_ready() -> None:
            if not future.done():
                future.set_result(None)

        self._loop.add_reader(descriptor, set_ready)
        if writable:
            self._loop.add_writer(descriptor, set_ready)
        try:
            await future
        finally:
            self._loop.remove_reader(descriptor)
            if writable:
                self._loop.remove_writer(descriptor)

    async def wait_readable(self) -> None:
        """Wait for data from the server, or for `wake`.

        Call this only after all buffered data has been read. The event loop keeps watching the
        socket between two waits, until data arrives while no wait is active.
        """
        self._waiting = self._loop.create_future()
        if self._watched is None:
            self._watched = self._pgconn.socket
            self._loop.add_reader(self._watched, self._note_readable)
        try:
            await self._waiting
        finally:
            self._waiting = None

    def wake(self) -> None:
        """End the current wait, if there is one."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _note_readable(self) -> None:
        if self._waiting is None or self._waiting.done():
            self.unwatch()
        else:
            self._waiting.set_result(None)

    def unwatch(self) -> None:
        """Stop watching the socket.

        This must be called as soon as libpq fails: libpq has closed the socket, and the next
        connection may get the same descriptor.
        """
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
            self._watched = None

    def consume_input(self) -> None:
        """Read the socket into libpq's buffer."""
        try:
            self._pgconn.consume_input()
        except psycopg.Error as error:
            self.unwatch()
            raise connection_lost(error) from error

    def end_of_stream(self) -> Exception:
        """The reason why the server ended the stream."""
        self.unwatch()
        try:
            result = self._pgconn.get_result()
        except psycopg.Error as error:
            return connection_lost(error)
        if result is not None and result.error_message:
            return self._failure(result, "streaming")
        return Retryable("PostgreSQL ended the replication stream")

    def send_status(
        self, received_lsn: int, confirmed_lsn: int, *, reply_requested: bool = False
    ) -> None:
        """Report the received and the confirmed position to PostgreSQL; never waits."""
        if self._closed:
            return
        update = build_status_update(
            written_lsn=max(received_lsn, confirmed_lsn),
            flushed_lsn=confirmed_lsn,
            applied_lsn=confirmed_lsn,
            send_time_us=time.time_ns() // 1000,
            reply_requested=reply_requested,
        )
        try:
            self._pgconn.put_copy_data(update)
            self._pgconn.flush()
        except psycopg.Error as error:
            self.unwatch()
            raise connection_lost(error) from error

    @asynccontextmanager
    async def kept_alive(self, interval: float) -> AsyncIterator[None]:
        """Send status updates, so that the walsender does not time out before streaming begins."""

        async def report() -> None:
            while True:
                self.send_status(0, 0)
                await asyncio.sleep(interval)

        task = asyncio.ensure_future(report())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Retryable):
                await task

    async def finish(self) -> None:
        """End streaming in order, so that the slot is free immediately."""
        if self._closed:
            return
        try:
            self._pgconn.put_copy_end()
            self._pgconn.flush()
            async with asyncio.timeout(2):
                while True:
                    count, _ = self._pgconn.get_copy_data(1)
                    if count == 0:
                        await self._ready()
                        self._pgconn.consume_input()
                    elif count < 0:
                        break
        except (psycopg.Error, TimeoutError):
            pass
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        if not self._closed:
            self._closed = True
            self.unwatch()
            await self._connection.close()


def _parse_history(text: str) -> dict[int, int]:
    """Read a timeline history file; its lines are timeline, LSN at which it was left, reason."""
    forks = {}
    for line in text.splitlines():
        parts = line.split()
        if len(parts) >= 2 and parts[0].isdecimal():
            forks[int(parts[0])] = parse_lsn(parts[1])
    return forks
