"""`cdc mirror` with bad input, in other encodings, and into PostgreSQL."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgpack
import psycopg
import pytest

from consumer_sdk.wire.subjects import Subjects
from tests.fixtures.mirror import Workload, sqlite_rows, wait_equal
from tests.fixtures.oracle import table_difference
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def make_users(database: Any) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO users SELECT i, 'v' FROM generate_series(1, 100) i")
    database.publish("users")


def tables_in(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in rows if not name.startswith("_tailrace")}


def test_bad_input_ends_with_one_line_and_an_exit_code(
    database: Any, bridge_process: Any, mirror_process: Any, run_command: Any, prefix: str,
    nats_server: Any, tmp_path: Path,
) -> None:  # fmt: skip
    make_users(database)
    bridge = bridge_process()
    path = tmp_path / "replica.db"
    into = ("--into", f"sqlite:///{path}", "--prefix", prefix)

    def complaint(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
        done = run_command("cdc", "mirror", *arguments, environment=environment)
        assert done.stderr.count("\n") == 1, done.stderr
        return done.returncode, done.stderr

    assert complaint(*into)[0] == 2
    assert complaint("users", "--all", *into)[0] == 2
    assert complaint("users", "--into", "oracle://x", "--prefix", prefix)[0] == 2
    code, said = complaint("user", *into)
    assert (code, "did you mean users" in said) == (1, True), said
    code, said = complaint("users", "--into", f"sqlite:///{tmp_path}", "--prefix", prefix)
    assert code == 3, said
    code, said = complaint("users", "--into", "sqlite:////proc/nothing.db", "--prefix", prefix)
    assert (code, "cannot be written" in said) == (3, True), said
    away = {"NATS_URL": "nats://me:secret@127.0.0.1:1"}
    code, said = complaint("users", *into, "--timeout", "1", environment=away)
    assert (code, "secret" in said) == (3, False), said
    bridge.terminate()
    bridge.wait()
    code, said = complaint("users", *into)
    assert (code, "no bridge answers" in said) == (3, True), said
    assert tables_in(path) == set()


def test_a_second_mirror_on_the_same_file_is_refused(
    database: Any, bridge_process: Any, mirror_process: Any, run_command: Any, prefix: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    make_users(database)
    bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("users", "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, "users", mirror=mirror)
    done = run_command("cdc", "mirror", "users", "--into", f"sqlite:///{path}", "--prefix", prefix)
    assert done.returncode == 3
    assert "another mirror is writing" in done.stderr
    assert mirror.running


async def test_a_damaged_chunk_is_not_applied(
    database: Any, bridge_process: Any, mirror_process: Any, run_command: Any, prefix: str,
    nats_client: Any, tmp_path: Path,
) -> None:  # fmt: skip
    make_users(database)
    bridge_process()
    path = tmp_path / "replica.db"
    done = run_command("cdc", "snapshot", "users", "--prefix", prefix)
    assert done.returncode == 0, done.stderr
    subjects = Subjects(prefix)
    js = nats_client.jetstream()
    chunk = await js.get_last_msg(subjects.init_stream, f"{subjects.init}.snap.users.>")
    damaged = bytes([chunk.data[0]]) + bytes(len(chunk.data) - 1)
    headers = {**chunk.headers, "Nats-Msg-Id": "damaged"}
    await js.delete_msg(subjects.init_stream, chunk.seq)
    await js.publish(chunk.subject, damaged, headers=headers)
    # Its checksum tells; a new snapshot takes its place.
    mirror = mirror_process("users", "--into", f"sqlite:///{path}", "--once")
    assert mirror.wait() == 0, mirror.describe()
    assert "does not have its sha256" in mirror.log_text()
    wait_equal(database.dsn, path, "users", timeout=1)


async def test_a_newer_wire_version_stops_the_mirror_and_nothing_of_it_is_applied(
    database: Any, bridge_process: Any, mirror_process: Any, nats_client: Any, prefix: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    make_users(database)
    bridge = bridge_process()
    path = tmp_path / "replica.db"
    arguments = ("users", "--into", f"sqlite:///{path}")
    mirror = mirror_process(*arguments, "--once")
    assert mirror.wait() == 0, mirror.describe()
    database.execute("UPDATE users SET v = 'known' WHERE id = 1")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)
    js = nats_client.jetstream()
    subjects = Subjects(prefix)
    known = await js.get_last_msg(subjects.cdc_stream, subjects.change("users", "update"))
    document = msgpack.unpackb(known.data)
    newer = {
        **document,
        "v": 2,
        "lsn": document["lsn"] + 8,
        "msg_id": "newer",
        "data": {**document["data"], "v": "newer"},
    }
    headers = {**known.headers, "Nats-Msg-Id": "newer"}
    await js.publish(known.subject, msgpack.packb(newer), headers=headers)
    mirror = mirror_process(*arguments)
    assert mirror.wait(90) == 4, mirror.describe()
    assert "version" in mirror.log_text()
    values = {row["v"] for row in sqlite_rows(path, "users") or []}
    assert values <= {"v", "known"}


@pytest.mark.timeout(300)
def test_interrupt_ends_between_transactions_with_success(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    Workload.create(database.dsn, rows=200)
    database.publish(*Workload.TABLES)
    bridge_process()
    path = tmp_path / "replica.db"
    with Workload(database.dsn, writers=1) as workload:
        for _ in range(2):
            mirror = mirror_process(*Workload.TABLES, "--into", f"sqlite:///{path}")
            # Its own start and that of the snapshot's workers, which give way to everything.
            mirror.wait_logged("event=following", 120)
            workload.wait_for(20)
            mirror.interrupt()
            assert mirror.wait() == 0, mirror.describe()
            assert "changes applied" in mirror.log_text()
        mirror = mirror_process(*Workload.TABLES, "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)


@pytest.mark.parametrize(
    "flags", [("--json",), ("--zstd",), ("--pack", "--zstd")], ids=["json", "zstd", "pack-zstd"]
)
def test_every_encoding_is_mirrored(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    Workload.create(database.dsn, rows=300)
    database.publish(*Workload.TABLES)
    bridge_process(*flags)
    path = tmp_path / "replica.db"
    mirror = mirror_process("--all", "--into", f"sqlite:///{path}")
    with Workload(database.dsn) as workload:
        workload.wait_for(60)
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)


def test_fresh_builds_everything_anew(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    make_users(database)
    bridge = bridge_process()
    path = tmp_path / "replica.db"
    arguments = ("users", "--into", f"sqlite:///{path}", "--once")
    mirror = mirror_process(*arguments)
    assert mirror.wait() == 0, mirror.describe()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE INDEX mine ON users (v)")
        connection.execute("CREATE VIEW first_user AS SELECT * FROM users WHERE id = 1")
        connection.execute("DELETE FROM users WHERE id = 1")
        connection.commit()
    published = bridge.status()["cdc_events_published"]
    database.execute("UPDATE users SET v = 'x' WHERE id = 1")
    wait_until(lambda: bridge.status()["cdc_events_published"] > published)
    mirror = mirror_process(*arguments)
    assert mirror.wait() == 3, mirror.describe()
    assert "rebuild it with --fresh" in mirror.log_text()
    mirror = mirror_process(*arguments, "--fresh")
    assert mirror.wait() == 0, mirror.describe()
    wait_equal(database.dsn, path, "users", timeout=1)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT v FROM first_user").fetchall() == [("x",)]
        assert connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'mine'").fetchall()


def test_postgres_replica_follows_under_load_through_kills(
    database: Any, bridge_process: Any, mirror_process: Any, replica_database: str
) -> None:
    Workload.create(database.dsn)
    database.publish(*Workload.TABLES)
    bridge_process()
    arguments = (*Workload.TABLES, "--into", replica_database)
    with Workload(database.dsn) as workload:
        for _ in range(2):
            mirror = mirror_process(*arguments)
            workload.wait_for(60)
            mirror.kill()
        mirror = mirror_process(*arguments)
        workload.wait_for(20)

    def differences() -> list[Any]:
        try:
            return [
                found
                for table in Workload.TABLES
                if (found := table_difference(database.dsn, replica_database, table))
            ]
        except Exception as error:  # noqa: BLE001 - not there yet
            return [error]

    wait_until(lambda: not differences(), 60, lambda: f"{differences()}\n{mirror.describe()}")


def test_a_second_interrupt_ends_a_mirror_whose_target_is_locked(
    database: Any, bridge_process: Any, mirror_process: Any, replica_database: str
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    mirror = mirror_process("users", "--into", replica_database)
    mirror.wait_logged("event=following")
    mirror_waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
    with psycopg.connect(replica_database) as reader:
        # to_regclass would keep the answer of its first call for as long as a transaction lasts.
        is_there = "SELECT EXISTS (SELECT FROM pg_tables WHERE tablename = 'users')"
        wait_until(lambda: reader.execute(is_there).fetchone() == (True,), 30, mirror.describe)
        reader.execute("LOCK TABLE users IN ACCESS EXCLUSIVE MODE")
        database.execute("INSERT INTO users VALUES (1)")
        wait_until(lambda: reader.execute(mirror_waits).fetchone() == (True,), 30, mirror.describe)
        mirror.interrupt()
        # Both would be taken for one if they came at once.
        with pytest.raises(AssertionError):
            mirror.wait(1)
        mirror.interrupt()
        mirror.wait(20)
    mirror = mirror_process("users", "--into", replica_database, "--once")
    assert mirror.wait() == 0, mirror.describe()
    with psycopg.connect(replica_database) as reader:
        assert reader.execute("SELECT id FROM users").fetchall() == [(1,)]
