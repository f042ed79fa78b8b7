"""Writes folded changes to the lake: one commit for each table and batch, with the position.

Spark expressions use the plain names of the columns; calls of the lake map them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import functions as fn

from consumer_sdk.wire.subjects import table_token
from spark_consumer.changes.change_rows import GONE, KEEP, NET, changes_schema
from spark_consumer.changes.fold import fold_bag, fold_keyed, missing_row
from spark_consumer.errors import MissingRowError
from spark_consumer.lake.column_mapping import spark_schema, spark_type
from spark_consumer.lake.lake_table import BagPlan, MergePlan
from spark_consumer.lake.table_definition import DELETED, SYNCED_AT, lake_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.changes.staging import StagedChanges
    from spark_consumer.lake.lake_table import LakePosition, LakeTable
    from spark_consumer.lake.table_definition import TableDefinition, TableOptions

_SMALL_BATCH = 50_000
_COPIES = "_copies"
_INCOMPLETE = "_incomplete"
_RAISED_BY_QUERY = "USER_RAISED_EXCEPTION"
"""Spark's error condition of `raise_error`."""


@dataclass
class KeptTable:
    """A table of the lake, with its state between batches."""

    table: LakeTable
    definition: TableDefinition
    schema: TableSchema
    position: LakePosition
    schemas: dict[int, TableSchema] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The table's name as written in SQL."""
        return self.definition.name

    @property
    def token(self) -> str:
        """The table's token in NATS subjects."""
        return table_token(self.definition.schema, self.definition.table)


class TableWriter:
    """Applies staged changes to tables.

    `now_us` is the time of the batch for `_synced_at`, in microseconds since 1970.
    """

    def __init__(self, spark: SparkSession, options: TableOptions) -> None:
        self._spark = spark
        self._options = options

    def apply(
        self, kept: KeptTable, staged: StagedChanges, position: LakePosition, now_us: int
    ) -> None:
        """Commit the staged changes of one table, together with `position`.

        MissingRowError, and no commit, if the table lacks a row that a change refers to.
        """
        try:
            if not staged.facts.count:
                kept.table.advance(position)
            elif kept.definition.is_bag:
                self._apply_bag(kept, staged, position, now_us)
            else:
                self._apply_keyed(kept, staged, position, now_us)
        except PySparkException as error:
            if error.getCondition() != _RAISED_BY_QUERY:
                raise
            raise MissingRowError(kept.name) from error
        kept.position = position

    def rewrite(self, kept: KeptTable, definition: TableDefinition) -> None:
        """Rewrite the whole table with wider types; rows and position stay the same."""
        rows = self._rows(kept)
        present = kept.definition.plain_names
        widened = [
            (fn.col(present[name]) if name in present else fn.lit(None))
            .cast(spark_type(definition.columns.field(name).type))
            .alias(plain)
            for name, plain in definition.plain_names.items()
        ]
        own = [fn.col(name) for name in (DELETED, SYNCED_AT) if name in rows.columns]
        self._replace(kept, definition, rows.select(*widened, *own), kept.position)

    def _rows(self, kept: KeptTable) -> DataFrame:
        return kept.table.rows(self._spark, kept.definition.plain_names)

    def _replace(
        self, kept: KeptTable, definition: TableDefinition, rows: DataFrame, position: LakePosition
    ) -> None:
        columns = lake_columns(definition, self._options)
        plain = definition.plain_names
        ordered = rows.select(*(plain.get(name, name) for name in columns.names))
        kept.table.replace(ordered, columns, position)

    def _staged_names(self, definition: TableDefinition) -> dict[str, str]:
        """For each column of the lake, its name in expressions."""
        plain = definition.plain_names
        columns = lake_columns(definition, self._options)
        return {name: plain.get(name, name) for name in columns.names}

    def _changes(self, kept: KeptTable, staged: StagedChanges) -> DataFrame:
        schema = spark_schema(changes_schema(kept.definition))
        changes = self._spark.read.schema(schema).parquet(*staged.files)
        # One partition needs no shuffle, which would cost a small batch more than the work itself.
        return changes.coalesce(1) if staged.facts.count < _SMALL_BATCH else changes

    def _own(self, deleted: Column, now_us: int) -> list[Column]:
        """The values of the columns that the job adds, for rows written now."""
        own = []
        if self._options.soft_deletes:
            own.append(deleted.alias(DELETED))
        if self._options.synced_at:
            own.append(fn.timestamp_micros(fn.lit(now_us)).alias(SYNCED_AT))
        return own

    def _all_deleted(self, kept: KeptTable, now_us: int) -> DataFrame:
        """The rows of the table, marked as deleted; rows deleted before keep their `_synced_at`."""
        rows = self._rows(kept)
        if self._options.synced_at:
            now = fn.timestamp_micros(fn.lit(now_us))
            stamp = fn.when(fn.col(DELETED), fn.col(SYNCED_AT)).otherwise(now)
            rows = rows.withColumn(SYNCED_AT, stamp)
        return rows.withColumn(DELETED, fn.lit(True))

    # tables with a key

    def _apply_keyed(
        self, kept: KeptTable, staged: StagedChanges, position: LakePosition, now_us: int
    ) -> None:
        plain = kept.definition.plain_names
        key = [plain[name] for name in kept.definition.key]
        names = list(plain.values())
        soft = self._options.soft_deletes
        truncated = staged.facts.truncated_at is not None
        needs_table_rows = bool(staged.facts.moved_unchanged) and not truncated
        folded = fold_keyed(
            self._changes(kept, staged),
            key,
            names,
            staged.facts,
            self._rows(kept) if needs_table_rows else None,
            keep_deleted=soft,
        )
        if truncated:
            self._replace_keyed(kept, folded, key, position, now_us)
            return
        flags = {
            name: f"_keep_{short}"
            for name, short in plain.items()
            if short not in key and (soft or short in staged.facts.unchanged)
        }
        rows = folded.select(
            *names,
            *(
                fn.coalesce(fn.array_contains(KEEP, plain[name]), fn.lit(False)).alias(flag)
                for name, flag in flags.items()
            ),
            *([] if soft else [fn.col(DELETED).alias(GONE)]),
            *([_is_incomplete().alias(_INCOMPLETE)] if staged.facts.unchanged else []),
            *self._own(fn.col(DELETED), now_us),
        )
        plan = MergePlan(
            key=kept.definition.key,
            columns=self._staged_names(kept.definition),
            keepable=flags,
            deleted=None if soft else GONE,
            incomplete=_INCOMPLETE if staged.facts.unchanged else None,
        )
        kept.table.merge(rows, plan, position)

    def _replace_keyed(
        self,
        kept: KeptTable,
        folded: DataFrame,
        key: list[str],
        position: LakePosition,
        now_us: int,
    ) -> None:
        """Replace the table after a TRUNCATE with the rows that came later."""
        names = kept.definition.plain_names.values()
        soft = self._options.soft_deletes
        first = fn.when(_is_incomplete(), missing_row().cast(folded.schema[key[0]].dataType))
        folded = folded.withColumn(key[0], first.otherwise(fn.col(key[0])))
        live = folded if soft else folded.where(~fn.col(DELETED))
        rows = live.select(*names, *self._own(fn.col(DELETED), now_us))
        if soft:
            ended = self._all_deleted(kept, now_us).join(rows.select(*key), key, "left_anti")
            rows = rows.unionByName(ended.select(*rows.columns))
        self._replace(kept, kept.definition, rows, position)

    # tables without a key

    def _apply_bag(
        self, kept: KeptTable, staged: StagedChanges, position: LakePosition, now_us: int
    ) -> None:
        names = list(kept.definition.plain_names.values())
        soft = self._options.soft_deletes
        net = fold_bag(self._changes(kept, staged), names, staged.facts)
        # On disk, because the rewriting of files needs the heap.
        net = net.persist(StorageLevel.DISK_ONLY)
        try:
            rows = _copies(net, names, NET).select(*names, *self._own(fn.lit(False), now_us))
            if soft:
                gone = _copies(net, names, GONE)
                rows = rows.unionByName(gone.select(*names, *self._own(fn.lit(True), now_us)))
            if staged.facts.truncated_at is not None:
                if not net.where(fn.col(NET) < 0).isEmpty():
                    raise MissingRowError(kept.name)
                if soft:
                    ended = self._all_deleted(kept, now_us)
                    rows = rows.unionByName(ended.select(*rows.columns))
                self._replace(kept, kept.definition, rows, position)
                return
            removed = net.where(fn.col(NET) < 0).select(*names, (-fn.col(NET)).alias(_COPIES))
            plan = BagPlan(
                columns=self._staged_names(kept.definition),
                values=tuple(names),
                copies=_COPIES,
                deleted=DELETED if soft else None,
            )
            kept.table.merge_bag(rows, removed, plan, position)
        finally:
            net.unpersist()


def _is_incomplete() -> Column:
    """Whether a folded row lives on with values that only the table has."""
    return ~fn.col(DELETED) & fn.col(KEEP).isNotNull()


def _copies(rows: DataFrame, names: Sequence[str], count: str) -> DataFrame:
    numbers = fn.sequence(fn.lit(1).cast("long"), fn.col(count))
    some = rows.where(fn.col(count) > 0)
    return some.withColumn("_copy", fn.explode(numbers)).select(*names)
