"""Schema changes that alter rows by themselves, which the log does not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.lake_oracle import assert_same_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database
    from tests.spark.conftest import Jobs

    Bridges: TypeAlias = Callable[..., BridgeProcess]

pytestmark = pytest.mark.timeout(900)

CHANGES = {
    "filled": (
        "ALTER TABLE filled ADD COLUMN c int DEFAULT 5; ALTER TABLE filled ALTER c DROP DEFAULT",
    ),
    "doubled": ("ALTER TABLE doubled ALTER a TYPE bigint USING a * 2",),
    "rounded": ("ALTER TABLE rounded ALTER n TYPE numeric(10, 2)",),
    "emptied": (
        "ALTER TABLE emptied DROP COLUMN a",
        "INSERT INTO emptied VALUES (7)",
        "ALTER TABLE emptied ADD COLUMN a int",
    ),
    "emptied_at_once": ("ALTER TABLE emptied_at_once DROP COLUMN n, ADD COLUMN n numeric(10, 4)",),
    "swapped": (
        "ALTER TABLE swapped RENAME a TO c",
        "ALTER TABLE swapped RENAME b TO a",
        "ALTER TABLE swapped RENAME c TO b",
    ),
}


def test_rows_that_a_schema_change_alters_are_read_again(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    for table in CHANGES:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, n numeric(10, 4), a int)")
        database.execute(f"INSERT INTO {table} VALUES (1, 1.2345, 10), (2, 2.3456, 20)")
    database.execute("ALTER TABLE swapped ADD COLUMN b int; UPDATE swapped SET b = 7")
    database.publish(*CHANGES)
    bridge_process()
    jobs.once(*CHANGES)
    for table, statements in CHANGES.items():
        for statement in (*statements, f"INSERT INTO {table} (id) VALUES (3)"):
            database.execute(statement)
    jobs.once(*CHANGES)
    assert_same_rows(database.dsn, jobs.lake, *CHANGES)
