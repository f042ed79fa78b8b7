"""Opens connections with the password of the moment, and says why one was refused.

libpq gives no SQLSTATE for a refused connection, and the text is in the server's language. It
reports an expired certificate and an unknown CA with the same words.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import ssl
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bridge.postgres.errors import INVALID_PASSWORD, sqlstate_of
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.options import certificate_problem
from consumer_sdk.transport.passwords import PasswordSource, PasswordUnavailable

# https://www.postgresql.org/docs/current/protocol-message-formats.html
SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
ANSWER_SECONDS: Final = 5.0
ROOT_FILE: Final = "~/.postgresql/root.crt"
TRACED_VERSION: Final = 170000
"""Since this version libpq's trace contains the messages of a login."""
_REFUSAL: Final = re.compile(rb'\tErrorResponse\t S ".*?" V "[A-Z]+" C "([0-9A-Z]{5})"')


class Conninfo(str):
    """A connection string of libpq, and where its password comes from."""

    __slots__ = ("password",)

    password: PasswordSource

    def __new__(cls, text: str, password: PasswordSource) -> Self:
        conninfo = super().__new__(cls, text)
        conninfo.password = password
        return conninfo


async def log_in(conninfo: str, **parameters: Any) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """Connect with psycopg; a refused password is read again, and tried if it is a new one."""
    try:
        if not (isinstance(conninfo, Conninfo) and conninfo.password.changes):
            return await psycopg.AsyncConnection.connect(conninfo, **parameters)
        source = conninfo.password
        password = await _read(source)
        try:
            return await psycopg.AsyncConnection.connect(conninfo, password=password, **parameters)
        except psycopg.OperationalError as error:
            await stay_cancelled()
            await asyncio.to_thread(_add_sqlstate, error, conninfo, password)
            if sqlstate_of(error) != INVALID_PASSWORD:
                raise
            source.refuse(password)
            newer = await _read(source)
            if newer == password:
                raise
        return await psycopg.AsyncConnection.connect(conninfo, password=newer, **parameters)
    except psycopg.OperationalError as error:
        await stay_cancelled()
        if not (isinstance(conninfo, Conninfo) and conninfo.password.changes):
            await asyncio.to_thread(_add_sqlstate, error, conninfo)
        raise await asyncio.to_thread(_explained, error, conninfo) from error


def log_in_blocking(conninfo: str, **parameters: Any) -> psycopg.Connection[Any]:
    """The same for a program without event loop."""
    if not (isinstance(conninfo, Conninfo) and conninfo.password.changes):
        return psycopg.connect(conninfo, **parameters)
    source = conninfo.password
    password = _read_blocking(source)
    try:
        return psycopg.connect(conninfo, password=password, **parameters)
    except psycopg.OperationalError as error:
        _add_sqlstate(error, conninfo, password)
        if sqlstate_of(error) != INVALID_PASSWORD:
            raise
        source.refuse(password)
        newer = _read_blocking(source)
        if newer == password:
            raise
    return psycopg.connect(conninfo, password=newer, **parameters)


async def _read(source: PasswordSource) -> str:
    return await asyncio.to_thread(_read_blocking, source)


def _read_blocking(source: PasswordSource) -> str:
    try:
        return source.read()
    except PasswordUnavailable as error:
        raise psycopg.errors.InvalidPassword(str(error)) from error


def _add_sqlstate(error: psycopg.OperationalError, conninfo: str, password: str = "") -> None:
    """Ask the server once more for the code of a refusal whose words are not known."""
    if not sqlstate_of(error):
        error.sqlstate = refusal_code(conninfo, password) or error.sqlstate


def refusal_code(conninfo: str, password: str = "") -> str | None:
    """The SQLSTATE with which the server refuses the login; None if it does not, or not in time.

    Only libpq's trace shows it. The trace stays in memory, because it contains the login.
    """
    if sys.platform != "linux" or pq.version() < TRACED_VERSION:
        return None
    own = {"password": password} if password else {}
    deadline = time.monotonic() + ANSWER_SECONDS
    with os.fdopen(os.memfd_create("libpq"), "rb") as trace:
        connection = pq.PGconn.connect_start(make_conninfo(conninfo, **own).encode())
        try:
            if connection.status == pq.ConnStatus.BAD:
                return None
            connection.trace(trace.fileno())
            ended = (pq.PollingStatus.OK, pq.PollingStatus.FAILED)
            while (status := connection.connect_poll()) not in ended:
                reads = [connection.socket] if status == pq.PollingStatus.READING else []
                writes = [] if reads else [connection.socket]
                if not any(select.select(reads, writes, [], deadline - time.monotonic())):
                    return None
            connection.untrace()
        except (psycopg.Error, OSError, ValueError):
            return None
        finally:
            connection.finish()
        trace.seek(0)
        codes = _REFUSAL.findall(trace.read())
    return codes[-1].decode() if codes else None


def _explained(error: psycopg.OperationalError, conninfo: str) -> psycopg.OperationalError:
    """The error, with the reason if the server's certificate was refused."""
    if "certificate verify failed" not in str(error):
        return error
    problem = _certificate_problem(conninfo)
    if problem is None:
        return error
    return psycopg.OperationalError(f"the server's certificate is refused: {problem}")


def _certificate_problem(conninfo: str) -> str | None:
    """Begin TLS with each server as libpq does, only to see its certificate."""
    parts = conninfo_to_dict(conninfo)
    hosts = str(parts.get("host") or parts.get("hostaddr") or "").split(",")
    addresses = str(parts.get("hostaddr") or parts.get("host") or "").split(",")
    ports = str(parts.get("port") or 5432).split(",")
    for number, (host, address) in enumerate(zip(hosts, addresses, strict=False)):
        port = int(ports[number] if number < len(ports) else ports[0])
        try:
            _begin_tls(host, address, port, str(parts.get("sslrootcert") or ROOT_FILE))
        except ssl.SSLCertVerificationError as error:
            return certificate_problem(error)
        except (OSError, ValueError):
            continue
    return None


def _begin_tls(host: str, address: str, port: int, root_file: str) -> None:
    file = None if root_file == "system" else str(Path(root_file).expanduser())
    context = ssl.create_default_context(cafile=file)
    context.check_hostname = False
    with socket.create_connection((address, port), ANSWER_SECONDS) as plain:
        plain.sendall(SSL_REQUEST)
        if plain.recv(1) == b"S":
            with context.wrap_socket(plain, server_hostname=host) as encrypted, suppress(OSError):
                encrypted.unwrap()
