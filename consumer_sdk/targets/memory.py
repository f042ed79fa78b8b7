"""Tables in memory: for caches and tests, and an example for a target of your own.

A target follows three rules. Readers see everything between `begin` and `commit` at once (here:
steps are collected and run under a lock). Positions and copies are saved in the same transaction as
the rows. A change finds exactly its row, even while a transaction swaps keys.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import TargetError
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.targets.incomplete import keys_of, known_values, same_key
from consumer_sdk.targets.target import (
    CopyState,
    Lane,
    MirrorCopy,
    MirrorPosition,
    SnapshotRow,
    TableName,
    TargetState,
)
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event

Row = dict[str, Any]


@dataclass(slots=True)
class _Table:
    """Rows by key. Several rows share a key only in a table without a key, or during a swap."""

    key: tuple[str, ...]
    rows: dict[tuple[Any, ...], list[Row]] = field(default_factory=dict)

    def key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)

    def add(self, row: Row) -> None:
        self.rows.setdefault(self.key_of(row), []).append(row)

    def take(self, identity: Row) -> Row | None:
        """Remove and return the oldest row that matches; None if there is none."""
        found = self.rows.get(self.key_of(identity), [])
        for index, row in enumerate(found):
            if all(_equal(row.get(name), value) for name, value in identity.items()):
                del found[index]
                if not found:
                    del self.rows[self.key_of(identity)]
                return row
        return None


def _equal(one: Any, other: Any) -> bool:
    # To PostgreSQL NaN equals NaN.
    return bool(one == other or (one != one and other != other))


class MemoryTarget:
    """Keeps every table as a dictionary; `rows` never shows part of a transaction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[Callable[[], object]] = []
        self._positions: dict[str, MirrorPosition] = {}
        self._copies: dict[tuple[Lane, TableName], MirrorCopy] = {}
        self._tables: dict[tuple[Lane, TableName], _Table] = {}

    def rows(self, table: str, schema: str = "public") -> list[Row]:
        """The rows of a live table, copied; [] if there is no such table yet."""
        with self._lock:
            found = self._tables.get((Lane.LIVE, (schema, table)))
            return [dict(row) for rows in found.rows.values() for row in rows] if found else []

    def tables(self) -> list[TableName]:
        """The live tables."""
        with self._lock:
            return [name for lane, name in self._tables if lane is Lane.LIVE]

    # the Target protocol

    def open(self) -> None:
        self._steps.clear()

    def close(self) -> None:
        self._steps.clear()

    def interrupt(self) -> None:
        """Does nothing: no call here waits."""

    def read_state(self) -> TargetState:
        return TargetState(dict(self._positions), list(self._copies.values()))

    def require_room(self, copies: Sequence[MirrorCopy]) -> None:
        """Does nothing: only the mirror creates tables here."""

    def begin(self) -> None:
        self._steps.clear()

    def commit(self) -> None:
        with self._lock:
            for step in self._steps:
                step()
        self._steps.clear()

    def rollback(self) -> None:
        self._steps.clear()

    def save_position(self, position: MirrorPosition) -> None:
        self._steps.append(partial(self._positions.__setitem__, position.source, position))

    def save_copy(self, copy: MirrorCopy) -> None:
        self._steps.append(partial(self._copies.__setitem__, (copy.lane, copy.name), copy))

    def create(self, copy: MirrorCopy) -> None:
        table = _Table(key_columns(copy.schema))
        self._steps.append(partial(self._tables.__setitem__, (copy.lane, copy.name), table))

    def drop(self, copy: MirrorCopy) -> None:
        self._steps.append(partial(self._tables.pop, (copy.lane, copy.name), None))
        self._steps.append(partial(self._copies.pop, (copy.lane, copy.name), None))

    def load(self, copy: MirrorCopy, rows: Sequence[SnapshotRow]) -> None:
        self._steps.append(partial(self._load, (copy.lane, copy.name), list(rows)))

    def apply(self, copy: MirrorCopy, events: Sequence[Event]) -> None:
        self._steps.append(partial(self._apply, (copy.lane, copy.name), list(events)))

    def replay(self, copy: MirrorCopy, events: Sequence[Event]) -> None:
        self._steps.append(partial(self._replay, copy, list(events)))

    def alter(self, copy: MirrorCopy, schema: TableSchema) -> None:
        self._steps.append(partial(self._alter, (copy.lane, copy.name), schema))

    def promote(self, copies: Sequence[MirrorCopy]) -> None:
        self._steps.append(partial(self._promote, list(copies)))

    # the steps

    def _load(self, which: tuple[Lane, TableName], rows: list[SnapshotRow]) -> None:
        for row in rows:
            self._tables[which].add(dict(row.data))

    def _apply(self, which: tuple[Lane, TableName], events: list[Event]) -> None:
        table = self._tables[which]
        for event in events:
            if event.operation == "TRUNCATE":
                table.rows.clear()
            elif event.operation == "INSERT":
                table.add(dict(event.data))
            else:
                self._change(which[1], table, event)

    def _change(self, name: TableName, table: _Table, event: Event) -> None:
        identity: Row = event.data
        if event.operation == "UPDATE":
            identity = event.old or {column: event.data[column] for column in table.key}
        row = table.take(identity)
        if row is None:
            raise TargetError(
                f"table {format_table_name(*name)} lacks a row that the source has "
                f"{event.operation.lower()}d; rebuild the mirror"
            )
        if event.operation == "UPDATE":
            table.add(row | event.data)

    def _replay(self, copy: MirrorCopy, events: list[Event]) -> None:
        table = self._tables[copy.lane, copy.name]
        for event in events:
            if event.operation == "TRUNCATE":
                table.rows.clear()
            elif event.operation == "DELETE":
                table.rows.pop(table.key_of(event.data), None)
            elif event.operation == "INSERT":
                table.rows[table.key_of(event.data)] = [dict(event.data)]
            else:
                self._replay_update(copy, table, event)

    def _replay_update(self, copy: MirrorCopy, table: _Table, event: Event) -> None:
        before, after = keys_of(event, table.key)
        found = table.rows.pop(table.key_of(before), None)
        if not same_key(before, after):
            empty = dict.fromkeys(column.name for column in copy.schema.columns)
            table.rows[table.key_of(after)] = [empty | known_values(event)]
        elif found is not None:
            table.rows[table.key_of(after)] = [row | known_values(event) for row in found]

    def _alter(self, which: tuple[Lane, TableName], schema: TableSchema) -> None:
        table = self._tables[which]
        names = [column.name for column in schema.columns]
        for rows in table.rows.values():
            rows[:] = [{name: row.get(name) for name in names} for row in rows]

    def _promote(self, copies: list[MirrorCopy]) -> None:
        for copy in copies:
            self._tables[Lane.LIVE, copy.name] = self._tables.pop((Lane.NEXT, copy.name))
            self._copies.pop((Lane.NEXT, copy.name), None)
            self._copies[Lane.LIVE, copy.name] = copy.become(CopyState.LIVE)
