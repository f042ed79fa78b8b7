"""Folded changes into the lake: one commit for each table and batch, position included.

Within expressions the table's columns have plain names; their own appear only where files are read
and written.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pads
from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as fn

from consumer_sdk.transport.holds import hold
from spark_consumer.changes.change_decoder import changes_schema
from spark_consumer.changes.change_rows import GONE, KEEP, NET
from spark_consumer.changes.fold import fold_bag, fold_keyed
from spark_consumer.lake.column_mapping import spark_schema, spark_type
from spark_consumer.lake.lake_table import MergePlan
from spark_consumer.lake.parquet_files import DataFile, write_files
from spark_consumer.lake.table_definition import DELETED, SYNCED_AT, lake_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.changes.staging import StagedChanges
    from spark_consumer.lake.lake_table import LakePosition, LakeTable
    from spark_consumer.lake.table_definition import TableDefinition

_OWN = (DELETED, SYNCED_AT)
_SMALL_BATCH = 50_000


@dataclass
class KeptTable:
    """A table of the lake and what is known of it between batches."""

    token: str
    root: str
    table: LakeTable
    definition: TableDefinition
    schema: TableSchema
    position: LakePosition
    schemas: dict[int, TableSchema] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The table as SQL spells it."""
        return self.definition.name


class TableWriter:
    """Applies staged changes to tables.

    `_synced_at` takes the time of the batch, in microseconds since 1970.
    """

    def __init__(
        self, spark: SparkSession, staging: str, *, soft_deletes: bool, synced_at: bool
    ) -> None:
        self._spark = spark
        self._staging = staging
        self._soft = soft_deletes
        self._stamped = synced_at

    def apply(
        self, kept: KeptTable, staged: StagedChanges, position: LakePosition, now_us: int
    ) -> None:
        """Bring one table to `position`."""
        if not staged.facts.count:
            hold("spark-before-commit")
            kept.table.advance(position)
        elif kept.definition.is_bag:
            self._apply_bag(kept, staged, position, now_us)
        else:
            self._apply_keyed(kept, staged, position, now_us)
        kept.position = position

    def columns(self, definition: TableDefinition) -> pa.Schema:
        """The columns of a table in the lake."""
        return lake_columns(definition, soft_deletes=self._soft, synced_at=self._stamped)

    def rewrite(self, kept: KeptTable, definition: TableDefinition) -> None:
        """Give the whole table wider types; rows and position stay as they are."""
        rows = self._frame(kept)
        present = kept.definition.plain_names
        widened = [
            (fn.col(present[name]) if name in present else fn.lit(None))
            .cast(spark_type(definition.columns.field(name).type))
            .alias(plain)
            for name, plain in definition.plain_names.items()
        ]
        files = self._write(kept, rows.select(*widened, *self._own_of(rows)), definition)
        hold("spark-before-commit")
        kept.table.replace(files, self.columns(definition), kept.position)

    def _frame(self, kept: KeptTable, files: Sequence[str] | None = None) -> DataFrame:
        """The table, or some of its files, under plain names."""
        stored = kept.table.columns
        plain = kept.definition.plain_names
        schema = spark_schema(stored)
        paths = kept.table.data_files() if files is None else files
        if paths:
            frame = self._spark.read.schema(schema).parquet(*paths)
        else:
            frame = self._spark.createDataFrame([], schema)
        return frame.select(
            *(fn.col(_quoted(name)).alias(plain.get(name, name)) for name in stored.names),
            *([fn.col("_metadata.file_path").alias("_file")] if paths else []),
        )

    def _changes(self, kept: KeptTable, staged: StagedChanges) -> DataFrame:
        schema = spark_schema(changes_schema(kept.definition))
        changes = self._spark.read.schema(schema).parquet(*staged.files)
        # One partition needs no shuffle, which costs a small batch more than its work.
        return changes.coalesce(1) if staged.facts.count < _SMALL_BATCH else changes

    def _own(self, deleted: Column, now_us: int) -> list[Column]:
        """The columns that the lake adds, for rows written now."""
        own = []
        if self._soft:
            own.append(deleted.alias(DELETED))
        if self._stamped:
            own.append(fn.timestamp_micros(fn.lit(now_us)).alias(SYNCED_AT))
        return own

    def _own_of(self, rows: DataFrame) -> list[Column]:
        return [fn.col(name) for name in _OWN if name in rows.columns]

    def _ended(self, rows: DataFrame, now_us: int) -> DataFrame:
        """Rows marked as deleted; those that were keep their time."""
        if self._stamped:
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
        truncated = staged.facts.truncated_at is not None
        looks_back = bool(staged.facts.moved_unchanged) and not truncated
        folded = fold_keyed(
            self._changes(kept, staged),
            key,
            names,
            staged.facts,
            self._frame(kept) if looks_back else None,
            keep_deleted=self._soft,
        )
        if truncated:
            self._replace_keyed(kept, folded, key, position, now_us)
            return
        flags = {
            name: f"_keep_{short}"
            for name, short in plain.items()
            if short not in key and (self._soft or short in staged.facts.unchanged)
        }
        rows = folded.select(
            *names,
            *(
                fn.coalesce(fn.array_contains(KEEP, plain[name]), fn.lit(False)).alias(flag)
                for name, flag in flags.items()
            ),
            *([] if self._soft else [fn.col(DELETED).alias(GONE)]),
            *self._own(fn.col(DELETED), now_us),
        )
        directory = f"{self._staging}/merge-{uuid.uuid4().hex}"
        rows.write.parquet(directory)
        plan = MergePlan(
            key=kept.definition.key,
            columns={name: plain.get(name, name) for name in self.columns(kept.definition).names},
            keepable=flags,
            deleted=None if self._soft else GONE,
        )
        hold("spark-before-commit")
        try:
            kept.table.merge(_reader(directory), plan, position)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _replace_keyed(
        self,
        kept: KeptTable,
        folded: DataFrame,
        key: list[str],
        position: LakePosition,
        now_us: int,
    ) -> None:
        """After a TRUNCATE: the rows that came later are the table."""
        names = kept.definition.plain_names.values()
        live = folded if self._soft else folded.where(~fn.col(DELETED))
        rows = live.select(*names, *self._own(fn.col(DELETED), now_us))
        if self._soft:
            ended = self._ended(self._frame(kept), now_us).join(rows.select(*key), key, "left_anti")
            rows = rows.unionByName(ended.select(*rows.columns))
        files = self._write(kept, rows, kept.definition)
        hold("spark-before-commit")
        kept.table.replace(files, self.columns(kept.definition), position)

    # tables without a key

    def _apply_bag(
        self, kept: KeptTable, staged: StagedChanges, position: LakePosition, now_us: int
    ) -> None:
        names = list(kept.definition.plain_names.values())
        net = fold_bag(self._changes(kept, staged), names, staged.facts)
        # On disk: the heap is what the rewriting of files needs.
        net = net.persist(StorageLevel.DISK_ONLY)
        try:
            rows = _copies(net, names, NET).select(*names, *self._own(fn.lit(False), now_us))
            if self._soft:
                gone = _copies(net, names, GONE)
                rows = rows.unionByName(gone.select(*names, *self._own(fn.lit(True), now_us)))
            if staged.facts.truncated_at is not None:
                if self._soft:
                    ended = self._ended(self._frame(kept), now_us)
                    rows = rows.unionByName(ended.select(*rows.columns))
                files = self._write(kept, rows, kept.definition)
                hold("spark-before-commit")
                kept.table.replace(files, self.columns(kept.definition), position)
                return
            fewer = net.where(fn.col(NET) < 0).select(*names, (-fn.col(NET)).alias("_fewer"))
            touched = self._files_with(kept, fewer, names)
            if touched:
                rest = self._without(self._frame(kept, touched), fewer, names)
                rows = rows.unionByName(rest.select(*rows.columns))
            files = self._write(kept, rows, kept.definition)
            hold("spark-before-commit")
            kept.table.exchange(touched, files, position)
        finally:
            net.unpersist()

    def _files_with(self, kept: KeptTable, fewer: DataFrame, names: Sequence[str]) -> list[str]:
        """The data files that hold a row of which copies are to go."""
        if fewer.isEmpty() or not kept.table.data_files():
            return []
        rows = self._frame(kept)
        if self._soft:
            rows = rows.where(~fn.col(DELETED))
        matches = _same_values(rows, fewer, names)
        found = rows.join(fewer, matches, "left_semi").select("_file").distinct().collect()
        files = {Path(row["_file"]).name for row in found}
        return [path for path in kept.table.data_files() if Path(path).name in files]

    def _without(self, rows: DataFrame, fewer: DataFrame, names: Sequence[str]) -> DataFrame:
        """The rows, less as many copies of each as are to go."""
        alike = [*names, *([DELETED] if self._soft else [])]
        among = Window.partitionBy(*alike).orderBy(fn.lit(0))
        numbered = rows.withColumn("_copy", fn.row_number().over(among))
        matches = _same_values(numbered, fewer, names)
        if self._soft:
            matches = matches & ~numbered[DELETED]
        joined = numbered.join(fewer, matches, "left")
        remaining = joined.where(fn.col("_fewer").isNull() | (fn.col("_copy") > fn.col("_fewer")))
        return remaining.select(*(numbered[name] for name in rows.columns))

    def _write(
        self, kept: KeptTable, rows: DataFrame, definition: TableDefinition
    ) -> list[DataFile]:
        """Write rows with plain names as files of the table."""
        columns = self.columns(definition)
        plain = definition.plain_names
        named = rows.select(*(fn.col(plain.get(n, n)).alias(n) for n in columns.names))
        return write_files(named, kept.root, f"load-{uuid.uuid4().hex[:12]}", columns)


def _copies(rows: DataFrame, names: Sequence[str], count: str) -> DataFrame:
    numbers = fn.sequence(fn.lit(1).cast("long"), fn.col(count))
    some = rows.where(fn.col(count) > 0)
    return some.withColumn("_copy", fn.explode(numbers)).select(*names)


def _same_values(left: DataFrame, right: DataFrame, names: Sequence[str]) -> Column:
    condition = fn.lit(True)
    for name in names:
        condition = condition & left[name].eqNullSafe(right[name])
    return condition


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _reader(directory: str) -> Any:
    """The staged rows as a stream of Arrow batches, never all of them in memory."""
    dataset = pads.dataset(directory, format="parquet", exclude_invalid_files=False)
    return dataset.scanner(batch_size=65_536, use_threads=True).to_reader()
