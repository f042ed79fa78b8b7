r"""Reads the rows of a running COPY in blocks: the hot path of a worker.

libpq returns one row per call, which takes longer than PostgreSQL needs to produce it. If the
connection is not encrypted, frames are therefore read from its socket directly and split in one
pass: in text format the only newline of a row is its last byte, so every `\n` + `d` + four bytes is
the end of one CopyData message and the head of the next. Other messages are parsed one by one, and
an encrypted connection is read through libpq.
https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import os
import re
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

import psycopg

from bridge.errors import ProtocolError
from bridge.postgres.errors import StatementFailed, primary_message, server_message

if TYPE_CHECKING:
    from collections.abc import Generator

RECEIVE_BYTES: Final = 256 * 1024
ROWS_PER_BLOCK: Final = 2000
_NEXT_ROW: Final = re.compile(rb"\nd....", re.DOTALL)
_HEAD_BYTES: Final = 5
_length: Final = struct.Struct("!I").unpack_from


class FrameSplitter:
    """Splits the server's bytes, in pieces of any size, into rows and other messages; no I/O.

    `feed` returns the complete rows without their newlines. Other messages are collected in
    `notices`. ReadyForQuery sets `finished`.
    """

    def __init__(self) -> None:
        self.finished = False
        self.notices: list[tuple[bytes, bytes]] = []
        self._row: list[bytes] = []
        self._in_row = False
        self._head = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Process the next bytes; return the rows that end in them."""
        if not self._in_row:
            data = self._head + data
            self._head = b""
            rest = self._messages(data)
            if rest is None:
                return []
            data = rest
        elif b"\n" not in data and b"\n" not in self._row[-1]:
            # The middle of a wide row; joining it for every piece would take quadratic time.
            self._row.append(data)
            return []
        if self._row:
            self._row.append(data)
            data = b"".join(self._row)
            self._row.clear()
        rows: list[bytes] = []
        while True:
            pieces = _NEXT_ROW.split(data)
            tail = pieces.pop()
            rows += pieces
            row, newline, after = tail.partition(b"\n")
            if not newline or not after or (after[:1] == b"d" and len(after) < _HEAD_BYTES):
                self._row.append(tail)
                break
            # Something other than a row follows, so this row is complete.
            rows.append(row)
            self._in_row = False
            rest = self._messages(after)
            if rest is None:
                break
            data = rest
        if b"\n" in b"".join(rows):
            raise ProtocolError("a COPY row holds a bare newline")
        return rows

    def _messages(self, data: bytes) -> bytes | None:
        """Read messages until the head of a CopyData; return what follows it, None without one."""
        position = 0
        while len(data) - position >= _HEAD_BYTES:
            kind = data[position : position + 1]
            if kind == b"d":
                self._in_row = True
                return data[position + _HEAD_BYTES :]
            end = position + 1 + _length(data, position + 1)[0]
            if end > len(data):
                break
            self.notices.append((kind, data[position + _HEAD_BYTES : end]))
            position = end
            if kind == b"Z":
                self.finished = True
        self._head = data[position:]
        return None


def copy_rows(
    connection: psycopg.Connection[Any], statement: str
) -> Generator[list[bytes], None, None]:
    """Run a COPY and yield its rows block by block, without newlines.

    An error of the server raises StatementFailed. Closing the generator early cancels the COPY. In
    both cases the session is usable again after a rollback to a savepoint.
    """
    if connection.pgconn.ssl_in_use or _is_gss_encrypted(connection):
        return _rows_through_libpq(connection, statement)
    return _rows_from_socket(connection, statement)


def _is_gss_encrypted(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute(
        "SELECT encrypted FROM pg_catalog.pg_stat_gssapi"
        " WHERE pid = pg_catalog.pg_backend_pid() AND encrypted"
    ).fetchone()
    return row is not None


def _rows_through_libpq(
    connection: psycopg.Connection[Any], statement: str
) -> Generator[list[bytes], None, None]:
    try:
        with connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
            rows: list[bytes] = []
            while data := copy.read():
                rows.append(bytes(data)[:-1])
                if len(rows) == ROWS_PER_BLOCK:
                    yield rows
                    rows = []
            if rows:
                yield rows
    except psycopg.Error as error:
        raise StatementFailed(primary_message(error)) from error


def _rows_from_socket(
    connection: psycopg.Connection[Any], statement: str
) -> Generator[list[bytes], None, None]:
    # libpq is idle and stays idle: it handles neither the query nor the answer.
    query = statement.encode() + b"\0"
    splitter = FrameSplitter()
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.setblocking(True)
        try:
            wire.sendall(b"Q" + struct.pack("!I", len(query) + 4) + query)
            while not splitter.finished:
                rows = splitter.feed(_receive(wire))
                if rows:
                    yield rows
        except OSError as error:
            raise StatementFailed(f"connection to PostgreSQL lost during COPY: {error}") from error
        except (GeneratorExit, ProtocolError):
            _cancel(connection, wire, splitter)
            raise
        finally:
            wire.setblocking(False)
    for kind, body in splitter.notices:
        if kind == b"E":
            raise StatementFailed(error_text(body))


def _receive(wire: socket.socket) -> bytes:
    data = wire.recv(RECEIVE_BYTES)
    if not data:
        raise StatementFailed("PostgreSQL closed the connection during COPY")
    return data


def _cancel(
    connection: psycopg.Connection[Any], wire: socket.socket, splitter: FrameSplitter
) -> None:
    """Cancel the COPY and read the rest of its output, so that the session can be used again."""
    connection.cancel_safe()
    while not splitter.finished:
        splitter.feed(_receive(wire))


def error_text(body: bytes) -> str:
    """The primary message of an ErrorResponse, without values of rows."""
    fields = {field[:1]: field[1:].decode(errors="replace") for field in body.split(b"\0")}
    if b"M" not in fields:
        return "PostgreSQL reported an error without a message"
    return server_message(fields.get(b"C", ""), fields[b"M"])
