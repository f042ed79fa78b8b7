"""A DataFrame of changes made by hand, and a table after its folded changes, by plain joins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as fn
from pyspark.sql import types as st

from spark_consumer.changes.change_rows import (
    COMMIT_LSN,
    KEEP,
    NET,
    OLD,
    OPERATION,
    SEQ,
    UNCHANGED,
    ChangeFacts,
)
from spark_consumer.lake.table_definition import DELETED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame


def change_schema(columns: st.StructType, identity: Sequence[str]) -> st.StructType:
    """The schema of changes to a table with these columns.

    `_operation` is insert, update, delete or truncate; `_old` holds the old identity columns of an
    UPDATE that changed one of them (of a table without key: of every UPDATE); `_unchanged` names
    the columns that the UPDATE does not carry. A DELETE carries its identity columns at least.
    """
    old = st.StructType([columns[name] for name in identity])
    return st.StructType(
        [
            st.StructField(COMMIT_LSN, st.LongType()),
            st.StructField(SEQ, st.LongType()),
            st.StructField(OPERATION, st.StringType()),
            st.StructField(OLD, old),
            st.StructField(UNCHANGED, st.ArrayType(st.StringType())),
            *columns.fields,
        ]
    )


def facts_of(changes: DataFrame) -> ChangeFacts:
    """Look at the changes once."""
    moved = fn.col(OLD).isNotNull()
    row = changes.select(
        fn.count("*"),
        fn.max(fn.when(fn.col(OPERATION) == "truncate", fn.struct(COMMIT_LSN, SEQ))),
        fn.max(moved),
        fn.array_distinct(fn.flatten(fn.collect_set(UNCHANGED))),
        fn.array_distinct(fn.flatten(fn.collect_set(fn.when(moved, fn.col(UNCHANGED))))),
    ).collect()[0]
    return ChangeFacts(
        count=row[0],
        truncated_at=None if row[1] is None else (row[1][0], row[1][1]),
        moves=bool(row[2]),
        unchanged=frozenset(row[3]),
        moved_unchanged=frozenset(row[4]),
    )


def apply_keyed(
    base: DataFrame, folded: DataFrame, key: Sequence[str], columns: Sequence[str]
) -> DataFrame:
    """The table after the folded changes, by a join: what a sink's MERGE must give."""
    values = [name for name in columns if name not in key]
    new = folded.withColumnsRenamed({name: f"_new_{name}" for name in values})
    kept = {
        name: fn.coalesce(fn.array_contains(KEEP, name), fn.lit(False)) | fn.col(DELETED).isNull()
        for name in values
    }
    joined = base.join(new, list(key), "full_outer").where(~fn.coalesce(DELETED, fn.lit(False)))
    return joined.select(
        *key,
        *(
            fn.when(kept[name], fn.col(name)).otherwise(fn.col(f"_new_{name}")).alias(name)
            for name in values
        ),
    )


def apply_bag(base: DataFrame, net: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The table of equal rows after the folded changes."""
    counted = base.select(*columns).withColumn(NET, fn.lit(1).cast("long"))
    total = (
        counted.unionByName(net.select(*columns, NET)).groupBy(*columns).agg(fn.sum(NET).alias(NET))
    )
    copies = fn.explode(fn.sequence(fn.lit(1).cast("long"), fn.col(NET)))
    return total.where(fn.col(NET) > 0).withColumn("_copy", copies).select(*columns)
