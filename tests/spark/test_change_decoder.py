"""Stored messages of a table as typed changes."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from consumer_sdk.errors import CorruptData, GapError, VersionTooNew
from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.envelope import JSON, MSGPACK, encode
from spark_consumer.changes.change_decoder import ChangeDecoder
from spark_consumer.changes.change_rows import ChangeFacts
from spark_consumer.errors import SchemaChangeError, UnrepresentableError
from spark_consumer.lake.lake_table import LakePosition
from spark_consumer.lake.table_definition import define, evolve

AT = LakePosition("slot", 1, 7, stream_seq=10, commit_lsn=500, complete_at=0, schema_version=1)


def schema(version: int = 1, **more: Any) -> TableSchema:
    columns = [
        {"name": "id", "type_oid": oids.INT8, "is_key": True},
        {"name": "body", "type_oid": oids.TEXT},
        {"name": "tree", "type_oid": oids.JSONB},
        {"name": "raw", "type_oid": oids.BYTEA},
        {"name": "until", "type_oid": oids.DATE},
        *more.pop("added", ()),
    ]
    document = {
        "v": 1,
        "source": "slot",
        "epoch": 1,
        "table": "users",
        "schema": "public",
        "timestamp": 0,
        "schema_version": version,
        "lsn": 1,
        "primary_key": ["id"],
        "replica_identity": "default",
        "columns": [
            {"position": index, "data_type": "t", **column}
            for index, column in enumerate(columns, start=1)
        ],
    }
    return TableSchema.from_document({**document, **more})


def event(operation: str, seq: int = 0, lsn: int = 600, **fields: Any) -> dict[str, Any]:
    head = {"v": 1, "source": "slot", "epoch": 1, "table": "users", "schema": "public"}
    return {**head, "operation": operation, "lsn": lsn, "seq": seq, "schema_version": 1, **fields}


def decoded(
    *documents: dict[str, Any],
    kind: str = MSGPACK,
    table: TableSchema | None = None,
    policy: Any = "error",
) -> tuple[list[dict[str, Any]], ChangeFacts]:
    table = table or schema()
    decoder = ChangeDecoder(define(table, policy), {1: table}, AT, policy)
    rows: list[dict[str, Any]] = []
    for sequence, document in enumerate(documents, start=11):
        payload = encode(document, as_json=kind == JSON)
        for batch in decoder.add(sequence, kind, payload):
            rows.extend(batch.to_pylist())
    for batch in decoder.flush():
        rows.extend(batch.to_pylist())
    return rows, decoder.facts


ROW = {"id": 1, "body": "b", "tree": {"a": [1, "x"]}, "raw": b"\x00\xff", "until": "2030-01-01"}


@pytest.mark.parametrize("kind", [MSGPACK, JSON])
def test_a_row_is_the_same_in_both_encodings(kind: str) -> None:
    rows, facts = decoded(event("INSERT", data=ROW), kind=kind)
    (row,) = rows
    assert (row["c0"], row["c1"], row["c3"]) == (1, "b", b"\x00\xff")
    assert row["c2"] == '{"a": [1, "x"]}'
    assert row["c4"].isoformat() == "2030-01-01"
    assert (row["_operation"], row["_commit_lsn"], row["_seq"]) == ("insert", 600, 0)
    assert facts == ChangeFacts(count=1)


def test_json_text_that_travels_raw_stays_as_it_is() -> None:
    rows, _ = decoded(
        event("INSERT", 0, data={**ROW, "tree": "1.50"}, raw=["tree"]),
        event("INSERT", 1, data={**ROW, "tree": "text"}),
        event("INSERT", 2, data={**ROW, "tree": None}),
    )
    assert [row["c2"] for row in rows] == ["1.50", '"text"', None]


def test_packed_rows_count_on_from_the_first_ordinal() -> None:
    packed = event("INSERT", 4, rows=[{"data": {**ROW, "id": n}} for n in range(3)])
    rows, facts = decoded(packed)
    assert [(row["_seq"], row["c0"]) for row in rows] == [(4, 0), (5, 1), (6, 2)]
    assert facts.count == 3


def test_what_the_position_covers_is_dropped() -> None:
    before = ChangeDecoder(define(schema()), {1: schema()}, AT)
    payload = encode(event("INSERT", data=ROW))
    assert not list(before.add(10, MSGPACK, payload))
    rows, _ = decoded(event("INSERT", lsn=500, data=ROW), event("INSERT", lsn=501, data=ROW))
    assert [row["_commit_lsn"] for row in rows] == [501]
    assert not list(before.flush())


def test_values_left_out_and_keys_changed_are_told() -> None:
    short = {"id": 2, "tree": None, "raw": None, "until": None}
    rows, facts = decoded(
        event("UPDATE", 0, data=short, unchanged=["body"]),
        event("UPDATE", 1, data=short, old={"id": 2}, unchanged=["body"]),
        event("UPDATE", 2, data=short, old={"id": 1}, unchanged=["body"]),
        event("TRUNCATE", 3),
        event("DELETE", 4, data={"id": 9}),
    )
    assert [row["_old"] for row in rows] == [None, None, {"c0": 1}, None, None]
    assert rows[2]["_unchanged"] == ["c1"]
    assert rows[4]["c0"] == 9
    assert facts == ChangeFacts(
        count=5,
        truncated_at=(600, 3),
        moves=True,
        unchanged=frozenset({"c1"}),
        moved_unchanged=frozenset({"c1"}),
    )


def test_an_old_row_in_full_fills_in_what_was_left_out() -> None:
    data = {name: value for name, value in ROW.items() if name != "body"}
    rows, facts = decoded(event("UPDATE", data=data, old={**ROW, "id": 7}, unchanged=["body"]))
    assert rows[0]["c1"] == "b"
    assert rows[0]["_old"] == {"c0": 7}
    assert facts.unchanged == frozenset()


def test_a_table_without_key_needs_the_whole_old_row() -> None:
    bag = schema(primary_key=[], replica_identity="full")
    rows, _ = decoded(event("UPDATE", data=ROW, old={**ROW, "body": "before"}), table=bag)
    assert rows[0]["_old"]["c1"] == "before"
    assert rows[0]["_old"]["c2"] == '{"a": [1, "x"]}'
    with pytest.raises(CorruptData, match="without the old row"):
        decoded(event("UPDATE", data=ROW), table=bag)


def test_every_version_is_read_by_its_own_schema() -> None:
    first = schema()
    second = schema(2, added=[{"name": "age", "type_oid": oids.INT4}])
    definition = evolve(define(first), first, second).definition
    decoder = ChangeDecoder(definition, {1: first, 2: second}, AT)
    rows: list[dict[str, Any]] = []
    for sequence, document in enumerate(
        (
            event("INSERT", 0, data=ROW),
            event("INSERT", 1, schema_version=2, data={**ROW, "age": 3}),
        ),
        start=11,
    ):
        for batch in decoder.add(sequence, MSGPACK, encode(document)):
            rows.extend(batch.to_pylist())
    for batch in decoder.flush():
        rows.extend(batch.to_pylist())
    assert [row["c5"] for row in rows] == [None, 3]
    with pytest.raises(CorruptData, match="schema version 3 of users is not known"):
        list(decoder.add(13, MSGPACK, encode(event("INSERT", 2, schema_version=3, data=ROW))))


def test_numbers_that_become_text_are_written_as_postgresql_writes_them() -> None:
    bounded = {"name": "n", "type_oid": oids.NUMERIC, "type_modifier": 4 + (20 << 16) + 10}
    first = schema(added=[bounded])
    second = schema(2, added=[{**bounded, "type_modifier": -1}])
    definition = evolve(define(first), first, second).definition
    decoder = ChangeDecoder(definition, {1: first, 2: second}, AT)
    payload = encode(event("INSERT", data={**ROW, "n": "0.0000000001"}))
    (batch,) = chain(decoder.add(11, MSGPACK, payload), decoder.flush())
    assert batch.to_pylist()[0]["c5"] == "0.0000000001"


def test_a_column_without_a_place_in_the_lake_is_never_dropped_silently() -> None:
    newer = schema(2, added=[{"name": "age", "type_oid": oids.INT4}])
    decoder = ChangeDecoder(define(schema()), {1: schema(), 2: newer}, AT)
    payload = encode(event("INSERT", schema_version=2, data={**ROW, "age": 3}))
    with pytest.raises(SchemaChangeError, match="no place for column age of schema version 2"):
        list(decoder.add(11, MSGPACK, payload))


def test_text_of_unrepresentable_values_goes_beside_them() -> None:
    odd = {**ROW, "until": "infinity"}
    with pytest.raises(UnrepresentableError, match=r"column until, row of change \d+ at \w+/\w+: "):
        decoded(event("INSERT", data=odd))
    rest = {name: value for name, value in ROW.items() if name != "until"}
    rows, _ = decoded(
        event("INSERT", 0, data=odd),
        event("UPDATE", 1, data=rest, unchanged=["until"]),
        policy="text",
    )
    assert (rows[0]["c4"], rows[0]["c5"]) == (None, "infinity")
    assert rows[1]["_unchanged"] == ["c4", "c5"]


def test_another_epoch_is_a_gap() -> None:
    with pytest.raises(GapError, match="began epoch 2"):
        decoded(event("INSERT", data=ROW, epoch=2))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage",
        encode({"v": 1}),
        encode(event("INSERT")),
        encode(event("INSERT", rows=5)),
        encode(event("INSERT", rows=[{"data": 3}])),
        encode(event("INSERT", data=ROW, lsn="x")),
        encode(event("INSERT", data={**ROW, "id": "one"})),
    ],
)
def test_damaged_messages_are_refused(payload: bytes) -> None:
    decoder = ChangeDecoder(define(schema()), {1: schema()}, AT)
    with pytest.raises(CorruptData):
        list(chain(decoder.add(11, MSGPACK, payload), decoder.flush()))


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(VersionTooNew):
        decoded(event("INSERT", data=ROW) | {"v": 2})
