"""The common part of SQL targets: saved state, copies and row writers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import TargetError
from consumer_sdk.targets import incomplete
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.targets.sql_rows import DuplicateKey, SqlRowWriter
from consumer_sdk.targets.target import (
    CopyState,
    Lane,
    MirrorCopy,
    MirrorPosition,
    TableName,
    TargetState,
)
from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.targets.sql_rows import Engine
    from consumer_sdk.targets.target import SnapshotRow
    from consumer_sdk.wire.column_types import Column
    from consumer_sdk.wire.envelope import Event

_POSITION_COLUMNS = "source, epoch, commit_lsn, seq, stream_seq, stream_created"
_COPY_COLUMNS = (
    "table_schema, table_name, lane, epoch, snapshot_id, snapshot_lsn, loaded, applied_lsn, "
    "stream_seq, stream_created, relation_id, document"
)
_INDEXED_COLUMNS = 3
# A key in the document of a copy that is loaded from a snapshot of several consistent points.
_PIECES = "$pieces"
# Lane and `loaded` are how a state is stored. A copy whose loading was interrupted is a plan again.
_STATES = {
    (Lane.NEXT, False): CopyState.PLANNED,
    (Lane.NEXT, True): CopyState.CATCHING_UP,
    (Lane.LIVE, True): CopyState.LIVE,
    (Lane.LIVE, False): CopyState.RETIRED,
}


class SqlTarget(ABC):
    """Keeps positions and copies in two tables, and rows in one table for each copy."""

    positions_table: str
    copies_table: str
    unsigned_type: str
    """A column type that holds any LSN."""

    def __init__(self) -> None:
        self._writers: dict[tuple[Lane, TableName], SqlRowWriter] = {}
        self._has_state = False
        """Whether the target has the state tables of a mirror; the first commit creates them."""

    @property
    @abstractmethod
    def _engine(self) -> Engine: ...

    @abstractmethod
    def _physical(self, copy: MirrorCopy) -> str:
        """The quoted name of a copy's table."""

    @abstractmethod
    def _find_state(self) -> bool:
        """Whether the state tables of a mirror exist."""

    @abstractmethod
    def _refuse_foreign(self, copy: MirrorCopy) -> None:
        """Raise TargetError if a table that no mirror made has the name of a copy's table."""

    @abstractmethod
    def _definition(self, column: Column) -> str:
        """The quoted name and the type of a column."""

    @abstractmethod
    def _is_indexable(self, column: Column) -> bool:
        """Whether the values of a column are small and can be indexed."""

    @abstractmethod
    def _index_name(self, copy: MirrorCopy) -> str:
        """The quoted name of an index; empty if the database chooses one."""

    @abstractmethod
    def _replace_live(self, copy: MirrorCopy) -> None:
        """Replace the live copy's table by the next copy's."""

    def _create_state(self) -> None:
        number = self.unsigned_type
        self._engine.execute(
            f"CREATE TABLE IF NOT EXISTS {self.positions_table} (source text PRIMARY KEY, "
            f"epoch {number}, commit_lsn {number}, seq {number}, stream_seq {number}, "
            f"stream_created {number})"
        )
        self._engine.execute(
            f"CREATE TABLE IF NOT EXISTS {self.copies_table} (table_schema text, table_name text, "
            f"lane text, epoch {number}, snapshot_id text, snapshot_lsn {number}, loaded integer, "
            f"applied_lsn {number}, stream_seq {number}, stream_created {number}, "
            f"relation_id {number}, document text, PRIMARY KEY (table_schema, table_name, lane))"
        )

    def read_state(self) -> TargetState:
        """Positions and copies as saved."""
        state = TargetState()
        if not self._find_state():
            return state
        query = self._engine.query
        for source, *numbers in query(f"SELECT {_POSITION_COLUMNS} FROM {self.positions_table}"):
            state.positions[source] = MirrorPosition(source, *map(int, numbers))
        for row in query(f"SELECT {_COPY_COLUMNS} FROM {self.copies_table}"):
            state.copies.append(_read_copy(row))
        return state

    def require_room(self, copies: Sequence[MirrorCopy]) -> None:
        """Raise TargetError if a table that no mirror made has the name of a copy's table."""
        for copy in copies:
            self._refuse_foreign(copy)

    def save_position(self, position: MirrorPosition) -> None:
        """Save the position of a source in place of an earlier one."""
        self._put(
            self.positions_table,
            _POSITION_COLUMNS,
            "source",
            (
                position.source,
                position.epoch,
                position.commit_lsn,
                position.seq,
                position.stream_seq,
                position.stream_created,
            ),
        )

    def save_copy(self, copy: MirrorCopy) -> None:
        """Save a copy in place of an earlier one of the same table and lane."""
        self._put(
            self.copies_table,
            _COPY_COLUMNS,
            "table_schema, table_name, lane",
            (
                *copy.name,
                copy.lane.value,
                copy.epoch,
                copy.snapshot_id,
                copy.snapshot_lsn,
                int(copy.loaded and not copy.retired),
                copy.applied_lsn,
                copy.stream_seq,
                copy.stream_created,
                copy.relation_id,
                json.dumps(_document(copy)),
            ),
        )

    def _put(self, table: str, columns: str, key: str, values: Sequence[Any]) -> None:
        marks = ", ".join([self._engine.placeholder] * len(values))
        news = ", ".join(f"{name} = excluded.{name}" for name in columns.split(", "))
        self._engine.execute(
            f"INSERT INTO {table} ({columns}) VALUES ({marks}) "
            f"ON CONFLICT ({key}) DO UPDATE SET {news}",
            values,
        )

    def _forget(self, name: TableName, lane: Lane) -> None:
        mark = self._engine.placeholder
        self._engine.execute(
            f"DELETE FROM {self.copies_table} WHERE table_schema = {mark} "
            f"AND table_name = {mark} AND lane = {mark}",
            (*name, lane.value),
        )
        self._writers.pop((lane, name), None)

    def create(self, copy: MirrorCopy) -> None:
        """Create an empty next copy in place of an earlier one, without saving it."""
        self._engine.execute(f"DROP TABLE IF EXISTS {self._physical(copy)}")
        self._writers.pop((copy.lane, copy.name), None)
        self._create_table(copy)

    def _create_table(self, copy: MirrorCopy) -> None:
        self._refuse_foreign(copy)
        key = key_columns(copy.schema)
        columns = [self._definition(column) for column in copy.schema.columns]
        if key:
            columns.append(f"PRIMARY KEY ({', '.join(map(self._engine.quote, key))})")
        self._engine.execute(f"CREATE TABLE {self._physical(copy)} ({', '.join(columns)})")
        if not key:
            self._index_columns(copy)

    def _index_columns(self, copy: MirrorCopy) -> None:
        """Index some columns of a table without a key, whose rows are found by their values."""
        small = [column.name for column in copy.schema.columns if self._is_indexable(column)]
        if small and copy.schema.replica_identity == "full":
            listed = ", ".join(map(self._engine.quote, small[:_INDEXED_COLUMNS]))
            index = self._index_name(copy)
            self._engine.execute(f"CREATE INDEX {index} ON {self._physical(copy)} ({listed})")

    def drop(self, copy: MirrorCopy) -> None:
        """Drop a copy's table and its saved state."""
        self._engine.execute(f"DROP TABLE IF EXISTS {self._physical(copy)}")
        self._forget(copy.name, copy.lane)

    def load(self, copy: MirrorCopy, rows: Sequence[SnapshotRow]) -> None:
        """Add rows of the snapshot to a next copy."""
        try:
            self._writer(copy).load(rows)
        except DuplicateKey as error:
            raise TargetError(
                f"the snapshot of {format_table_name(*copy.name)} holds a key twice"
            ) from error

    def apply(self, copy: MirrorCopy, events: Sequence[Event]) -> None:
        """Apply row changes and truncates of one table, in order."""
        self._writer(copy).apply(events)

    def replay(self, copy: MirrorCopy, events: Sequence[Event]) -> None:
        """Apply changes below the exact LSN of a next copy, in order."""
        self._writer(copy).replay(events)

    def promote(self, copies: Sequence[MirrorCopy]) -> None:
        """Replace live copies by next copies, and save these as live."""
        for copy in copies:
            self._writer(copy).finish()
            self._replace_live(copy)
            self._forget(copy.name, Lane.NEXT)
            self._writers.pop((Lane.LIVE, copy.name), None)
            self.save_copy(copy.become(CopyState.LIVE))

    def _finish_writers(self) -> None:
        for writer in self._writers.values():
            writer.finish()

    def _forget_writers(self) -> None:
        self._writers.clear()

    def _writer(self, copy: MirrorCopy) -> SqlRowWriter:
        writer = self._writers.get((copy.lane, copy.name))
        if writer is None or writer.schema_version != copy.schema.schema_version:
            writer = SqlRowWriter(self._engine, self._physical(copy), copy.schema)
            self._writers[copy.lane, copy.name] = writer
        return writer


def _document(copy: MirrorCopy) -> dict[str, Any]:
    document = copy.schema.to_document()
    if copy.exact_lsn:
        rows = incomplete.to_document(copy.incomplete)
        document[_PIECES] = {"exact_lsn": copy.exact_lsn, "incomplete": rows}
    return document


def _read_copy(row: tuple[Any, ...]) -> MirrorCopy:
    lane, epoch, snapshot_id, snapshot_lsn, loaded = row[2:7]
    applied_lsn, stream_seq, stream_created, relation_id, text = row[7:]
    document = json.loads(text)
    pieces = document.get(_PIECES) or {}
    return MirrorCopy(
        schema=TableSchema.from_document(document),
        state=_STATES[Lane(lane), bool(loaded)],
        epoch=int(epoch),
        snapshot_id=snapshot_id,
        snapshot_lsn=int(snapshot_lsn),
        applied_lsn=int(applied_lsn),
        stream_seq=int(stream_seq),
        stream_created=int(stream_created),
        relation_id=int(relation_id),
        exact_lsn=int(pieces.get("exact_lsn", 0)),
        incomplete=incomplete.from_document(pieces.get("incomplete", ())),
    )
