"""Chunks: bounds, documents, references, compression, Arrow columns."""

from __future__ import annotations

import hashlib
import json
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa
import pytest
import zstandard

from bridge.errors import ProtocolError
from bridge.events.values import ColumnType
from bridge.jetstream.dictionaries import ZstdDictionary, dictionary_id, train
from bridge.snapshot.formats.arrow import ArrowEncoder, BatchParser
from bridge.snapshot.formats.chunks import ChunkContent, ChunkHead, ChunkMessageBuilder, byte_limit
from bridge.snapshot.formats.rows import RowEncoder
from bridge.snapshot.tables import CopyColumn
from consumer_sdk.wire import decode_payload, oids

HEAD = ChunkHead("src", 17, "t", "public", "snap", 2**40)


def column(name: str, oid: int, typmod: int = -1, element: int = 0) -> CopyColumn:
    return CopyColumn(1, 1, name, ColumnType(oid, typmod, oid, element), "", True)


def row_encoder(*columns: CopyColumn, as_json: bool = False, **limits: Any) -> RowEncoder:
    objects: list[bytes] = limits.pop("objects", [])

    def refer(payload: bytes) -> dict[str, Any]:
        objects.append(payload)
        return {"bucket": "b", "name": str(len(objects) - 1), "size": len(payload)}

    bounds = {"max_rows": 10, "max_bytes": 1000, **limits}
    return RowEncoder(HEAD, columns, as_json=as_json, store_object=refer, **bounds)


def encoded(encoder: Any, lines: list[bytes]) -> list[dict[str, Any]]:
    contents: list[ChunkContent] = [*encoder.add(lines), *encoder.flush()]
    return [
        decode_payload({"Content-Type": content.content_type}, content.encode(number))
        for number, content in enumerate(contents)
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_chunks_are_bounded_by_rows_and_by_bytes(as_json: bool) -> None:
    lines = [b"%d\t%s" % (n, b"x" * (n * 7 % 300)) for n in range(200)]
    encoder = row_encoder(column("id", 23), column("v", 25), as_json=as_json)
    contents = [*encoder.add(lines), *encoder.flush()]
    assert [row["id"] for c in contents for row in _rows(c)] == list(range(200))
    assert max(content.row_count for content in contents) <= 10
    assert max(len(content.encode(0)) for content in contents) < 1000 + 300


def _rows(content: ChunkContent) -> list[dict[str, Any]]:
    document = decode_payload({"Content-Type": content.content_type}, content.encode(0))
    rows: list[dict[str, Any]] = document["data"]
    return rows


def test_a_chunk_is_the_document_of_the_wire_format() -> None:
    (document,) = encoded(row_encoder(column("id", 23), column("v", 25)), [b"1\tx", b"2\t\\N"])
    assert document == {
        "v": 1, "source": "src", "epoch": 17, "table": "t", "schema": "public",
        "operation": "snapshot", "snapshot_id": "snap", "chunk": 0, "lsn": 2**40,
        "data": [{"id": 1, "v": "x"}, {"id": 2, "v": None}],
    }  # fmt: skip


def test_json_columns_are_named_once_and_jsonb_row_by_row() -> None:
    encoder = row_encoder(
        column("j", oids.JSON), column("b", oids.JSONB), column("a", 3807, -1, oids.JSONB)
    )
    (document,) = encoded(encoder, [b'{"x": 1}\t{"x": 1}\t{1}', b"1\t1e400\t{}", b"\\N\t\\N\t\\N"])
    assert document["raw_columns"] == ["j", "a"]
    assert document["raw"] == {"1": ["b"]}
    assert document["data"][0] == {"j": '{"x": 1}', "b": {"x": 1}, "a": ["1"]}
    assert document["data"][1]["b"] == "1e400"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_wide_row_becomes_a_reference_in_its_place(as_json: bool) -> None:
    objects: list[bytes] = []
    encoder = row_encoder(column("id", 23), column("v", 25), as_json=as_json, objects=objects)
    wide = b"w" * 2000
    (document,) = encoded(encoder, [b"1\ta", b"2\t" + wide, b"3\tc"])
    assert [set(row) for row in document["data"]] == [{"id", "v"}, {"$ref"}, {"id", "v"}]
    read = json.loads if as_json else msgpack.unpackb
    assert read(objects[0]) == {"id": 2, "v": wide.decode()}


def test_the_limit_leaves_room_for_headers_on_any_server() -> None:
    assert byte_limit(1024 * 1024) == 900_000
    assert byte_limit(8 * 1024 * 1024) == 900_000
    assert byte_limit(64 * 1024) == 48 * 1024
    assert 0 < byte_limit(1024) <= 1024


def test_a_sealed_chunk_carries_its_checksum_and_its_compression() -> None:
    lines = [b"%d\tsome text that repeats" % n for n in range(9)]
    (content,) = [*row_encoder(column("id", 23), column("v", 25)).add(lines)] or list(
        _flushed(lines)
    )
    plain = ChunkMessageBuilder("snap", zstd=False).build(content, 7)
    assert plain.headers["Nats-Msg-Id"] == "snap-7"
    assert "Content-Encoding" not in plain.headers
    assert plain.headers["Cdc-Sha256"] == hashlib.sha256(plain.payload).hexdigest()
    small = ChunkMessageBuilder("snap", zstd=True).build(content, 7)
    assert zstandard.decompress(small.payload) == plain.payload
    assert small.headers["Cdc-Sha256"] == hashlib.sha256(small.payload).hexdigest()
    trained = train([b'{"id": %d, "v": "some text that repeats"}' % n for n in range(500)])
    assert trained is not None
    name = dictionary_id(trained)
    smaller = ChunkMessageBuilder(
        "snap", zstd=True, dictionary=ZstdDictionary(name, trained)
    ).build(content, 7)
    assert smaller.headers["Cdc-Dict"] == name
    assert len(smaller.payload) < len(small.payload)
    document = decode_payload(smaller.headers, smaller.payload, {name: trained})
    assert document["data"][3] == {"id": 3, "v": "some text that repeats"}


def _flushed(lines: list[bytes]) -> list[ChunkContent]:
    encoder = row_encoder(column("id", 23), column("v", 25))
    return [*encoder.add(lines), *encoder.flush()]


def test_too_few_samples_train_nothing() -> None:
    assert train([b"a"] * 10) is None


ALL = (
    column("b", oids.BOOL),
    column("i2", oids.INT2),
    column("i8", oids.INT8),
    column("f4", oids.FLOAT4),
    column("f8", oids.FLOAT8),
    column("n", oids.NUMERIC, ((12 << 16) | 2) + 4),
    column("nn", oids.NUMERIC),
    column("t", oids.TEXT),
    column("by", oids.BYTEA),
    column("ts", oids.TIMESTAMP),
    column("tz", oids.TIMESTAMPTZ),
    column("d", oids.DATE),
    column("a", 1007, -1, oids.INT4),
    column("na", 1231, ((6 << 16) | 1) + 4, oids.NUMERIC),
    column("ta", 1185, -1, oids.TIMESTAMPTZ),
)
PLAIN = (
    b"t\t-32768\t9223372036854775807\t0.1\t1e-320\t-1.50\t123456789012345678901234567890.5\tx\\ty"
    b"\t\\\\x00ff\t2025-12-12 12:00:34.3\t1969-12-31 23:59:59.999999+00\t0001-01-01\t{1,NULL,-3}"
    b'\t{1.5,NULL}\t{"2025-01-01 00:00:00+00"}'
)
NULLS = b"\t".join([b"\\N"] * len(ALL))


def test_arrow_columns_have_the_types_spark_expects() -> None:
    batch, odd = BatchParser(ALL).parse([PLAIN, NULLS])
    assert odd == {}
    assert [str(field.type) for field in batch.schema] == [
        "bool", "int16", "int64", "float", "double", "decimal128(12, 2)", "string", "string",
        "binary", "timestamp[us]", "timestamp[us, tz=UTC]", "date32[day]", "list<item: int32>",
        "list<item: decimal128(6, 1)>", "list<item: timestamp[us, tz=UTC]>",
    ]  # fmt: skip
    first, second = batch.to_pylist()
    assert set(second.values()) == {None}
    assert first["i8"] == 2**63 - 1
    assert first["f8"] == 1e-320
    assert first["n"] == Decimal("-1.50")
    assert first["nn"] == "123456789012345678901234567890.5"
    assert first["t"] == "x\ty"
    assert first["by"] == b"\x00\xff"
    assert first["tz"].isoformat() == "1969-12-31T23:59:59.999999+00:00"
    assert first["a"] == [1, None, -3]
    assert first["na"] == [Decimal("1.5"), None]
    assert first["ta"][0].isoformat() == "2025-01-01T00:00:00+00:00"


def test_what_a_typed_column_cannot_hold_stands_beside_it() -> None:
    odd_row = (
        b"f\t1\t2\tNaN\t-Infinity\tNaN\tNaN\t\t\\\\x\t0044-03-15 00:00:00 BC\tinfinity"
        b"\t10000-01-01\t{{1},{2}}\t{NaN}\t{infinity}"
    )
    batch, odd = BatchParser(ALL).parse([PLAIN, odd_row, NULLS])
    rows = batch.to_pylist()
    assert rows[0]["n"] == Decimal("-1.50")
    assert rows[1]["f8"] == float("-inf")
    assert rows[1]["nn"] == "NaN"
    assert odd == {
        "n": {"1": "NaN"},
        "ts": {"1": "0044-03-15 00:00:00 BC"},
        "tz": {"1": "infinity"},
        "d": {"1": "10000-01-01"},
        "a": {"1": [[1], [2]]},
        "na": {"1": ["NaN"]},
        "ta": {"1": ["infinity"]},
    }
    assert all(rows[1][name] is None for name in odd)


def test_an_array_with_odd_bounds_stands_beside_its_column() -> None:
    batch, odd = BatchParser([column("a", 1007, -1, oids.INT4)]).parse([b"[2:3]={7,8}", b"{}"])
    assert batch.to_pylist() == [{"a": None}, {"a": []}]
    assert odd == {"a": {"0": "[2:3]={7,8}"}}


def test_values_never_show_in_errors_of_the_arrow_parser() -> None:
    with pytest.raises(ProtocolError) as caught:
        BatchParser([column("i", oids.INT4)]).parse([b"secret"])
    assert "secret" not in str(caught.value)


def test_arrow_chunks_split_until_they_fit_and_refer_when_one_row_does_not() -> None:
    objects: list[bytes] = []

    def refer(payload: bytes) -> dict[str, Any]:
        objects.append(payload)
        return {"name": "o"}

    columns = (column("id", oids.INT8), column("v", oids.TEXT))
    encoder = ArrowEncoder(HEAD, columns, max_rows=1000, max_bytes=4000, store_object=refer)
    lines = [b"%d\t%s" % (n, b"v" * (n % 50)) for n in range(2000)]
    lines.insert(1000, b"5000\t" + b"w" * 9000)
    contents = [*encoder.add(lines[:700]), *encoder.add(lines[700:]), *encoder.flush()]
    seen: list[int] = []
    for number, content in enumerate(contents):
        payload = content.encode(number)
        if content.content_type == "application/msgpack":
            assert msgpack.unpackb(payload)["ref"] == {"name": "o"}
            payload = objects.pop()
        else:
            assert len(payload) < 4000 + 1500
        with pa.ipc.open_stream(payload) as reader:
            assert json.loads(reader.schema.metadata[b"cdc"])["chunk"] == number
            seen += reader.read_all().column("id").to_pylist()
    assert seen == [*range(1000), 5000, *range(1000, 2000)]
    assert objects == []
