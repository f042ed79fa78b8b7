"""Connections of the HTTP port: how many, for how long, and TLS.

Clients that send nothing, or send or read slowly, cannot keep others out: a new connection ends an
old one of the address that has the most. asyncio would start TLS before it asks for a protocol, so
TLS is started here, where connections without a handshake count too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import ssl
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import SettingsError
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("bridge.http")

MAX_CONNECTIONS = 128
FIRST_REQUEST_SECONDS = 5.0
"""How long a new connection may take to send a whole request, its TLS handshake included."""
IDLE_SECONDS = 30.0
"""How long a connection may last after its last request, its answer included."""
EARLY_BYTES = 64 * 1024
WAITING_CONNECTIONS = 1024


class Certificate:
    """The certificate of the port; a renewed one is used for new connections."""

    def __init__(self, certificate: str, key: str = "") -> None:
        self._paths = [Path(certificate), Path(key or certificate)]
        self._signature = self._sign()
        self._reported = self._signature
        self.context = self._load()

    def renew(self) -> None:
        """Read the files again if they have changed; a bad pair is logged once and not used."""
        signature = self._sign()
        if signature in (self._signature, self._reported):
            return
        try:
            self.context = self._load()
        except SettingsError as error:
            self._reported = signature
            event(log, "http certificate not renewed", level=logging.ERROR, reason=str(error))
            return
        self._signature = self._reported = signature
        event(log, "http certificate renewed")

    def _sign(self) -> tuple[object, ...]:
        found: list[object] = []
        for path in self._paths:
            try:
                state = path.stat()
                found += [state.st_ino, state.st_mtime_ns, state.st_size]
            except OSError as error:
                found.append(error.errno)
        return tuple(found)

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._paths
        for setting, path in (("--http-cert", certificate), ("--http-key", key)):
            try:
                path.read_bytes()
            except OSError as error:
                raise SettingsError(f"{setting}: cannot read {path}: {error.strerror}") from error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise SettingsError(
                f"--http-cert: {certificate} and {key} are not a PEM certificate and its own "
                "unencrypted key"
            ) from error
        return context


def enlarge_queue(server: asyncio.Server) -> None:
    """Let more connections wait to be accepted, so that a burst does not delay others by a second.

    asyncio's own setting for this is also how many it accepts at a time, without a pause.
    """
    for bound in server.sockets:
        with socket.socket(fileno=os.dup(bound.fileno())) as same:
            same.listen(WAITING_CONNECTIONS)


class Connections:
    """The open connections, oldest activity first, at most MAX_CONNECTIONS."""

    def __init__(
        self, make_handler: Callable[[], asyncio.Protocol], certificate: Certificate | None = None
    ) -> None:
        self._make_handler = make_handler
        self._certificate = certificate
        self._open: dict[_Connection, None] = {}
        self._of_handler: dict[asyncio.Protocol, _Connection] = {}

    def __len__(self) -> int:
        return len(self._open)

    def accept(self) -> asyncio.Protocol:
        """The protocol of a new connection, for `create_server`."""
        return _Connection(self)

    def note_request(self, handler: asyncio.Protocol) -> None:
        """A whole request has arrived, so this connection is now the last to be closed."""
        connection = self._of_handler.get(handler)
        if connection is not None and connection in self._open:
            connection.deadline = time.monotonic() + IDLE_SECONDS
            del self._open[connection]
            self._open[connection] = None

    def close_overdue(self) -> None:
        """Close the connections whose time is over, and look for a renewed certificate."""
        now = time.monotonic()
        for connection in [one for one in self._open if one.deadline < now]:
            connection.abort()
        if self._certificate is not None:
            self._certificate.renew()

    def close_all(self) -> None:
        """Close every connection at once."""
        for connection in list(self._open):
            connection.abort()

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context of new connections; None without TLS."""
        return None if self._certificate is None else self._certificate.context

    def add(self, connection: _Connection) -> None:
        """Count a new connection; at the limit, close one of the address that has the most."""
        if len(self._open) >= MAX_CONNECTIONS:
            counts = Counter(one.peer for one in self._open)
            most = max(counts.values())
            next(one for one in self._open if counts[one.peer] == most).abort()
        self._open[connection] = None

    def new_handler(self, connection: _Connection) -> asyncio.Protocol:
        """The HTTP handler of a connection that has sent something."""
        handler = self._make_handler()
        self._of_handler[handler] = connection
        return handler

    def forget(self, connection: _Connection, handler: asyncio.Protocol | None) -> None:
        """A connection has ended, or soon will."""
        self._open.pop(connection, None)
        if handler is not None:
            self._of_handler.pop(handler, None)


class _Connection(asyncio.Protocol):
    """One connection: TLS if configured, then HTTP from its first byte on."""

    def __init__(self, connections: Connections) -> None:
        self.peer = ""
        self.deadline = time.monotonic() + FIRST_REQUEST_SECONDS
        self._connections = connections
        self._socket: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None
        self._handler: asyncio.Protocol | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._socket = transport
        self.peer = _network(transport.get_extra_info("peername"))
        self._connections.add(self)
        context = self._connections.context
        if context is None:
            self._transport = transport
        else:
            transport.pause_reading()
            self._handshake = asyncio.create_task(self._start_tls(transport, context))

    async def _start_tls(self, plain: asyncio.Transport, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        try:
            # None if the connection is lost during the handshake.
            secured: asyncio.Transport | None = await loop.start_tls(
                plain, self, context, server_side=True,
                ssl_handshake_timeout=FIRST_REQUEST_SECONDS, ssl_shutdown_timeout=1.0,
            )  # fmt: skip
        except (OSError, RuntimeError):
            secured = None
        if secured is None or self._socket is None:
            self.abort()
            return
        self._transport = secured
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            # The client sent it right behind the handshake, whose task has yet to run.
            self._early += data
            if len(self._early) > EARLY_BYTES:
                self.abort()
            return
        if self._handler is None:
            self._handler = self._connections.new_handler(self)
            self._handler.connection_made(self._transport)
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._handler is None else self._handler.eof_received()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        handler, self._handler = self._handler, None
        self._socket = self._transport = None
        self._connections.forget(self, handler)
        if handler is not None:
            handler.connection_lost(exc)

    def abort(self) -> None:
        """Close at once, whatever is still to be sent; it no longer counts."""
        self._connections.forget(self, None)
        if self._socket is not None:
            self._socket.abort()


def _network(peername: object) -> str:
    """The address of a client, for IPv6 its /64: that is what one client can choose from."""
    if not isinstance(peername, tuple):
        return ""
    host = str(peername[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
