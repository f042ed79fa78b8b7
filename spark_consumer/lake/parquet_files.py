"""Data files: executors write Parquet from Arrow and return the facts that a commit needs.

Each file has a new name and is committed only if its description reaches the driver, so files of
killed or repeated tasks are in no table.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import DataFrame

ROWS_PER_FILE: Final = 1_000_000
_GROUP_ROWS: Final = 128 * 1024
_GROUP_BYTES: Final = 64 * 1024 * 1024
_LONGEST_BOUND: Final = 32
DESCRIPTION: Final = pa.schema(
    [("path", pa.string()), ("size", pa.int64()), ("rows", pa.int64()), ("stats", pa.string())]
)
DESCRIPTION_DDL: Final = "path STRING, size BIGINT, rows BIGINT, stats STRING"


@dataclass(frozen=True)
class DataFile:
    """One finished file: its path relative to the table, and its statistics in Delta's format."""

    path: str
    size: int
    rows: int
    stats: str


class ParquetWriter:
    """Writes batches of one schema to files in a directory, a new file every million rows."""

    def __init__(self, root: str, directory: str, schema: pa.Schema) -> None:
        self._root = Path(root)
        self._directory = directory
        self._schema = schema
        self._writer: pq.ParquetWriter | None = None
        self._path = ""
        self._rows = 0
        self._group: list[pa.RecordBatch] = []
        self._group_rows = 0
        self._group_bytes = 0
        self.files: list[DataFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Add a batch; its columns are in the order of the schema."""
        if not batch.num_rows:
            return
        self._group.append(batch)
        self._group_rows += batch.num_rows
        self._group_bytes += batch.nbytes
        if self._group_rows >= _GROUP_ROWS or self._group_bytes >= _GROUP_BYTES:
            self._write_group()
            if self._rows >= ROWS_PER_FILE:
                self.finish()

    def _write_group(self) -> None:
        if not self._group:
            return
        if self._writer is None:
            self._path = f"{self._directory}/part-{uuid.uuid4()}.parquet"
            target = self._root / self._path
            target.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(target, self._schema, compression="snappy")
            self._rows = 0
        self._writer.write_table(pa.Table.from_batches(self._group, self._schema))
        self._rows += self._group_rows
        self._group, self._group_rows, self._group_bytes = [], 0, 0

    def finish(self) -> None:
        """Close the current file."""
        self._write_group()
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        target = self._root / self._path
        self.files.append(
            DataFile(self._path, target.stat().st_size, self._rows, file_statistics(target))
        )

    def discard(self) -> None:
        """Close and discard all files, after an error."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            (self._root / self._path).unlink(missing_ok=True)


def describe(files: Iterable[DataFile]) -> pa.RecordBatch:
    """The descriptions of files as a batch that Spark returns to the driver."""
    rows = [(one.path, one.size, one.rows, one.stats) for one in files]
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, DESCRIPTION, strict=True)],
        schema=DESCRIPTION,
    )


def file_writer(
    root: str, directory: str, schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for `mapInArrow` that writes each partition and returns its files.

    Columns are matched by their order; the files have the names of the schema.
    """

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        writer = ParquetWriter(root, directory, schema)
        try:
            for batch in batches:
                named = pa.RecordBatch.from_arrays(batch.columns, names=schema.names)
                writer.write(named.cast(schema) if named.schema != schema else named)
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        yield describe(writer.files)

    return write


def write_files(frame: DataFrame, root: str, directory: str, schema: pa.Schema) -> list[DataFile]:
    """Let the executors write a DataFrame, and return its files."""
    # Spark reads a column's name as an expression, which `Odd Col.` is not.
    plain = frame.toDF(*[f"c{place}" for place in range(len(frame.columns))])
    found = plain.mapInArrow(file_writer(root, directory, schema), DESCRIPTION_DDL).collect()
    return [DataFile(row["path"], row["size"], row["rows"], row["stats"]) for row in found]


def file_statistics(path: Path) -> str:
    """Row count, null counts, and bounds of the columns that all Delta readers order alike."""
    metadata = pq.read_metadata(path)
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    flat = {field.name for field in metadata.schema.to_arrow_schema() if _is_flat(field.type)}
    unknown: set[str] = set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            name = column.path_in_schema
            statistics = column.statistics
            if name not in flat or statistics is None:
                continue
            if statistics.has_null_count:
                nulls[name] = nulls.get(name, 0) + statistics.null_count
            if statistics.has_min_max and _has_order(statistics.min):
                low, high = statistics.min, statistics.max
                least[name] = min(least[name], low) if name in least else low
                greatest[name] = max(greatest[name], high) if name in greatest else high
            elif row_group.num_rows != statistics.null_count:
                unknown.add(name)
    for name in [name for name, value in greatest.items() if _is_long(value)]:
        unknown.add(name)
    bounds = {
        "numRecords": metadata.num_rows,
        "minValues": {name: _bound(v) for name, v in least.items() if name not in unknown},
        "maxValues": {name: _bound(v) for name, v in greatest.items() if name not in unknown},
        "nullCount": nulls,
    }
    return json.dumps(bounds)


def _is_flat(type_: pa.DataType) -> bool:
    return not pa.types.is_nested(type_)


def _has_order(value: object) -> bool:
    return isinstance(value, (int, str, date)) and not isinstance(value, bool)


def _is_long(value: object) -> bool:
    return isinstance(value, str) and len(value) > _LONGEST_BOUND


def _bound(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else value
