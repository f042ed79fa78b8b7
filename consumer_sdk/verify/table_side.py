"""The two sides of a comparison: a table of the source and one of a replica, each read in one
snapshot."""

from __future__ import annotations

import json
import sqlite3
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.string import TextLoader

from consumer_sdk.errors import NotAvailable, TargetError, UsageError
from consumer_sdk.targets.canonical import Spelling, to_sqlite
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.targets.postgres import (
    key_operators,
    open_session,
    read_postgres_state,
    shown,
)
from consumer_sdk.targets.sqlite import quote, read_sqlite_state, table_name
from consumer_sdk.targets.target_url import display_url, split_url
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from psycopg.adapt import AdaptersMap

    from consumer_sdk.targets.target import TargetState
    from consumer_sdk.wire.column_types import TableSchema

SLICE_ROWS = 2000

Row = tuple[str | None, ...]


class TableLayout:
    """The columns of a table and their canonical texts; UsageError if its key cannot find rows."""

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema
        self.columns = schema.columns
        self.names = [column.name for column in schema.columns]
        self.key = key_columns(schema)
        self.key_indexes = [self.names.index(name) for name in self.key]
        self.spellings = [Spelling(column) for column in schema.columns]
        self.families = {column.name: column.family for column in schema.columns}
        for name in self.key:
            if self.families[name] in ("array", "jsonb"):
                table = format_table_name(schema.schema, schema.table)
                raise UsageError(
                    f"{table} cannot be verified: rows are not found by {name}, which is of type "
                    f"{self.columns[self.names.index(name)].data_type}"
                )

    def key_of(self, row: Row) -> str:
        """The key of a row as one text; the whole row if the table has no key."""
        return json.dumps([row[index] for index in self.key_indexes] if self.key else row)


class Side(Protocol):
    """A table that does not change while it is read."""

    def slices(self) -> Generator[list[Row], None, None]:
        """All rows as canonical texts, in lists of SLICE_ROWS; a table with a key in its order."""
        ...

    def find(self, keys: Sequence[str]) -> dict[str, Row]:
        """The rows with these keys, by key."""
        ...

    def count(self) -> int:
        """How many rows there are."""
        ...


class PostgresSide:
    """A table read in a transaction that sees one snapshot."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        layout: TableLayout,
        *,
        only: bool = False,
        condition: str | None = None,
    ) -> None:
        self._connection = connection
        self._layout = layout
        schema = layout.schema
        columns = ", ".join(f"t.{quote(name)}" for name in layout.names)
        table = f"{'ONLY ' if only else ''}{quote(schema.schema)}.{quote(schema.table)}"
        self._select = f"SELECT {columns} FROM {table} AS t"
        self._count = f"SELECT pg_catalog.count(*) FROM {table} AS t"
        self._where = f" WHERE ({condition})" if condition else ""
        self._order = ", ".join(f"t.{quote(name)}" for name in layout.key)
        self._key_types = self._types() if layout.key else []
        name = f"{quote(schema.schema)}.{quote(schema.table)}"
        self._operators = key_operators(connection, name, layout.key) if layout.key else {}

    def _types(self) -> list[str]:
        schema = self._layout.schema
        rows = self._connection.execute(
            # Modifier -1 gives a type without a length; a bare `character` or `bit` has length 1.
            "SELECT a.attname, pg_catalog.format_type(a.atttypid, -1) "
            "FROM pg_catalog.pg_attribute a "
            "WHERE a.attrelid = pg_catalog.to_regclass(%s) AND a.attnum > 0",
            (f"{quote(schema.schema)}.{quote(schema.table)}",),
        ).fetchall()
        types = dict(rows)
        return [types[name] for name in self._layout.key]

    def slices(self) -> Generator[list[Row], None, None]:
        order = ""
        if self._layout.key:
            # By the index of the key: a sort would write the whole table to the server's disk.
            self._connection.execute("SET LOCAL enable_sort = off")
            order = f" ORDER BY {self._order}"
        with self._connection.cursor(name="tailrace_verify") as cursor:
            _load_texts(cursor.adapters)
            cursor.execute((self._select + self._where + order).encode())
            while rows := cursor.fetchmany(SLICE_ROWS):
                yield self._spelled(rows)

    def _spelled(self, rows: list[Sequence[str | None]]) -> list[Row]:
        if not rows:
            return []
        columns = zip(*rows, strict=True)
        spelled = (
            spelling.column_from_text(column)
            for spelling, column in zip(self._layout.spellings, columns, strict=True)
        )
        return list(zip(*spelled, strict=True))

    def count(self) -> int:
        row = self._connection.execute((self._count + self._where).encode()).fetchone()
        return int(row[0]) if row else 0

    def find(self, keys: Sequence[str]) -> dict[str, Row]:
        layout = self._layout
        values = list(zip(*map(json.loads, keys), strict=True))
        arrays = ", ".join(f"pg_catalog.unnest(%s::{kind}[])" for kind in self._key_types)
        names = ", ".join(f"k{index}" for index in range(len(values)))
        match = " AND ".join(
            f"t.{quote(name).replace('%', '%%')} {self._operators[name]} w.k{index}"
            for index, name in enumerate(layout.key)
        )
        condition = f" AND {self._where.removeprefix(' WHERE ')}" if self._where else ""
        statement = (
            f"{self._select.replace('%', '%%')} "
            f"JOIN ROWS FROM ({arrays}) AS w({names}) ON {match}"
            f"{condition.replace('%', '%%')}"
        )
        with self._connection.cursor() as cursor:
            _load_texts(cursor.adapters)
            cursor.execute(statement.encode(), [list(column) for column in values])
            return {layout.key_of(row): row for row in self._spelled(cursor.fetchall())}


def _load_texts(adapters: AdaptersMap) -> None:
    """Have every value read as PostgreSQL prints it; it is a text already if its type is unknown.

    A cast to text would change char(n) and inet.
    """
    for known in psycopg.adapters.types:
        for oid in (known.oid, known.array_oid):
            if oid:
                adapters.register_loader(oid, TextLoader)


class SqliteSide:
    """A table of a SQLite file, read within one transaction."""

    def __init__(self, connection: sqlite3.Connection, layout: TableLayout) -> None:
        self._connection = connection
        self._layout = layout
        schema = layout.schema
        columns = ", ".join(map(quote, layout.names))
        table = quote(table_name(schema.schema, schema.table))
        self._select = f"SELECT {columns} FROM {table}"
        self._count = f"SELECT count(*) FROM {table}"
        key = ", ".join(map(quote, layout.key))
        self._order = f" ORDER BY {key}" if key else ""

    def count(self) -> int:
        return int(self._connection.execute(self._count).fetchone()[0])

    def slices(self) -> Generator[list[Row], None, None]:
        cursor = self._connection.execute(self._select + self._order)
        while rows := cursor.fetchmany(SLICE_ROWS):
            yield self._spelled(rows)

    def find(self, keys: Sequence[str]) -> dict[str, Row]:
        layout = self._layout
        match = " AND ".join(f"{quote(name)} = ?" for name in layout.key)
        found: dict[str, Row] = {}
        for key in keys:
            values = [
                to_sqlite(layout.families[name], text)
                for name, text in zip(layout.key, json.loads(key), strict=True)
            ]
            for row in self._connection.execute(f"{self._select} WHERE {match}", values):
                found[key] = self._spelled([row])[0]
        return found

    def _spelled(self, rows: list[Sequence[Any]]) -> list[Row]:
        if not rows:
            return []
        columns = zip(*rows, strict=True)
        spelled = (
            spelling.column_from_sqlite(column)
            for spelling, column in zip(self._layout.spellings, columns, strict=True)
        )
        return list(zip(*spelled, strict=True))


class Replica:
    """A target opened for reading; state and tables are read in one transaction."""

    def __init__(self, url: str) -> None:
        self._kind, self._path = split_url(url)
        self.name = display_url(url)
        self._sqlite: sqlite3.Connection | None = None
        self._postgres: psycopg.Connection[Any] | None = None

    def open(self) -> TargetState:
        """Begin the read transaction; returns the saved state."""
        if self._kind == "sqlite":
            return self._open_sqlite()
        return self._open_postgres()

    def side(self, layout: TableLayout) -> Side:
        """One of its tables."""
        if self._sqlite is not None:
            return SqliteSide(self._sqlite, layout)
        assert self._postgres is not None
        return PostgresSide(self._postgres, layout)

    def close(self) -> None:
        """End reading; idempotent."""
        if self._sqlite is not None:
            self._sqlite.close()
        if self._postgres is not None:
            self._postgres.close()
        self._sqlite = self._postgres = None

    def _open_sqlite(self) -> TargetState:
        path = Path(self._path)
        if path.is_dir():
            raise TargetError(f"replica {path} is a directory; name the SQLite file in it")
        if not path.is_file():
            raise TargetError(
                f"there is no replica {path}; create it with cdc mirror, or correct the path"
            )
        try:
            connection = sqlite3.connect(
                path, isolation_level=None, timeout=30, check_same_thread=False
            )
            self._sqlite = connection
            connection.execute("BEGIN")
            return read_sqlite_state(path, connection)
        except sqlite3.Error as error:
            raise TargetError(f"SQLite file {path} is not a replica: {error}") from error

    def _open_postgres(self) -> TargetState:
        connection = connect_postgres(self._path, self.name)
        self._postgres = connection
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        return read_postgres_state(self._path, connection)


def require_conninfo(dsn: str) -> None:
    """Raise UsageError, which does not show the address, if libpq cannot read the address.

    An empty address is refused too: libpq would connect to its default database.
    """
    try:
        usable = bool(dsn.strip()) and bool(conninfo_to_dict(dsn))
    except psycopg.Error:
        usable = False
    if not usable:
        raise UsageError(
            "--source is not the address of a PostgreSQL database; "
            "write postgresql://user@host/database, or host=… dbname=…"
        )


def connect_postgres(dsn: str, name: str, **options: Any) -> psycopg.Connection[Any]:
    """A session that prints values in the format of the wire."""
    try:
        return open_session(dsn, **options)
    except psycopg.Error as error:
        raise NotAvailable(f"{name} cannot be reached: {shown(error)}") from error


@contextmanager
def reading_errors(table: str) -> Iterator[None]:
    """Turn every error of a database into NotAvailable."""
    try:
        yield
    except psycopg.Error as error:
        raise NotAvailable(f"{table} cannot be compared: {shown(error)}") from error
    except sqlite3.Error as error:
        raise NotAvailable(f"{table} cannot be compared: {error}") from error


def rollback_quietly(connection: psycopg.Connection[Any]) -> None:
    """End a transaction that has only read."""
    with suppress(psycopg.Error):
        connection.execute("ROLLBACK")
