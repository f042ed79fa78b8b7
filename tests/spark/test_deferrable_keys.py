"""Keys that two rows may share until their transaction ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.lake_oracle import assert_same_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database
    from tests.spark.conftest import Jobs

pytestmark = pytest.mark.timeout(900)

SCHEMA = """
CREATE TABLE places (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, name text, body text);
ALTER TABLE places ALTER body SET STORAGE EXTERNAL;
ALTER TABLE places REPLICA IDENTITY FULL;
INSERT INTO places SELECT n, 'name ' || n, repeat(n::text, 4000) FROM generate_series(1, 6) n
"""

CHANGES = (
    "UPDATE places SET id = 3 - id WHERE id < 3",
    "INSERT INTO places VALUES (3, 'newer', 'x'); DELETE FROM places WHERE name = 'name 3'",
    "UPDATE places SET id = 5 WHERE id = 4; DELETE FROM places WHERE name = 'name 5'",
    "UPDATE places SET id = 7 WHERE id = 6; UPDATE places SET id = 6 WHERE id = 7",
)


def test_rows_that_share_a_key_for_a_moment_are_told_apart(
    database: Database, bridge_process: Callable[..., BridgeProcess], jobs: Jobs
) -> None:
    database.execute(SCHEMA)
    database.publish("places")
    bridge_process()
    jobs.once("places")
    with database.connect() as connection:
        for change in CHANGES:
            connection.execute(change)
            connection.commit()
    jobs.once("places")
    assert_same_rows(database.dsn, jobs.lake, "places")
