"""Delta tables with the embedded engine: Spark writes files, `deltalake` commits in the driver.

A MERGE also runs in the driver, over rows that Spark has staged as Parquet. To change rows of a
table without a key, the data files that hold them are rewritten.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as pads
from pyspark.sql import Observation, Window
from pyspark.sql import functions as fn

from consumer_sdk.transport.holds import hold
from consumer_sdk.wire.subjects import format_table_name, table_token
from spark_consumer.errors import MissingRowError
from spark_consumer.lake.column_mapping import exact, spark_schema
from spark_consumer.lake.delta_log import DeltaLog
from spark_consumer.lake.directory import staging_directory
from spark_consumer.lake.parquet_files import DataFile, write_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from spark_consumer.lake.lake_table import BagPlan, LakePosition, MergePlan

_FILE = "_file"
_IDENTITY = "_identity"
_LIVE = "_live"


class EmbeddedDeltaTable:
    """One Delta table; see `LakeTable` for what each call promises."""

    def __init__(self, log: DeltaLog, staging: str) -> None:
        self.log = log
        self._staging = staging

    @property
    def version(self) -> int:
        return self.log.version

    @property
    def columns(self) -> pa.Schema:
        return self.log.columns

    def position(self, source: str) -> LakePosition | None:
        return self.log.position(source)

    def require_unchanged(self) -> None:
        self.log.require_unchanged()

    def rows(self, spark: SparkSession, names: Mapping[str, str]) -> DataFrame:
        return self._frame(spark, names, self.log.data_files()).drop(_FILE)

    def load(self, files: Sequence[DataFile], columns: pa.Schema, position: LakePosition) -> None:
        self.log.load(files, columns, position)

    def replace(self, rows: DataFrame, columns: pa.Schema, position: LakePosition) -> None:
        files = self._write(rows, columns)
        hold("spark-before-commit")
        self.log.replace(files, columns, position)

    def merge(self, rows: DataFrame, plan: MergePlan, position: LakePosition) -> None:
        directory = f"{self._staging}/merge-{uuid.uuid4().hex}"
        try:
            counted = Observation()
            rows.observe(counted, fn.count(fn.lit(1)).alias("rows")).write.parquet(directory)
            hold("spark-before-commit")
            self.log.merge(_reader(directory), int(counted.get["rows"]), plan, position)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def merge_bag(
        self, added: DataFrame, removed: DataFrame, plan: BagPlan, position: LakePosition
    ) -> None:
        wanted = removed.agg(fn.sum(plan.copies)).collect()[0][0] or 0
        touched = self._files_with(removed, plan) if wanted else []
        found = Observation()
        if touched:
            rest = self._without(removed, plan, touched, found)
            added = added.unionByName(rest.select(*added.columns))
        # Without those that another writer has added meanwhile.
        columns = pa.schema([one for one in self.columns if one.name in plan.columns])
        files = self._write(added.select(*(plan.columns[name] for name in columns.names)), columns)
        if wanted != (found.get["rows"] if touched else 0):
            raise MissingRowError(self.log.name)
        hold("spark-before-commit")
        self.log.exchange(touched, files, position)

    def advance(self, position: LakePosition) -> None:
        hold("spark-before-commit")
        self.log.advance(position)

    def evolve(self, columns: pa.Schema, position: LakePosition) -> None:
        known = set(self.columns.names)
        self.log.add_columns([one for one in columns if one.name not in known], position)

    def maintain(self) -> None:
        self.log.maintain()

    def _frame(
        self, spark: SparkSession, names: Mapping[str, str], files: Sequence[str]
    ) -> DataFrame:
        """The rows of the given data files, each with the path of its file."""
        stored = self.columns
        schema = spark_schema(stored)
        if files:
            frame = spark.read.schema(schema).parquet(*files)
            file = fn.col("_metadata.file_path")
        else:
            frame = spark.createDataFrame([], schema)
            file = fn.lit("")
        own = (fn.col(_quoted(name)).alias(names.get(name, name)) for name in stored.names)
        return frame.select(*own, file.alias(_FILE))

    def _write(self, rows: DataFrame, columns: pa.Schema) -> list[DataFile]:
        return write_files(rows, self.log.root, f"load-{uuid.uuid4().hex[:12]}", columns)

    def _files_with(self, removed: DataFrame, plan: BagPlan) -> list[str]:
        """The data files that hold copies of the rows to remove."""
        files = self.log.data_files()
        if not files:
            return []
        rows = self._frame(removed.sparkSession, plan.columns, files)
        if plan.deleted is not None:
            rows = rows.where(~fn.col(plan.deleted))
        rows, gone = _with_identity(rows, plan.values), _with_identity(removed, plan.values)
        found = rows.join(gone, _IDENTITY, "left_semi").select(_FILE).distinct().collect()
        names = {Path(row[_FILE]).name for row in found}
        return [path for path in files if Path(path).name in names]

    def _without(
        self, removed: DataFrame, plan: BagPlan, files: Sequence[str], found: Observation
    ) -> DataFrame:
        """The rows of the given files without the copies to remove, which `found` counts."""
        rows = self._frame(removed.sparkSession, plan.columns, files)
        names = rows.columns
        live = fn.lit(True) if plan.deleted is None else ~fn.col(plan.deleted)
        rows = _with_identity(rows, plan.values).withColumn(_LIVE, live)
        among = Window.partitionBy(_IDENTITY, _LIVE).orderBy(fn.lit(0))
        numbered = rows.withColumn("_copy", fn.row_number().over(among))
        gone = _with_identity(removed, plan.values).select(_IDENTITY, plan.copies)
        joined = numbered.join(gone, _IDENTITY, "left")
        goes = fn.coalesce(fn.col(_LIVE) & (fn.col("_copy") <= fn.col(plan.copies)), fn.lit(False))
        counted = joined.withColumn("_goes", goes).observe(
            found, fn.count_if("_goes").alias("rows")
        )
        return counted.where(~fn.col("_goes")).select(*names)


class EmbeddedDeltaLake:
    """A directory of Delta tables, one for each table of the source."""

    def __init__(self, directory: str) -> None:
        self.directory = str(Path(directory).resolve())

    def table_root(self, schema: str, table: str) -> str:
        """`users`, `sales.orders`; special characters as ~XX, as `=` would mean a partition."""
        return str(Path(self.directory, table_token(schema, table).replace("=", "~")))

    def find(self, schema: str, table: str) -> EmbeddedDeltaTable | None:
        root = self.table_root(schema, table)
        log = DeltaLog.find(root, format_table_name(schema, table))
        return None if log is None else self._table(log)

    def create(
        self,
        schema: str,
        table: str,
        files: Sequence[DataFile],
        columns: pa.Schema,
        position: LakePosition,
    ) -> EmbeddedDeltaTable:
        root = self.table_root(schema, table)
        name = format_table_name(schema, table)
        return self._table(DeltaLog.create(root, name, files, columns, position))

    def _table(self, log: DeltaLog) -> EmbeddedDeltaTable:
        return EmbeddedDeltaTable(log, staging_directory(self.directory))


def _with_identity(rows: DataFrame, names: Sequence[str]) -> DataFrame:
    """The rows with all their values as one, which is equal exactly for equal copies."""
    types = rows.schema
    return rows.withColumn(
        _IDENTITY, fn.struct(*(exact(fn.col(name), types[name].dataType) for name in names))
    )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _reader(directory: str) -> pa.RecordBatchReader:
    """The staged rows as a stream of Arrow batches; they are never all in memory."""
    dataset = pads.dataset(directory, format="parquet", exclude_invalid_files=False)
    return dataset.scanner(batch_size=65_536, use_threads=True).to_reader()
