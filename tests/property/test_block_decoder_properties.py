"""Decoding rows in blocks gives exactly what decoding them one by one gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import ProtocolError
from bridge.events.values import ColumnType
from bridge.snapshot.formats.copy_text import compile_block_decoder, compile_row_decoder
from consumer_sdk.wire import oids
from consumer_sdk.wire.envelope import to_json_value

COLUMNS = [
    ("i", ColumnType(oids.INT8)),
    ("t", ColumnType(oids.TEXT)),
    ("f", ColumnType(oids.FLOAT8)),
    ("b", ColumnType(oids.BOOL)),
    ("tz", ColumnType(oids.TIMESTAMPTZ)),
    ("ts", ColumnType(oids.TIMESTAMP)),
    ("j", ColumnType(oids.JSON)),
    ("jb", ColumnType(oids.JSONB)),
    ("by", ColumnType(oids.BYTEA)),
    ("a", ColumnType(1007, -1, 1007, oids.INT4)),
]


def escaped(text: str) -> bytes:
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    return plain.replace("\r", "\\r").encode()


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
null = st.just(b"\\N")
fields = st.tuples(
    null | st.integers(-(2**63), 2**63 - 1).map(lambda n: str(n).encode()),
    null | texts.map(escaped),
    null | st.floats().map(lambda x: repr(x).encode()),
    null | st.sampled_from([b"t", b"f"]),
    null
    | st.sampled_from([b"2024-02-29 01:02:03.5+00", b"infinity", b"0044-03-15 00:00:00+00 BC"]),
    null | st.sampled_from([b"2024-02-29 01:02:03", b"-infinity", b"0044-03-15 00:00:00 BC"]),
    null | st.sampled_from([b'{"a": 1}', b"null", b'"\\\\u0000"']),
    null
    | st.sampled_from([b'{"a": 1}', b"1e400", b"12345678901234567890", b'"x\\\\\\\\y"', b"null"]),
    null | st.binary(max_size=4).map(lambda data: b"\\\\x" + data.hex().encode()),
    null | st.sampled_from([b"{}", b"{1,NULL}", b"{{1},{2}}", b"[2:3]={7,8}"]),
)
rows_of_copy = st.lists(fields.map(b"\t".join), max_size=12)


@given(rows_of_copy, st.booleans())
def test_blocks_and_rows_decode_alike(lines: list[bytes], as_json: bool) -> None:
    decode_row = compile_row_decoder(COLUMNS, json_messages=as_json)
    rows, raw = [], {}
    for index, line in enumerate(lines):
        row, marked = decode_row(line)
        rows.append(to_json_value(row) if as_json else row)
        named = [name for name in marked if name != "j"]
        if named:
            raw[index] = named
    found_rows, found_raw = compile_block_decoder(COLUMNS, as_json=as_json)(lines)
    assert repr(found_rows) == repr(rows)
    assert found_raw == raw


@given(rows_of_copy, st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")))
def test_a_damaged_row_is_a_protocol_error_or_a_row(lines: list[bytes], damage: bytes) -> None:
    try:
        rows, _ = compile_block_decoder(COLUMNS)([*lines, damage])
    except ProtocolError:
        return
    assert len(rows) == len(lines) + 1
