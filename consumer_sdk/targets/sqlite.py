"""Mirror into a SQLite file, in WAL mode: readers see whole transactions and never wait.

Tables of schema public keep their name, others are called `schema.table`. The file also holds
`_tailrace_positions` and `_tailrace_copies`.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import TargetError
from consumer_sdk.targets.sql_rows import DuplicateKey
from consumer_sdk.targets.sql_target import SqlTarget
from consumer_sdk.targets.stored_values import sqlite_encoder
from consumer_sdk.targets.target import CannotAlter, Lane, MirrorCopy
from consumer_sdk.transport.private_files import (
    create_private,
    open_private,
    require_own,
    resolve_own,
)
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from consumer_sdk.targets.canonical import Spelling
    from consumer_sdk.targets.target import TableName, TargetState
    from consumer_sdk.wire.column_types import Column, TableSchema

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FileLock:
    """An exclusive lock, held from `acquire` to `release`; its file may remain."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._descriptor is not None

    def acquire(self) -> bool:
        """Take the lock; False if another process, or another lock of this process, holds it."""
        while True:
            descriptor = open_private(self._path)
            try:
                _lock(descriptor)
            except OSError:
                os.close(descriptor)
                return False
            if self._is_file(descriptor):
                self._descriptor = descriptor
                return True
            # The last holder removed the file in the meantime; a lock on that file excludes nobody.
            os.close(descriptor)

    def release(self, *, remove: bool = False) -> None:
        """Release the lock, and remove its file if asked to; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if sys.platform == "win32":  # Windows cannot remove an open file
            os.close(descriptor)
        if remove:
            with suppress(OSError):
                self._path.unlink()
        if sys.platform != "win32":
            os.close(descriptor)

    def _is_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


_ENDINGS = ("", "-wal", "-shm", "-journal")
BUSY_SECONDS = 30.0
# The declared type decides how SQLite stores a value; all other types are TEXT.
_TYPES = {"bool": "INTEGER", "int": "INTEGER", "float": "REAL", "bytea": "BLOB"}
# By the primary result code, https://www.sqlite.org/rescode.html
_REMEDIES = {
    sqlite3.SQLITE_NOTADB: "; choose another file",
    sqlite3.SQLITE_CORRUPT: "; delete the file, or restore it, and mirror anew",
    sqlite3.SQLITE_CANTOPEN: "; check the rights on the file and on its directory",
    sqlite3.SQLITE_READONLY: "; check the rights on the file and on its directory",
    sqlite3.SQLITE_FULL: "; make room, then start again",
    sqlite3.SQLITE_BUSY: "; end the program that keeps it locked, then start again",
}
_ROW_IDS = ("rowid", "_rowid_", "oid")
_LARGE = frozenset({"bytea", "json", "jsonb", "array", "other"})


class SqliteEngine:
    """One connection; every error of SQLite becomes a TargetError."""

    placeholder = "?"

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        with self._translated():
            return self._connection.execute(statement, values).rowcount

    def execute_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> int:
        with self._translated():
            return self._connection.executemany(statement, rows).rowcount

    def insert_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._translated():
            if len(rows) == 1:
                self._connection.execute(statement, rows[0])
                return
            self._connection.execute("SAVEPOINT rows")
            try:
                self._connection.executemany(statement, rows)
            except sqlite3.IntegrityError:
                self._connection.execute("ROLLBACK TO rows")
                raise
            finally:
                self._connection.execute("RELEASE rows")

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._translated():
            return self._connection.execute(statement, values).fetchall()

    def quote(self, name: str) -> str:
        return quote(name)

    def encoder(self, column: Column) -> Callable[[Any, bool], Any] | None:
        return sqlite_encoder(column)

    def equals(self, column: Column) -> str:
        return f"{quote(column.name)} = ?"

    def key_equals(self, table: str, names: Sequence[str]) -> str:  # noqa: ARG002
        return " AND ".join(f"{quote(name)} = ?" for name in names)

    def printed(self, name: str) -> str:
        return quote(name)

    def canonical(self, spelling: Spelling, printed: Any) -> str | None:
        return spelling.from_sqlite(printed)

    def row_id(self, names: Iterable[str]) -> str:
        taken = {name.lower() for name in names}
        for name in _ROW_IDS:
            if name not in taken:
                return name
        raise TargetError("a table has columns rowid, _rowid_ and oid; SQLite needs one of them")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise DuplicateKey(str(error)) from error
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            remedy = _REMEDIES.get(code, "")
            raise TargetError(f"SQLite file {self._path}: {error}{remedy}") from error
        except (OverflowError, ValueError) as error:
            raise TargetError(f"SQLite file {self._path}: {error}") from error


def quote(name: str) -> str:
    """A quoted name for a statement."""
    return '"' + name.replace('"', '""') + '"'


def table_name(schema: str, table: str) -> str:
    """The name of a table in the file."""
    if schema == "public" and "." not in table:
        return table
    return f"{schema}.{table}"


class SqliteTarget(SqlTarget):
    """A SQLite file that is kept equal to the source."""

    positions_table = "_tailrace_positions"
    copies_table = "_tailrace_copies"
    unsigned_type = "INTEGER"

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._file = self.path
        self._lock = FileLock(_beside(self._file, ".mirror-lock"))
        self._is_new = False
        self._connection: sqlite3.Connection | None = None
        self._opened: SqliteEngine | None = None

    @property
    def _engine(self) -> SqliteEngine:
        assert self._opened is not None, "the target is not open"
        return self._opened

    def rows(self, table: str, schema: str = "public") -> list[dict[str, Any]]:
        """The rows of a live table as readers see them, on a connection of their own."""
        with sqlite3.connect(self.path) as reader:
            cursor = reader.execute(f"SELECT * FROM {quote(table_name(schema, table))}")
            names = [column[0] for column in cursor.description]
            found = [dict(zip(names, row, strict=True)) for row in cursor]
        reader.close()
        return found

    def open(self) -> None:
        if self.path.is_dir():
            raise TargetError(f"SQLite file {self.path} is a directory; name a file in it")
        try:
            # Two mirrors that name the file by different links must find the same lock.
            self._file = resolve_own(self.path)
            self._lock = FileLock(_beside(self._file, ".mirror-lock"))
            for ending in _ENDINGS:
                require_own(_beside(self._file, ending))
            locked = self._lock.acquire()
        except OSError as error:
            raise TargetError(
                f"SQLite file {self.path} cannot be written: {error.strerror}"
            ) from error
        if not locked:
            raise TargetError(f"SQLite file {self.path}: another mirror is writing to it")
        self._is_new = not self._file.exists()
        try:
            if self._is_new:
                self._create_file()
            self._connect()
        except BaseException:
            self.close()
            raise

    def _create_file(self) -> None:
        """Create the file with mode 0600, which SQLite also gives to the files beside it."""
        try:
            os.close(create_private(self._file))
        except OSError as error:
            raise TargetError(
                f"SQLite file {self.path} cannot be written: {error.strerror}"
            ) from error

    def _connect(self) -> None:
        try:
            connection = sqlite3.connect(
                self._file,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                cached_statements=1024,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise TargetError(f"SQLite file {self.path}: {error}") from error
        self._connection = connection
        self._opened = SqliteEngine(self.path, connection)
        self._has_state = self._find_state()
        if self._has_state:
            self._configure()

    def _configure(self) -> None:
        """Set WAL mode, which the file keeps, and the settings of this connection."""
        mode = self._engine.query("PRAGMA journal_mode = WAL")[0][0]
        if mode != "wal":
            raise TargetError(f"SQLite file {self.path} cannot use WAL mode; move it to a disk")
        # Position and rows are in one file, so a commit lost in a power cut is applied again.
        for setting in (
            "synchronous = NORMAL",
            "cache_size = -65536",
            "temp_store = MEMORY",
            "legacy_alter_table = ON",
            "foreign_keys = OFF",
        ):
            self._engine.execute(f"PRAGMA {setting}")

    def close(self) -> None:
        connection, self._connection, self._opened = self._connection, None, None
        if connection is not None:
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.rollback()
            connection.close()
        self._forget_writers()
        if self._lock.held and self._is_new and not self._has_state:
            for ending in _ENDINGS:
                _beside(self._file, ending).unlink(missing_ok=True)
        self._lock.release(remove=not self._has_state)

    def interrupt(self) -> None:
        connection = self._connection
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.interrupt()

    def begin(self) -> None:
        if self._has_state:
            self._engine.execute("BEGIN IMMEDIATE")
        else:
            self._configure()
            self._engine.execute("BEGIN IMMEDIATE")
            self._create_state()

    def commit(self) -> None:
        self._finish_writers()
        self._engine.execute("COMMIT")
        self._has_state = True

    def rollback(self) -> None:
        self._forget_writers()
        assert self._connection is not None
        # After a full disk, SQLite has rolled back already.
        if self._connection.in_transaction:
            self._engine.execute("ROLLBACK")

    def alter(self, copy: MirrorCopy, schema: TableSchema) -> None:
        self._writers.pop((copy.lane, copy.name), None)
        before = {column.name for column in copy.schema.columns}
        after = {column.name: column for column in schema.columns}
        try:
            for name in sorted(before - after.keys()):
                self._engine.execute(
                    f"ALTER TABLE {self._physical(copy)} DROP COLUMN {quote(name)}"
                )
            for name, column in after.items():
                if name not in before:
                    self._engine.execute(
                        f"ALTER TABLE {self._physical(copy)} ADD COLUMN {self._definition(column)}"
                    )
        except TargetError as error:
            raise CannotAlter(str(error)) from error

    def _physical(self, copy: MirrorCopy) -> str:
        name = table_name(*copy.name)
        return quote(name if copy.lane is Lane.LIVE else f"_tailrace_next:{name}")

    def _create_table(self, copy: MirrorCopy) -> None:
        if not copy.schema.columns:
            raise TargetError(
                f"table {format_table_name(*copy.name)} has no columns any more, and SQLite has no "
                "such tables; add a column"
            )
        super()._create_table(copy)

    def _definition(self, column: Column) -> str:
        return f"{quote(column.name)} {_TYPES.get(column.family, 'TEXT')}"

    def _is_indexable(self, column: Column) -> bool:
        return column.family not in _LARGE

    def _index_name(self, copy: MirrorCopy) -> str:
        # Index names are unique in a file, and the live copy may have such an index too.
        return quote(f"_tailrace_rows:{secrets.token_hex(8)}:{table_name(*copy.name)}")

    def _find_state(self) -> bool:
        return bool(
            self._engine.query(
                "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?",
                (self.copies_table,),
            )
        )

    def require_room(self, copies: Sequence[MirrorCopy]) -> None:
        """Also raise TargetError if the names of two tables in the file differ at most in case."""
        super().require_room(copies)
        names: dict[bytes, TableName] = {}
        for table in [*(copy.name for copy in self.read_state().copies), *(c.name for c in copies)]:
            name = table_name(*table)
            # SQLite ignores the case of ASCII letters only.
            other = names.setdefault(name.encode().lower(), table)
            if other != table:
                raise TargetError(
                    f"SQLite file {self.path} cannot hold both {format_table_name(*other)} and "
                    f"{format_table_name(*table)}: both would be called {name!r}, and SQLite "
                    "ignores case; mirror one of them into another file"
                )

    def _refuse_foreign(self, copy: MirrorCopy) -> None:
        name = table_name(*copy.name)
        found = self._engine.query(
            "SELECT name FROM sqlite_master "
            "WHERE lower(name) = lower(?) AND type IN ('table', 'view')",
            (name,),
        )
        ours = {table_name(*name) for name in self.read_state().lane(Lane.LIVE)} if found else ()
        if found and (found[0][0] not in ours or found[0][0] != name):
            raise TargetError(
                f"SQLite file {self.path} already has {found[0][0]!r}, which this mirror did not "
                f"make for {format_table_name(*copy.name)}; drop it or choose another file"
            )

    def _replace_live(self, copy: MirrorCopy) -> None:
        live = table_name(*copy.name)
        indexes = self._engine.query(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ? "
            "AND sql IS NOT NULL AND substr(name, 1, 10) <> '_tailrace_'",
            (live,),
        )
        self._engine.execute(f"DROP TABLE IF EXISTS {quote(live)}")
        self._engine.execute(f"ALTER TABLE {self._physical(copy)} RENAME TO {quote(live)}")
        for _, statement in indexes:
            # Indexes that readers created are created again, unless their column was dropped.
            with suppress(TargetError, DuplicateKey):
                self._engine.execute(statement)


def read_sqlite_state(path: Path, connection: sqlite3.Connection) -> TargetState:
    """The saved state of a mirror, read over a reader's connection."""
    target = SqliteTarget(path)
    target._opened = SqliteEngine(path, connection)
    return target.read_state()
