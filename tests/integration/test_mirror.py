"""A mirror beside a real bridge: bootstrap, following, and what a reader of the file sees."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from typing import TYPE_CHECKING, Any

from tests.fixtures.mirror import Workload, sqlite_rows, wait_equal
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


class Reader(threading.Thread):
    """Polls the file like any application and remembers every state that was not whole."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._done = threading.Event()
        self.looks = 0
        self.broken: list[tuple[Any, ...]] = []

    def run(self) -> None:
        with contextlib.closing(sqlite3.connect(self._path, timeout=30)) as connection:
            while not self._done.is_set():
                try:
                    row = connection.execute(
                        "SELECT (SELECT amount FROM accounts WHERE id = 0), "
                        "(SELECT amount FROM ledger WHERE id = 0), "
                        '(SELECT amount FROM "sales.orders" WHERE id = 0)'
                    ).fetchone()
                except sqlite3.OperationalError as error:
                    if "no such table" not in str(error):
                        raise
                    continue
                self.looks += 1
                if len(set(row)) != 1 or row[0] is None:
                    self.broken.append(row)

    def stop(self) -> None:
        self._done.set()
        self.join()


def test_bootstrap_under_load_shows_only_whole_transactions(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    Workload.create(database.dsn)
    database.publish(*Workload.TABLES)
    bridge_process()
    path = tmp_path / "replica.db"
    with Workload(database.dsn) as workload:
        workload.wait_for(20)
        mirror = mirror_process(*Workload.TABLES, "--into", f"sqlite:///{path}")
        reader = Reader(path)
        reader.start()
        mirror.wait_logged("event=loaded")
        workload.wait_for(200)
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)
    reader.stop()
    assert reader.looks > 0
    assert reader.broken == []
    mirror.interrupt()
    assert mirror.wait() == 0


def test_rows_keep_their_identity_whatever_a_transaction_does_to_them(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    wide = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 300) n)"
    for statement in (
        "CREATE TABLE plain (id int PRIMARY KEY, name text, body text)",
        "CREATE TABLE pairs (a int, b text, v text, PRIMARY KEY (a, b))",
        "CREATE TABLE swapped (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, body text)",
        "ALTER TABLE swapped REPLICA IDENTITY FULL",
        "CREATE TABLE bag (a int, b text)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "CREATE TABLE coded (code text NOT NULL, id int, UNIQUE (code))",
        "ALTER TABLE coded REPLICA IDENTITY USING INDEX coded_code_key",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, parent_id int)",
        "ALTER TABLE child ADD FOREIGN KEY (parent_id) REFERENCES parent "  # noqa: ISC004
        "ON DELETE CASCADE ON UPDATE CASCADE",
        "CREATE TABLE log_only (line text)",
    ):
        database.execute(statement)
    tables = ("plain", "pairs", "swapped", "bag", "coded", "parent", "child", "log_only")
    database.publish(*tables)
    bridge_process()
    path = tmp_path / "replica.db"
    database.execute(f"INSERT INTO plain VALUES (1, 'one', {wide}), (2, 'two', {wide})")
    database.execute("INSERT INTO bag SELECT i / 3, NULL FROM generate_series(0, 11) i")
    mirror = mirror_process(*tables, "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, *tables, mirror=mirror)
    for transaction in (
        # Keys move while their bodies, stored out of line, are not logged again.
        ["UPDATE plain SET id = id + 10", "UPDATE plain SET name = 'moved' WHERE id = 11"],
        ["UPDATE plain SET id = -1 WHERE id = 11", "UPDATE plain SET id = 11 WHERE id = 12",
         "UPDATE plain SET id = 12 WHERE id = -1"],
        ["INSERT INTO pairs VALUES (1, 'x', 'v'), (1, 'y', 'w')",
         "UPDATE pairs SET a = 2, b = 'z' WHERE b = 'x'", "UPDATE pairs SET v = NULL"],
        [f"INSERT INTO swapped SELECT i, i || {wide} FROM generate_series(1, 5) i"],
        ["UPDATE swapped SET id = id % 5 + 1"],
        ["UPDATE swapped SET id = 6 - id", "DELETE FROM swapped WHERE id = 3",
         "INSERT INTO swapped VALUES (3, 'new')", "UPDATE swapped SET body = 'x' WHERE id = 1"],
        ["INSERT INTO swapped VALUES (2, 'second')",
         "DELETE FROM swapped WHERE id = 2 AND body <> 'second'"],
        ["DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 1)",
         "UPDATE bag SET b = 'x' WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 2)"],
        ["INSERT INTO coded VALUES ('a', 1), ('b', 2)", "UPDATE coded SET code = 'c' WHERE id = 1",
         "UPDATE coded SET id = 9 WHERE code = 'b'", "DELETE FROM coded WHERE code = 'c'"],
        ["INSERT INTO parent VALUES (1), (2)", "INSERT INTO child VALUES (1, 1), (2, 2), (3, 2)",
         "UPDATE parent SET id = 5 WHERE id = 2", "DELETE FROM parent WHERE id = 1"],
        ["TRUNCATE parent CASCADE", "INSERT INTO parent VALUES (7)",
         "INSERT INTO child VALUES (70, 7)"],
        ["INSERT INTO log_only VALUES ('same'), ('same'), (NULL)"],
        ["INSERT INTO plain VALUES (1, 'a', 'b')", "DELETE FROM plain WHERE id = 1",
         "INSERT INTO plain VALUES (1, 'again', NULL)"],
        ["TRUNCATE plain, bag", "INSERT INTO bag VALUES (NULL, NULL), (NULL, NULL)"],
    ):  # fmt: skip
        with database.connect(autocommit=True) as connection, connection.transaction():
            for statement in transaction:
                connection.execute(statement)
        wait_equal(database.dsn, path, *tables, mirror=mirror)


def test_fifty_tables_become_visible_together(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    tables = [f"t{n}" for n in range(50)]
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        database.execute(f"INSERT INTO {table} SELECT i, 'v' || i FROM generate_series(1, 20) i")
    database.publish(*tables)
    bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("--all", "--into", f"sqlite:///{path}")
    seen: list[int] = []

    def visible() -> int:
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as connection:
            count = connection.execute(
                "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name LIKE 't%'"
            ).fetchone()[0]
        seen.append(count)
        return int(count)

    wait_until(lambda: path.exists() and visible() == 50, 90, mirror.describe)
    assert set(seen) <= {0, 50}
    for table in tables:
        database.execute(f"UPDATE {table} SET v = 'changed' WHERE id = 7")
    wait_equal(database.dsn, path, *tables, mirror=mirror)


def test_a_huge_transaction_shows_at_once(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE big (id int PRIMARY KEY, v text)")
    database.publish("big")
    bridge_process("--pack")
    path = tmp_path / "replica.db"
    mirror = mirror_process("big", "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, "big", mirror=mirror)
    database.execute("INSERT INTO big SELECT i, 'value ' || i FROM generate_series(1, 60000) i")
    counts: set[int] = set()

    def complete() -> bool:
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as connection:
            counts.add(connection.execute("SELECT count(*) FROM big").fetchone()[0])
        return 60000 in counts

    wait_until(complete, 60, mirror.describe)
    assert counts <= {0, 60000}
    database.execute("DELETE FROM big WHERE id % 2 = 0")
    wait_equal(database.dsn, path, "big", mirror=mirror)


def test_all_follows_tables_published_later(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE first (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("--all", "--into", f"sqlite:///{path}")
    database.execute("INSERT INTO first VALUES (1, 'x')")
    wait_equal(database.dsn, path, "first", mirror=mirror)
    database.execute("CREATE TABLE second (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO second SELECT i, 'y' FROM generate_series(1, 1000) i")
    database.execute("INSERT INTO first VALUES (2, 'z')")
    wait_equal(database.dsn, path, "first", "second", mirror=mirror)
    database.execute("DELETE FROM second WHERE id > 10")
    wait_equal(database.dsn, path, "first", "second", mirror=mirror)


def test_once_ends_with_everything_stored_at_its_start(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, v text)")
    database.execute("CREATE TABLE busy (id int PRIMARY KEY)")
    database.execute("INSERT INTO users SELECT i, 'v' FROM generate_series(1, 100) i")
    database.publish("users", "busy")
    bridge = bridge_process()
    path = tmp_path / "replica.db"
    for step in range(1, 4):
        mirror = mirror_process("users", "--into", f"sqlite:///{path}", "--once")
        assert mirror.wait() == 0, mirror.describe()
        assert len(sqlite_rows(path, "users") or []) == 99 + step
        wait_equal(database.dsn, path, "users", timeout=1)
        database.execute("INSERT INTO users VALUES (%s, 'later')", [1000 + step])
        # Other tables go on; nothing more of ours is in the stream.
        published = bridge.status()["cdc_events_published"]
        database.execute("INSERT INTO busy VALUES (%s)", [step])
        wait_until(lambda before=published: bridge.status()["cdc_events_published"] > before)
