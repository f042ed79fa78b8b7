"""What the job asks of a lake of any format: tables that keep their position with their rows.

A sink for another format implements `LakeTable` and `Lake`; nothing else knows Delta.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from spark_consumer.lake.parquet_files import DataFile


@dataclass(frozen=True)
class LakePosition:
    """How far a table has got: part of every commit that changes its rows.

    Everything stored up to `stream_seq` of the stream created at `stream_created` is in it, and of
    what follows every change whose commit LSN is at most `commit_lsn`. `complete_at` is the LSN of
    the snapshot it began with: before the source's changes up to there are applied to other tables
    too, the tables do not show one moment.
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
    """How staged rows change a table with a key.

    `columns` maps the table's columns to the staged ones, `keepable` some of them to the staged
    flag that says "keep the table's value". `deleted` is the flag of rows to take out, if any are.
    """

    key: tuple[str, ...]
    columns: dict[str, str]
    keepable: dict[str, str]
    deleted: str | None


class LakeTable(Protocol):
    """One table of the lake; every writing call is one atomic commit that holds the position."""

    @property
    def version(self) -> int: ...

    @property
    def columns(self) -> pa.Schema: ...

    def position(self, source: str) -> LakePosition | None:
        """Where it stands in the history of a source, None if it never took part in it."""

    def require_untampered(self) -> None:
        """Raise LakeError if somebody restored or replaced the table behind our back."""

    def data_files(self) -> list[str]:
        """Absolute paths of the Parquet files that make up the newest version."""

    def replace(
        self, files: Sequence[DataFile], columns: pa.Schema, position: LakePosition
    ) -> None:
        """Make these files the whole table, with these columns."""

    def append(self, files: Sequence[DataFile], position: LakePosition) -> None:
        """Add files."""

    def exchange(
        self, removed: Sequence[str], files: Sequence[DataFile], position: LakePosition
    ) -> None:
        """Take some data files out, given by their absolute paths, and put others in."""

    def merge(self, rows: Any, plan: MergePlan, position: LakePosition) -> None:
        """Apply staged rows, given as a reader of Arrow batches."""

    def advance(self, position: LakePosition) -> None:
        """Move the position alone."""

    def add_columns(self, columns: Sequence[pa.Field], position: LakePosition) -> None:
        """Append columns; existing rows hold null there."""

    def tend(self) -> None:
        """Compact and clean up if there is enough to do."""


class Lake(Protocol):
    """A directory of tables."""

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
