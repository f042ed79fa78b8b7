from __future__ import annotations

import pytest

from bridge.errors import ProtocolError
from bridge.events.values import ColumnType
from bridge.snapshot.formats.copy_text import compile_row_decoder, parse_row
from consumer_sdk.wire import oids

COLUMNS = [
    ("id", ColumnType(oids.INT4)),
    ("note", ColumnType(oids.TEXT)),
    ("data", ColumnType(oids.BYTEA)),
    ("doc", ColumnType(oids.JSONB)),
    ("tags", ColumnType(1009)),
    ("at", ColumnType(oids.TIMESTAMPTZ)),
]


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (b"1\ttwo\t\n", [b"1", b"two", b""]),
        (b"1\ttwo", [b"1", b"two"]),
        (b"\n", [b""]),
        (b"\\N\t\\\\N\tN\n", [None, b"\\N", b"N"]),
        (rb"\b\f\n\r\t\v\\", [b"\b\f\n\r\t\v\\"]),
        (rb"\101\7\x41\xag\x\9\.", [b"A\x07A\x0agx9."]),
        ("a,b;🐘\t\\\\x00\n".encode(), ["a,b;🐘".encode(), b"\\x00"]),
    ],
)
def test_rows_split_and_unescape(line: bytes, fields: list[bytes | None]) -> None:
    assert parse_row(line) == fields


def test_an_escape_without_end_is_refused() -> None:
    with pytest.raises(ProtocolError):
        parse_row(b"a\tb\\\n")


def test_rows_decode_to_the_values_of_events() -> None:
    decode = compile_row_decoder(COLUMNS)
    assert decode(b'1\ta\t\\\\x00ff\t{"a": 1}\t{x,y}\t2025-12-12 12:00:34+00\n') == (
        {
            "id": 1,
            "note": "a",
            "data": b"\x00\xff",
            "doc": {"a": 1},
            "tags": ["x", "y"],
            "at": "2025-12-12T12:00:34Z",
        },
        (),
    )


def test_nulls_escapes_and_raw_columns_are_told_apart() -> None:
    decode = compile_row_decoder(COLUMNS)
    line = (
        rb"1" b"\t" rb"\\N\t\n" b"\t" rb"\N" b"\t" rb"1.10" b"\t" rb'{"a\\\\b"}' b"\t" rb"\N" b"\n"
    )
    assert decode(line) == (
        {"id": 1, "note": "\\N\t\n", "data": None, "doc": "1.10", "tags": ["a\\b"], "at": None},
        ("doc",),
    )


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"1\n",
        b"1\ta\t\\\\x\t1\t{}\tinfinity\t7\n",
        b"x\ta\t\\\\x\t1\t{}\tinfinity\n",
        b"1\t\xff\t\\\\x\t1\t{}\tinfinity\n",
        b"1\ta\tz\t1\t{}\tinfinity\n",
        b"1\ta\t\\\\x\t1\t{\tinfinity\n",
        b"1\ta\\\t\\\\x\t1\t{}\tinfinity\n",
    ],
)
def test_rows_that_do_not_fit_their_columns_are_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        compile_row_decoder(COLUMNS)(line)


def test_errors_name_the_column_and_hide_the_value() -> None:
    with pytest.raises(ProtocolError, match="'id'") as refused:
        compile_row_decoder([("id", ColumnType(oids.INT4))])(b"secret\n")
    assert "secret" not in str(refused.value)


def test_tables_of_one_column_and_of_none_are_read() -> None:
    assert compile_row_decoder([("note", ColumnType(oids.TEXT))])(b"\n") == ({"note": ""}, ())
    assert compile_row_decoder([])(b"\n") == ({}, ())
    with pytest.raises(ProtocolError):
        compile_row_decoder([])(b"x\n")


def test_column_names_are_never_code() -> None:
    name = "x'}: __import__('os'), \\\n\"{0}{"
    assert compile_row_decoder([(name, ColumnType(oids.INT4))])(b"1\n") == ({name: 1}, ())
