"""Folds changes: pure functions from a DataFrame of changes to their net effect on a table.

A change is a row of `changes_schema`. Changes are ordered by their position in the source's
history, not by their arrival, so a change that arrives twice is applied once. Each column is folded
separately, because an UPDATE leaves out TOASTed values that it did not change.

An UPDATE that changes the key and leaves a value out gives only the old key of the row. The value
is the one that the row had at the old key just before: an earlier change carried it, or the row had
moved there from a third key without it, or the table held it before the changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as fn

from spark_consumer.changes.change_rows import (
    ARRIVES,
    COMMIT_LSN,
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
from spark_consumer.lake.column_mapping import exact
from spark_consumer.lake.table_definition import DELETED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_NEWEST: Final = "_newest"
_ROW: Final = "_row"
_MOVE: Final = "_move"
_ORIGIN: Final = "_origin"
_FOUND: Final = "_found"
_VALUE: Final = "_value"
_NEXT: Final = "_next"


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

    `_keep` names the columns whose value the changes do not give: the table's value stays. `base`
    is the table before the changes; the fold reads it only for rows that changed their key and left
    a TOASTed value out. With `keep_deleted` a deleted row still carries its last values.
    """
    changes = _after_truncate(changes, facts)
    values = [name for name in columns if name not in key]
    omitted = [name for name in values if name in facts.unchanged]
    complete = [name for name in values if name not in facts.unchanged]
    steps = _steps(changes, key, values, facts)
    position = [fn.col(COMMIT_LSN), fn.col(SEQ), fn.col(STEP)]
    live = ~fn.col(DELETED)
    # The key as well: it is grouped by value, and the newest of 0.0 and -0.0 stays.
    newest = fn.max(fn.struct(*position, DELETED, *key, *complete))
    aggregates = [newest.alias(_NEWEST)]
    if keep_deleted:
        aggregates.append(fn.max(fn.when(live, fn.struct(*position, *complete))).alias(_ROW))
    for index, name in enumerate(omitted):
        missing = _left_out(name)
        moved_without = missing & fn.col(OLD).isNotNull()
        candidate = fn.struct(
            *position,
            fn.col(name).alias("value"),
            fn.when(moved_without, fn.col(OLD)).alias("origin"),
        )
        known = live & (~missing | fn.col(OLD).isNotNull())
        aggregates.append(fn.max(fn.when(known, candidate)).alias(f"_omitted{index}"))
    folded = steps.groupBy(*key).agg(*aggregates)
    row = _ROW if keep_deleted else _NEWEST
    for index, name in enumerate(omitted):
        if name in facts.moved_unchanged:
            folded = _with_traced_values(folded, f"_omitted{index}", steps, name, key, base)
    keep = [
        fn.when(fn.col(f"_omitted{index}").isNull(), fn.lit(name))
        for index, name in enumerate(omitted)
    ]
    if keep_deleted:
        keep += [fn.when(fn.col(_ROW).isNull(), fn.lit(name)) for name in complete]
    omitted_value = {
        name: fn.col(f"_omitted{index}")["value"] for index, name in enumerate(omitted)
    }
    complete_value = {name: fn.col(row)[name] for name in complete}
    return folded.select(
        *(fn.col(_NEWEST)[name].alias(name) for name in key),
        *((complete_value | omitted_value)[name].alias(name) for name in values),
        fn.col(_NEWEST)[DELETED].alias(DELETED),
        _names(keep).alias(KEEP),
    )


def missing_row() -> Column:
    """Stops the query if it is evaluated: the table lacks a row that a change refers to."""
    return fn.raise_error(fn.lit("a row that a change refers to is not in the table"))


def _left_out(name: str) -> Column:
    """Whether the change does not carry the column's value."""
    return fn.coalesce(fn.array_contains(UNCHANGED, name), fn.lit(False))


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
    """The changes at each key: a change of key is a delete at the old key and a row at the new."""
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
    """One row for each distinct row changed: `_net` copies added or removed, `_gone` deleted.

    For tables without a key, which may hold several equal rows. -0.0 and 0.0 are distinct.
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
    rows = current.unionByName(replaced)
    types = rows.schema
    identity = fn.struct(*(exact(fn.col(name), types[name].dataType) for name in columns))
    return (
        rows.groupBy(identity.alias(_ROW))
        .agg(
            fn.first(fn.struct(*columns)).alias(_VALUE),
            fn.sum(NET).alias(NET),
            fn.sum(GONE).alias(GONE),
        )
        .where((fn.col(NET) != 0) | (fn.col(GONE) != 0))
        .select(*(fn.col(_VALUE)[name].alias(name) for name in columns), NET, GONE)
    )


def _with_traced_values(
    folded: DataFrame,
    slot: str,
    steps: DataFrame,
    name: str,
    key: Sequence[str],
    base: DataFrame | None,
) -> DataFrame:
    """Set the value of column `name` in `slot` for rows that moved without carrying it.

    `slot` is a struct with the position of the newest change and, if that change left the value
    out, the previous key of the row as `origin`.
    """
    links = _links(steps, name, key)
    while not links.where(fn.col(_NEXT).isNotNull()).isEmpty():
        links = _shortened(links)
    traced = _values(links, name, key, base, steps.schema[name].dataType)
    won = fn.col(slot)
    joined = folded.withColumn(
        _MOVE, fn.when(won["origin"].isNotNull(), _move_at(won[COMMIT_LSN], won[SEQ]))
    ).join(traced, _MOVE, "left")
    value = fn.when(won["origin"].isNotNull(), won.withField("value", fn.col(_VALUE)))
    return joined.withColumn(slot, value.otherwise(won)).drop(_MOVE, _VALUE)


def _move_at(commit_lsn: Column, seq: Column) -> Column:
    return fn.struct(commit_lsn.alias(COMMIT_LSN), seq.alias(SEQ))


def _links(steps: DataFrame, name: str, key: Sequence[str]) -> DataFrame:
    """For each change of key that left the value out, where the value comes from.

    `_next` is an earlier change of the same kind. Without one, `_found` is true if a change carried
    the value; otherwise the table has it at `_origin`.
    """
    missing = _left_out(name)
    moved_without = missing & fn.col(OLD).isNotNull()
    history = steps.where(~fn.col(DELETED) & (~missing | moved_without)).select(
        fn.struct(*key).alias(_ORIGIN),
        fn.struct(COMMIT_LSN, SEQ, STEP).alias("_since"),
        fn.struct(fn.col(name).alias("value"), moved_without.alias("moved")).alias(_FOUND),
    )
    moves = steps.where(~fn.col(DELETED) & moved_without).select(
        _move_at(fn.col(COMMIT_LSN), fn.col(SEQ)).alias(_MOVE),
        fn.struct(*(fn.col(OLD)[column].alias(column) for column in key)).alias(_ORIGIN),
        fn.struct(COMMIT_LSN, SEQ, fn.lit(LEAVES).alias(STEP)).alias("_until"),
    )
    before = fn.when(fn.col("_since") < fn.col("_until"), fn.struct("_since", _FOUND))
    latest = (
        moves.join(history, _ORIGIN, "left")
        .groupBy(_MOVE, _ORIGIN)
        .agg(fn.max(before).alias("_latest"))
    )
    since, found = fn.col("_latest")["_since"], fn.col("_latest")[_FOUND]
    return latest.select(
        _MOVE,
        _ORIGIN,
        found.isNotNull().alias(_FOUND),
        found["value"].alias(_VALUE),
        fn.when(found["moved"], _move_at(since[COMMIT_LSN], since[SEQ])).alias(_NEXT),
    ).localCheckpoint(eager=True)


def _shortened(links: DataFrame) -> DataFrame:
    """Replace each link by the link it points to; every call halves the chains."""
    target = links.select(
        fn.col(_MOVE).alias(_NEXT),
        fn.struct(_ORIGIN, _FOUND, _VALUE, fn.col(_NEXT).alias("_after")).alias("_target"),
    )
    linked = fn.col("_target").isNotNull()
    jumped = fn.col("_target")
    return (
        links.join(target, _NEXT, "left")
        .select(
            _MOVE,
            *(
                fn.when(linked, jumped[part]).otherwise(fn.col(part)).alias(part)
                for part in (_ORIGIN, _FOUND, _VALUE)
            ),
            jumped["_after"].alias(_NEXT),
        )
        .localCheckpoint(eager=True)
    )


def _values(
    links: DataFrame, name: str, key: Sequence[str], base: DataFrame | None, type_: DataType
) -> DataFrame:
    lost = missing_row().cast(type_)
    if base is None:
        known = fn.when(fn.col(_FOUND), fn.col(_VALUE)).otherwise(lost)
        return links.select(_MOVE, known.alias(_VALUE))
    origin = base.select(
        fn.struct(*key).alias(_ORIGIN), fn.struct(fn.col(name).alias("value")).alias("_row")
    )
    known = (
        fn.when(fn.col(_FOUND), fn.col(_VALUE))
        .when(fn.col("_row").isNotNull(), fn.col("_row")["value"])
        .otherwise(lost)
    )
    return links.join(origin, _ORIGIN, "left").select(_MOVE, known.alias(_VALUE))
