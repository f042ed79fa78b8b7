"""Generated code for odd names of columns: used at every count, and equal to the slow path."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.events import row_code
from bridge.events.messages import Packaging
from bridge.events.relations import CompiledRelation, VersionedStructure
from bridge.events.row_code import COLD_ROWS, GENERATED_COLUMNS, Deferred
from bridge.events.rows import read_change
from bridge.events.values import ColumnType
from bridge.snapshot.formats import copy_text
from bridge.source import Source
from bridge.wal.messages import Begin
from consumer_sdk.wire import Subjects, oids
from tests.assembler_harness import Harness, structure
from tests.pgoutput_encoder import encode_row

VALUES = {
    oids.INT4: [b"0", b"37", b"-2147483648"],
    oids.TEXT: [b"", b"%s %b %", b"{} {0}", "naïve".encode(), b"x" * 300],
    oids.BOOL: [b"t", b"f"],
    oids.NUMERIC: [b"1.50", b"NaN"],
    oids.TIMESTAMPTZ: [b"2025-12-12 12:00:34+00", b"infinity"],
    oids.BYTEA: [b"\\x2500ff"],
    oids.JSONB: [b'{"%": [1]}'],
}
odd_names = st.text(st.sampled_from("%{}'\"\\\n\r\t bsd0:é🐘"), min_size=1, max_size=20)
COUNTS = [*range(1, 71), 1600]


def build(count: int, data: Any) -> Any:
    """Makes a relation of so many columns; two rows, and the pairs of names and types."""
    base = data.draw(st.lists(odd_names, min_size=1, max_size=5))
    names = [f"{base[n % len(base)]}{n}"[-63:] for n in range(count)]
    kinds = [data.draw(st.sampled_from([*VALUES]))] if count > 70 else None
    chosen = [kinds[0] if kinds else data.draw(st.sampled_from([*VALUES])) for _ in range(count)]
    columns = tuple(
        (name, oid, -1, n == 0) for n, (name, oid) in enumerate(zip(names, chosen, strict=True))
    )
    types = [ColumnType(oid) for oid in chosen]
    place = data.draw(st.integers(0, 10))
    rows = [
        tuple(
            None
            if (place + n + shift) % 11 == 10 and shift
            else VALUES[oid][(n + place) % len(VALUES[oid])]
            for n, oid in enumerate(chosen)
        )
        for shift in (0, 1)
    ]
    versioned = VersionedStructure(structure(1, "t", columns), types, 1)
    packaging = Packaging(Source("s", 1, "pub", Subjects(""), as_json=False), 1 << 20)

    def relation(cold_rows: int) -> CompiledRelation:
        return CompiledRelation(versioned, packaging, cold_rows=cold_rows)

    return relation, rows, list(zip(names, types, strict=True))


@pytest.mark.parametrize("count", COUNTS)
@settings(max_examples=3)
@given(data=st.data())
def test_rows_of_any_count_of_odd_names_are_written_as_the_general_path_reads_them(
    count: int, data: Any
) -> None:
    make, rows, _ = build(count, data)
    relation, cold = make(0), make(1_000_000)
    for row in rows:
        body = encode_row(row)
        for tag in ("IN", "UN", "UK", "UO", "DK", "DO"):
            both = body + b"N" + body if tag in ("UK", "UO") else body
            message = b"%c\0\0\0\1%c%b" % (ord(tag[0]), ord(tag[1]), both)
            writer = relation.writers[message[:6]]
            written = writer.write(message, 6)
            assert written is not None, "the fast writer declines the row"
            assert not isinstance(writer.write, Deferred)
            parts, fields = read_change(cold, message, 0)
            assert parts.subject == writer.parts.subject
            unpacked = msgpack.unpackb(b"%c%b" % (0x80 | writer.field_count, written))
            assert repr(unpacked) == repr({**fields})
            if count <= GENERATED_COLUMNS:
                _, read = read_change(relation, message, 0)
                assert repr(read) == repr(fields)
    if count <= GENERATED_COLUMNS:
        readers = (relation.read_row, relation.read_key)
        assert not any(isinstance(one, Deferred) for one in readers)


@pytest.mark.parametrize("count", COUNTS)
@settings(max_examples=2)
@given(data=st.data())
def test_copied_rows_of_any_count_of_odd_names_are_decoded_without_the_careful_path(
    count: int, data: Any
) -> None:
    _, rows, columns = build(count, data)
    plain = [tuple(value and value.replace(b"\\", b"\\\\") for value in row) for row in rows]
    lines = [b"\t".join(b"\\N" if v is None else v for v in row) + b"\n" for row in plain]
    converters = [(name, copy_text.converter_for(kind)) for name, kind in columns]
    for line in lines:
        expected = copy_text._decode(line, converters)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copy_text, "_decode", None)
            assert repr(copy_text.compile_row_decoder(columns)(line)) == repr(expected)
    blocks = [line.rstrip(b"\n") for line in lines]
    found, _ = copy_text.compile_block_decoder(columns)(blocks)
    assert repr(found) == repr([copy_text._decode(line, converters)[0] for line in lines])


@settings(max_examples=10)
@given(data=st.data())
def test_a_writer_is_generated_after_some_rows(data: Any) -> None:
    make, (row, _), _ = build(6, data)
    relation = make(COLD_ROWS)
    message = b"I\0\0\0\1N" + encode_row(row)
    writer = relation.writers[message[:6]]
    for _ in range(COLD_ROWS):
        assert writer.write(message, 6) is None
        assert isinstance(writer.write, Deferred)
    assert writer.write(message, 6) is not None
    assert not isinstance(writer.write, Deferred)


@pytest.mark.parametrize("count", [6, 1600])
def test_describing_a_relation_generates_nothing(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the description of one table holds up the rows of all others."""
    generated: list[str] = []
    compile_code = row_code.RowCode.compile

    def counted(self: row_code.RowCode) -> object:
        generated.append(self.source)
        return compile_code(self)

    monkeypatch.setattr(row_code.RowCode, "compile", counted)
    columns = tuple((f"unseen{count}_{n}", oids.INT4, -1, n == 0) for n in range(count))
    harness = Harness(cold_rows=COLD_ROWS)
    harness.describe(structure(1, "t", columns))
    harness.feed(Begin(8, 1, 1))
    row = encode_row((b"1",) * count)
    messages = [b"I\0\0\0\1N" + row, b"U\0\0\0\1O" + row + b"N" + row, b"D\0\0\0\1K" + row]
    for message in messages * COLD_ROWS:
        harness.feed(message)
    assert generated == []
    for message in messages:
        harness.feed(message)
    # For a wide relation only the splitting writer is generated, which is short.
    assert len(generated) == (3 if count <= GENERATED_COLUMNS else 1)
    assert count <= GENERATED_COLUMNS or generated[0].count("\n") < 30
