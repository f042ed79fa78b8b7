"""What the job asks of a lake, whichever engine writes it: tables that keep their position.

An engine implements `Lake` and `LakeTable`; nothing above this module knows Delta.
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
    """How far a table has got: part of every commit that changes its rows.

    The table holds everything stored up to `stream_seq` of the stream created at `stream_created`,
    and of the messages after it every change whose commit LSN is at most `commit_lsn`.
    `complete_at` is the LSN of the snapshot that it was loaded from: until the other tables have
    the changes up to there, the tables are not consistent with each other.
    """

    source: str
    epoch: int
    stream_created: int
    stream_seq: int
    commit_lsn: int
    complete_at: int
    schema_version: int

    def moved_to(
        self, stream_seq: int, commit_lsn: int, schema_version: int | None = None
    ) -> LakePosition:
        """A later position in the same history; neither part ever moves backwards."""
        return replace(
            self,
            stream_seq=max(self.stream_seq, stream_seq),
            commit_lsn=max(self.commit_lsn, commit_lsn),
            schema_version=self.schema_version if schema_version is None else schema_version,
        )


@dataclass(frozen=True)
class MergePlan:
    """How given rows change a table with a key.

    `columns` maps the table's columns to those of the rows, `keepable` some of them to the flag in
    the rows that says "keep the table's value". `deleted` is the flag of rows to take out, if any.
    """

    key: tuple[str, ...]
    columns: dict[str, str]
    keepable: dict[str, str]
    deleted: str | None


@dataclass(frozen=True)
class BagPlan:
    """How given rows change a table without key, where equal rows are several rows.

    `columns` maps the table's columns to those of the rows; `values` are those columns of the rows
    by which copies are found, `copies` says how many of them go. `deleted` marks rows that stay in
    the table though they were deleted: they are no copies.
    """

    columns: dict[str, str]
    values: tuple[str, ...]
    copies: str
    deleted: str | None


class LakeTable(Protocol):
    """One table of the lake; every writing call is one atomic commit that holds the position.

    The columns of given rows count by their place, except where a plan names them.
    """

    @property
    def version(self) -> int:
        """Version of the newest commit known here."""

    @property
    def columns(self) -> pa.Schema:
        """Names and types, as `column_mapping` has them."""

    def position(self, source: str) -> LakePosition | None:
        """Where it stands in the history of a source, None if it never took part in it."""

    def require_untampered(self) -> None:
        """Raise LakeError if somebody has restored the table since our last commit."""

    def rows(self, spark: SparkSession, names: Mapping[str, str]) -> DataFrame:
        """The newest version; columns in `names` under the name given there."""

    def load(self, files: Sequence[DataFile], columns: pa.Schema, position: LakePosition) -> None:
        """Make these files, written below the table's root, the whole table."""

    def replace(self, rows: DataFrame, columns: pa.Schema, position: LakePosition) -> None:
        """Make these rows the whole table, with these columns."""

    def merge(self, rows: DataFrame, plan: MergePlan, position: LakePosition) -> None:
        """Insert, update and delete by key."""

    def merge_bag(
        self, added: DataFrame, removed: DataFrame, plan: BagPlan, position: LakePosition
    ) -> None:
        """Take copies of the removed rows out of a table without key, and add rows."""

    def advance(self, position: LakePosition) -> None:
        """Move the position alone."""

    def evolve(self, columns: pa.Schema, position: LakePosition) -> None:
        """Append those of the columns that the table does not have; existing rows hold null."""

    def tend(self) -> None:
        """Compact and vacuum if there is enough to do."""


class Lake(Protocol):
    """The tables of one place."""

    def find(self, schema: str, table: str) -> LakeTable | None:
        """The table, None if there is none; LakeError if something else is in its place."""

    def create(
        self,
        schema: str,
        table: str,
        files: Sequence[DataFile],
        columns: pa.Schema,
        position: LakePosition,
    ) -> LakeTable:
        """Make the table with its first rows, in one commit."""

    def table_root(self, schema: str, table: str) -> str:
        """The directory below which the table's data files are written."""
