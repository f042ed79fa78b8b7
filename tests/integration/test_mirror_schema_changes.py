"""Tables change their structure under a running mirror."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.mirror import wait_equal

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def mirrored(database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path) -> Any:
    """Run statements in the source; each time wait until the mirror of both tables is equal."""
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name varchar(10), n numeric(6,2))")
    database.execute("INSERT INTO users SELECT i, 'n' || i, i FROM generate_series(1, 50) i")
    database.execute("CREATE TABLE others (id int PRIMARY KEY, v text)")
    database.publish("users", "others")
    bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("users", "others", "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, "users", "others", mirror=mirror)

    def run(*statements: str) -> str:
        said_before = len(mirror.log_text())
        with database.connect() as connection, connection.transaction():
            for statement in statements:
                connection.execute(statement)
        wait_equal(database.dsn, path, "users", "others", mirror=mirror)
        return str(mirror.log_text()[said_before:])

    return run


def test_changes_that_touch_no_row_are_made_in_place(mirrored: Any) -> None:
    said = mirrored(
        "ALTER TABLE users ADD COLUMN extra text",
        "INSERT INTO users VALUES (100, 'new', 1, 'x')",
        "UPDATE users SET extra = 'y' WHERE id < 10",
    )
    said += mirrored(
        "INSERT INTO users VALUES (101, 'before', 1, 'x')",
        "ALTER TABLE users DROP COLUMN n",
        "INSERT INTO users VALUES (102, 'after', 'x')",
        "INSERT INTO others VALUES (1, 'same transaction')",
    )
    said += mirrored(
        "ALTER TABLE users ALTER COLUMN name TYPE text",
        "UPDATE users SET name = repeat('long', 10) WHERE id = 5",
    )
    assert "event=gap" not in said
    assert "event=loading" not in said


def test_changes_that_touch_rows_unseen_rebuild_the_table(mirrored: Any) -> None:
    # Existing rows get a value that no event carries, also if the default does not stay.
    said = mirrored(
        "ALTER TABLE users ADD COLUMN flag int DEFAULT 7",
        "ALTER TABLE users ALTER COLUMN flag DROP DEFAULT",
        "INSERT INTO others VALUES (2, 'meanwhile')",
        "UPDATE users SET name = 'x' WHERE id = 1",
    )
    assert "event=gap" in said
    said = mirrored(
        "ALTER TABLE users RENAME COLUMN flag TO renamed", "DELETE FROM users WHERE id = 2"
    )
    assert "event=gap" in said
    said = mirrored(
        "ALTER TABLE users ALTER COLUMN renamed TYPE bigint USING renamed * 2",
        "INSERT INTO users (id) VALUES (1000)",
    )
    assert "event=gap" in said
    said = mirrored(
        "UPDATE users SET name = id",
        "ALTER TABLE users DROP CONSTRAINT users_pkey, ADD PRIMARY KEY (name)",
        "UPDATE users SET n = 5 WHERE id = 3",
    )
    assert "its key changed" in said


def test_a_table_dropped_and_created_again_is_rebuilt(mirrored: Any, database: Any) -> None:
    said = mirrored(
        "DROP TABLE users",
        "CREATE TABLE users (id int PRIMARY KEY, name varchar(10), n numeric(6,2))",
        "ALTER PUBLICATION pub ADD TABLE users",
        "INSERT INTO users VALUES (1, 'again', 2)",
    )
    assert "created again" in said
    said = mirrored(
        "ALTER TABLE users RENAME TO former",
        "CREATE TABLE users (id int PRIMARY KEY, name varchar(10), n numeric(6,2))",
        "ALTER PUBLICATION pub ADD TABLE users",
        "INSERT INTO users VALUES (1, 'third', 2)",
    )
    assert "created again" in said


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        (
            ("ALTER TABLE users DROP COLUMN n", "ALTER TABLE users ADD COLUMN n numeric(6,2)"),
            "dropped and added again",
        ),
        (("ALTER TABLE users ALTER COLUMN n TYPE numeric(6,2) USING n * 2",), "was rewritten"),
        (
            ("ALTER TABLE users RENAME n TO m", "ALTER TABLE users ADD n numeric(6,2)"),
            "dropped and added again",
        ),
    ],
    ids=["again", "rewritten", "replaced"],
)
def test_columns_that_only_look_the_same_rebuild_the_table(
    mirrored: Any, statements: tuple[str, ...], reason: str
) -> None:
    mirrored("INSERT INTO users VALUES (100, 'before', 1)")
    assert reason in mirrored(*statements, "INSERT INTO users (id, n) VALUES (101, 5)")
