"""A mirror that is refused leaves nothing: no file, no table, no schema, no mode, no lock."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def refused(prefix: str, nats_server: Any, run_command: Any) -> Callable[..., str]:
    """Run `cdc mirror`, which must refuse: `refused(exit code, arguments…)` is what it says."""

    def run(code: int, *arguments: str, **environment: str) -> str:
        environment = {"BRIDGE_PREFIX": prefix, **environment}
        done = run_command("cdc", "mirror", *arguments, environment=environment)
        said = [line for line in done.stderr.splitlines() if not line.startswith("level=info")]
        assert done.returncode == code, done.stderr
        assert len(said) == 1, done.stderr
        assert done.stdout == ""
        return str(said[0])

    return run


@pytest.fixture
def published(database: Any, bridge_process: Any) -> Any:
    """A bridge on a publication of all tables, one of them `users`."""
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    bridge_process()
    database.execute("INSERT INTO users VALUES (1)")
    return database


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with nothing else in it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_the_source_itself_stays_as_it_is(published: Any, refused: Callable[..., str]) -> None:
    said = refused(3, "users", "--into", published.dsn)
    assert "already has users, which this mirror did not make" in said
    assert published.value("SELECT to_regnamespace('tailrace')") is None


def test_a_file_of_somebody_else_stays_as_it_is(
    published: Any, refused: Callable[..., str], place: Path
) -> None:
    path = place / "precious.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE users (precious)")
        connection.commit()
    before = path.read_bytes()
    assert "already has 'users'" in refused(3, "users", "--into", f"sqlite:///{path}")
    assert path.read_bytes() == before
    assert [found.name for found in place.iterdir()] == ["precious.db"]


def test_nothing_is_made_for_what_cannot_be_mirrored(
    published: Any, refused: Callable[..., str], own_nats: Any, place: Path
) -> None:
    into = ("--into", f"sqlite:///{place / 'new.db'}")
    assert "user is not published" in refused(1, "user", *into)
    without = own_nats(jetstream=None)
    assert "JetStream" in refused(3, "users", *into, NATS_URL=without.url)
    assert list(place.iterdir()) == []


def test_what_is_no_file_is_told_and_gets_no_lock(
    published: Any, refused: Callable[..., str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "adir").mkdir()
    said = refused(3, "users", "--into", "sqlite:///adir")
    assert said == "cdc: SQLite file adir is a directory; name a file in it"
    assert "in memory" in refused(2, "users", "--into", "sqlite:///:memory:")
    (place / "junk.db").write_bytes(b"this is not a database, it only looks like a file" * 50)
    said = refused(3, "users", "--into", "sqlite:///junk.db")
    assert said == "cdc: SQLite file junk.db: file is not a database; choose another file"
    assert sorted(found.name for found in place.iterdir()) == ["adir", "junk.db"]


def test_a_role_that_may_not_make_a_schema_leaves_nothing(
    published: Any, refused: Callable[..., str], pg: Any
) -> None:
    dsn = published.role("LOGIN")
    other = f"{published.name}_target"
    with published.connect(autocommit=True) as owner:
        owner.execute(f"CREATE DATABASE {other}")
        try:
            said = refused(3, "users", "--into", dsn.replace(f"/{published.name}", f"/{other}"))
            role = published.roles[0]
            assert "permission denied for database" in said
            assert said.endswith(f'run: GRANT CREATE ON DATABASE "{other}" TO "{role}"')
        finally:
            owner.execute(f"DROP DATABASE {other} WITH (FORCE)")


def test_a_damaged_file_is_told_with_what_to_do(
    published: Any, refused: Callable[..., str], place: Path
) -> None:
    path = place / "damaged.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE x (a)")
        connection.commit()
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xaa" * (4096 - 100)
    path.write_bytes(content)
    said = refused(3, "users", "--into", f"sqlite:///{path}")
    assert said.endswith("malformed; delete the file, or restore it, and mirror anew")


def test_a_directory_is_no_replica(
    published: Any, run_command: Any, prefix: str, place: Path
) -> None:
    done = run_command(
        "cdc", "verify", "users", "--source", published.dsn, "--replica", f"sqlite:///{place}",
        environment={"BRIDGE_PREFIX": prefix},
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == f"cdc: replica {place} is a directory; name the SQLite file in it\n"


def test_a_table_without_columns_is_left_out_and_told(
    published: Any, refused: Callable[..., str], run_command: Any, prefix: str, place: Path
) -> None:
    published.execute("CREATE TABLE nothing ()")
    published.execute("ALTER TABLE nothing REPLICA IDENTITY FULL")
    published.execute("INSERT INTO nothing DEFAULT VALUES")
    environment = {"BRIDGE_PREFIX": prefix}

    def tables() -> str:
        return str(run_command("cdc", "tables", environment=environment).stdout)

    wait_until(lambda: "nothing" in tables(), what="the table")
    into = ("--into", f"sqlite:///{place / 'r.db'}")
    assert "table nothing has no columns" in refused(2, "nothing", *into)
    assert "table nothing has no columns" in refused(2, "users", "nothing", *into)
    assert list(place.iterdir()) == []
    done = run_command("cdc", "mirror", "--all", *into, "--once", environment=environment)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "level=warning" in line]
    assert len(warnings) == 1, done.stderr
    assert 'event="table skipped" table=nothing reason="it has no columns"' in warnings[0]
    with closing(sqlite3.connect(place / "r.db")) as connection:
        assert connection.execute("SELECT id FROM users").fetchall() == [(1,)]
