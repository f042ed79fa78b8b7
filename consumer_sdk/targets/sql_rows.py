"""Row changes as SQL statements, the same for every engine. HOT PATH.

Consecutive changes of one kind are written in one call. An update or delete that finds no row, or
an insert that finds one, means that something else wrote to the mirror. There is one exception: in
the middle of a transaction, two rows may have the same value of a deferrable primary key. The older
row is then set aside until a later change of the transaction moves or deletes it.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from consumer_sdk.errors import CorruptData, TargetError
from consumer_sdk.targets.canonical import Spelling
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.targets.incomplete import keys_of, known_values, same_key
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from consumer_sdk.targets.stored_values import Encode
    from consumer_sdk.targets.target import SnapshotRow
    from consumer_sdk.wire.column_types import Column, TableSchema
    from consumer_sdk.wire.envelope import Event

    Encodings = list[tuple[int, str, Encode]]
    Pick = Callable[[dict[str, Any]], tuple[Any, ...]]
    Row = Sequence[Any]


class DuplicateKey(Exception):
    """A row with this key exists already."""


class Engine(Protocol):
    """A database connection as the row writer needs it."""

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement; returns how many rows it changed."""
        ...

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> int:
        """Run a statement for every row; returns how many rows were changed in all."""
        ...

    def insert_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Insert all rows, or none of them and raise DuplicateKey."""
        ...

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query; returns its rows."""
        ...

    def quote(self, name: str) -> str:
        """A name as part of a statement."""
        ...

    def encoder(self, column: Column) -> Encode | None:
        """Converts a value, given whether it is raw, to its stored form; None if they are equal."""
        ...

    def equals(self, column: Column) -> str:
        """A condition: the column holds exactly the value, which is not null."""
        ...

    def key_equals(self, table: str, names: Sequence[str]) -> str:
        """A condition: the columns of a table's key hold these values."""
        ...

    def printed(self, name: str) -> str:
        """An expression for the value of a column, in a form that can be inserted again."""
        ...

    def canonical(self, spelling: Spelling, printed: Any) -> str | None:
        """The canonical text of a value read with `printed`."""
        ...

    def row_id(self, names: Iterable[str]) -> str:
        """The name of the system column that identifies a row, in a table with these columns."""
        ...

    placeholder: str


class SqlRowWriter:
    """Writes the rows of one table."""

    def __init__(self, engine: Engine, table: str, schema: TableSchema) -> None:
        self.schema_version = schema.schema_version
        self._engine = engine
        self._table = table
        self._schema = schema
        self._columns = schema.columns
        self._names = tuple(column.name for column in schema.columns)
        self._key = key_columns(schema)
        self._encoders = {column.name: engine.encoder(column) for column in schema.columns}
        self._encodings = [
            (index, column.name, encode)
            for index, column in enumerate(schema.columns)
            if (encode := self._encoders[column.name]) is not None
        ]
        self._pick = _picker(self._names)
        self._pick_key = _picker(self._key)
        self._key_encodings = [
            (index, name, encode)
            for index, name in enumerate(self._key)
            if (encode := self._encoders[name]) is not None
        ]
        mark = engine.placeholder
        listed = ", ".join(engine.quote(name) for name in self._names)
        self._insert = (
            f"INSERT INTO {table} ({listed}) VALUES ({', '.join([mark] * len(self._names))})"
        )
        printed = ", ".join(engine.printed(name) for name in self._names)
        self._select = f"SELECT {printed} FROM {table}"
        self._by_key = engine.key_equals(table, self._key) if self._key else ""
        self._delete = f"DELETE FROM {table} WHERE {self._by_key}"
        rest = tuple(name for name in self._names if name not in self._key) or self._key
        self._pick_update = _picker((*rest, *self._key))
        self._update_encodings = [
            (index, name, encode)
            for index, name in enumerate((*rest, *self._key))
            if (encode := self._encoders[name]) is not None
        ]
        self._update_all = self._update_by_key(rest)
        self._updates: dict[tuple[str, ...], str] = {}
        self._spellings = [(column.name, Spelling(column)) for column in schema.columns]
        self._aside: dict[tuple[str | None, ...], list[list[Any]]] = {}
        self._may_swap = schema.replica_identity == "full" and bool(self._key)

    def load(self, rows: Sequence[SnapshotRow]) -> None:
        """Insert rows of a snapshot."""
        self._engine.insert_many(self._insert, self.encoded(rows))

    def encoded(self, rows: Sequence[SnapshotRow]) -> list[Row]:
        """Rows of a snapshot in their stored form, in the order of the columns."""
        return [self._encode(self._pick, self._encodings, row.data, row.raw) for row in rows]

    def apply(self, events: Sequence[Event]) -> None:
        """Apply the changes, in order."""
        for operation, run in groupby(events, _operation):
            changes = list(run)
            if operation == "TRUNCATE":
                self._engine.execute(f"DELETE FROM {self._table}")
                self._aside.clear()
            elif operation == "INSERT":
                self._insert_rows(changes)
            elif not self._key:
                for event in changes:
                    self._change_equal_row(event)
            elif operation == "DELETE":
                self._delete_rows(changes)
            else:
                self._update_rows(changes)

    def replay(self, events: Sequence[Event]) -> None:
        """Apply changes of which the rows may hold some already, in order."""
        for operation, run in groupby(events, _operation):
            changes = list(run)
            if operation == "TRUNCATE":
                self._engine.execute(f"DELETE FROM {self._table}")
            elif operation == "UPDATE":
                for event in changes:
                    self._replay_update(event)
            else:
                keys = [self._key_values(event.data, event.raw) for event in changes]
                self._engine.execute_many(self._delete, keys)
                if operation == "INSERT":
                    self._insert_rows(changes)

    def finish(self) -> None:
        """Check, at the end of a transaction, that no row is still set aside."""
        if self._aside:
            self._aside.clear()
            raise self._diverged("has two rows with one key")

    # runs of changes

    def _insert_rows(self, events: list[Event]) -> None:
        rows = self._encode_all(events)
        if not self._aside:
            try:
                self._engine.insert_many(self._insert, rows)
            except DuplicateKey:
                if not self._may_swap:
                    raise self._diverged("has a row that the source has just inserted") from None
            else:
                return
        for event, row in zip(events, rows, strict=True):
            self._insert_row(self._key_values(event.data, event.raw), row)

    def _delete_rows(self, events: list[Event]) -> None:
        if self._aside:
            for event in events:
                if self._take_aside(event.data, event.data, event.raw) is None:
                    key = self._key_values(event.data, event.raw)
                    self._expect(self._engine.execute(self._delete, key), 1)
            return
        keys = [self._key_values(event.data, event.raw) for event in events]
        self._expect(self._engine.execute_many(self._delete, keys), len(events))

    def _update_rows(self, events: list[Event]) -> None:
        width = len(self._names)
        run: list[Row] = []
        for event in events:
            data, old = event.data, event.old
            moved = old is not None and any(
                name in old and name in data and old[name] != data[name] for name in self._key
            )
            if not moved and not self._aside and len(data) == width:
                run.append(self._encode(self._pick_update, self._update_encodings, data, event.raw))
                continue
            self._update_run(run)
            run = []
            self._update_one(event, moved=moved)
        self._update_run(run)

    def _update_run(self, run: list[Row]) -> None:
        if run:
            self._expect(self._engine.execute_many(self._update_all, run), len(run))

    # single changes

    def _update_one(self, event: Event, *, moved: bool) -> None:
        """Update a row whose event lacks columns, or whose key changes."""
        data, raw = event.data, event.raw
        old = event.old or {}
        old_key, new_key = (
            self._key_values({**data, **old}, raw),
            self._key_values({**old, **data}, raw),
        )
        set_aside = self._take_aside(event.old or data, event.old, raw) if self._aside else None
        if set_aside is not None:
            for index, name in enumerate(self._names):
                if name in data:
                    set_aside[index] = self._value(name, data[name], raw)
            self._insert_row(new_key, set_aside)
            return
        if moved and self._may_swap:
            self._set_aside_row(new_key, event)
        names = tuple(name for name in self._names if name in data)
        self._require_columns(event)
        statement = self._update_some(names)
        values = [self._value(name, data[name], raw) for name in names]
        try:
            changed = self._engine.execute(statement, values + old_key)
        except DuplicateKey:
            raise self._diverged("has a row where the source has just moved another") from None
        self._expect(changed, 1)

    def _replay_update(self, event: Event) -> None:
        """Update a row that may be missing; null stands for what a row with a new key lacks."""
        data, raw = known_values(event), event.raw
        self._require_columns(event)
        before, after = keys_of(event, self._key)
        old_key = self._key_values(before, raw)
        if same_key(before, after):
            names = tuple(name for name in self._names if name in data)
            statement = self._update_some(names)
            values = [self._value(name, data[name], raw) for name in names]
            self._engine.execute(statement, values + old_key)
            return
        self._engine.execute(self._delete, old_key)
        self._engine.execute(self._delete, self._key_values(after, raw))
        row = [self._value(name, data.get(name), raw) for name in self._names]
        try:
            self._engine.insert_many(self._insert, [row])
        except DuplicateKey:
            raise self._diverged("has a row where the source has just moved another") from None

    def _change_equal_row(self, event: Event) -> None:
        """Update or delete one of the rows that equal the old row."""
        old = event.data if event.operation == "DELETE" else event.old
        if self._schema.replica_identity != "full" or old is None:
            raise TargetError(
                f"{self._display()} has no key by which a changed row can be found; in the source: "
                f"ALTER TABLE {self._display()} REPLICA IDENTITY FULL"
            )
        conditions, values = [], []
        for column in self._columns:
            if column.name not in old:
                continue
            value = self._value(column.name, old[column.name], event.raw)
            if value is None:
                conditions.append(f"{self._engine.quote(column.name)} IS NULL")
            else:
                conditions.append(self._engine.equals(column))
                values.append(value)
        row_id = self._engine.row_id(self._names)
        one = (
            f"{row_id} = (SELECT {row_id} FROM {self._table} "
            f"WHERE {' AND '.join(conditions)} LIMIT 1)"
        )
        if event.operation == "DELETE":
            self._expect(self._engine.execute(f"DELETE FROM {self._table} WHERE {one}", values), 1)
            return
        names = [name for name in self._names if name in event.data]
        new = [self._value(name, event.data[name], event.raw) for name in names]
        statement = f"UPDATE {self._table} SET {self._assign(names)} WHERE {one}"
        self._expect(self._engine.execute(statement, new + values), 1)

    # two rows for one key

    def _insert_row(self, key: list[Any], row: Row) -> None:
        if self._may_swap:
            self._set_aside_row(key)
        try:
            self._engine.insert_many(self._insert, [row])
        except DuplicateKey:
            raise self._diverged("has a row that the source has just inserted") from None

    def _set_aside_row(self, key: list[Any], move: Event | None = None) -> None:
        """Set aside the row that has this key, unless `move` moves that row itself."""
        for found in self._engine.query(f"{self._select} WHERE {self._by_key}", key):
            current = self._spell(found)
            if move is None or not self._matches(current, move.old or {}, move.raw):
                # Equal keys may have different texts (1.0, 1.00): this one is the row's own.
                own = tuple(current[name] for name in self._key)
                self._aside.setdefault(own, []).append(list(found))
                self._engine.execute(self._delete, key)

    def _take_aside(
        self, identity: dict[str, Any], old: dict[str, Any] | None, raw: Sequence[str]
    ) -> list[Any] | None:
        """The row set aside that a change is about; None if it is about the row in the table."""
        if any(name not in identity for name in self._key):
            return None
        wanted = self._spell_wire(identity, raw)
        key = tuple(wanted[name] for name in self._key)
        rows = self._aside.get(key, [])
        for index, row in enumerate(rows):
            if old is None or self._matches(self._spell(row), old, raw):
                del rows[index]
                if not rows:
                    del self._aside[key]
                return row
        return None

    def _matches(self, row: dict[str, str | None], old: dict[str, Any], raw: Sequence[str]) -> bool:
        return self._spell_wire(old, raw).items() <= row.items()

    def _spell(self, row: Row) -> dict[str, str | None]:
        """The canonical texts of a row read from the table."""
        return {
            name: self._engine.canonical(spelling, stored)
            for (name, spelling), stored in zip(self._spellings, row, strict=True)
        }

    def _spell_wire(self, data: dict[str, Any], raw: Sequence[str]) -> dict[str, str | None]:
        return {
            name: spelling.from_wire(data[name], name in raw)
            for name, spelling in self._spellings
            if name in data
        }

    # values and statements

    def _encode_all(self, events: list[Event]) -> list[Row]:
        if not self._encodings:
            pick = self._pick
            try:
                return [pick(event.data) for event in events]
            except KeyError as error:
                raise self._incomplete(error) from error
        return [
            self._encode(self._pick, self._encodings, event.data, event.raw) for event in events
        ]

    def _encode(
        self, pick: Pick, encodings: Encodings, data: dict[str, Any], raw: Sequence[str]
    ) -> Row:
        try:
            picked = pick(data)
        except KeyError as error:
            raise self._incomplete(error) from error
        if not encodings:
            return picked
        row = list(picked)
        for index, name, encode in encodings:
            value = row[index]
            if value is not None:
                try:
                    row[index] = encode(value, name in raw)
                except MISFITS as error:
                    raise self._misfit(name) from error
        return row

    def _key_values(self, data: dict[str, Any], raw: Sequence[str]) -> list[Any]:
        return list(self._encode(self._pick_key, self._key_encodings, data, raw))

    def _value(self, name: str, value: Any, raw: Sequence[str]) -> Any:
        encode = self._encoders[name]
        if value is None or encode is None:
            return value
        try:
            return encode(value, name in raw)
        except MISFITS as error:
            raise self._misfit(name) from error

    def _require_columns(self, event: Event) -> None:
        sent = sum(name in event.data for name in self._names)
        if sent + len(event.unchanged) < len(self._names):
            raise CorruptData(f"a row of {self._display()} lacks columns")

    def _update_some(self, names: tuple[str, ...]) -> str:
        statement = self._updates.get(names)
        if statement is None:
            statement = self._updates[names] = self._update_by_key(names)
        return statement

    def _update_by_key(self, names: Sequence[str]) -> str:
        return f"UPDATE {self._table} SET {self._assign(names)} WHERE {self._by_key}"

    def _assign(self, names: Sequence[str]) -> str:
        mark = self._engine.placeholder
        return ", ".join(f"{self._engine.quote(name)} = {mark}" for name in names)

    def _expect(self, changed: int, wanted: int) -> None:
        if changed != wanted:
            raise self._diverged("lacks rows that the source has changed")

    def _display(self) -> str:
        return format_table_name(self._schema.schema, self._schema.table)

    def _diverged(self, what: str) -> TargetError:
        return TargetError(
            f"the mirror of {self._display()} {what}; something else has written to it: "
            "rebuild it with --fresh"
        )

    def _misfit(self, name: str) -> CorruptData:
        return CorruptData(f"column {name!r} of {self._display()} holds a value of another type")

    def _incomplete(self, error: KeyError) -> CorruptData:
        return CorruptData(f"a row of {self._display()} lacks column {error}")


_operation = attrgetter("operation")


def _picker(names: tuple[str, ...]) -> Pick:
    if not names:
        return lambda _: ()
    if len(names) == 1:
        only = names[0]
        return lambda row: (row[only],)
    return itemgetter(*names)
