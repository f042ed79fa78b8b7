"""What the log does not tell is announced: tables that leave and return, filters, partitions."""

from __future__ import annotations

import asyncio
import json
import secrets
import zlib
from typing import TYPE_CHECKING, Any

import nats
import pytest

from consumer_sdk.wire import Subjects
from tests.fixtures.cdc_log import CdcLog
from tests.fixtures.postgres import both_versions, versions_since
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.mirror import MirrorProcess
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Holds
    from tests.fixtures.tcp_proxy import TcpProxy

pytestmark = pytest.mark.quick_checks

PARTITIONED = """
CREATE TABLE part (id int PRIMARY KEY, body text) PARTITION BY RANGE (id);
CREATE TABLE part1 PARTITION OF part FOR VALUES FROM (0) TO (100);
CREATE TABLE part2 PARTITION OF part FOR VALUES FROM (100) TO (200);
INSERT INTO part VALUES (1, 'one'), (101, 'hundred and one');
"""
ATTACH = """
CREATE TABLE part3 (LIKE part INCLUDING ALL);
INSERT INTO part3 VALUES (201, 'from elsewhere');
ALTER TABLE part ATTACH PARTITION part3 FOR VALUES FROM (200) TO (300);
"""


async def gaps(cdc: CdcLog) -> list[dict[str, Any]]:
    """The gaps announced so far."""
    return [record["gap"] for record in await cdc.progress() if record["gap"]]


async def two_gaps(cdc: CdcLog) -> list[dict[str, Any]] | None:
    found = await gaps(cdc)
    return found if len(found) > 1 else None


async def remembered(cdc: CdcLog, database: Database) -> dict[str, Any]:
    return await cdc.kept_coverage(f"slot_{database.name}")


@pytest.fixture
def run(run_command: Callable[..., Any], prefix: str) -> Callable[..., Any]:
    """Run `cdc` on the streams of this test."""
    return lambda *arguments: run_command("cdc", *arguments, environment={"BRIDGE_PREFIX": prefix})


@pytest.fixture
def partitioned(database: Database) -> Database:
    for statement in PARTITIONED.strip().splitlines():
        database.execute(statement)
    database.publish("part", options="publish_via_partition_root = true")
    return database


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("TRUNCATE part1", "truncated or rewritten"),
        ("ALTER TABLE part DETACH PARTITION part2", "detached or dropped"),
        ("DROP TABLE part2", "detached or dropped"),
        (ATTACH, "attached with rows"),
    ],
)
async def test_rows_that_partitions_bring_or_take_are_a_gap(
    partitioned: Database,
    bridge_process: Callable[..., BridgeProcess],
    mirror_process: Callable[..., MirrorProcess],
    cdc: CdcLog,
    tmp_path: Path,
    run: Callable[..., Any],
    statements: str,
    reason: str,
) -> None:
    bridge_process()
    await eventually(lambda: remembered(cdc, partitioned))
    replica = f"sqlite:///{tmp_path / 'replica.db'}"
    mirror = mirror_process("part", "--into", replica)
    mirror.wait_logged("following")
    for statement in statements.strip().splitlines():
        partitioned.execute(statement)
    (gap,) = await eventually(lambda: gaps(cdc))
    assert reason in gap["reason"]
    assert gap["tables"] == ["part"]
    partitioned.execute("INSERT INTO part VALUES (7, 'afterwards')")

    def is_equal() -> bool:
        done = run("verify", "part", "--source", partitioned.dsn, "--replica", replica)
        return done.returncode == 0

    wait_until(is_equal, 30, mirror.log_text)


@both_versions
async def test_new_partitions_and_a_truncate_of_the_whole_are_no_gap(
    partitioned: Database, bridge_process: Callable[..., BridgeProcess], cdc: CdcLog
) -> None:
    bridge_process()
    before = await eventually(lambda: remembered(cdc, partitioned))
    partitioned.execute("CREATE TABLE part4 PARTITION OF part FOR VALUES FROM (300) TO (400)")
    partitioned.execute("INSERT INTO part VALUES (301, 'new')")
    partitioned.execute("ANALYZE part1")
    partitioned.execute("TRUNCATE part")
    partitioned.execute("INSERT INTO part VALUES (1, 'anew')")

    async def noticed() -> bool:
        then, now = before["tables"]["part"]["leaves"], await remembered(cdc, partitioned)
        leaves = now["tables"]["part"]["leaves"]
        return len(leaves) == 3 and all(leaves[leaf] != node for leaf, node in then.items())

    await eventually(noticed)
    assert await gaps(cdc) == []


@both_versions
@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
async def test_a_table_that_left_the_publication_and_came_back_is_a_gap(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    cdc: CdcLog,
    tmp_path: Path,
    run: Callable[..., Any],
    running: bool,
) -> None:
    database.execute("CREATE TABLE kept (id int PRIMARY KEY)")
    database.execute("CREATE TABLE gone (id int PRIMARY KEY)")
    database.execute("INSERT INTO gone VALUES (1)")
    database.publish("kept", "gone")
    bridge = bridge_process()
    assert await eventually(lambda: remembered(cdc, database))
    replica = f"sqlite:///{tmp_path / 'replica.db'}"
    mirror = ("mirror", "gone", "--into", replica, "--once")
    assert run(*mirror).returncode == 0
    if not running:
        bridge.terminate()
        bridge.wait(30)
    database.execute("ALTER PUBLICATION pub DROP TABLE gone")
    if running:
        bridge.wait_logged("not published any more", 30)
        assert "gone" not in run("tables").stdout
        refused = run("mirror", "gone", "--into", f"{replica}2", "--once")
        assert refused.returncode == 1
        assert "not published" in refused.stderr
    database.execute("INSERT INTO gone VALUES (2)")
    database.execute("ALTER PUBLICATION pub ADD TABLE gone")
    if not running:
        bridge_process()
    (gap,) = await eventually(lambda: gaps(cdc))
    assert gap["tables"] == ["gone"]
    assert "out of the publication" in gap["reason"]
    await eventually(lambda: cdc.schema("gone"))
    for one in (replica, f"{replica}3"):
        done = run("mirror", "gone", "--into", one, "--once")
        assert done.returncode == 0, done.stderr
        verified = run("verify", "gone", "--source", database.dsn, "--replica", one)
        assert verified.returncode == 0, verified.stdout


REWRITES = {
    "ALTER TABLE kept ALTER COLUMN n TYPE int USING n * 2": "a column was rewritten",
    "ALTER TABLE kept DROP COLUMN n, ADD COLUMN n int DEFAULT 9": "dropped and added",
}


@pytest.mark.parametrize(("statement", "reason"), REWRITES.items(), ids=["rewritten", "replaced"])
async def test_other_values_under_the_same_names_and_types_are_a_gap(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    mirror_process: Callable[..., MirrorProcess],
    cdc: CdcLog,
    tmp_path: Path,
    run: Callable[..., Any],
    statement: str,
    reason: str,
) -> None:
    database.execute("CREATE TABLE kept (id int PRIMARY KEY, m int, n int)")
    database.execute("INSERT INTO kept VALUES (1, 1, 10)")
    database.publish("kept")
    bridge_process()
    await eventually(lambda: remembered(cdc, database))
    replica = f"sqlite:///{tmp_path / 'replica.db'}"
    mirror = mirror_process("kept", "--into", replica)
    mirror.wait_logged("following")
    database.execute(statement)
    database.execute("INSERT INTO kept VALUES (2, 2, 20)")
    (gap,) = await eventually(lambda: gaps(cdc))
    assert reason in gap["reason"]
    assert gap["tables"] == ["kept"]
    # A retained snapshot has the values of before, so a new replica must not begin from it.
    other = f"{replica}2"
    assert run("mirror", "kept", "--into", other, "--once").returncode == 0
    for one in (replica, other):

        def is_equal(one: str = one) -> bool:
            done = run("verify", "kept", "--source", database.dsn, "--replica", one)
            return done.returncode == 0

        wait_until(is_equal, 30, mirror.log_text)


async def test_rows_only_moved_and_changes_that_the_log_tells_are_no_gap(
    database: Database, bridge_process: Callable[..., BridgeProcess], cdc: CdcLog
) -> None:
    database.execute("CREATE TABLE kept (id int PRIMARY KEY, n int)")
    database.execute("INSERT INTO kept VALUES (1, 10)")
    database.publish("kept")
    bridge_process()
    for statement in (
        "VACUUM FULL kept",
        "ALTER TABLE kept ALTER COLUMN n SET NOT NULL",
        "ALTER TABLE kept ALTER COLUMN n TYPE bigint",
    ):
        before = await eventually(lambda: remembered(cdc, database))
        with database.connect() as connection:
            connection.execute(statement)

        async def noticed(before: dict[str, Any] = before) -> bool:
            now = await remembered(cdc, database)
            return bool(now and now["tables"]["kept"] != before["tables"]["kept"])

        await eventually(noticed)
    assert await gaps(cdc) == []


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
async def test_another_row_filter_is_a_gap_for_its_table_alone(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    cdc: CdcLog,
    tmp_path: Path,
    run: Callable[..., Any],
    running: bool,
) -> None:
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    database.execute("CREATE TABLE sifted (id int PRIMARY KEY)")
    database.execute("INSERT INTO sifted VALUES (2), (20)")
    database.execute("CREATE PUBLICATION pub FOR TABLE other, sifted WHERE (id > 10)")
    bridge = bridge_process()
    assert await eventually(lambda: remembered(cdc, database))
    replica = f"sqlite:///{tmp_path / 'replica.db'}"
    mirror = ("mirror", "--all", "--into", replica, "--once")
    assert run(*mirror).returncode == 0
    if not running:
        bridge.terminate()
        bridge.wait(30)
    database.execute("ALTER PUBLICATION pub SET TABLE other, sifted WHERE (id > 1)")
    if not running:
        bridge_process()
    (gap,) = await eventually(lambda: gaps(cdc))
    assert gap["tables"] == ["sifted"]
    assert "row filter" in gap["reason"]
    again = run(*mirror)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("event=loaded") == 1
    verified = run("verify", "sifted", "--source", database.dsn, "--replica", replica)
    assert verified.returncode == 0, verified.stdout


async def test_a_gap_in_the_middle_of_a_busy_stream_repeats_no_event(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    cdc: CdcLog,
    nats_server: NatsServer,
    tcp_proxy: Callable[[int], TcpProxy],
) -> None:
    database.execute("CREATE TABLE busy (id bigserial PRIMARY KEY)")
    database.execute("CREATE TABLE filtered (id int PRIMARY KEY)")
    database.publish("busy", "filtered")
    proxy = tcp_proxy(nats_server.port)
    bridge_process(nats_url=proxy.through(nats_server.bridge_url))
    await eventually(lambda: remembered(cdc, database))
    # Longer than the deduplication window, so that it hides nothing.
    proxy.delay(0.1)
    database.execute("ALTER PUBLICATION pub SET TABLE busy, filtered WHERE (id > 1)")
    with database.connect(autocommit=True) as connection:

        async def announced() -> list[dict[str, Any]]:
            for _ in range(10):
                connection.execute("INSERT INTO busy SELECT FROM generate_series(1, 5)")
            return await gaps(cdc)

        await eventually(announced, 30)
    proxy.delay(0)
    await cdc.settle()
    positions = [event.position for event in await cdc.changes("busy")]
    assert positions == sorted(set(positions))


AWAY_AND_BACK = {
    "detached for a while": (
        "publish_via_partition_root = true",
        "part",
        "ALTER TABLE part DETACH PARTITION part1",
        "INSERT INTO part1 VALUES (2, 'unseen')",
        "ALTER TABLE part ATTACH PARTITION part1 FOR VALUES FROM (0) TO (100)",
    ),
    "detached for a while ": (
        "publish_via_partition_root = false",
        "part1",
        "ALTER TABLE part DETACH PARTITION part1",
        "INSERT INTO part1 VALUES (2, 'unseen')",
        "ALTER TABLE part ATTACH PARTITION part1 FOR VALUES FROM (0) TO (100)",
    ),
    "options were set": (
        "",
        "plain",
        "ALTER PUBLICATION pub SET (publish = 'update')",
        "INSERT INTO plain VALUES (2, 'unseen')",
        "ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate')",
    ),
    "another name": (
        "",
        "plain",
        "ALTER TABLE plain RENAME TO other",
        "INSERT INTO other VALUES (2, 'unseen')",
        "ALTER TABLE other RENAME TO plain",
    ),
    "unlogged": (
        "",
        None,
        "ALTER TABLE plain SET UNLOGGED",
        "INSERT INTO plain VALUES (2, 'unseen')",
        "ALTER TABLE plain SET LOGGED",
    ),
}


@both_versions
@pytest.mark.parametrize("reason", AWAY_AND_BACK)
async def test_what_was_otherwise_between_two_looks_is_a_gap(
    database: Database, bridge_process: Callable[..., BridgeProcess], cdc: CdcLog, reason: str
) -> None:
    options, table, *statements = AWAY_AND_BACK[reason]
    database.execute("CREATE TABLE plain (id int PRIMARY KEY, body text)")
    for statement in PARTITIONED.strip().splitlines():
        database.execute(statement)
    database.publish(*(["plain", "part"] if table else []), options=options)
    bridge = bridge_process()
    await eventually(lambda: remembered(cdc, database))
    bridge.kill()
    for statement in statements:
        database.execute(statement)
    bridge_process()
    (gap,) = await eventually(lambda: gaps(cdc))
    assert reason.strip() in gap["reason"]
    assert (table or "plain") in gap["tables"]


@versions_since(15)
async def test_work_that_moves_no_rows_is_no_gap(
    database: Database, bridge_process: Callable[..., BridgeProcess], cdc: CdcLog
) -> None:
    database.execute("CREATE TABLE worked (id int PRIMARY KEY, body text)")
    database.execute("CREATE TABLE emptied (id int PRIMARY KEY, body text)")
    database.execute("INSERT INTO worked VALUES (1, 'one')")
    database.publish("worked", "emptied")
    database.role("SUPERUSER")
    owner = database.roles[-1]
    bridge = bridge_process()
    await eventually(lambda: remembered(cdc, database))
    bridge.kill()
    with database.connect(autocommit=True) as connection:
        for statement in (
            "VACUUM FULL worked",
            "CREATE INDEX ON worked (body)",
            "CLUSTER worked USING worked_pkey",
            "REINDEX TABLE worked",
            "VACUUM (FREEZE, ANALYZE) worked",
            "ALTER TABLE worked ADD CHECK (id > 0)",
            "COMMENT ON TABLE worked IS 'busy'",
            "GRANT SELECT ON worked TO PUBLIC",
            "ALTER TABLE worked SET (fillfactor = 50)",
            "TRUNCATE emptied",
            "ALTER PUBLICATION pub ADD TABLES IN SCHEMA public",
            f"ALTER PUBLICATION pub OWNER TO {owner}",
            f"ALTER TABLE worked OWNER TO {owner}",
        ):
            connection.execute(statement)
    second = bridge_process()

    async def has_entries(count: int) -> bool:
        return len((await remembered(cdc, database))["tables"]["worked"]["entries"]) == count

    await eventually(lambda: has_entries(2))
    # Published by its schema now, it may go from the list.
    second.kill()
    database.execute("ALTER PUBLICATION pub DROP TABLE worked")
    bridge_process()
    await eventually(lambda: has_entries(1))
    assert await gaps(cdc) == []


async def test_a_table_published_during_a_long_look_is_not_taken_for_gone(
    partitioned: Database, bridge_process: Callable[..., BridgeProcess], cdc: CdcLog, holds: Holds
) -> None:
    partitioned.execute("CREATE TABLE t (id int PRIMARY KEY)")
    partitioned.execute("ALTER PUBLICATION pub ADD TABLE t")
    bridge_process()
    partitioned.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    # A partition in another file has the look wait for the log, which waits for the publisher.
    holds.set("between-kv-and-schema-message")
    partitioned.execute("ALTER TABLE t ADD a int; INSERT INTO t VALUES (2, 2)")
    await holds.wait_reached("between-kv-and-schema-message")
    partitioned.execute("TRUNCATE part1")
    await asyncio.sleep(2)
    partitioned.execute("CREATE TABLE fresh (id int PRIMARY KEY)")
    partitioned.execute("ALTER PUBLICATION pub ADD TABLE fresh")
    await eventually(lambda: cdc.schema("fresh"))
    holds.release("between-kv-and-schema-message")

    async def known() -> bool:
        fresh = (await remembered(cdc, partitioned))["tables"].get("fresh")
        return bool(fresh and not fresh.get("is_gone"))

    await eventually(known)
    assert [gap["tables"] for gap in await gaps(cdc)] == [["part"]]


async def test_thousands_of_tables_are_remembered_and_their_gap_is_announced_once(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    own_nats: Callable[..., NatsServer],
    prefix: str,
) -> None:
    names = [f"{'a_table_with_a_name_of_some_length_':_<40}{number}" for number in range(400)]
    database.execute("; ".join(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names))
    database.publish()
    # What thousands of tables are to the usual limit.
    server = own_nats(config="max_payload: 64KB")
    client = await nats.connect(server.url)
    try:
        cdc = CdcLog(client, Subjects(prefix), database)
        bridge = bridge_process(nats_url=server.url)
        await eventually(lambda: cdc.schema(names[-1]), 30)
        bridge.kill()
        database.execute("ALTER PUBLICATION pub SET (publish = 'insert')")
        bridge_process(nats_url=server.url)
        (gap,) = await eventually(lambda: gaps(cdc), 20)
        assert gap["tables"] == sorted(names)
        # The next look finds another change, and nothing of the first.
        database.execute("ALTER PUBLICATION pub SET (publish = 'insert, update')")
        assert len(await eventually(lambda: two_gaps(cdc), 20)) == 2
    finally:
        await client.close()


async def test_tables_that_come_and_go_for_years_are_remembered_in_little_room(
    database: Database, bridge_process: Callable[..., BridgeProcess], cdc: CdcLog
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish()
    bridge = bridge_process()
    document = await eventually(lambda: remembered(cdc, database))
    bridge.kill()
    one = document["tables"]["t"]
    for number in range(6000):
        shapes = {str(secrets.randbits(63)): [secrets.randbits(63) for _ in range(3)]}
        gone = {**one, "table": f"day_{number}", "shapes": shapes, "is_gone": True}
        document["tables"][f"day_{number}"] = gone
    bucket = await cdc.client.jetstream().key_value(cdc.subjects.bridge_bucket)
    key = f"coverage.slot_{database.name}"
    await bucket.put(key, zlib.compress(json.dumps(document).encode()))
    bridge_process()

    async def size() -> int | None:
        value = (await bucket.get(key)).value or b""
        return len(value) if b'"later"' in zlib.decompress(value) else None

    database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    # A message may have a megabyte.
    assert (await eventually(size, 20)) < 150_000
    database.execute("CREATE TABLE day_7 (id int PRIMARY KEY)")
    (gap,) = await eventually(lambda: gaps(cdc))
    assert gap["tables"] == ["day_7"]
