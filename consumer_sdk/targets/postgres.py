"""Mirror into a PostgreSQL database: the same schemas, tables, column types and keys.

State is kept in schema `tailrace`. A type that the database lacks becomes its base type, or text.
Types whose values name objects of the source, such as `regclass`, become text. A table is replaced
by DELETE and INSERT, so that a reader's snapshot sees either all old or all new rows.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import psycopg
from psycopg import errors

from consumer_sdk.errors import TargetError
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.targets.sql_rows import DuplicateKey
from consumer_sdk.targets.sql_target import SqlTarget
from consumer_sdk.targets.stored_values import postgres_encoder
from consumer_sdk.targets.target import CannotAlter, CopyState, Lane, MirrorCopy
from consumer_sdk.targets.target_url import display_url
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from consumer_sdk.targets.canonical import Spelling
    from consumer_sdk.targets.target import TargetState
    from consumer_sdk.wire.column_types import Column, TableSchema

FIRST_USER_OID: Final = 16384
# The values of these types name objects of the source: regproc to regcollation, and aclitem.
_NAMING_OBJECTS: Final = frozenset(
    {24, 1033, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191}
)
# Types without an = operator, or whose = ignores differences in the text (1.0 and 1.00).
_COMPARED_AS_TEXT: Final = frozenset({"numeric", "interval", "json", "jsonb", "other"})
SESSION = (
    "-c client_encoding=UTF8 -c datestyle=ISO -c timezone=UTC -c intervalstyle=postgres "
    "-c extra_float_digits=1 -c bytea_output=hex"
)
CONNECT_SECONDS = 10
COPY_ROWS = 50
_INDEXABLE = frozenset({"bool", "int", "float", "timestamp", "timestamptz", "date", "time", "uuid"})
_INDEXED_COLUMNS = 3


class PostgresEngine:
    """One connection; every error of PostgreSQL becomes a TargetError that shows no row values."""

    placeholder = "%s"

    def __init__(self, name: str, connection: psycopg.Connection[Any]) -> None:
        self._name = name
        self.connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        with self.translated():
            return self.connection.execute(statement, tuple(values)).rowcount

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> int:
        with self.translated(), self.connection.cursor() as cursor:
            cursor.executemany(statement, rows)
            return cursor.rowcount

    def insert_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        with self.translated(), self.connection.transaction():
            if len(rows) < COPY_ROWS:
                with self.connection.cursor() as cursor:
                    cursor.executemany(statement, rows)
            else:
                self._copy(statement, rows)

    def _copy(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        table = statement.removeprefix("INSERT INTO ").rpartition(" VALUES (")[0].replace("%%", "%")
        with self.connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.translated():
            return self.connection.execute(statement, tuple(values)).fetchall()

    def quote(self, name: str) -> str:
        return quote(name)

    def encoder(self, column: Column) -> Callable[[Any, bool], Any] | None:
        return postgres_encoder(column)

    def equals(self, column: Column) -> str:
        name = quote(column.name)
        if column.family == "jsonb":
            # PostgreSQL prints both values, because an event may write a number differently.
            return f"{name}::text = %s::jsonb::text"
        if _is_compared_as_text(column):
            return f"format('%%s', {name}) = %s"
        return f"{name} = %s"

    def printed(self, name: str) -> str:
        return printed(quote(name)).replace("'%s'", "'%%s'")

    def canonical(self, spelling: Spelling, printed: Any) -> str | None:
        return spelling.from_text(printed)

    def row_id(self, names: Iterable[str]) -> str:  # noqa: ARG002
        # No user column can have the name of a system column.
        return "ctid"

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except errors.UniqueViolation as error:
            raise DuplicateKey(_first_line(error)) from error
        except errors.InsufficientPrivilege as error:
            raise TargetError(
                f"{self._name}: {_first_line(error)}; grant that to the role, or use the owner's"
            ) from error
        except psycopg.Error as error:
            raise TargetError(f"{self._name}: {_first_line(error)}") from error


def quote(name: str) -> str:
    """A quoted name for a statement with placeholders."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def printed(name: str) -> str:
    """An expression for the text of a value; a cast to text would change char(n) and inet."""
    return f"CASE WHEN {name} IS DISTINCT FROM NULL THEN format('%s', {name}) END"


def _first_line(error: psycopg.Error) -> str:
    # The detail of the error would show row values.
    return error.diag.message_primary or str(error).partition("\n")[0]


class PostgresTarget(SqlTarget):
    """A PostgreSQL database that is kept equal to the source."""

    positions_table = "tailrace.positions"
    copies_table = "tailrace.copies"
    unsigned_type = "numeric(20)"

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.name = f"target {display_url(url)}"
        self._opened: PostgresEngine | None = None
        self._types: dict[tuple[str, int, int, int], str] = {}

    @property
    def _engine(self) -> PostgresEngine:
        assert self._opened is not None, "the target is not open"
        return self._opened

    def rows(self, table: str, schema: str = "public") -> list[dict[str, Any]]:
        """The rows of a live table as readers see them, on a connection of their own."""
        from psycopg.rows import dict_row

        with psycopg.connect(self._url, options=SESSION, row_factory=dict_row) as reader:
            statement = f"SELECT * FROM {quote(schema)}.{quote(table)}"
            return reader.execute(statement).fetchall()

    def open(self) -> None:
        try:
            connection = psycopg.connect(
                self._url, autocommit=True, options=SESSION, connect_timeout=CONNECT_SECONDS
            )
        except psycopg.Error as error:
            raise TargetError(f"{self.name} cannot be reached: {_first_line(error)}") from error
        self._opened = PostgresEngine(self.name, connection)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        lock = crc32(b"tailrace mirror")
        if not self._engine.query("SELECT pg_try_advisory_lock(%s)", (lock,))[0][0]:
            raise TargetError(f"{self.name}: another mirror is writing to it")
        if self._engine.query("SHOW transaction_read_only")[0][0] == "on":
            raise TargetError(
                f"{self.name} is read-only; choose a primary that accepts writes, or turn "
                "default_transaction_read_only off"
            )
        # Position and rows are in one database, so a commit lost in a crash is applied again.
        self._engine.execute("SET synchronous_commit = off")
        self._has_state = self._find_state()

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.connection.close()
        self._forget_writers()

    def interrupt(self) -> None:
        opened = self._opened
        if opened is not None:
            with suppress(psycopg.Error):
                opened.connection.cancel_safe(timeout=CONNECT_SECONDS)

    def begin(self) -> None:
        self._engine.execute("BEGIN")
        if not self._has_state:
            self._create_own_schema()
            self._create_state()

    def _create_own_schema(self) -> None:
        try:
            self._engine.execute("CREATE SCHEMA IF NOT EXISTS tailrace")
        except TargetError as error:
            reason = error.__cause__
            if not isinstance(reason, errors.InsufficientPrivilege):
                raise
            info = self._engine.connection.info
            right = f"CREATE ON DATABASE {quote(info.dbname)} TO {quote(info.user)}"
            raise TargetError(
                f"{self.name}: {_first_line(reason)}, where the mirror makes schema tailrace for "
                f"its state; run: GRANT {right.replace('%%', '%')}"
            ) from error

    def commit(self) -> None:
        self._finish_writers()
        self._engine.execute("COMMIT")
        self._has_state = True

    def _find_state(self) -> bool:
        found = self._engine.query("SELECT to_regclass(%s) IS NOT NULL", (self.copies_table,))
        return bool(found[0][0])

    def rollback(self) -> None:
        self._forget_writers()
        with suppress(TargetError):
            self._engine.execute("ROLLBACK")

    def alter(self, copy: MirrorCopy, schema: TableSchema) -> None:
        self._writers.pop((copy.lane, copy.name), None)
        before = {column.name: column for column in copy.schema.columns}
        after = {column.name: column for column in schema.columns}
        changes = [f"DROP COLUMN {quote(name)}" for name in before if name not in after]
        for name, column in after.items():
            if name not in before:
                changes.append(f"ADD COLUMN {self._definition(column)}")
            elif column.data_type != before[name].data_type:
                changes.append(f"ALTER COLUMN {quote(name)} TYPE {self._type(column)}")
        if not changes:
            return
        try:
            with self._engine.connection.transaction():
                self._engine.execute(f"ALTER TABLE {self._physical(copy)} {', '.join(changes)}")
        except TargetError as error:
            raise CannotAlter(str(error)) from error

    def _physical(self, copy: MirrorCopy) -> str:
        schema, table = copy.name
        if copy.lane is Lane.LIVE:
            return f"{quote(schema)}.{quote(table)}"
        # PostgreSQL cuts names at 63 bytes; the checksum makes long names differ.
        mark = f"{crc32(f'{schema}.{table}'.encode()):08x}"
        return f"tailrace.{quote(f'next_{mark}_{table[:30]}')}"

    def _create_table(self, copy: MirrorCopy) -> None:
        self._refuse_foreign(copy)
        key = key_columns(copy.schema)
        columns = [self._definition(column) for column in copy.schema.columns]
        if key:
            columns.append(f"PRIMARY KEY ({', '.join(map(quote, key))})")
        self._engine.execute(f"CREATE TABLE {self._physical(copy)} ({', '.join(columns)})")
        if not key:
            self._index_columns(copy)

    def _index_columns(self, copy: MirrorCopy) -> None:
        """Index some columns of a table without a key, whose rows are found by their values."""
        small = [column.name for column in copy.schema.columns if column.family in _INDEXABLE]
        if copy.schema.replica_identity == "full" and small:
            listed = ", ".join(map(quote, small[:_INDEXED_COLUMNS]))
            self._engine.execute(f"CREATE INDEX ON {self._physical(copy)} ({listed})")

    def _refuse_foreign(self, copy: MirrorCopy) -> None:
        found = self._engine.query(
            "SELECT c.relname FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s",
            copy.name,
        )
        if found and copy.name not in self.read_state().lane(Lane.LIVE):
            raise TargetError(
                f"{self.name} already has {format_table_name(*copy.name)}, which this mirror did "
                "not make; drop or rename it, or choose another database"
            )

    def _replace_live(self, copy: MirrorCopy) -> None:
        schema, table = copy.name
        live = f"{quote(schema)}.{quote(table)}"
        next_table = self._physical(copy)
        if self._same_columns(copy):
            # Older transactions keep their rows, which they would not after TRUNCATE or DROP.
            listed = ", ".join(quote(column.name) for column in copy.schema.columns)
            self._engine.execute(f"DELETE FROM {live}")
            self._engine.execute(f"INSERT INTO {live} ({listed}) SELECT {listed} FROM {next_table}")
            self._engine.execute(f"DROP TABLE {next_table}")
            return
        self._engine.execute(f"CREATE SCHEMA IF NOT EXISTS {quote(schema)}")
        self._engine.execute(f"DROP TABLE IF EXISTS {live}")
        name = next_table.partition(".")[2]
        self._engine.execute(f"ALTER TABLE {next_table} SET SCHEMA {quote(schema)}")
        self._engine.execute(f"ALTER TABLE {quote(schema)}.{name} RENAME TO {quote(table)}")

    def _same_columns(self, copy: MirrorCopy) -> bool:
        """Whether there is a live table with the columns and key of the next copy."""
        live = copy.become(CopyState.LIVE)
        return self._structure(live) == self._structure(copy) != []

    def _structure(self, copy: MirrorCopy) -> list[tuple[Any, ...]]:
        name = self._physical(copy).replace("%%", "%")
        return self._engine.query(
            "SELECT a.attname, a.atttypid, a.atttypmod, EXISTS (SELECT FROM pg_catalog.pg_index i "
            "WHERE i.indrelid = a.attrelid AND i.indisprimary AND a.attnum = ANY (i.indkey)) "
            "FROM pg_catalog.pg_attribute a WHERE a.attrelid = to_regclass(%s) "
            "AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attname",
            (name,),
        )

    def _definition(self, column: Column) -> str:
        return f"{quote(column.name)} {self._type(column)}"

    def _type(self, column: Column) -> str:
        """The column's type if the database has it, else the type behind it, else text."""
        wanted = (column.data_type, column.base_type_oid, column.element_oid, column.type_modifier)
        known = self._types.get(wanted)
        if known is None:
            known = self._types[wanted] = self._find_type(column)
        return known

    def _find_type(self, column: Column) -> str:
        if _names_objects(column):
            return "text[]" if column.family == "array" else "text"
        if self._engine.query("SELECT to_regtype(%s) IS NOT NULL", (column.data_type,))[0][0]:
            return column.data_type.replace("%", "%%")
        for oid, suffix in ((column.base_type_oid, ""), (column.element_oid, "[]")):
            if 0 < oid < FIRST_USER_OID:
                found = self._engine.query(
                    "SELECT format_type(%s::oid, %s)", (oid, column.type_modifier)
                )
                return str(found[0][0]) + suffix
        return "text[]" if column.family == "array" else "text"


def _names_objects(column: Column) -> bool:
    """Whether its values name objects, and can be stored only where these objects exist."""
    return not _NAMING_OBJECTS.isdisjoint((column.base_type_oid, column.element_oid))


def _is_compared_as_text(column: Column) -> bool:
    """Whether values of the column are compared by the text that PostgreSQL prints."""
    return (column.element_family or column.family) in _COMPARED_AS_TEXT


def read_postgres_state(url: str, connection: psycopg.Connection[Any]) -> TargetState:
    """The saved state of a mirror, read over a reader's connection."""
    target = PostgresTarget(url)
    target._opened = PostgresEngine(target.name, connection)
    return target.read_state()
