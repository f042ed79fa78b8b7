"""Values that came along with their row from another key.

An UPDATE that changes the key and leaves a TOASTed value out says only where the row came from. The
value is that of the row there just before: carried by an earlier change, brought along from a third
key in the same way, or the one the table had before the changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as fn

from spark_consumer.changes.change_columns import (
    COMMIT_LSN,
    DELETED,
    LEAVES,
    OLD,
    SEQ,
    STEP,
    UNCHANGED,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_MOVE: Final = "_move"
_ORIGIN: Final = "_origin"
_FOUND: Final = "_found"
_VALUE: Final = "_value"
_NEXT: Final = "_next"


def with_traced_values(
    folded: DataFrame,
    slot: str,
    steps: DataFrame,
    name: str,
    key: Sequence[str],
    base: DataFrame | None,
) -> DataFrame:
    """Put into `slot` of each folded row the value of column `name` that came along with it.

    `slot` is a struct with the position of the change that won and, as `origin`, the key the row
    came from if that change left the value out.
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
    """For each change of key that left the value out, where its row got the value before.

    `_next` is an earlier such change of key; without it `_found` tells whether a change carried
    the value, else it is in the table at `_origin`.
    """
    missing = fn.coalesce(fn.array_contains(UNCHANGED, name), fn.lit(False))
    came_along = missing & fn.col(OLD).isNotNull()
    history = steps.where(~fn.col(DELETED) & (~missing | came_along)).select(
        fn.struct(*key).alias(_ORIGIN),
        fn.struct(COMMIT_LSN, SEQ, STEP).alias("_since"),
        fn.struct(fn.col(name).alias("value"), came_along.alias("moved")).alias(_FOUND),
    )
    moves = steps.where(~fn.col(DELETED) & came_along).select(
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
    """Let each link skip its neighbour: chains halve with every call."""
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
    lost = fn.raise_error(
        fn.lit(f"column {name}: the row before a change of key is not in the table")
    ).cast(type_)
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
