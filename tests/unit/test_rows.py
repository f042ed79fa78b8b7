"""Rows of the log: the general path and the compiled readers."""

from __future__ import annotations

from textwrap import indent
from typing import Any

import msgpack
import pytest

from bridge.errors import ProtocolError
from bridge.events import row_code
from bridge.events.row_code import (
    compile_row_reader,
    compile_row_writer,
    compile_update_reader,
    compile_update_writer,
    row_reader_code,
    splitting_writer_code,
)
from bridge.events.rows import RowConverter
from bridge.events.values import ColumnType
from bridge.wal.messages import UNCHANGED, BinaryValue, Row
from consumer_sdk.wire import oids
from tests.pgoutput_encoder import encode_row

COLUMNS = [
    ("id", ColumnType(oids.INT8)),
    ('odd "name"\n{0}', ColumnType(oids.TEXT)),
    ("ok", ColumnType(oids.BOOL)),
    ("ratio", ColumnType(oids.FLOAT8)),
    ("at", ColumnType(oids.TIMESTAMPTZ)),
    ("doc", ColumnType(oids.JSONB)),
]
ROW: Row = (b"7", "naïve".encode(), b"t", b"-0.5", b"2025-12-12 12:00:34+00", b'{"a": 1}')
DATA: dict[str, Any] = {
    "id": 7,
    'odd "name"\n{0}': "naïve",
    "ok": True,
    "ratio": -0.5,
    "at": "2025-12-12T12:00:34Z",
    "doc": {"a": 1},
}


def with_doc(doc: bytes | None) -> Row:
    return (*ROW[:-1], doc)


def test_a_plain_row_is_read_the_same_on_both_paths() -> None:
    assert RowConverter(COLUMNS).convert(ROW).data == DATA
    assert compile_row_reader(COLUMNS)(encode_row(ROW), 0) == (DATA, ())


def test_a_row_is_read_from_the_middle_of_a_frame() -> None:
    assert compile_row_reader(COLUMNS)(b"w" * 31 + encode_row(ROW), 31) == (DATA, ())


def test_nulls_are_read_on_the_fast_path_wherever_they_stand() -> None:
    nothing = (None,) * len(COLUMNS)
    row = compile_row_reader(COLUMNS)(encode_row(nothing), 0)
    assert row == (dict.fromkeys(DATA), ())


def test_raw_columns_are_named_on_both_paths() -> None:
    row = with_doc(b"1.10")
    assert RowConverter(COLUMNS).convert(row).raw == ("doc",)
    assert compile_row_reader(COLUMNS)(encode_row(row), 0) == (DATA | {"doc": "1.10"}, ("doc",))


def test_unchanged_columns_are_absent_and_named() -> None:
    row = (b"7", UNCHANGED, None, None, None, UNCHANGED)
    converted = RowConverter(COLUMNS).convert(row)
    assert converted.data == {"id": 7, "ok": None, "ratio": None, "at": None}
    assert converted.unchanged == ('odd "name"\n{0}', "doc")
    assert compile_row_reader(COLUMNS)(encode_row(row), 0) is None


def test_only_the_identity_of_a_key_row_is_kept() -> None:
    row = (b"7", None, None, None, None, None)
    assert RowConverter(COLUMNS).convert(row, only={"id"}).data == {"id": 7}
    assert compile_row_reader(COLUMNS, only={"id"})(encode_row(row), 0) == ({"id": 7}, ())


def test_a_binary_value_is_refused_because_text_was_asked_for() -> None:
    row = (BinaryValue(b"\0"), *ROW[1:])
    with pytest.raises(ProtocolError, match="'id'"):
        RowConverter(COLUMNS).convert(row)
    assert compile_row_reader(COLUMNS)(encode_row(row), 0) is None


def test_errors_name_the_column_and_hide_the_value() -> None:
    with pytest.raises(ProtocolError, match="'id'") as refused:
        RowConverter(COLUMNS).convert((b"secret", *ROW[1:]))
    assert "secret" not in str(refused.value)


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ProtocolError, match="5 columns"):
        RowConverter(COLUMNS).convert(ROW[:5])
    assert compile_row_reader(COLUMNS)(encode_row(ROW[:5]), 0) is None


def test_a_relation_without_columns_has_empty_rows() -> None:
    assert RowConverter([]).convert(()).data == {}
    assert compile_row_reader([])(encode_row(()), 0) == ({}, ())


def test_an_update_is_read_with_its_old_row() -> None:
    data = encode_row(ROW) + b"N" + encode_row(with_doc(None))
    assert compile_update_reader(COLUMNS)(data, 0) == (DATA, DATA | {"doc": None}, ())
    assert compile_update_reader(COLUMNS, only={"id"})(data, 0) == (
        {"id": 7},
        DATA | {"doc": None},
        (),
    )


def test_a_column_raw_in_one_row_of_an_update_is_raw_in_both() -> None:
    exact, inexact = with_doc(b'"1.5"'), with_doc(b"1.50")
    assert compile_update_reader(COLUMNS)(encode_row(exact) + b"N" + encode_row(inexact), 0) is None
    for old, new in ((exact, inexact), (inexact, exact)):
        old_row, new_row = RowConverter(COLUMNS).convert_pair(old, new)
        assert old_row.raw == new_row.raw == ("doc",)
        assert {old_row.data["doc"], new_row.data["doc"]} == {'"1.5"', "1.50"}


def test_an_update_that_does_not_fit_takes_the_general_path() -> None:
    read = compile_update_reader(COLUMNS)
    row = encode_row(ROW)
    assert read(row + b"X" + row, 0) is None
    assert read(row + b"N" + row + b"!", 0) is None
    assert all(read((row + b"N" + row)[:end], 0) is None for end in range(2 * len(row) + 1))


def test_a_relation_of_1600_columns_compiles() -> None:
    columns = [(f"c{number}", ColumnType(oids.INT4)) for number in range(1600)]
    read = compile_row_reader(columns)
    row = read(encode_row((b"1",) * 1600), 0)
    assert row == ({name: 1 for name, _ in columns}, ())


def test_the_generated_code_is_the_code_that_its_module_shows() -> None:
    columns = (("id", ColumnType(oids.INT4)), ("name", ColumnType(oids.TEXT)))
    shown = row_code.__doc__ or ""
    assert indent(row_reader_code(columns).source, "    ") in shown
    assert indent(splitting_writer_code(columns, None).source, "    ") in shown


@pytest.mark.parametrize("count", [37, 293, 549, 805, 1061, 1317, 1573])
def test_a_count_of_columns_that_holds_a_per_cent_sign_is_written_too(count: int) -> None:
    """The count's last byte is a per cent sign, which formatting must not take for its own."""
    columns = [(f"c{number}", ColumnType(oids.INT4)) for number in range(count)]
    data = dict.fromkeys((name for name, _ in columns), 1)
    row = encode_row((b"1",) * count)
    with_null = encode_row((None, *(b"1",) * (count - 1)))
    written = compile_row_writer(columns)(row, 0)
    assert written is not None
    assert msgpack.unpackb(b"\x81" + written) == {"data": data}
    walked = compile_row_writer(columns)(with_null, 0)
    assert walked is not None
    assert msgpack.unpackb(b"\x81" + walked) == {"data": data | {"c0": None}}
    updated = compile_update_writer(columns)(row + b"N" + row, 0)
    assert updated is not None
    assert msgpack.unpackb(b"\x82" + updated) == {"data": data, "old": data}
    key = compile_row_writer(columns, only=set(data))(row, 0)
    assert key == written


@pytest.mark.parametrize("name", ["%", "100%b", "n" * 37, "{} {0}", "'\"\\\n"])
def test_any_column_name_is_written(name: str) -> None:
    columns = [(name, ColumnType(oids.TEXT)), ("at", ColumnType(oids.TIMESTAMPTZ))]
    row = encode_row((b"%s", b"2025-12-12 12:00:34+00"))
    data = {name: "%s", "at": "2025-12-12T12:00:34Z"}
    written = compile_row_writer(columns)(row, 0)
    assert written is not None
    assert msgpack.unpackb(b"\x81" + written) == {"data": data}
    updated = compile_update_writer(columns, only={name})(row + b"N" + row, 0)
    assert updated is not None
    assert msgpack.unpackb(b"\x82" + updated) == {"data": data, "old": {name: "%s"}}
    assert compile_row_reader(columns)(row, 0) == (data, ())
