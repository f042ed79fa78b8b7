"""Mirror into a PostgreSQL database: the same schemas, tables, column types and keys.

State is kept in schema `tailrace`. A type that the database lacks becomes its base type, or text.
Types whose values name objects of the source, such as `regclass`, become text. A table is replaced
by DELETE and INSERT, so that a reader's snapshot sees either all old or all new rows.

Nothing that another user of the database created is called: the search path is empty, operators of
keys come from the operator class of their index, and a domain, whose checks are code, is used only
if its owner is trusted.
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from consumer_sdk.errors import TargetError
from consumer_sdk.targets.sql_rows import DuplicateKey
from consumer_sdk.targets.sql_target import SqlTarget
from consumer_sdk.targets.stored_values import postgres_encoder
from consumer_sdk.targets.target import CannotAlter, CopyState, Lane, MirrorCopy
from consumer_sdk.targets.target_url import display_url
from consumer_sdk.wire.escaping import printable, sql_identifier
from consumer_sdk.wire.server_messages import without_values
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
_SESSION: Final = (
    "-c client_encoding=UTF8 -c datestyle=ISO -c timezone=UTC -c intervalstyle=postgres "
    "-c extra_float_digits=1 -c bytea_output=hex -c search_path="
)
# A connection pooler may ignore the options of a connection.
_PIN_SEARCH_PATH: Final = "SELECT pg_catalog.set_config('search_path', '', false)"
# The operator of an index on the column finds rows by their key. With an empty search path, it has
# to be named if it belongs to an extension, such as that of citext.
_OPERATORS: Final = """
WITH RECURSIVE base(name, oid, typtype, typbasetype) AS (
    SELECT a.attname, t.oid, t.typtype, t.typbasetype
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = pg_catalog.to_regclass(%s) AND a.attname = ANY (%s::text[])
  UNION ALL
    SELECT b.name, t.oid, t.typtype, t.typbasetype
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typbasetype
    WHERE b.typtype = 'd'
)
SELECT b.name, n.nspname, o.oprname
FROM base b
JOIN pg_catalog.pg_opclass c ON c.opcintype = b.oid AND c.opcdefault
JOIN pg_catalog.pg_am m ON m.oid = c.opcmethod AND m.amname = 'btree'
JOIN pg_catalog.pg_amop p ON p.amopfamily = c.opcfamily AND p.amopstrategy = 3
    AND p.amoplefttype = b.oid AND p.amoprighttype = b.oid
JOIN pg_catalog.pg_operator o ON o.oid = p.amopopr
JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
WHERE b.typtype <> 'd' AND n.nspname <> 'pg_catalog'
"""
# A domain or a type with fields may run checks that its owner wrote, so the owner must be one who
# could do that anyway: a superuser, the owner of the database, or the role of the mirror itself.
_FIND_TYPE: Final = """
SELECT pg_catalog.format_type(t.oid, %s)
FROM pg_catalog.pg_type t
LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
JOIN pg_catalog.pg_roles r ON r.oid = coalesce(e.typowner, t.typowner)
JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
WHERE t.oid = pg_catalog.to_regtype(%s)
  AND (coalesce(e.typtype, t.typtype) IN ('b', 'e', 'r', 'm') OR r.rolsuper OR d.datdba = r.oid
       OR r.rolname = current_user)
"""
# Whoever owns the schema of the state, or a table in it, decides which code runs on a write to it.
_FOREIGN_STATE: Final = """
SELECT o.kind, o.name, r.rolname
FROM (SELECT 'schema', n.nspname::text, n.nspowner
      FROM pg_catalog.pg_namespace n WHERE n.nspname = 'tailrace'
    UNION ALL
      SELECT 'table', n.nspname || '.' || c.relname, c.relowner
      FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
      WHERE n.nspname = 'tailrace' AND c.relkind IN ('r', 'p', 'v', 'm', 'f')) o(kind, name, owner)
JOIN pg_catalog.pg_roles r ON r.oid = o.owner
JOIN pg_catalog.pg_roles me ON me.rolname = current_user
JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
WHERE NOT (r.rolsuper OR r.oid IN (d.datdba, me.oid)
           OR (NOT me.rolsuper AND pg_catalog.pg_has_role(me.oid, r.oid, 'USAGE')))
ORDER BY o.kind, o.name LIMIT 1
"""
# Reading an ordinary table without row security runs nobody's code, whoever owns it.
_UNREADABLE_STATE: Final = """
SELECT c.relname FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'tailrace' AND c.relname IN ('positions', 'copies')
  AND (c.relkind <> 'r' OR c.relrowsecurity)
"""
_UNQUALIFIED: Final = re.compile(r'(?:"(?:[^"]|"")*"|[^".])*\Z')
_UNREADABLE: Final = (
    "its address cannot be read; in a password write / as %2F, ? as %3F, # as %23 and @ as %40"
)
# The function of PostgreSQL behind RAISE of PL/pgSQL, which sets any text with any SQLSTATE.
_RAISE: Final = "exec_stmt_raise"
CONNECT_SECONDS = 10
COPY_ROWS = 50
_INDEXABLE = frozenset({"bool", "int", "float", "timestamp", "timestamptz", "date", "time", "uuid"})


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
            return f"pg_catalog.format('%%s', {name}) = %s"
        return f"{name} = %s"

    def key_equals(self, table: str, names: Sequence[str]) -> str:
        with self.translated():
            operators = key_operators(self.connection, table.replace("%%", "%"), names)
        return " AND ".join(f"{quote(name)} {operators[name]} %s" for name in names)

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
            raise DuplicateKey(shown(error)) from error
        except errors.InsufficientPrivilege as error:
            raise TargetError(
                f"{self._name}: {shown(error)}; grant this to the role, or connect as the owner"
            ) from error
        except psycopg.Error as error:
            raise TargetError(f"{self._name}: {shown(error)}") from error


def quote(name: str) -> str:
    """A quoted name for a statement with placeholders."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def printed(name: str) -> str:
    """An expression for the text of a value; a cast to text would change char(n) and inet."""
    return f"CASE WHEN {name} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {name}) END"


def open_session(url: str, **parameters: Any) -> psycopg.Connection[Any]:
    """Open a session that prints values in the format of the wire, with an empty search path."""
    before = str(_read_address(url).get("options") or "")
    connection: psycopg.Connection[Any] = psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_SECONDS,
        options=f"{before} {_SESSION}".strip(),
        **parameters,
    )
    try:
        connection.execute(_PIN_SEARCH_PATH)
    except BaseException:
        connection.close()
        raise
    return connection


def _read_address(url: str) -> dict[str, Any]:
    """The parameters of an address; the error shows none, because they may be part of a password.

    If a password contains / or ?, libpq takes the rest of it as a port or a parameter.
    """
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise psycopg.ProgrammingError(_UNREADABLE) from None
    ports = str(given.get("port") or "").split(",")
    hosts = str(given.get("host") or "").split(",")
    # A host that begins with @ is an abstract socket.
    if not all(port.isdecimal() for port in ports if port) or any("@" in one[1:] for one in hosts):
        raise psycopg.ProgrammingError(_UNREADABLE)
    return given


def key_operators(
    connection: psycopg.Connection[Any], table: str, names: Sequence[str]
) -> dict[str, str]:
    """For each column the operator that compares it as an index does, by name."""
    found = connection.execute(_OPERATORS, (table, list(names))).fetchall()
    return dict.fromkeys(names, "=") | {
        name: f"OPERATOR({quote(schema)}.{operator})" for name, schema, operator in found
    }


def shown(error: psycopg.Error) -> str:
    """The message of an error without values of rows; a traceback shows no more than that."""
    kind, diag, state = type(error).__name__, error.diag, error.sqlstate
    if diag.source_function == _RAISE:
        state = errors.RaiseException.sqlstate
    text = without_values(kind, state, diag.message_primary, text=str(error))
    error.args = (text,)
    return text


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

        with open_session(self._url, row_factory=dict_row) as reader:
            statement = f"SELECT * FROM {quote(schema)}.{quote(table)}"
            return reader.execute(statement).fetchall()

    def open(self) -> None:
        try:
            connection = open_session(self._url)
        except psycopg.Error as error:
            raise TargetError(f"{self.name} cannot be reached: {shown(error)}") from error
        self._opened = PostgresEngine(self.name, connection)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        lock = crc32(b"tailrace mirror")
        if not self._engine.query("SELECT pg_catalog.pg_try_advisory_lock(%s)", (lock,))[0][0]:
            raise TargetError(f"{self.name}: another mirror is writing to it")
        if self._engine.query("SHOW transaction_read_only")[0][0] == "on":
            raise TargetError(
                f"{self.name} is read-only; choose a primary that accepts writes, or turn "
                "default_transaction_read_only off"
            )
        # Position and rows are in one database, so a commit lost in a crash is applied again.
        self._engine.execute("SET synchronous_commit = off")
        self._refuse_foreign_state()
        self._has_state = self._find_state()

    def _refuse_foreign_state(self) -> None:
        for kind, name, owner in self._engine.query(_FOREIGN_STATE):
            raise TargetError(
                f"{self.name}: {kind} {printable(name)} belongs to role {printable(owner)}, and "
                "the mirror keeps its state only where no other user's code can run; drop it, or "
                "make the mirror's role its owner"
            )

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
            # Another user may have made it since this mirror looked.
            self._refuse_foreign_state()
            self._create_state()

    def _create_own_schema(self) -> None:
        try:
            self._engine.execute("CREATE SCHEMA IF NOT EXISTS tailrace")
        except TargetError as error:
            reason = error.__cause__
            if not isinstance(reason, errors.InsufficientPrivilege):
                raise
            info = self._engine.connection.info
            names = sql_identifier(info.dbname), sql_identifier(info.user)
            right = "CREATE ON DATABASE {} TO {}".format(*names)
            raise TargetError(
                f"{self.name}: {shown(reason)}, where the mirror makes schema tailrace for "
                f"its state; run: GRANT {right}"
            ) from error

    def commit(self) -> None:
        self._finish_writers()
        self._engine.execute("COMMIT")
        self._has_state = True

    def _find_state(self) -> bool:
        found = self._engine.query(
            "SELECT pg_catalog.to_regclass(%s) IS NOT NULL", (self.copies_table,)
        )
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

    def _is_indexable(self, column: Column) -> bool:
        return column.family in _INDEXABLE

    def _index_name(self, copy: MirrorCopy) -> str:  # noqa: ARG002
        return ""

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
            "FROM pg_catalog.pg_attribute a WHERE a.attrelid = pg_catalog.to_regclass(%s) "
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
        # Schema documents name the types of schema public without it.
        is_qualified = _UNQUALIFIED.match(column.data_type) is None
        for name in (column.data_type, *(() if is_qualified else (f"public.{column.data_type}",))):
            known = self._engine.query(_FIND_TYPE, (column.type_modifier, name))
            if known:
                return str(known[0][0]).replace("%", "%%")
        for oid, suffix in ((column.base_type_oid, ""), (column.element_oid, "[]")):
            if 0 < oid < FIRST_USER_OID:
                found = self._engine.query(
                    "SELECT pg_catalog.format_type(%s::oid, %s)", (oid, column.type_modifier)
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
    for (name,) in target._engine.query(_UNREADABLE_STATE):
        raise TargetError(f"{target.name}: tailrace.{name} is not a table that a mirror has made")
    return target.read_state()
