"""Folding changes, held against a plain model of a table."""

from __future__ import annotations

from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import types as st

from spark_consumer.changes.change_rows import ChangeFacts
from spark_consumer.changes.fold import fold_bag, fold_keyed
from tests.spark.fold_model import apply_bag, apply_keyed, change_schema, facts_of
from tests.spark.history_model import COLUMNS, KEY, BagHistory, KeyedHistory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

TABLE = (
    st.StructType()
    .add("region", st.IntegerType())
    .add("code", st.StringType())
    .add("count", st.LongType())
    .add("note", st.StringType())
    .add("body", st.StringType())
)
BAG = st.StructType().add("number", st.IntegerType()).add("letter", st.StringType())


def changes_of(spark: SparkSession, changes: Sequence[dict[str, Any]]) -> DataFrame:
    schema = change_schema(TABLE, KEY)
    rows = [tuple(change.get(name) for name in schema.names) for change in changes]
    return spark.createDataFrame(rows, schema)


def table_of(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    return spark.createDataFrame([tuple(row[name] for name in COLUMNS) for row in rows], TABLE)


def rows_of(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.collect()), key=repr)


def applied(spark: SparkSession, base: DataFrame, changes: Sequence[dict[str, Any]]) -> DataFrame:
    frame = changes_of(spark, changes)
    facts = facts_of(frame)
    start = base if facts.truncated_at is None else base.limit(0)
    folded = fold_keyed(frame, KEY, COLUMNS, facts, start)
    return apply_keyed(start, folded, KEY, COLUMNS)


@pytest.mark.parametrize("seed", [1, 3])
def test_any_history_folded_at_once_leaves_the_rows_it_left(spark: SparkSession, seed: int) -> None:
    history = KeyedHistory(seed, keys=40)
    base = table_of(spark, history.start(20))
    history.run(300, truncates=seed == 3)
    result = applied(spark, base, history.changes)
    assert rows_of(result) == sorted(history.state(), key=repr)


def test_a_history_cut_anywhere_gives_the_same_rows(spark: SparkSession) -> None:
    history = KeyedHistory(11, keys=20)
    table = table_of(spark, history.start(10))
    history.run(120, truncates=True)
    cuts = [0, *sorted(history.random.sample(range(len(history.changes)), 3)), None]
    for first, end in pairwise(cuts):
        table = applied(spark, table, history.changes[first:end]).localCheckpoint()
    assert rows_of(table) == sorted(history.state(), key=repr)


def test_the_order_of_arrival_and_repetitions_do_not_matter(spark: SparkSession) -> None:
    history = KeyedHistory(21, keys=20)
    base = table_of(spark, history.start(10))
    history.run(100)
    shuffled = history.changes + history.changes[20:60]
    history.random.shuffle(shuffled)
    assert rows_of(applied(spark, base, shuffled)) == sorted(history.state(), key=repr)


def test_values_left_out_travel_through_a_chain_of_keys(spark: SparkSession) -> None:
    history = KeyedHistory(31)
    keys = history.all_keys()
    base = table_of(spark, [history.new_row(keys[0]) | {"body": "kept", "count": 0}])
    for step, (old, new) in enumerate(pairwise(keys[:5])):
        history.emit(
            "update",
            region=new[0],
            code=new[1],
            count=step,
            note="n",
            _old={"region": old[0], "code": old[1]},
            _unchanged=["body"],
        )
    last = keys[4]
    assert rows_of(applied(spark, base, history.changes)) == [(*last, 3, "n", "kept")]


def test_a_value_that_came_from_nowhere_stops_the_fold(spark: SparkSession) -> None:
    history = KeyedHistory(41)
    old, new = history.all_keys()[:2]
    history.emit(
        "update",
        region=new[0],
        code=new[1],
        count=1,
        note="n",
        _old={"region": old[0], "code": old[1]},
        _unchanged=["body"],
    )
    with pytest.raises(PySparkException, match="not in the table"):
        applied(spark, table_of(spark, []), history.changes).collect()


def test_a_deleted_row_keeps_its_last_values_when_asked_for(spark: SparkSession) -> None:
    history = KeyedHistory(51)
    first, second = history.all_keys()[:2]
    history.emit("insert", **history.new_row(first) | {"count": 7, "body": "b", "note": "n"})
    history.emit("delete", region=first[0], code=first[1])
    history.emit("delete", region=second[0], code=second[1])
    frame = changes_of(spark, history.changes)
    folded = fold_keyed(frame, KEY, COLUMNS, facts_of(frame), keep_deleted=True)
    by_key = {(row["region"], row["code"]): row for row in folded.collect()}
    assert by_key[first]["_deleted"]
    assert (by_key[first]["count"], by_key[first]["body"]) == (7, "b")
    assert by_key[first]["_keep"] is None
    assert by_key[second]["_deleted"]
    assert set(by_key[second]["_keep"]) == {"count", "note", "body"}


def test_facts_name_what_the_changes_need(spark: SparkSession) -> None:
    history = KeyedHistory(61)
    old, new = history.all_keys()[:2]
    history.emit("truncate")
    key = {"region": new[0], "code": new[1]}
    history.emit("update", **key, _unchanged=["note"])
    history.emit("update", **key, _old={"region": old[0], "code": old[1]}, _unchanged=["body"])
    facts = facts_of(changes_of(spark, history.changes))
    assert facts == ChangeFacts(
        count=3,
        truncated_at=(1000, 0),
        moves=True,
        unchanged=frozenset({"note", "body"}),
        moved_unchanged=frozenset({"body"}),
    )


@pytest.mark.parametrize("seed", [5, 6])
def test_a_table_without_key_keeps_each_of_its_equal_rows(spark: SparkSession, seed: int) -> None:
    history = BagHistory(seed)
    history.run(60)
    base = spark.createDataFrame(history.rows, BAG)
    already = len(history.changes)
    history.run(150)
    schema = change_schema(BAG, BAG.names)
    new = history.changes[already:]
    new += new[10:20]
    frame = spark.createDataFrame([tuple(one[n] for n in schema.names) for one in new], schema)
    facts = facts_of(frame)
    start = base if facts.truncated_at is None else base.limit(0)
    result = apply_bag(start, fold_bag(frame, BAG.names, facts), BAG.names)
    assert rows_of(result) == sorted(history.rows, key=repr)


FLOATS = (
    st.StructType()
    .add("single", st.FloatType())
    .add("double", st.DoubleType())
    .add("many", st.ArrayType(st.DoubleType()))
)


def test_zeros_of_both_signs_are_distinct_rows_of_a_table_without_key(spark: SparkSession) -> None:
    rows = [
        (-0.0, -0.0, [-0.0, None]),
        (0.0, -0.0, [-0.0, None]),
        (0.0, 0.0, [0.0, None]),
        (0.0, 0.0, [-0.0, None]),
        (nan, nan, [nan]),
        (None, None, None),
    ]
    schema = change_schema(FLOATS, FLOATS.names)
    changes = [(1, seq, "insert", None, None, *row) for seq, row in enumerate(rows)]
    changes += [(2, seq, "insert", None, None, *row) for seq, row in enumerate(rows[:2])]
    changes.append((3, 0, "delete", None, None, *rows[1]))
    frame = spark.createDataFrame(changes, schema)
    net = fold_bag(frame, FLOATS.names, facts_of(frame)).collect()
    counted = {repr(tuple(row)[:3]): row["_net"] for row in net}
    assert counted == {repr(row): 2 if row is rows[0] else 1 for row in rows}


def test_a_key_of_zero_takes_the_sign_of_the_newest_change(spark: SparkSession) -> None:
    table = st.StructType().add("id", st.DoubleType()).add("body", st.StringType())
    changes = [
        (1, 0, "insert", None, None, 0.0, "first"),
        (2, 0, "update", None, None, -0.0, "second"),
        (3, 0, "insert", None, None, nan, "third"),
        (4, 0, "update", None, None, nan, "fourth"),
    ]
    frame = spark.createDataFrame(changes, change_schema(table, ["id"]))
    folded = fold_keyed(frame, ["id"], table.names, facts_of(frame)).collect()
    assert sorted(repr(tuple(row)[:2]) for row in folded) == ["(-0.0, 'second')", "(nan, 'fourth')"]
