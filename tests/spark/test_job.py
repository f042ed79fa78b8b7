"""The job end to end: PostgreSQL, bridge, NATS, Spark, Delta; the source decides what is right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as parquet
import pytest

from consumer_sdk.wire.envelope import encode
from spark_consumer.errors import (
    LakeError,
    SchemaChangeError,
    SparkConsumerError,
    UnrepresentableError,
)
from spark_consumer.lake.embedded import EmbeddedDeltaLake
from spark_consumer.lake.records import Manifest
from spark_consumer.runtime.nats_thread import NatsThread
from tests.fixtures.waiting import wait_until
from tests.spark.conftest import Jobs
from tests.spark.lake_oracle import assert_same_rows, lake_rows, lake_table, same_rows, source_rows
from tests.spark.workload import SCHEMA, TABLES, Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from consumer_sdk.client import Client
    from consumer_sdk.transport.settings import NatsSettings
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

    Bridges: TypeAlias = Callable[..., BridgeProcess]

pytestmark = pytest.mark.timeout(900)

# Batches of a query that runs beside the test; a busy computer draws them out.
PATIENCE = 300


def test_tables_follow_their_source_through_any_work(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute(SCHEMA)
    work = Workload(seed=7)
    with database.connect() as connection:
        work.run(connection, 30)
        database.publish(*TABLES)
        bridge_process()
        work.run(connection, 30)
        jobs.once(*TABLES)
        assert_same_rows(database.dsn, jobs.lake, *TABLES)
        work.run(connection, 60)
        jobs.once(*TABLES)
        assert_same_rows(database.dsn, jobs.lake, *TABLES)


@pytest.mark.parametrize("flags", [["--json"], ["--pack", "--zstd", "--zstd-events"]])
def test_every_encoding_gives_the_same_tables(
    database: Database, bridge_process: Bridges, jobs: Jobs, flags: list[str]
) -> None:
    database.execute(SCHEMA)
    work = Workload(seed=8)
    wide = "UPDATE everything SET body = repeat(md5(id::text), 40000) WHERE id = %s"
    with database.connect() as connection:
        work.run(connection, 20)
        connection.execute("INSERT INTO everything (id, body) VALUES (-1, repeat('wide', 300000))")
        database.publish(*TABLES)
        bridge_process(*flags)
        jobs.once(*TABLES)
        work.run(connection, 30)
        connection.execute(wide, [-1])
        connection.execute(
            "INSERT INTO sales.pairs SELECT 7, 'n' || n, n FROM generate_series(1, 900) n"
        )
        connection.execute("UPDATE sales.pairs SET count = count + 1 WHERE region = 7")
    jobs.once(*TABLES)
    assert_same_rows(database.dsn, jobs.lake, *TABLES)


def test_without_its_checkpoint_the_job_goes_on_where_the_tables_are(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE heap (n int); ALTER TABLE heap REPLICA IDENTITY FULL")
    database.publish("heap")
    bridge_process()
    database.execute("INSERT INTO heap SELECT n % 3 FROM generate_series(1, 100) n")
    jobs.once("heap")
    database.execute("INSERT INTO heap SELECT n % 5 FROM generate_series(1, 100) n")
    jobs.once("heap")
    shutil.rmtree(jobs.lake / "_tailrace" / "checkpoint")
    database.execute("DELETE FROM heap WHERE n = 4; INSERT INTO heap VALUES (1), (1)")
    assert jobs.once("heap").events == 22
    assert_same_rows(database.dsn, jobs.lake, "heap")
    assert jobs.once("heap").events == 0


def test_an_earlier_version_is_the_source_as_it_was(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.publish("users")
    bridge_process()
    database.execute("INSERT INTO users SELECT n, 'first' FROM generate_series(1, 50) n")
    states = []
    for step in ("UPDATE users SET name = 'x' WHERE id < 9", "DELETE FROM users WHERE id > 40"):
        jobs.once("users")
        entry = Manifest(str(jobs.lake)).latest()
        assert entry is not None
        states.append((entry.tables["users"], source_rows(database.dsn, "users", jobs.lake)))
        database.execute(step)
    jobs.once("users")
    assert_same_rows(database.dsn, jobs.lake, "users")
    for version, rows in states:
        assert lake_rows(jobs.lake, "users", version) == rows


def test_columns_change_while_the_query_runs(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, n int, name text, gone int)")
    database.execute("INSERT INTO users SELECT g, g, 'a', g FROM generate_series(1, 20) g")
    database.publish("users")
    bridge_process()

    def then(*statements: str) -> None:
        for statement in statements:
            database.execute(statement)
        wait_until(same_rows(database.dsn, jobs.lake, "users"), PATIENCE, statements[0])

    with jobs.following("users"):
        wait_until(same_rows(database.dsn, jobs.lake, "users"), PATIENCE, "bootstrap")
        then("ALTER TABLE users ADD COLUMN age int", "INSERT INTO users VALUES (21, 1, 'b', 1, 7)")
        then(
            "ALTER TABLE users ALTER COLUMN n TYPE bigint",
            "UPDATE users SET n = 5000000000 WHERE id = 3",
        )
        then("INSERT INTO users (id, n) VALUES (22, 2)")
        # Existing rows get a value that no event tells.
        then(
            "ALTER TABLE users ADD COLUMN level int DEFAULT 5",
            "INSERT INTO users (id, level) VALUES (23, 6)",
        )
    columns = {
        field.name: str(field.type) for field in lake_table(jobs.lake, "users").schema().fields
    }
    assert '"long"' in columns["n"]


def test_a_dropped_column_stays_and_is_null_from_then_on(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, a int, b int)")
    database.execute("INSERT INTO users VALUES (1, 1, 1), (2, 2, 2)")
    database.publish("users")
    bridge_process()
    jobs.once("users")
    database.execute("ALTER TABLE users DROP COLUMN a")
    database.execute("UPDATE users SET b = 9 WHERE id = 2; INSERT INTO users VALUES (3, 3)")
    jobs.once("users")
    assert lake_rows(jobs.lake, "users") == [(1, 1, 1), (2, None, 9), (3, None, 3)]


def test_an_incompatible_change_stops_or_rebuilds(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, a int)")
    database.execute("INSERT INTO users VALUES (1, 1)")
    database.publish("users")
    bridge_process()
    jobs.once("users")
    version = lake_table(jobs.lake, "users").version()
    database.execute("ALTER TABLE users ALTER COLUMN a TYPE text USING 'no ' || a")
    database.execute("INSERT INTO users VALUES (2, 'two')")
    with pytest.raises(SchemaChangeError, match=r"table users .* column a .*--rebootstrap"):
        jobs.once("users")
    assert lake_table(jobs.lake, "users").version() == version
    jobs.once("users", rebootstrap=True)
    assert lake_rows(jobs.lake, "users") == [(1, "no 1"), (2, "two")]


def test_columns_announced_before_their_first_row_are_remembered(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    jobs.once("users")
    # Where a batch ends right behind the announcement, this is all there is of the new version.
    announced = _announce_column(jobs.nats, "users", "later")
    jobs.once("users")
    table = EmbeddedDeltaLake(str(jobs.lake)).find("public", "users")
    assert table is not None
    assert table.columns.names == ["id", "later"]
    position = table.position(f"slot_{database.name}")
    assert position is not None
    assert position.schema_version == announced


def _announce_column(settings: NatsSettings, name: str, column: str) -> int:
    async def announce(client: Client) -> int:
        schema = (await client.schema(name)).to_document()
        version = int(schema["schema_version"]) + 1
        position = len(schema["columns"]) + 1
        text = {"name": column, "position": position, "data_type": "text", "type_oid": 25}
        subject = client.subjects.change(name, "schema")
        await client.js.publish(
            subject,
            encode(
                {
                    **schema,
                    "schema_version": version,
                    "columns": [*schema["columns"], {**text, "backfilled": False}],
                    "operation": "SCHEMA",
                    "msg_id": "announced",
                    "subject": subject,
                    "ts": schema["timestamp"],
                }
            ),
            headers={"Content-Type": "application/msgpack"},
        )
        return version

    # Readers may not publish; without a login, tests are administrators.
    with NatsThread(replace(settings, user="", password="")) as nats:
        return nats.run(announce)


def test_tables_agree_at_every_position_of_the_manifest(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    names = ("one", "two", "three")
    for name in names:
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, amount int)")
    database.publish(*names)
    bridge_process()
    manifest = Manifest(str(jobs.lake))
    with jobs.following(*names, rows_per_batch=50):
        wait_until(manifest.latest, PATIENCE, "bootstrap")
        with database.connect() as connection:
            for step in range(1, 61):
                with connection.transaction():
                    for name in names[:: 1 if step % 2 else -1]:
                        connection.execute(f"INSERT INTO {name} VALUES (%s, %s)", [step, step])
                        if step % 3 == 0:
                            connection.execute(f"DELETE FROM {name} WHERE id = %s", [step - 2])
        wait_until(lambda: len(lake_rows(jobs.lake, "three")) == 40, PATIENCE, "all applied")
    entries = manifest.entries()
    seen: set[int] = set()
    for entry in entries:
        states = [lake_rows(jobs.lake, name, entry.tables[name]) for name in names]
        assert states[0] == states[1] == states[2]
        seen.add(len(states[0]))
    assert len(seen) > 2
    assert_same_rows(database.dsn, jobs.lake, *names)


def test_deleted_rows_stay_when_asked_for(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute(SCHEMA)
    work = Workload(seed=9)
    options: dict[str, Any] = {"soft_deletes": True, "synced_at": True}
    tables = ("sales.pairs", "heap")
    with database.connect() as connection:
        work.run(connection, 20)
        database.publish(*TABLES)
        bridge_process()
        jobs.once(*tables, **options)
        connection.execute("INSERT INTO sales.pairs VALUES (50, 'kept', 1, 'last words', 'x')")
        connection.execute("INSERT INTO heap VALUES (77, 'z'), (77, 'z')")
        jobs.once(*tables, **options)
        connection.execute("DELETE FROM sales.pairs WHERE region = 50")
        connection.execute("DELETE FROM heap WHERE number = 77")
        work.run(connection, 40)
        jobs.once(*tables, **options)
    assert_same_rows(database.dsn, jobs.lake, *tables)
    pairs = lake_table(jobs.lake, "sales.pairs").to_pyarrow_table().to_pylist()
    (kept,) = [row for row in pairs if row["region"] == 50]
    assert (kept["_deleted"], kept["body"]) == (True, "last words")
    assert all(row["_synced_at"] is not None for row in pairs)
    heap = lake_table(jobs.lake, "heap").to_pyarrow_table().to_pylist()
    assert [row["_deleted"] for row in heap if row["number"] == 77] == [True, True]


def test_values_spark_cannot_hold_stop_vanish_or_stay_as_text(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute(
        "CREATE TABLE odd (id int PRIMARY KEY, at timestamptz, n numeric(9, 2), a int[])"
    )
    database.execute("INSERT INTO odd VALUES (1, 'infinity', 'NaN', '{{1,2},{3,4}}')")
    database.publish("odd")
    bridge_process()
    with pytest.raises(UnrepresentableError, match=r"table odd, column at, row 1 of its chunk"):
        jobs.once("odd")
    assert not (jobs.lake / "odd" / "_delta_log").exists()
    vanishing = Jobs(jobs.spark, jobs.nats, jobs.lake.with_name("vanishing"))
    vanishing.once("odd", unrepresentable="null")
    assert lake_rows(vanishing.lake, "odd") == [(1, None, None, None)]
    jobs.once("odd", unrepresentable="text")
    database.execute("INSERT INTO odd VALUES (2, '0044-03-15 BC', 1.5, '[5:6]={7,8}')")
    database.execute("INSERT INTO odd VALUES (3)")
    database.execute("UPDATE odd SET at = '2020-01-01 00:00+00' WHERE id = 1")
    with pytest.raises(UnrepresentableError, match=r"row of change 0 at "):
        jobs.once("odd")
    jobs.once("odd", unrepresentable="text")
    rows = sorted(
        lake_table(jobs.lake, "odd").to_pyarrow_table().to_pylist(), key=lambda r: r["id"]
    )
    assert [row["at__text"] for row in rows] == [None, "0044-03-15 00:00:00+00 BC", None]
    assert rows[0]["at"].isoformat() == "2020-01-01T00:00:00+00:00"
    assert (rows[0]["n"], rows[0]["n__text"]) == (None, "NaN")
    assert [row["a__text"] for row in rows] == ["[[1, 2], [3, 4]]", "[5:6]={7,8}", None]


def test_tables_that_others_optimize_meanwhile_are_tried_again(
    database: Database, bridge_process: Bridges, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.execute("CREATE TABLE heap (n int); ALTER TABLE heap REPLICA IDENTITY FULL")
    database.publish("users", "heap")
    bridge_process()
    for number in range(3):
        database.execute(f"INSERT INTO users VALUES ({number}); INSERT INTO heap VALUES (1)")
        jobs.once("users", "heap")
    optimized: list[int] = []

    def optimize(point: str) -> None:
        if point == "spark-before-commit" and not optimized:
            for table in ("users", "heap"):
                found = lake_table(jobs.lake, table).optimize.compact()
                optimized.append(found["numFilesRemoved"])

    monkeypatch.setattr("spark_consumer.lake.embedded.hold", optimize)
    database.execute("TRUNCATE users; INSERT INTO users VALUES (7)")
    database.execute("DELETE FROM heap WHERE ctid = (SELECT ctid FROM heap LIMIT 1)")
    jobs.once("users", "heap")
    assert min(optimized) > 1
    assert_same_rows(database.dsn, jobs.lake, "users", "heap")


def test_a_staged_row_that_is_lost_stops_the_job(
    database: Database, bridge_process: Bridges, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    jobs.once("users")
    lake_table(jobs.lake, "users").alter.set_table_description("Who they are.")
    version = lake_table(jobs.lake, "users").version()

    def lose_a_row(point: str) -> None:
        if point == "spark-before-commit":
            for file in (jobs.lake / "_tailrace" / "staging").glob("merge-*/*.parquet"):
                rows = parquet.read_table(file)
                parquet.write_table(rows.slice(1), file)

    database.execute("INSERT INTO users SELECT generate_series(1, 10)")
    with monkeypatch.context() as patched:
        patched.setattr("spark_consumer.lake.embedded.hold", lose_a_row)
        with pytest.raises(LakeError, match=r"10 rows were staged .* 9 reached") as stopped:
            jobs.once("users")
    assert stopped.value.exit_code == 4
    assert lake_table(jobs.lake, "users").version() == version
    jobs.once("users")
    assert_same_rows(database.dsn, jobs.lake, "users")


def test_a_query_that_does_not_start_is_one_line(
    database: Database, bridge_process: Bridges, jobs: Jobs
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    setting = "spark.sql.streaming.checkpointFileManagerClass"
    jobs.spark.conf.set(setting, "no.such.Manager")
    try:
        with pytest.raises(SparkConsumerError) as raised:
            jobs.once("users")
    finally:
        jobs.spark.conf.unset(setting)
    assert str(raised.value) == "Spark failed: ClassNotFoundException: no.such.Manager"
    assert raised.value.exit_code == 3


def test_a_run_ends_with_a_summary(
    database: Database,
    bridge_process: Bridges,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.execute("INSERT INTO users VALUES (1), (2), (3)")
    database.publish("users")
    bridge_process()
    lines: list[dict[str, Any]] = []

    def log(_: object, event: str, **fields: Any) -> None:
        lines.append({"event": event, **fields})

    monkeypatch.setattr("spark_consumer.job.job.event", log)
    jobs.once("users")
    database.execute("INSERT INTO users VALUES (4), (5)")
    jobs.once("users")
    wanted = ("event", "tables", "rows_loaded", "events")
    assert [tuple(line[name] for name in wanted) for line in lines] == [
        ("done", 1, 3, 0),
        ("done", 1, 0, 2),
    ]
    assert all(line["seconds"] > 0 for line in lines)
