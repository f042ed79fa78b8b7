"""Cutting what PostgreSQL sends during COPY into rows."""

from __future__ import annotations

import struct

import pytest

from bridge.errors import ProtocolError
from bridge.postgres.copy_stream import FrameSplitter, error_text


def frame(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def conversation(rows: list[bytes]) -> bytes:
    head = frame(b"H", b"\0\0\0")
    body = b"".join(frame(b"d", row + b"\n") for row in rows)
    return head + body + frame(b"c", b"") + frame(b"C", b"COPY\0") + frame(b"Z", b"T")


def split(data: bytes, step: int) -> tuple[list[bytes], FrameSplitter]:
    splitter = FrameSplitter()
    rows: list[bytes] = []
    for start in range(0, len(data), step):
        rows += splitter.feed(data[start : start + step])
    return rows, splitter


# Lengths whose field holds newlines and letters d, and rows that look like heads.
ROWS = [
    b"",
    b"x" * (0x0A - 5),
    b"y" * (0x0A0A - 5),
    b"z" * (0x640A - 5),
    b"d\\n\tdddd",
    b"",
    b"end",
]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 6, 7, 100, 4096, 10**6])
def test_rows_come_out_whole_wherever_the_pieces_end(step: int) -> None:
    rows, splitter = split(conversation(ROWS), step)
    assert rows == ROWS
    assert splitter.finished
    assert [kind for kind, _ in splitter.notices] == [b"H", b"c", b"C", b"Z"]


def test_a_copy_without_rows_ends() -> None:
    rows, splitter = split(conversation([]), 4)
    assert rows == []
    assert splitter.finished


@pytest.mark.parametrize("step", [1, 4, 10**6])
def test_notices_between_rows_are_set_aside(step: int) -> None:
    notice = frame(b"N", b"SNOTICE\0Mhello\nworld\0\0")
    data = (
        frame(b"H", b"\0\0\0")
        + frame(b"d", b"one\n")
        + notice
        + frame(b"S", b"TimeZone\0UTC\0")
        + frame(b"d", b"two\n")
        + frame(b"c", b"")
        + frame(b"Z", b"I")
    )
    rows, splitter = split(data, step)
    assert rows == [b"one", b"two"]
    assert [kind for kind, _ in splitter.notices] == [b"H", b"N", b"S", b"c", b"Z"]


def test_an_error_after_rows_is_kept_with_its_message() -> None:
    error = frame(b"E", b"SERROR\0C22012\0Mdivision by zero\0Drow (1, secret)\0\0")
    data = frame(b"H", b"\0\0\0") + frame(b"d", b"one\n") + error + frame(b"Z", b"E")
    rows, splitter = split(data, 9)
    assert rows == [b"one"]
    (body,) = [body for kind, body in splitter.notices if kind == b"E"]
    assert error_text(body) == "division by zero"


def test_a_row_with_a_bare_newline_is_refused() -> None:
    with pytest.raises(ProtocolError):
        split(frame(b"H", b"\0\0\0") + frame(b"d", b"a\nXbcdefgh\n") + frame(b"d", b"b\n"), 10**6)


def test_a_wide_row_is_not_joined_for_every_piece() -> None:
    wide = b"w" * 3_000_000
    rows, _ = split(conversation([b"a", wide, b"b"]), 1000)
    assert rows == [b"a", wide, b"b"]
