"""A row has the same values as an event and in a snapshot of any format."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridge.events.row_code import compile_row_reader, compile_row_writer
from bridge.events.values import ColumnType
from bridge.snapshot.formats.arrow import ArrowEncoder
from bridge.snapshot.formats.chunks import ChunkHead
from bridge.snapshot.formats.rows import RowEncoder
from bridge.snapshot.tables import CopyColumn
from consumer_sdk.reading.references import References
from consumer_sdk.snapshot.chunks import ChunkReader
from consumer_sdk.snapshot.snapshot import SnapshotMeta
from consumer_sdk.transport.api import Frame
from consumer_sdk.wire import Subjects, oids
from tests.pgoutput_encoder import encode_row

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = ChunkHead("src", 17, "t", "public", "snap", 2**40)
TYPES = {
    "t": ColumnType(oids.TEXT),
    "c": ColumnType(oids.CHAR),
    "n": ColumnType(oids.INT8),
    "f": ColumnType(oids.FLOAT8),
    "d": ColumnType(oids.NUMERIC, (12 << 16 | 2) + 4),
    "z": ColumnType(oids.TIMESTAMPTZ),
    "y": ColumnType(oids.DATE),
    "b": ColumnType(oids.BYTEA),
    "e": ColumnType(16500),
    "a": ColumnType(1009, -1, 1009, oids.TEXT),
    "k": ColumnType(1002, -1, 1002, oids.CHAR),
    "u": ColumnType(oids.VARCHAR),
}
COLUMNS = [
    CopyColumn(number, number, name, kind, "", is_nullable=True)
    for number, (name, kind) in enumerate(TYPES.items(), 1)
]
ESCAPES = {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
ESCAPES["\v"] = "\\v"

ODD = ["\ufeff", "\ufeffx", "", " ", " x ", "\r", "\n", "\r\n", "\\N", "\\.", "NULL", "\x01\x7f"]
ODD += [
    "\x85",
    "\u2028",
    "\u200b",
    "\ufffe",
    "😀",
    "\U0001d4b3\U0010ffff",
    '"',
    "{a,b}",
    "\t",
    "'",
    "\\",
]
text = st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0", codec="utf-8"))
char = st.integers(1, 255).map(lambda byte: bytes([byte])) | st.just(b"")


def literal(items: Sequence[bytes | None]) -> bytes:
    """An array as PostgreSQL prints it, with every element in quotes."""
    quoted = [
        b"NULL" if item is None
        else b'"' + item.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'
        for item in items
    ]  # fmt: skip
    return b"{" + b",".join(quoted) + b"}"


def fields() -> Any:
    encoded = text.map(str.encode)
    return st.tuples(
        st.none() | encoded,
        st.none() | char,
        st.none() | st.integers(-(2**63), 2**63 - 1).map(lambda n: b"%d" % n),
        st.none() | st.sampled_from([b"NaN", b"Infinity", b"-0", b"0.1", b"1e+300", b"5e-324"]),
        st.none() | st.sampled_from([b"NaN", b"0.00", b"-1.50", b"9999999999.99"]),
        st.none()
        | st.sampled_from([b"2024-02-29 01:02:03.5+00", b"infinity", b"10000-01-01 00:00:00+00"]),
        st.none() | st.sampled_from([b"2024-02-29", b"0044-03-15 BC", b"-infinity"]),
        st.none() | st.binary(max_size=5).map(lambda data: b"\\x" + data.hex().encode()),
        st.none() | encoded,
        st.none() | st.lists(st.none() | encoded, max_size=3).map(literal),
        st.none() | st.lists(st.none() | char, max_size=3).map(literal),
        st.none() | encoded,
    )


def copied(row: Sequence[bytes | None]) -> bytes:
    """The row as COPY prints it."""
    printed = []
    for field in row:
        shown = b"\\N"
        if field is not None:
            # Latin-1 keeps bytes that are no UTF-8, which a "char" before version 16 may be.
            shown = "".join(ESCAPES.get(one, one) for one in field.decode("latin-1")).encode(
                "latin-1"
            )
        printed.append(shown)
    return b"\t".join(printed)


def encoder(form: str) -> Any:
    def refuse(_: bytes) -> dict[str, Any]:
        raise AssertionError("no row is this wide")

    limits: dict[str, Any] = {"max_rows": 5, "max_bytes": 900_000, "store_object": refuse}
    if form == "arrow":
        return ArrowEncoder(HEAD, COLUMNS, **limits)
    return RowEncoder(HEAD, COLUMNS, as_json=form == "json", **limits)


async def in_snapshot(form: str, lines: list[bytes]) -> list[dict[str, Any]]:
    """The rows as a consumer reads them from a snapshot."""
    meta = SnapshotMeta(
        "snap", "src", 17, "t", "public", 2**40, 0, 0, 0, 1,
        tuple(one.to_document() for one in COLUMNS), {}, form, "CDC", 0, 0, "",
    )  # fmt: skip
    reader = ChunkReader(References(None, Subjects()), meta)  # type: ignore[arg-type]
    made = encoder(form)
    rows: list[dict[str, Any]] = []
    for number, content in enumerate([*made.add(lines), *made.flush()]):
        headers = f"NATS/1.0\r\nContent-Type: {content.content_type}\r\n\r\n".encode()
        rows += await reader.rows(number, Frame(1, b"", headers, content.encode(number)))
    return rows


@pytest.mark.parametrize("form", ["msgpack", "json", "arrow"])
@given(rows=st.lists(fields(), min_size=1, max_size=12))
@example(
    rows=[("\ufefffirst".encode(), *[None] * 10, b"x"), *[("\ufeff".encode(), *[None] * 11)] * 6]
)
@example(rows=[(None, b"\xc8", *[None] * 8, b'{"\xc8"}', None)])
def test_values_are_equal_in_events_and_in_every_format_of_snapshots(
    form: str, rows: list[tuple[bytes | None, ...]]
) -> None:
    columns = list(TYPES.items())
    read, write = compile_row_reader(columns), compile_row_writer(columns)
    events = []
    for row in rows:
        body = encode_row(row)
        values = read(body, 0)
        assert values is not None
        written = write(body, 0)
        assert written is not None
        assert repr(msgpack.unpackb(b"\x81" + written)["data"]) == repr(values[0])
        events.append(values[0])
    assert repr(asyncio.run(in_snapshot(form, list(map(copied, rows))))) == repr(events)
