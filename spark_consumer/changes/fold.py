"""Many changes to one: pure functions from a DataFrame of changes to their net effect on a table.

A change is a row of `change_schema`. Order is the position in the source's history, never the order
of arrival, so that a change that comes twice counts once. Each column takes its newest value,
because an UPDATE leaves out TOASTed values that it did not touch; such a value travels with its row
from key to key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as fn
from pyspark.sql import types as st

from spark_consumer.changes.change_columns import (
    ARRIVES,
    COMMIT_LSN,
    DELETED,
    GONE,
    KEEP,
    LEAVES,
    NET,
    OLD,
    OPERATION,
    SEQ,
    STEP,
    UNCHANGED,
    ChangeFacts,
)
from spark_consumer.changes.key_moves import with_traced_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

_NEWEST: Final = "_newest"
_ROW: Final = "_row"


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


def fold_keyed(
    changes: DataFrame,
    key: Sequence[str],
    columns: Sequence[str],
    facts: ChangeFacts,
    base: DataFrame | None = None,
    *,
    keep_deleted: bool = False,
) -> DataFrame:
    """One row for each key touched: its columns, `_deleted`, and `_keep`.

    `_keep` names the columns that are not known from the changes: the table's own value stays.
    `base` is the table before the changes; only rows that changed their key and left a TOASTed
    value out are looked up there. With `keep_deleted` a deleted row still carries its last values.
    """
    changes = _after_truncate(changes, facts)
    values = [name for name in columns if name not in key]
    loose = [name for name in values if name in facts.unchanged]
    settled = [name for name in values if name not in facts.unchanged]
    steps = _steps(changes, key, values, facts)
    position = [fn.col(COMMIT_LSN), fn.col(SEQ), fn.col(STEP)]
    live = ~fn.col(DELETED)
    newest = fn.max(fn.struct(*position, DELETED, *settled))
    aggregates = [newest.alias(_NEWEST)]
    if keep_deleted:
        aggregates.append(fn.max(fn.when(live, fn.struct(*position, *settled))).alias(_ROW))
    for index, name in enumerate(loose):
        missing = fn.coalesce(fn.array_contains(UNCHANGED, name), fn.lit(False))
        came_along = missing & fn.col(OLD).isNotNull()
        candidate = fn.struct(
            *position,
            fn.col(name).alias("value"),
            fn.when(came_along, fn.col(OLD)).alias("origin"),
        )
        known = live & (~missing | fn.col(OLD).isNotNull())
        aggregates.append(fn.max(fn.when(known, candidate)).alias(f"_loose{index}"))
    folded = steps.groupBy(*key).agg(*aggregates)
    row = _ROW if keep_deleted else _NEWEST
    for index, name in enumerate(loose):
        if name in facts.moved_unchanged:
            folded = with_traced_values(folded, f"_loose{index}", steps, name, key, base)
    keep = [
        fn.when(fn.col(f"_loose{index}").isNull(), fn.lit(name)) for index, name in enumerate(loose)
    ]
    if keep_deleted:
        keep += [fn.when(fn.col(_ROW).isNull(), fn.lit(name)) for name in settled]
    loose_value = {name: fn.col(f"_loose{index}")["value"] for index, name in enumerate(loose)}
    settled_value = {name: fn.col(row)[name] for name in settled}
    return folded.select(
        *(fn.col(name) for name in key),
        *((settled_value | loose_value)[name].alias(name) for name in values),
        fn.col(_NEWEST)[DELETED].alias(DELETED),
        _names(keep).alias(KEEP),
    )


def _names(candidates: Sequence[Column]) -> Column:
    if not candidates:
        return fn.lit(None).cast("array<string>")
    names = fn.array_compact(fn.array(*candidates))
    return fn.when(fn.size(names) > 0, names)


def _after_truncate(changes: DataFrame, facts: ChangeFacts) -> DataFrame:
    if facts.truncated_at is None:
        return changes
    commit_lsn, seq = facts.truncated_at
    same = (fn.col(COMMIT_LSN) == commit_lsn) & (fn.col(SEQ) > seq)
    return changes.where((fn.col(COMMIT_LSN) > commit_lsn) | same)


def _steps(
    changes: DataFrame, key: Sequence[str], values: Sequence[str], facts: ChangeFacts
) -> DataFrame:
    """What happens at each key: a change of key is a departure here and an arrival there."""
    arrivals = changes.select(
        COMMIT_LSN,
        SEQ,
        fn.lit(ARRIVES).alias(STEP),
        (fn.col(OPERATION) == "delete").alias(DELETED),
        OLD,
        UNCHANGED,
        *key,
        *values,
    )
    if not facts.moves:
        return arrivals
    types = changes.schema
    departures = changes.where(fn.col(OLD).isNotNull()).select(
        COMMIT_LSN,
        SEQ,
        fn.lit(LEAVES).alias(STEP),
        fn.lit(True).alias(DELETED),
        fn.lit(None).cast(types[OLD].dataType).alias(OLD),
        UNCHANGED,
        *(fn.col(OLD)[name].alias(name) for name in key),
        *(fn.lit(None).cast(types[name].dataType).alias(name) for name in values),
    )
    return arrivals.unionByName(departures)


def fold_bag(changes: DataFrame, columns: Sequence[str], facts: ChangeFacts) -> DataFrame:
    """One row for each distinct row touched: `_net` copies more (or fewer), `_gone` deleted ones.

    For tables without key, where equal rows are several rows.
    """
    changes = _after_truncate(changes, facts).dropDuplicates([COMMIT_LSN, SEQ])
    operation = fn.col(OPERATION)
    inserted = fn.when(operation.isin("insert", "update"), 1).otherwise(-1)
    current = changes.select(
        *columns,
        inserted.cast("long").alias(NET),
        (operation == "delete").cast("long").alias(GONE),
    )
    replaced = changes.where(operation == "update").select(
        *(fn.col(OLD)[name].alias(name) for name in columns),
        fn.lit(-1).cast("long").alias(NET),
        fn.lit(0).cast("long").alias(GONE),
    )
    return (
        current.unionByName(replaced)
        .groupBy(*columns)
        .agg(fn.sum(NET).alias(NET), fn.sum(GONE).alias(GONE))
        .where((fn.col(NET) != 0) | (fn.col(GONE) != 0))
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
