"""Replication frames: what CopyData carries in both directions during logical streaming.

https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final

from bridge.errors import ProtocolError

POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01 UTC, PostgreSQL's time zero, in microseconds since 1970."""

XLOG_DATA: Final = 0x77
KEEPALIVE: Final = 0x6B
XLOG_DATA_HEADER_BYTES: Final = 25
"""Where the pgoutput message starts in an XLogData frame."""

_XLOG_DATA = Struct(">cQQq")
_KEEPALIVE = Struct(">cQqB")
_STATUS_UPDATE = Struct(">cQQQqB")


@dataclass(frozen=True, slots=True)
class XLogData:
    """A piece of the stream: one pgoutput message."""

    start_lsn: int
    """Byte1('w'), then Int64: where the WAL data in this message starts."""
    end_lsn: int
    """Int64: the current end of WAL on the server."""
    send_time_us: int
    """Int64: the server's clock when it sent this, here in microseconds since 1970."""
    data: bytes
    """Byte*n: the pgoutput message."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """A keepalive message of the server."""

    end_lsn: int
    """Byte1('k'), then Int64: the current end of WAL on the server."""
    send_time_us: int
    """Int64: the server's clock when it sent this, here in microseconds since 1970."""
    reply_requested: bool
    """Byte1: 1 if the server will close the connection unless it gets a reply soon."""


def parse_frame(payload: bytes | memoryview) -> XLogData | Keepalive:
    """Read one CopyData payload; anything malformed or unknown raises ProtocolError."""
    payload = bytes(payload)
    if not payload:
        raise ProtocolError("replication frame is empty")
    if payload[0] == XLOG_DATA:
        if len(payload) < XLOG_DATA_HEADER_BYTES:
            raise ProtocolError(f"XLogData frame of {len(payload)} bytes is too short")
        _, start_lsn, end_lsn, sent = _XLOG_DATA.unpack_from(payload)
        return XLogData(
            start_lsn, end_lsn, sent + POSTGRES_EPOCH_US, payload[XLOG_DATA_HEADER_BYTES:]
        )
    if payload[0] == KEEPALIVE:
        if len(payload) != _KEEPALIVE.size:
            raise ProtocolError(f"keepalive frame of {len(payload)} bytes instead of 18")
        _, end_lsn, sent, reply = _KEEPALIVE.unpack(payload)
        if reply > 1:
            raise ProtocolError(f"keepalive frame asks for a reply with {reply}, not 0 or 1")
        return Keepalive(end_lsn, sent + POSTGRES_EPOCH_US, reply == 1)
    raise ProtocolError(f"unknown replication frame type 0x{payload[0]:02x}")


def build_status_update(
    *,
    written_lsn: int,
    flushed_lsn: int,
    applied_lsn: int,
    send_time_us: int,
    reply_requested: bool = False,
) -> bytes:
    """Build a standby status update; PostgreSQL may discard WAL before `flushed_lsn`.

    Each position is the last byte + 1; `send_time_us` counts microseconds since 1970.
    """
    return _STATUS_UPDATE.pack(
        b"r",
        written_lsn,
        flushed_lsn,
        applied_lsn,
        send_time_us - POSTGRES_EPOCH_US,
        reply_requested,
    )
