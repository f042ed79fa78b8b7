"""Rows of the lake are found by what identifies them: the key, else all their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spark_consumer.errors import LakeOptionsError, MissingRowError, UnrepresentableError
from spark_consumer.lake.embedded import EmbeddedDeltaLake
from tests.spark.lake_oracle import assert_same_rows, lake_rows, lake_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database
    from tests.spark.conftest import Jobs

    Bridges: TypeAlias = Callable[..., BridgeProcess]

pytestmark = pytest.mark.timeout(900)

BAG = """
CREATE TABLE bag (tree jsonb, trees jsonb[], doc json, amount numeric(20, 10), loose numeric,
    single real, double float8, raw bytea, moment timestamptz, day date, words text[]);
ALTER TABLE bag REPLICA IDENTITY FULL
"""
FILL = """
INSERT INTO bag VALUES
    ('{"rate": 0.00005, "text 1e-5": [1.5, "\\u00e9", null]}', ARRAY['{"k": 0.00002}'::jsonb],
     '{"z": 1,  "a": 2}', 0.0000000001, 1.10, 0.1, 1e-7, '\\x00ff', '0001-01-01 00:00+00',
     '1582-10-04', ARRAY['a', NULL, 'b,"']),
    ('1e-7', '{}', 'null', 0, 0.00, 'NaN', '-Infinity', '', '9999-12-31 23:59:59.999999+00',
     '9999-12-31', '{}'),
    (NULL, NULL, NULL, NULL, -0.0000001, 1e-40, 5e-324, NULL, NULL, NULL, NULL)
"""
# Equal in PostgreSQL and in Spark, but not the same.
ZEROS = """
INSERT INTO bag (single, double, words) VALUES ('-0', '-0', '{z}'), ('0', '-0', '{z}'),
    ('-0', '0', '{z}'), ('0', '0', '{z}')
"""


def test_a_row_without_key_is_found_whichever_way_it_came(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute(BAG)
    database.execute(FILL)
    database.publish("bag")
    bridge_process()
    jobs.once("bag")
    database.execute(FILL)
    jobs.once("bag")
    assert_same_rows(database.dsn, jobs.lake, "bag")
    database.execute(ZEROS)
    jobs.once("bag")
    assert_same_rows(database.dsn, jobs.lake, "bag")
    database.execute(ZEROS)
    database.execute("UPDATE bag SET words = '{y}' WHERE words = '{z}' AND single::text = '-0'")
    database.execute("DELETE FROM bag WHERE double::text = '-0'")
    jobs.once("bag")
    assert_same_rows(database.dsn, jobs.lake, "bag")
    database.execute("DELETE FROM bag")
    jobs.once("bag")
    assert lake_rows(jobs.lake, "bag") == []


LEFT_OUT = """
CREATE TABLE {table} (id float8 PRIMARY KEY, n int, body text);
ALTER TABLE {table} ALTER body SET STORAGE EXTERNAL;
INSERT INTO {table} SELECT n, n, repeat(n::text, 4000) FROM generate_series(0, 3) n
"""
WHOLE_ROWS = "ALTER TABLE {table} DROP CONSTRAINT {table}_pkey, REPLICA IDENTITY FULL"


def test_a_change_of_a_row_that_the_lake_lacks_stops_the_job(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    changes = {
        "updated": "UPDATE updated SET n = 7 WHERE id = 2",
        "moved": "UPDATE moved SET id = 9 WHERE id = 2",
        "bag": "UPDATE bag SET n = 7 WHERE id = 2",
    }
    for table in changes:
        database.execute(LEFT_OUT.format(table=table))
    database.execute(WHOLE_ROWS.format(table="bag"))
    database.publish(*changes)
    bridge_process()
    jobs.once(*changes)
    database.execute("UPDATE updated SET id = '-0', n = 5 WHERE id = 0")
    jobs.once(*changes)
    assert_same_rows(database.dsn, jobs.lake, *changes)
    for table, change in changes.items():
        lake = EmbeddedDeltaLake(str(jobs.lake)).find("public", table)
        assert lake is not None
        position = lake.position(f"slot_{database.name}")
        assert position is not None
        lake.load([], lake.columns, position)
        version = lake.version
        database.execute(change)
        with pytest.raises(MissingRowError, match=f"table {table} lacks a row") as stopped:
            jobs.once(table)
        assert stopped.value.exit_code == 4
        assert lake_table(jobs.lake, table).version() == version
        jobs.once(table, rebootstrap=True)
        assert_same_rows(database.dsn, jobs.lake, table)


@pytest.mark.parametrize("policy", ["null", "text"])
def test_a_key_that_has_no_place_stops_the_job_before_the_table_is_touched(
    database: Database, bridge_process: Bridges, jobs: Jobs, policy: str
) -> None:
    for table in ("spans", "endless"):
        database.execute(
            f"CREATE TABLE {table} (id int, until timestamptz, PRIMARY KEY (id, until))"
        )
    database.execute("INSERT INTO spans VALUES (1, '2020-01-01')")
    database.execute("INSERT INTO endless VALUES (1, 'infinity')")
    database.publish("spans", "endless")
    bridge_process()
    jobs.once("spans", unrepresentable=policy)
    before = lake_rows(jobs.lake, "spans")
    database.execute("INSERT INTO spans VALUES (1, 'infinity'), (1, '-infinity')")
    for table in ("spans", "endless"):
        with pytest.raises(UnrepresentableError, match=r"column until, .* REPLICA IDENTITY"):
            jobs.once(table, unrepresentable=policy)
    assert lake_rows(jobs.lake, "spans") == before
    assert not (jobs.lake / "endless" / "_delta_log").exists()


def test_a_table_without_key_keeps_to_its_texts(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE heap (at date); ALTER TABLE heap REPLICA IDENTITY FULL")
    database.execute("INSERT INTO heap VALUES ('infinity'), ('2020-01-01')")
    database.publish("heap")
    bridge_process()
    jobs.once("heap", unrepresentable="text")
    database.execute("DELETE FROM heap")
    with pytest.raises(LakeOptionsError, match="made with --unrepresentable=text"):
        jobs.once("heap", unrepresentable="null")
    jobs.once("heap", unrepresentable="null", rebootstrap=True)
    with pytest.raises(LakeOptionsError, match="made without --unrepresentable=text"):
        jobs.once("heap", unrepresentable="text")
    assert lake_rows(jobs.lake, "heap") == []
