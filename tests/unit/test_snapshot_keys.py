"""Conditions on keys: literals that cannot end early, ranges, and the order of `where`."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.errors import Refused
from bridge.events.values import ColumnType
from bridge.snapshot.coordinator.records import DivisionRecord, Group
from bridge.snapshot.keys import KeyColumn, KeyRange, end_sql, literal, parse_where
from consumer_sdk.wire.errors import MISFITS

KEY = (
    KeyColumn('a"b', ColumnType(23), "integer", 1),
    KeyColumn("c", ColumnType(25), "text", 0),
)


def test_a_literal_ends_where_it_should() -> None:
    assert literal("it's") == "'it''s'"
    assert literal("\\'; DROP") == " E'\\\\''; DROP'"
    assert literal("") == "''"


def test_a_range_compares_whole_keys() -> None:
    keys = KeyRange(KEY, ((">=", ("1", "x")),)).until(("2", "y'"))
    assert keys.conditions() == [
        '("a""b", "c") >= (\'1\'::integer, \'x\'::text)',
        "(\"a\"\"b\", \"c\") < ('2'::integer, 'y'''::text)",
    ]
    assert keys.until(None) is keys
    assert KeyRange(KEY, among=(("1", "x"), ("2", "y"))).conditions() == [
        "(\"a\"\"b\", \"c\") IN (('1'::integer, 'x'::text), ('2'::integer, 'y'::text))"
    ]


def test_the_end_of_a_piece_is_found_in_the_order_of_the_columns_and_not_of_their_text() -> None:
    assert end_sql('ONLY "s"."t"', KeyRange(KEY[:1], ((">=", ("1",)),)), 5) == (
        'SELECT pg_catalog.format(\'%s\', t."a""b") FROM ONLY "s"."t" AS t'
        ' WHERE (t."a""b") >= (\'1\'::integer) ORDER BY t."a""b" OFFSET 5 LIMIT 1'
    )


def test_neither_order_nor_repetition_of_keys_makes_another_option() -> None:
    first = parse_where({"keys": [[2, "b"], [1, "a"]]})
    assert first is not None
    assert first == parse_where({"keys": [[1, "a"], [2, "b"], [1, "a"]]})
    assert first.document == {"keys": [[1, "a"], [2, "b"]]}
    assert parse_where({"to": [1], "from": [0]}) == parse_where({"from": [0], "to": [1]})
    assert parse_where({"keys": [[1]]}) != parse_where({"keys": [[True]]})
    assert parse_where(None) is None


@pytest.mark.parametrize(
    "where", [[], "x", {}, {"keys": [[]]}, {"keys": [[2**80]]}, {"from": ["\ud800"]}, {"k": [1]}]
)
def test_junk_is_refused(where: Any) -> None:
    with pytest.raises(Refused, match="option where"):
        parse_where(where)


def test_a_division_survives_its_record() -> None:
    record = DivisionRecord(
        epoch=7, asked={"zstd": True}, columns=("a", "b"), format="json", zstd=True,
        fingerprint="f", schema_version=3, stream_created_us=5, cdc_seq=9,
        groups=(Group(2**60, 0, 4, "aa"), Group(2**60 + 8, 4, 4, "bb")), rows=10,
        start=("x", "'"), is_done=False,
    )  # fmt: skip
    assert DivisionRecord.from_document(record.to_document()) == record
    assert record.next_chunk == 4
    for name in record.to_document():
        damaged = record.to_document()
        del damaged[name]
        with pytest.raises(MISFITS):
            DivisionRecord.from_document(damaged)
