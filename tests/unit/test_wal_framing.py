from __future__ import annotations

from struct import pack

import pytest

from bridge.errors import ProtocolError
from bridge.wal.framing import (
    POSTGRES_EPOCH_US,
    XLOG_DATA_HEADER_BYTES,
    Keepalive,
    XLogData,
    build_status_update,
    parse_frame,
)

NEW_YEAR_2025_US = 1_735_689_600_000_000
SENT = NEW_YEAR_2025_US - POSTGRES_EPOCH_US


def test_the_postgresql_epoch_is_2000() -> None:
    assert POSTGRES_EPOCH_US == 946_684_800 * 1_000_000


def test_xlog_data_carries_its_message() -> None:
    payload = b"w" + pack(">QQq", 0x16B374D8, 2**63 + 5, SENT) + b"payload"
    assert parse_frame(payload) == XLogData(0x16B374D8, 2**63 + 5, NEW_YEAR_2025_US, b"payload")
    assert payload[XLOG_DATA_HEADER_BYTES:] == b"payload"


def test_frames_are_read_from_a_memoryview() -> None:
    frame = parse_frame(memoryview(b"w" + bytes(24) + b"x"))
    assert isinstance(frame, XLogData)
    assert frame.data == b"x"


@pytest.mark.parametrize("reply", [0, 1])
def test_keepalive_says_whether_it_wants_a_reply(reply: int) -> None:
    payload = b"k" + pack(">QqB", 77, SENT, reply)
    assert parse_frame(payload) == Keepalive(77, NEW_YEAR_2025_US, bool(reply))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"w",
        b"w" + bytes(23),
        b"k" + bytes(16),
        b"k" + bytes(18),
        b"k" + bytes(16) + b"\x02",
        b"x" + bytes(30),
    ],
)
def test_damaged_frames_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_frame(payload)


def test_status_update_follows_the_protocol_page() -> None:
    update = build_status_update(
        written_lsn=3, flushed_lsn=2, applied_lsn=1, send_time_us=NEW_YEAR_2025_US
    )
    assert update == b"r" + pack(">QQQqB", 3, 2, 1, SENT, 0)
    assert len(update) == 34


def test_status_update_can_ask_for_a_reply() -> None:
    update = build_status_update(
        written_lsn=0, flushed_lsn=0, applied_lsn=0, send_time_us=0, reply_requested=True
    )
    assert update[-1] == 1
