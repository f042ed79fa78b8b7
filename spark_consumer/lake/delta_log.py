"""Commits to a Delta table through `deltalake`, without a JVM and without jars.

The position is stored as `txn` actions in the same commit as the rows, because log cleanup removes
commit metadata. https://github.com/delta-io/delta/blob/master/PROTOCOL.md#transaction-identifiers
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, WriterProperties
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from consumer_sdk.transport.holds import hold
from spark_consumer.errors import LakeConflictError, LakeError, MissingRowError
from spark_consumer.lake.delta_commits import APP_PREFIX, deletion_vectors, find_change
from spark_consumer.lake.delta_merge import INCOMPLETE, CountedRows, MergeStatement
from spark_consumer.lake.lake_table import LakePosition

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spark_consumer.lake.lake_table import MergePlan
    from spark_consumer.lake.parquet_files import DataFile

_FACTS: Final = (
    "epoch",
    "stream_created",
    "stream_seq",
    "commit_lsn",
    "complete_at",
    "schema_version",
)
_METADATA_KEY: Final = "tailrace"
# A commit fails if another one came first. deltalake would retry on top of the other one; if that
# was an OPTIMIZE, its files would keep the rows that this commit replaces.
_RETRIES: Final = 0
_SMALL_FILES: Final = 24
_ROW_GROUP_BYTES: Final = 8 * 1024 * 1024
_ROW_GROUP_ROWS: Final = (10_000, 1_000_000)
_MAINTAIN_EVERY: Final = 20
_VACUUM_EVERY_SECONDS: Final = 6 * 3600.0
# Delta readers ignore file names that begin with an underscore.
_VACUUMED: Final = "_vacuumed"


class DeltaLog:
    """The log of one Delta table, written by this job alone; each writing call is one commit.

    LakeConflictError if another writer committed first; then nothing was written. LakeError if
    another writer has changed the rows or the columns since the last commit of this job.
    """

    def __init__(self, root: str, name: str) -> None:
        self.root = root
        self.name = name
        self._table = DeltaTable(root)
        own = self._last_own_version()
        if own is None:
            raise LakeError(
                f"{root} holds another table ({self._table.metadata().name or 'unnamed'}), not "
                f"{name} as written by this job; choose another --lake directory"
            )
        self._checked_version = own
        """No other writer has changed the table up to this version."""
        # The full count, so that a short run compacts too.
        self._commits = _MAINTAIN_EVERY

    @classmethod
    def find(cls, root: str, name: str) -> DeltaLog | None:
        """The log of the table at `root`, None if there is no table.

        LakeError if `root` holds anything but the table `name` of this job.
        """
        if not DeltaTable.is_deltatable(root):
            foreign_files = [one.name for one in Path(root).glob("*") if not _is_leftover(one)]
            if foreign_files:
                raise LakeError(
                    f"{root}, the directory of table {name}, holds other files "
                    f"({foreign_files[0]}); "
                    "choose another --lake directory"
                )
            return None
        try:
            return cls(root, name)
        except (DeltaError, OSError) as error:
            raise LakeError(f"lake table {root} cannot be read: {_line(error)}") from error

    @classmethod
    def create(
        cls,
        root: str,
        name: str,
        files: Sequence[DataFile],
        columns: pa.Schema,
        position: LakePosition,
    ) -> DeltaLog:
        """Create the table with its first rows, in one commit."""
        Path(root).mkdir(parents=True, exist_ok=True)
        try:
            create_table_with_add_actions(
                root,
                Schema.from_arrow(columns),
                _adds(files),
                mode="error",
                name=name,
                description=_description(name),
                commit_properties=_properties(name, 0, position),
            )
        except (DeltaError, OSError) as error:
            raise LakeError(f"lake table {root} cannot be created: {_line(error)}") from error
        return cls(root, name)

    @property
    def version(self) -> int:
        """The version of the newest commit that this object has read."""
        return int(self._table.version())

    @property
    def columns(self) -> pa.Schema:
        """The names and Arrow types of the columns."""
        return _plain(pa.schema(self._table.schema().to_arrow()))

    def position(self, source: str) -> LakePosition | None:
        """The table's position in the history of a source."""
        facts = {fact: self._table.transaction_version(_app_id(source, fact)) for fact in _FACTS}
        if any(value is None for value in facts.values()):
            return None
        return LakePosition(source=source, **{key: int(value or 0) for key, value in facts.items()})

    def require_unchanged(self) -> None:
        """Read the newest version; LakeError if another writer has changed rows or columns."""
        self._table.update_incremental()
        self._check_foreign_commits()

    def _check_foreign_commits(self) -> None:
        found = find_change(self.root, self._checked_version, self.version)
        if found is not None:
            raise LakeError(
                f"lake table {self.name} was changed by another writer (version {found.version}, "
                f"{found.operation}), so its rows are not those of its position: "
                f"restore it to version {found.version - 1}, or rebuild it with --rebootstrap"
            )
        self._checked_version = self.version

    def _last_own_version(self) -> int | None:
        """The version of this job's newest commit, None if the table is not of this job.

        Tables of earlier releases are recognised by their description or name.
        """
        version = self._table.transaction_version(_table_app_id(self.name))
        if version is not None:
            return int(version)
        own = [int(one["version"]) for one in self._table.history() if _METADATA_KEY in one]
        metadata = self._table.metadata()
        described = metadata.description == _description(self.name)
        if not described and not (own and metadata.name == self.name):
            return None
        return max(own, default=0)

    def data_files(self) -> list[str]:
        """The absolute paths of the data files of the newest version, which hold its rows only."""
        if deletion_vectors(self._table):
            raise LakeError(
                f"lake table {self.name} has deletion vectors, which this job does not write; "
                "rebuild it with --rebootstrap"
            )
        return [str(uri).removeprefix("file://") for uri in self._table.file_uris()]

    def load(self, files: Sequence[DataFile], columns: pa.Schema, position: LakePosition) -> None:
        """Replace the whole table with these files, whatever other writers have done to it."""
        self._checked_version = self.version
        self.replace(files, columns, position)

    def replace(
        self, files: Sequence[DataFile], columns: pa.Schema, position: LakePosition
    ) -> None:
        """Replace the whole table with these files."""
        self._commit(
            lambda: self._table.create_write_transaction(
                _adds(files),
                mode="overwrite",
                schema=Schema.from_arrow(columns),
                commit_properties=self._properties(position),
            )
        )

    def exchange(
        self, removed: Sequence[str], files: Sequence[DataFile], position: LakePosition
    ) -> None:
        """Remove the files with the given absolute paths, and add others."""
        now = int(time.time() * 1000)
        prefix = self.root.rstrip("/") + "/"
        removals = [RemoveAction(path.removeprefix(prefix), True, now) for path in removed]
        self._commit(
            lambda: self._table.create_write_transaction(
                [*removals, *_adds(files)],
                mode="append",
                schema=self._table.schema(),
                commit_properties=self._properties(position),
            )
        )

    def advance(self, position: LakePosition) -> None:
        """Commit the position without any rows."""
        self.exchange((), (), position)

    def merge(
        self, rows: pa.RecordBatchReader, row_count: int, plan: MergePlan, position: LakePosition
    ) -> None:
        """MERGE the rows; the position is committed even if they change nothing.

        LakeError, and a table as before, if `rows` are not `row_count` or if the table lacks an
        incomplete one.
        """
        statement = MergeStatement(plan)
        source = CountedRows(rows, row_count)
        before = self.version
        earlier = self.position(position.source)
        merged = 0

        def run() -> None:
            nonlocal merged
            merger = self._table.merge(
                source.reader(),
                predicate=statement.on,
                source_alias="s",
                target_alias="t",
                streamed_exec=True,
                writer_properties=self._writer_properties(),
                commit_properties=self._properties(position),
            )
            if statement.deleted is not None:
                merger = merger.when_matched_delete(predicate=statement.deleted)
            merger = merger.when_matched_update(statement.updates)
            unless = None if statement.deleted is None else f"NOT {statement.deleted}"
            metrics = merger.when_not_matched_insert(statement.inserts, predicate=unless).execute()
            merged = int(metrics["num_source_rows"])

        try:
            self._commit(run)
        except LakeError as error:
            if source.count not in (None, row_count):
                raise self._lost_rows(row_count, source.count) from error
            if INCOMPLETE in str(error):
                raise MissingRowError(self.name) from error
            raise
        if merged != row_count:
            if earlier is not None and self.position(position.source) == position:
                # Rows and position go back together, so that the next run merges all rows.
                again = self._properties(earlier)
                self._commit(lambda: self._table.restore(before, commit_properties=again))
            raise self._lost_rows(row_count, merged)
        if self.position(position.source) != position:
            self.advance(position)

    def _lost_rows(self, staged: int, merged: int | None) -> LakeError:
        return LakeError(
            f"{staged} rows were staged for lake table {self.name}, but {merged} reached the "
            "MERGE, so it was not done; check the disk of the lake and start the job again"
        )

    def add_columns(self, columns: Sequence[pa.Field], position: LakePosition) -> None:
        """Append columns."""
        fields = Schema.from_arrow(pa.schema(columns)).fields
        self._commit(
            lambda: self._table.alter.add_columns(
                fields, commit_properties=self._properties(position)
            )
        )

    def maintain(self) -> None:
        """Compact after many small commits, and delete files that no retained version needs."""
        if self._commits < _MAINTAIN_EVERY:
            return
        self._commits = 0
        if len(self._table.file_uris()) > _SMALL_FILES:
            writing = self._writer_properties()
            self._commit(
                lambda: self._table.optimize.compact(
                    writer_properties=writing,
                    commit_properties=CommitProperties(max_commit_retries=_RETRIES),
                )
            )
        if self._vacuum_is_due():
            # A full vacuum, because no commit lists the files of loads that were killed.
            self._commit(lambda: self._table.vacuum(dry_run=False, full=True))

    def _writer_properties(self) -> WriterProperties:
        """Row groups limited by size, because a writer in this process holds one in memory."""
        adds = pa.table(self._table.get_add_actions())
        rows = sum(count or 0 for count in adds["num_records"].to_pylist())
        size = sum(adds["size_bytes"].to_pylist())
        wanted = _ROW_GROUP_BYTES * rows // max(size, 1)
        fewest, most = _ROW_GROUP_ROWS
        return WriterProperties(
            compression="SNAPPY", max_row_group_size=min(max(wanted, fewest), most)
        )

    def _vacuum_is_due(self) -> bool:
        """Whether the last vacuum, of any run, was long ago; if so, record a new one."""
        mark = Path(self.root, _VACUUMED)
        try:
            age = time.time() - mark.stat().st_mtime
        except FileNotFoundError:
            age = None
        if age is not None and age <= _VACUUM_EVERY_SECONDS:
            return False
        mark.touch()
        return age is not None

    def _properties(self, position: LakePosition) -> CommitProperties:
        return _properties(self.name, self.version + 1, position)

    def _commit(self, write: Callable[[], object]) -> None:
        """Commit on top of the version that was read, and check what others committed after it."""
        if self.version != self._checked_version:
            self._check_foreign_commits()
        hold("lake-before-commit")
        try:
            write()
        except CommitFailedError as error:
            raise LakeConflictError(
                f"lake table {self.name} is being written by another process: {_line(error)}"
            ) from error
        except (DeltaError, OSError) as error:
            raise LakeError(f"lake table {self.name} cannot be written: {_line(error)}") from error
        hold("lake-after-commit")
        self._commits += 1
        self._table.update_incremental()
        # A MERGE that changes nothing commits nothing: then the next version is of another writer.
        if self._last_own_version() == self._checked_version + 1:
            self._checked_version += 1
        self._check_foreign_commits()


def _is_leftover(path: Path) -> bool:
    """Whether a killed first load may have left this: data files, or a log without commits."""
    if path.name == "_delta_log" and path.is_dir():
        return not any(one.suffix in (".json", ".parquet") for one in path.iterdir())
    return path.is_dir() and path.name.startswith("load-")


def _description(name: str) -> str:
    return f"{name}, kept by tailrace"


def _app_id(source: str, fact: str) -> str:
    return f"{APP_PREFIX}{source}/{fact}"


def _table_app_id(name: str) -> str:
    """Of the `txn` action whose version is that of this job's newest commit to the table."""
    return f"{APP_PREFIX}table:{name}"


def _properties(name: str, version: int, position: LakePosition) -> CommitProperties:
    """The position as `txn` actions and metadata, for a commit that becomes `version` or fails."""
    facts = {fact: getattr(position, fact) for fact in _FACTS}
    positions = [Transaction(_app_id(position.source, fact), facts[fact]) for fact in _FACTS]
    return CommitProperties(
        max_commit_retries=_RETRIES,
        custom_metadata={_METADATA_KEY: json.dumps({"source": position.source, **facts})},
        app_transactions=[Transaction(_table_app_id(name), version), *positions],
    )


def _adds(files: Sequence[DataFile]) -> list[Any]:
    now = int(time.time() * 1000)
    return [AddAction(one.path, one.size, {}, now, True, one.stats) for one in files]


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema with the types of `column_mapping`, without names for elements of lists."""
    return pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])


def _plain_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(_plain_type(type_.value_type))
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_):
        return pa.binary()
    return type_


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
