"""Applies the changes between two positions to the rows that they touch, on disk."""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING, Any, Self

from consumer_sdk.errors import CorruptData
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from consumer_sdk.verify.table_side import Row, TableLayout
    from consumer_sdk.wire.envelope import Event


class Fold:
    """The changes of one table: first stored, then applied to the rows that they touch.

    Without changes there is no file. In a table without a key, rows are counted instead: a change
    removes one row, adds one, or both.
    """

    def __init__(self, layout: TableLayout, directory: Path) -> None:
        self._layout = layout
        self._path = directory / f"fold-{layout.schema.schema}-{id(self)}.db"
        self._opened: sqlite3.Connection | None = None
        self.truncated = False
        self.lost: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there are no changes."""
        return self._opened is None and not self.truncated

    @property
    def _db(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        for statement in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            "CREATE TABLE changes (n INTEGER PRIMARY KEY, change TEXT)",
            "CREATE TABLE touched (key TEXT PRIMARY KEY) WITHOUT ROWID",
            "CREATE TABLE rows (n INTEGER PRIMARY KEY, key TEXT, content TEXT)",
            "CREATE INDEX rows_by_key ON rows (key)",
            "CREATE TABLE counts (content TEXT PRIMARY KEY, n INTEGER) WITHOUT ROWID",
            "BEGIN",
        ):
            db.execute(statement)
        return db

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._opened is not None:
            self._opened.close()

    def spool(self, event: Event) -> None:
        """Store a change for `apply` or `count_changes`."""
        if event.operation == "TRUNCATE":
            self.truncated = True
            for table in ("changes", "touched"):
                self._db.execute(f"DELETE FROM {table}")
            return
        try:
            self._spool(event)
        except KeyError as error:
            raise CorruptData(
                f"a change at {format_lsn(event.commit_lsn)} lacks column {error}"
            ) from error

    def _spool(self, event: Event) -> None:
        new = None if event.operation == "DELETE" else self._spell(event.data, event.raw)
        old = event.data if event.operation == "DELETE" else event.old
        before = None if old is None else self._spell(old, event.raw)
        if before is None and event.operation == "UPDATE":
            before = {name: new[name] for name in self._layout.key} if new is not None else None
        if not self._layout.key:
            self._require_whole(before)
            self._require_whole(None if new is None else {**(before or {}), **new})
        # The new row may lack an unchanged key.
        keys = [
            (self._key({**(before or {}), **row}),)
            for row in (before, new)
            if row is not None and self._layout.key
        ]
        self._db.execute("INSERT INTO changes (change) VALUES (?)", (json.dumps([before, new]),))
        self._db.executemany("INSERT OR IGNORE INTO touched VALUES (?)", keys)

    def _require_whole(self, row: dict[str, str | None] | None) -> None:
        """Raise KeyError if a row lacks a column; rows without a key are counted by all columns."""
        for name in self._layout.names if row is not None else ():
            if name not in (row or {}):
                raise KeyError(name)

    def touched(self, keys: Sequence[str]) -> set[str]:
        """The keys among these that a change has touched."""
        if self._opened is None:
            return set()
        find = "SELECT 1 FROM touched WHERE key = ?"
        return {key for key in keys if self._db.execute(find, (key,)).fetchone()}

    def all_touched(self, size: int) -> Iterator[list[str]]:
        """Every touched key, in lists of at most `size`."""
        cursor = self._db.execute("SELECT key FROM touched")
        while keys := cursor.fetchmany(size):
            yield [key for (key,) in keys]

    def add(self, row: Row) -> None:
        """Add a row that changes have touched, as it was before them."""
        self._db.execute(
            "INSERT INTO rows (key, content) VALUES (?, ?)",
            (self._layout.key_of(row), json.dumps(row)),
        )

    def remove_added(self) -> None:
        """Remove the rows that `add` has added."""
        if self._opened is not None:
            self._db.execute("DELETE FROM rows")

    def apply(self) -> None:
        """Apply the changes to the added rows; `lost` collects the keys of missing rows."""
        for (change,) in self._db.execute("SELECT change FROM changes ORDER BY n"):
            before, new = json.loads(change)
            row: dict[str, Any] | None = dict.fromkeys(self._layout.names)
            if before is not None:
                row = self._take(before)
            if row is None:
                self.lost.add(self._key(before))
            elif new is not None:
                self.add(tuple({**row, **new}[name] for name in self._layout.names))

    def _take(self, before: dict[str, Any]) -> dict[str, Any] | None:
        found = self._db.execute(
            "SELECT n, content FROM rows WHERE key = ? ORDER BY n", (self._key(before),)
        ).fetchall()
        for number, content in found:
            row = dict(zip(self._layout.names, json.loads(content), strict=True))
            if all(row[name] == value for name, value in before.items()):
                self._db.execute("DELETE FROM rows WHERE n = ?", (number,))
                return row
        return None

    def expected(self, keys: Sequence[str]) -> dict[str, Row]:
        """The rows with these keys after the changes."""
        rows: dict[str, Row] = {}
        for key in keys:
            found = self._db.execute("SELECT content FROM rows WHERE key = ?", (key,)).fetchone()
            if found is not None:
                rows[key] = tuple(json.loads(found[0]))
        return rows

    # without a key

    def count(self, rows: Iterable[Row], by: int) -> None:
        """Add `by` to the counts of these rows."""
        self._db.executemany(
            "INSERT INTO counts VALUES (?, ?) "
            "ON CONFLICT (content) DO UPDATE SET n = n + excluded.n",
            [(json.dumps(row), by) for row in rows],
        )

    def count_changes(self, by: int) -> None:
        """Add `by` for each row that a change adds, and -`by` for each row that it removes."""
        names = self._layout.names
        for (change,) in self._db.execute("SELECT change FROM changes ORDER BY n"):
            before, new = json.loads(change)
            if before is not None:
                self.count([tuple(before[name] for name in names)], -by)
            if new is not None:
                self.count([tuple({**(before or {}), **new}[name] for name in names)], by)

    def uneven(self) -> Iterator[tuple[str, int]]:
        """Rows whose counts on the two sides differ, and by how much."""
        yield from self._db.execute("SELECT content, n FROM counts WHERE n <> 0")

    # spelling

    def _spell(self, data: dict[str, Any], raw: Sequence[str]) -> dict[str, str | None]:
        layout = self._layout
        return {
            name: spelling.from_wire(data[name], name in raw)
            for name, spelling in zip(layout.names, layout.spellings, strict=True)
            if name in data
        }

    def _key(self, row: dict[str, Any]) -> str:
        return json.dumps([row[name] for name in self._layout.key])
