"""The interface between the job and a lake: tables that store their position with their rows.

An engine implements `Lake` and `LakeTable`; no module of the job depends on Delta.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from spark_consumer.lake.parquet_files import DataFile


@dataclass(frozen=True)
class LakePosition:
    """The position of a table: part of every commit that changes its rows.

    The table holds all changes up to `stream_seq` of the stream created at `stream_created`, and
    of the later messages every change whose commit LSN is at most `commit_lsn`. `complete_at` is
    the LSN of the snapshot that it was loaded from: the tables are consistent with each other only
    when all of them have the changes up to there.
    """

    source: str
    epoch: int
    stream_created: int
    stream_seq: int
    commit_lsn: int
    complete_at: int
    schema_version: int

    def moved_to(
        self, stream_seq: int = 0, commit_lsn: int = 0, schema_version: int | None = None
    ) -> LakePosition:
        """A later position in the same history; neither sequence nor LSN ever decreases.

        What is not given stays as it is.
        """
        return replace(
            self,
            stream_seq=max(self.stream_seq, stream_seq),
            commit_lsn=max(self.commit_lsn, commit_lsn),
            schema_version=self.schema_version if schema_version is None else schema_version,
        )


@dataclass(frozen=True)
class MergePlan:
    """How to apply rows to a table with a key.

    `columns` maps the table's columns to those of the rows. `keepable` maps some of them to a flag
    in the rows that means "keep the table's value". `deleted` is the flag of rows to delete, or
    None; `incomplete` that of rows which the table must have, as they do not carry all values.
    """

    key: tuple[str, ...]
    columns: dict[str, str]
    keepable: dict[str, str]
    deleted: str | None
    incomplete: str | None = None


@dataclass(frozen=True)
class BagPlan:
    """How to apply rows to a table without a key, which may hold several equal rows.

    `columns` maps the table's columns to those of the rows. Copies of a row are equal in the
    columns `values`; the column `copies` has the number of copies to remove. `deleted` marks
    soft-deleted rows, which stay in the table and do not count as copies.
    """

    columns: dict[str, str]
    values: tuple[str, ...]
    copies: str
    deleted: str | None


class LakeTable(Protocol):
    """One table of the lake; every writing call is one atomic commit with the position.

    Columns of rows are matched by their order, except where a plan names them.
    """

    @property
    def version(self) -> int:
        """The version of the newest commit that this object has read."""

    @property
    def columns(self) -> pa.Schema:
        """The names of the columns, and their types as in `column_mapping`."""

    def position(self, source: str) -> LakePosition | None:
        """The table's position in the history of a source, None if it has none."""

    def require_unchanged(self) -> None:
        """Read the newest version; LakeError if another writer has changed rows or columns."""

    def rows(self, spark: SparkSession, names: Mapping[str, str]) -> DataFrame:
        """The rows of the newest version; `names` maps columns to their names in the result."""

    def load(self, files: Sequence[DataFile], columns: pa.Schema, position: LakePosition) -> None:
        """Replace the whole table with these files, which are below the table's root."""

    def replace(self, rows: DataFrame, columns: pa.Schema, position: LakePosition) -> None:
        """Replace the whole table with these rows and columns."""

    def merge(self, rows: DataFrame, plan: MergePlan, position: LakePosition) -> None:
        """Insert, update and delete by key; LakeError unless all rows were merged."""

    def merge_bag(
        self, added: DataFrame, removed: DataFrame, plan: BagPlan, position: LakePosition
    ) -> None:
        """Remove copies of rows from a table without a key, and add rows.

        LakeError if the table does not have the copies to remove.
        """

    def advance(self, position: LakePosition) -> None:
        """Commit the position without any rows."""

    def evolve(self, columns: pa.Schema, position: LakePosition) -> None:
        """Add the columns that the table lacks; they are null in existing rows."""

    def maintain(self) -> None:
        """Compact and vacuum the table if needed."""


class Lake(Protocol):
    """The tables of one lake."""

    def find(self, schema: str, table: str) -> LakeTable | None:
        """The table, None if there is none; LakeError if its directory holds something else."""

    def create(
        self,
        schema: str,
        table: str,
        files: Sequence[DataFile],
        columns: pa.Schema,
        position: LakePosition,
    ) -> LakeTable:
        """Create the table with its first rows, in one commit."""

    def table_root(self, schema: str, table: str) -> str:
        """The directory of the table's data files."""
