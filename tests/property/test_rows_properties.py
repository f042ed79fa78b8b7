"""The compiled paths against the general ones: equal values, or both refuse."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge.errors import ProtocolError
from bridge.events.row_code import (
    can_write,
    compile_row_reader,
    compile_row_writer,
    compile_update_reader,
    compile_update_writer,
)
from bridge.events.rows import RowConverter
from bridge.events.values import ColumnType, converter_for, is_raw
from bridge.snapshot.formats.copy_text import compile_row_decoder, parse_row
from bridge.wal.messages import UNCHANGED, BinaryValue, Insert, Row
from bridge.wal.pgoutput import decode
from consumer_sdk.wire import oids
from tests.pgoutput_encoder import encode_row

TYPES = [
    oids.BOOL,
    oids.INT4,
    oids.INT8,
    oids.FLOAT8,
    oids.NUMERIC,
    oids.TEXT,
    oids.BYTEA,
    oids.TIMESTAMP,
    oids.TIMESTAMPTZ,
    oids.DATE,
    oids.UUID,
    oids.JSON,
    oids.JSONB,
    1007,
    1009,
    3807,
    16_500,
]
typical = st.sampled_from(
    [
        b"t",
        b"1",
        b"-12",
        b"1.50",
        b"NaN",
        b"",
        b"text",
        b"\\x00ff",
        b"2025-12-12 12:00:34.338547+00",
        b"2025-12-12 12:00:34",
        b"infinity",
        b"0044-03-15 12:00:00+00 BC",
        b"10000-01-01 00:00:00+00",
        b'{"a": [1, 2.5]}',
        b"1234567890123456789012345678901234567890",
        b"{1,NULL,3}",
        b'{"a,b",c}',
        b"[0:0]={1}",
        "naïve\t\\N\n🐘".encode(),
        b"\xff\xfe",
    ]
)
values = st.one_of(
    typical,
    typical,
    st.none(),
    st.binary(max_size=12),
    st.just(UNCHANGED),
    st.binary(max_size=3).map(BinaryValue),
)
column_lists = st.lists(st.sampled_from(TYPES), max_size=7).map(
    lambda types: [(f"c{index}", ColumnType(oid)) for index, oid in enumerate(types)]
)


@st.composite
def relations_with_rows(draw: st.DrawFn, rows: int = 1) -> Any:
    columns = draw(column_lists)
    width = st.lists(values, min_size=len(columns), max_size=len(columns)).map(tuple)
    return columns, [draw(width) for _ in range(rows)]


def general(columns: Any, body: bytes) -> Any:
    """What the general path makes of a row, in the form of the fast one; None if it refuses."""
    try:
        message = decode(b"I\0\0\0\x01N" + body)
        assert isinstance(message, Insert)
        row = RowConverter(columns).convert(message.new)
    except ProtocolError:
        return None
    return row


@given(relations_with_rows())
def test_fast_rows_equal_general_rows_or_both_refuse(sample: Any) -> None:
    columns, (row,) = sample
    body = encode_row(row)
    fast = compile_row_reader(columns)(body, 0)
    slow = general(columns, body)
    if fast is None:
        assert slow is None or slow.unchanged
    else:
        assert slow is not None
        assert repr(fast) == repr((slow.data, slow.raw))


@given(relations_with_rows(), st.data())
def test_damaged_rows_are_never_read_by_the_fast_path_alone(sample: Any, data: Any) -> None:
    columns, (row,) = sample
    body = bytearray(encode_row(row))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    fast = compile_row_reader(columns)(bytes(body), 0)
    slow = general(columns, bytes(body))
    if fast is not None:
        assert slow is not None
        assert repr(fast) == repr((slow.data, slow.raw))


@given(relations_with_rows(rows=2))
def test_fast_updates_equal_general_updates_or_take_the_general_path(sample: Any) -> None:
    columns, (old, new) = sample
    fast = compile_update_reader(columns)(encode_row(old) + b"N" + encode_row(new), 0)
    if fast is not None:
        old_row, new_row = RowConverter(columns).convert_pair(old, new)
        assert repr(fast) == repr((old_row.data, new_row.data, new_row.raw))


def is_utf8(row: Row) -> bool:
    """Whether the text of a row is what PostgreSQL promises."""
    try:
        for value in row:
            if isinstance(value, bytes):
                value.decode()
    except UnicodeDecodeError:
        return False
    return True


def unpacked(fields: bytes, count: int) -> Any:
    return msgpack.unpackb(b"%c%b" % (0x80 | count, fields), strict_map_key=False)


long_values = st.sampled_from([b"x" * 255, b"y" * 256, b"z" * 70_000, b"t\0\0\0\x01a", b"t\0\0\0"])


@given(relations_with_rows(), st.data())
def test_written_rows_equal_read_rows(sample: Any, data: Any) -> None:
    columns, (row,) = sample
    if row and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(row) - 1))
        row = (*row[:place], data.draw(long_values), *row[place + 1 :])
    assume(can_write(columns) and is_utf8(row))
    written = compile_row_writer(columns)(b"head" + encode_row(row), 4)
    read = compile_row_reader(columns)(encode_row(row), 0)
    if written is None:
        # Unchanged, binary, raw, wrong, or an integer that no type of PostgreSQL holds.
        if read is not None and not read[1]:
            with pytest.raises(OverflowError):
                msgpack.packb(read[0])
    else:
        assert read is not None
        assert not read[1]
        assert repr(unpacked(written, 1)) == repr({"data": read[0]})


@given(relations_with_rows(), st.data())
def test_damaged_rows_are_never_written(sample: Any, data: Any) -> None:
    columns, (row,) = sample
    body = bytearray(encode_row(row))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assume(can_write(columns))
    written = compile_row_writer(columns)(bytes(body), 0)
    if written is not None:
        # What was read as text may not be UTF-8 any more, which the server vouches for.
        message = decode(b"I\0\0\0\x01N" + bytes(body))
        assert isinstance(message, Insert)
        assume(is_utf8(message.new))
        slow = general(columns, bytes(body))
        assert slow is not None
        assert repr(unpacked(written, 1)) == repr({"data": slow.data})


@given(relations_with_rows(rows=2), st.booleans())
def test_written_updates_equal_read_updates(sample: Any, key_only: bool) -> None:
    columns, (old, new) = sample
    assume(can_write(columns) and is_utf8(old) and is_utf8(new))
    only = {name for name, _ in columns[:1]} if key_only else None
    body = encode_row(old) + b"N" + encode_row(new)
    written = compile_update_writer(columns, only=only)(body, 0)
    if written is not None:
        before, after = RowConverter(columns).convert_pair(old, new, only=only)
        assert not after.raw
        assert repr(unpacked(written, 2)) == repr({"data": after.data, "old": before.data})


def escape(value: bytes | None) -> bytes:
    """COPY's escaping, as PostgreSQL writes it."""
    if value is None:
        return b"\\N"
    value = value.replace(b"\\", b"\\\\")
    for plain, escaped in zip(b"\b\f\n\r\t\v", b"bfnrtv", strict=True):
        value = value.replace(bytes([plain]), b"\\" + bytes([escaped]))
    return value


@given(st.lists(st.none() | st.binary(max_size=20), min_size=1, max_size=6))
def test_copy_fields_round_trip(fields: list[bytes | None]) -> None:
    assert parse_row(b"\t".join(map(escape, fields)) + b"\n") == fields


@given(st.binary(max_size=60))
def test_any_copy_line_parses_or_is_refused(line: bytes) -> None:
    try:
        parse_row(line)
    except ProtocolError:
        assert b"\\" in line


@given(relations_with_rows())
def test_a_row_has_the_same_values_in_copy_and_in_the_log(sample: Any) -> None:
    columns, (row,) = sample
    sent: Row = tuple(value if isinstance(value, bytes) else None for value in row)
    line = b"\t".join(map(escape, sent)) + b"\n"
    try:
        copied: Any = compile_row_decoder(columns)(line)
    except ProtocolError:
        copied = None
    logged = general(columns, encode_row(sent))
    assert repr(copied) == repr(logged and (logged.data, logged.raw))


@given(st.sampled_from(TYPES), st.booleans(), st.binary(max_size=30) | typical)
def test_converters_convert_or_refuse_any_bytes(oid: int, json_messages: bool, data: bytes) -> None:
    converter = converter_for(ColumnType(oid), json_messages=json_messages)
    try:
        value = converter.convert(data)
    except ProtocolError:
        return
    assert converter.may_be_raw or not is_raw(value)
