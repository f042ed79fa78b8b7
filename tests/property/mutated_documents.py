"""Valid messages of every kind, and the same with one field that is not what it should be."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

import msgpack

from consumer_sdk.wire import oids

if TYPE_CHECKING:
    from collections.abc import Iterator

Document = dict[str, Any]
Path = tuple[str | int, ...]

_TYPES = (
    ("id", "integer", oids.INT4, 0),
    ("f", "double precision", oids.FLOAT8, 0),
    ("flag", "boolean", oids.BOOL, 0),
    ("body", "bytea", oids.BYTEA, 0),
    ("doc", "jsonb", oids.JSONB, 0),
    ("tags", "text[]", 1009, oids.TEXT),
    ("num", "numeric(10,2)", oids.NUMERIC, 0),
    ("at", "timestamp with time zone", oids.TIMESTAMPTZ, 0),
    ("name", "text", oids.TEXT, 0),
)
COLUMNS = [
    {
        "name": name, "position": place, "data_type": type_, "type_oid": oid, "base_type_oid": oid,
        "element_oid": element, "type_modifier": 655366 if name == "num" else -1,
        "is_nullable": place > 1, "column_default": None, "is_key": place == 1, "number": place,
        "backfilled": False,
    }
    for place, (name, type_, oid, element) in enumerate(_TYPES, start=1)
]  # fmt: skip
SCHEMA: Document = {
    "v": 1, "source": "shop", "epoch": 100, "table": "users", "schema": "public", "timestamp": 1,
    "schema_version": 1, "lsn": 10, "primary_key": ["id"], "replica_identity": "default",
    "columns": COLUMNS, "filenode": 5,
}  # fmt: skip
META: Document = {
    "v": 1, "snapshot_id": "a", "source": "shop", "epoch": 100, "table": "users",
    "schema": "public", "lsn": 1, "timestamp": 1, "batch_count": 1, "row_count": 1,
    "schema_version": 1, "columns": COLUMNS, "options": {}, "format": "msgpack", "zstd": False,
    "row_filter": None, "stream": "CDC", "stream_created": 1, "cdc_seq": 1, "checksum": "00",
}  # fmt: skip
PROGRESS: Document = {
    "v": 1, "source": "shop", "epoch": 100, "system_id": "7", "timeline": 1, "database": "d",
    "publication": "p", "lsn": 1000, "stream_seq": 5, "stream_created": 1, "source_lsn": 1001,
    "gap": {"reason": "lost", "previous_epoch": 1, "previous_lsn": 2, "tables": ["users"]},
    "ts": 1,
}  # fmt: skip
REFERENCE = {"bucket": "b", "name": "n", "size": 1, "sha256": "00"}

_MARKS = {
    # MessagePack that no Python value is packed to.
    "@deep list": b"\x91" * 900 + b"\xc0",
    "@deep map": b"\x81\xa1a" * 600 + b"\xc0",
    "@list as key": b"\x81\x91\x01\x03",
}


def _deep(levels: int, wrap: Any) -> Any:
    value: Any = None
    for _ in range(levels):
        value = wrap(value)
    return value


_ANYWHERE: tuple[Any, ...] = (
    None, True, -1, 2**64 - 1, 1.5, "text", "", "\x1b[2J\x7f\x9b2J\x00\u202e", "../*.>", [1], [],
    {"x": 1}, {},
)  # fmt: skip
IN_MSGPACK = (
    *_ANYWHERE, math.nan, math.inf, b"\xff\x00", 10**9, msgpack.Timestamp(5, 0),
    msgpack.ExtType(5, b"x"), [msgpack.ExtType(5, b"x")], {b"k": 1}, *_MARKS,
)  # fmt: skip
IN_JSON = (
    *_ANYWHERE, math.inf, "\ud800", {"\udc00": 1}, 10**400, str(2**64), "-5",
    _deep(900, lambda value: [value]), _deep(600, lambda value: {"a": value}),
)  # fmt: skip


def row(number: int = 1, *, as_json: bool) -> Document:
    """A row of the table."""
    return {
        "id": number, "f": 1.5, "flag": True, "body": "/w==" if as_json else b"\xff",
        "doc": {"a": [1, None]}, "tags": ["a", None], "num": "1.50",
        "at": "2025-12-12T12:00:34.338547Z", "name": "x",
    }  # fmt: skip


def messages(*, as_json: bool) -> Iterator[tuple[bytes, Document]]:
    """One valid message of every kind in the change stream, and its subject."""

    def change(operation: str, **fields: Any) -> tuple[bytes, Document]:
        subject = f"cdc.users.{operation.lower()}"
        document = {
            "v": 1, "source": "shop", "epoch": 100, "table": "users", "schema": "public",
            "operation": operation, "relation_id": 7, "schema_version": 1, "msg_id": "m",
            "subject": subject, "lsn": 1000, "xid": 5, "seq": 0, "ts": 1, **fields, "last": True,
            "end_lsn": 1010,
        }  # fmt: skip
        return subject.encode(), document

    new, same = row(2, as_json=as_json), row(1, as_json=as_json)
    kept = {name: value for name, value in same.items() if name != "name"}
    yield change("INSERT", data=new, raw=[])
    yield change("UPDATE", data=kept, unchanged=["name"], raw=["doc"])
    yield change("UPDATE", data={**same, "id": 9}, old={"id": 1})
    yield change("DELETE", data={"id": 1})
    yield change("TRUNCATE", cascade=False, restart_identity=False)
    yield change("INSERT", rows=[{"data": new}, {"data": {**new, "id": 3}, "raw": []}])
    yield change("INSERT", ref=REFERENCE)
    yield change("COMMIT", tables=["users"], changes=1)
    yield b"cdc.users.schema", {**SCHEMA, "operation": "SCHEMA", "msg_id": "m", "lsn": 1000}
    yield b"cdc.$progress.shop", PROGRESS
    message = {
        "v": 1, "source": "shop", "epoch": 100, "operation": "MESSAGE", "prefix": "audit",
        "msg_id": "m", "subject": "cdc.$message.audit", "lsn": 1000, "xid": 5, "seq": 0,
        "ordinal": 0, "ts": 1, "data": "hi", "encoding": "utf8", "end_lsn": 1010,
    }  # fmt: skip
    yield b"cdc.$message.audit", message


def chunk(*, as_json: bool) -> Document:
    """A chunk of a snapshot."""
    rows = [row(1, as_json=as_json), {**row(2, as_json=as_json), "doc": "{}"}, {"$ref": REFERENCE}]
    return {
        "v": 1, "source": "shop", "epoch": 100, "table": "users", "schema": "public",
        "operation": "snapshot", "snapshot_id": "a", "chunk": 0, "lsn": 1, "raw_columns": [],
        "raw": {"1": ["doc"]}, "data": rows,
    }  # fmt: skip


def mutated(document: Document, *, as_json: bool) -> Iterator[tuple[str, bytes]]:
    """The document as bytes: as it is, without each of its fields, and with each one spoilt."""
    yield "as it is", encoded(document, as_json=as_json)
    for path in _paths(document):
        yield f"without {path}", encoded(_changed(document, path), as_json=as_json)
        for value in IN_JSON if as_json else IN_MSGPACK:
            spoilt = _changed(document, path, value)
            yield f"{path} = {type(value).__name__} {value!r:.40}", encoded(spoilt, as_json=as_json)


def encoded(document: Document, *, as_json: bool) -> bytes:
    """The document as whoever wishes us ill would write it."""
    if as_json:
        return json.dumps(document).replace("Infinity", "1e999").encode()
    packed: bytes = msgpack.packb(document)
    for mark, content in _MARKS.items():
        packed = packed.replace(msgpack.packb(mark), content)
    return packed


def _paths(value: Any, above: Path = ()) -> Iterator[Path]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        # Columns are alike: the first of them stands for all.
        if above[-1:] == ("columns",) and key:
            continue
        yield (*above, key)
        if isinstance(inner, (dict, list)):
            yield from _paths(inner, (*above, key))


_ABSENT = object()


def _changed(document: Document, path: Path, value: Any = _ABSENT) -> Document:
    changed: Any = dict(document)
    place = changed
    for key in path[:-1]:
        place[key] = copy.copy(place[key])
        place = place[key]
    if value is _ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed  # type: ignore[no-any-return]
