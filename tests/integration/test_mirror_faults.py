"""Mirrors that are killed, starved and cut off end up equal to their source all the same."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from consumer_sdk.wire.position import parse_lsn
from consumer_sdk.wire.subjects import Subjects
from tests.fixtures.mirror import Workload, difference, sqlite_rows, wait_equal
from tests.fixtures.oracle import table_difference
from tests.fixtures.postgres import Database
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 20 if os.environ.get("TAILRACE_LONG") else 3


def positions(path: Path) -> dict[str, tuple[int, int, int]]:
    """Epoch, commit LSN and stream sequence by source, as the file has them."""
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        rows = connection.execute(
            "SELECT source, epoch, commit_lsn, stream_seq FROM _tailrace_positions"
        ).fetchall()
    return {source: (epoch, lsn, seq) for source, epoch, lsn, seq in rows}


@pytest.mark.slow
@pytest.mark.timeout(180 + 40 * KILLS)
def test_mirror_killed_at_random_resumes_exactly(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    Workload.create(database.dsn)
    database.publish(*Workload.TABLES)
    bridge_process()
    path = tmp_path / "replica.db"
    seed = int(os.environ.get("TAILRACE_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {seed}: repeat with TAILRACE_SEED={seed}")
    chance = random.Random(seed)
    with Workload(database.dsn) as workload:
        for kill in range(KILLS):
            mirror = mirror_process(*Workload.TABLES, "--into", f"sqlite:///{path}")
            # Starting takes longer than most transactions: kills count from where it is at work,
            # by turns from its first sign of life and from when it follows.
            mirror.wait_logged("event=" if kill % 2 == 0 else "event=following", 90)
            workload.wait_for(chance.randint(1, 150))
            assert mirror.running, mirror.describe()
            mirror.kill()
        mirror = mirror_process(*Workload.TABLES, "--into", f"sqlite:///{path}")
        workload.wait_for(20)
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)


@pytest.mark.parametrize(
    "point",
    [
        "mirror-before-loaded",
        "mirror-before-swap",
        "mirror-between-data-and-position",
        "mirror-after-commit",
    ],
)
def test_mirror_killed_at_a_named_point_resumes_exactly(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path, point: str
) -> None:
    Workload.create(database.dsn, rows=300)
    database.publish(*Workload.TABLES)
    bridge_process()
    path, holds = tmp_path / "replica.db", tmp_path / "holds"
    holds.mkdir()
    (holds / f"{point}.kill").touch()
    environment = {"TAILRACE_HOLD": str(holds)}
    arguments = (*Workload.TABLES, "--into", f"sqlite:///{path}")
    with Workload(database.dsn, writers=1) as workload:
        for _ in range(2):
            mirror = mirror_process(*arguments, environment=environment)
            assert mirror.wait() == 128 + signal.SIGKILL, mirror.describe()
        assert (holds / f"{point}.reached").exists()
        mirror = mirror_process(*arguments)
        workload.wait_for(20)
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)


@pytest.mark.slow
def test_bridge_and_mirror_killed_together_resume_exactly(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    Workload.create(database.dsn)
    database.publish(*Workload.TABLES)
    path = tmp_path / "replica.db"
    arguments = (*Workload.TABLES, "--into", f"sqlite:///{path}")
    bridge = bridge_process()
    mirror = mirror_process(*arguments)
    wait_until(lambda: not difference(database.dsn, path, "ledger"), 60, mirror.describe)
    with Workload(database.dsn) as workload:
        for _ in range(2):
            workload.wait_for(50)
            bridge.kill()
            mirror.kill()
            mirror = mirror_process(*arguments)
            bridge = bridge_process()
        workload.wait_for(50)
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)


def confirmed_lsn(database: Any) -> int:
    return parse_lsn(database.slot(f"slot_{database.name}")["confirmed_flush_lsn"])


def make_users(database: Any, rows: int = 100) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO users SELECT i, 'v' FROM generate_series(1, %s) i", [rows])
    database.publish("users")


@pytest.mark.timeout(240)
async def test_stream_purged_under_a_running_mirror_is_announced_and_repaired(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    tmp_path: Path,
    nats_client: Any,
    prefix: str,
) -> None:
    # More than a reader has on its way at any time.
    make_users(database, rows=9000)
    # The bridge has lost its record too, and may go on only with a new epoch.
    bridge_process("--on-gap=new-epoch")
    path = tmp_path / "replica.db"
    mirror = mirror_process("users", "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, "users", mirror=mirror)
    os.kill(mirror.pid, signal.SIGSTOP)
    database.execute("UPDATE users SET v = 'unseen'")
    # Before PostgreSQL was told, they would be stored again.
    written = parse_lsn(database.current_lsn())
    wait_until(lambda: confirmed_lsn(database) >= written, 60)
    await nats_client.jetstream().purge_stream(Subjects(prefix).cdc_stream)
    os.kill(mirror.pid, signal.SIGCONT)
    database.execute("UPDATE users SET v = 'seen' WHERE id > 90")
    mirror.wait_logged("event=gap", 90)
    wait_equal(database.dsn, path, "users", mirror=mirror)


async def test_mirror_stopped_until_the_stream_has_trimmed_past_it_is_repaired(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    tmp_path: Path,
    nats_client: Any,
    prefix: str,
) -> None:
    Workload.create(database.dsn, rows=300)
    database.publish(*Workload.TABLES)
    bridge_process("--cdc-discard", "old")
    path = tmp_path / "replica.db"
    arguments = (*Workload.TABLES, "--into", f"sqlite:///{path}")
    mirror = mirror_process(*arguments, "--once")
    assert mirror.wait(90) == 0, mirror.describe()
    ((_, _, seen),) = positions(path).values()
    js = nats_client.jetstream()
    name = Subjects(prefix).cdc_stream
    config = (await js.stream_info(name)).config
    config.max_msgs = 100
    await js.update_stream(config)

    async def first_held() -> int:
        return int((await js.stream_info(name)).state.first_seq)

    with Workload(database.dsn) as workload:
        while await first_held() <= seen + 1:
            await asyncio.to_thread(workload.wait_for, 10)
        # Room again, for what the repair itself has to read.
        config.max_msgs = -1
        await js.update_stream(config)
        mirror = mirror_process(*arguments)
        await asyncio.to_thread(mirror.wait_logged, "trimmed or purged", 90)
        await asyncio.to_thread(workload.wait_for, 20)
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)


async def test_old_data_stays_readable_until_the_repair_is_complete(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    tmp_path: Path,
    nats_client: Any,
    prefix: str,
) -> None:
    make_users(database)
    bridge = bridge_process()
    path, holds = tmp_path / "replica.db", tmp_path / "holds"
    holds.mkdir()
    mirror = mirror_process("users", "--into", f"sqlite:///{path}", "--once")
    assert mirror.wait() == 0, mirror.describe()
    published = bridge.status()["cdc_events_published"]
    database.execute("UPDATE users SET v = 'unseen'")
    wait_until(lambda: bridge.status()["cdc_events_published"] >= published + 100)
    # Retention has moved past the mirror while it was away.
    await nats_client.jetstream().purge_stream(Subjects(prefix).cdc_stream, keep=3)
    (holds / "mirror-before-swap.hold").touch()
    mirror = mirror_process(
        "users", "--into", f"sqlite:///{path}", environment={"TAILRACE_HOLD": str(holds)}
    )
    mirror.wait_logged("trimmed or purged")
    wait_until((holds / "mirror-before-swap.reached").exists, 60, mirror.describe)
    assert {row["v"] for row in sqlite_rows(path, "users") or []} == {"v"}
    (holds / "mirror-before-swap.hold").unlink()
    wait_equal(database.dsn, path, "users", mirror=mirror)


def test_new_epoch_after_a_lost_slot_is_repaired(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    make_users(database)
    bridge = bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("users", "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, "users", mirror=mirror)
    before = positions(path)
    bridge.terminate()
    bridge.wait()
    (slot,) = before
    database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    database.execute("DELETE FROM users WHERE id <= 30")
    bridge_process("--on-gap=new-epoch")
    database.execute("UPDATE users SET v = 'new epoch' WHERE id > 80")
    mirror.wait_logged("new epoch")
    wait_equal(database.dsn, path, "users", mirror=mirror)
    assert positions(path)[slot][0] > before[slot][0]


def test_a_repair_interrupted_by_a_new_epoch_does_not_wait_for_positions_of_the_old_one(
    own_postgres: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    """The new history counts from where another server stands, far behind the first."""
    first, second = (Database(own_postgres(), "shop") for _ in range(2))
    for database in (first, second):
        database.server.create_database("shop")
        make_users(database)
    for _ in range(3):
        first.execute("SELECT pg_switch_wal()")
        first.execute("CREATE TABLE IF NOT EXISTS filler ()")
    path, holds = tmp_path / "replica.db", tmp_path / "holds"
    holds.mkdir()
    bridge = bridge_process(slot="shop", database_url=first.dsn)
    mirror = mirror_process("users", "--into", f"sqlite:///{path}")
    wait_equal(first.dsn, path, "users", mirror=mirror)
    mirror.kill()
    first.execute("ALTER TABLE users ADD COLUMN filled text DEFAULT 'unseen'")
    first.execute("UPDATE users SET v = 'after' WHERE id = 1")
    (holds / "mirror-before-loaded.kill").touch()
    mirror = mirror_process(
        "users", "--into", f"sqlite:///{path}", environment={"TAILRACE_HOLD": str(holds)}
    )
    assert mirror.wait() == 128 + signal.SIGKILL, mirror.describe()
    bridge.kill()
    assert second.current_lsn() < first.current_lsn()
    bridge_process("--on-gap=new-epoch", slot="shop", database_url=second.dsn)
    second.execute("DELETE FROM users WHERE id > 50")
    mirror = mirror_process("users", "--into", f"sqlite:///{path}")
    wait_equal(second.dsn, path, "users", mirror=mirror)


async def test_recreated_stream_is_repaired(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    tmp_path: Path,
    nats_client: Any,
    prefix: str,
) -> None:
    make_users(database)
    bridge = bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("users", "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, "users", mirror=mirror)
    bridge.terminate()
    bridge.wait()
    await nats_client.jetstream().delete_stream(Subjects(prefix).cdc_stream)
    database.execute("DELETE FROM users WHERE id <= 30")
    bridge_process("--on-gap=new-epoch")
    database.execute("UPDATE users SET v = 'new stream' WHERE id > 80")
    mirror.wait_logged("event=gap")
    wait_equal(database.dsn, path, "users", mirror=mirror)


def test_two_sources_on_one_stream_are_followed_and_repaired_apart(
    database: Any, bridge_process: Any, mirror_process: Any, tmp_path: Path, pg: Any
) -> None:
    make_users(database)
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO orders SELECT i, 'o' FROM generate_series(1, 100) i")
    database.publish("orders", name="others")
    first = bridge_process(slot=f"one_{database.name}")
    bridge_process(slot=f"two_{database.name}", pub="others")
    path = tmp_path / "replica.db"
    mirror = mirror_process("users", "orders", "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, "users", "orders", mirror=mirror)
    for step in range(5):
        database.execute("UPDATE users SET v = v || %s WHERE id %% 5 = %s", [str(step), step])
        database.execute("UPDATE orders SET v = v || %s WHERE id %% 5 = %s", [str(step), step])
    wait_equal(database.dsn, path, "users", "orders", mirror=mirror)
    before = positions(path)
    assert set(before) == {f"one_{database.name}", f"two_{database.name}"}
    first.terminate()
    first.wait()
    database.execute("SELECT pg_drop_replication_slot(%s)", [f"one_{database.name}"])
    database.execute("DELETE FROM users WHERE id <= 30")
    bridge_process("--on-gap=new-epoch", slot=f"one_{database.name}")
    database.execute("UPDATE orders SET v = 'after'")
    wait_equal(database.dsn, path, "users", "orders", mirror=mirror)
    after = positions(path)
    assert after[f"one_{database.name}"][0] > before[f"one_{database.name}"][0]
    assert after[f"two_{database.name}"][0] == before[f"two_{database.name}"][0]


@pytest.mark.parametrize("point", ["mirror-between-data-and-position", "mirror-after-commit"])
def test_a_postgres_mirror_killed_at_a_named_point_resumes_exactly(
    database: Any, bridge_process: Any, mirror_process: Any, replica_database: str, tmp_path: Path,
    point: str,
) -> None:  # fmt: skip
    Workload.create(database.dsn, rows=100)
    database.publish(*Workload.TABLES)
    bridge_process()
    holds = tmp_path / "holds"
    holds.mkdir()
    (holds / f"{point}.kill").touch()
    arguments = (*Workload.TABLES, "--into", replica_database)
    with Workload(database.dsn, writers=1) as workload:
        mirror = mirror_process(*arguments, environment={"TAILRACE_HOLD": str(holds)})
        assert mirror.wait() == 128 + signal.SIGKILL, mirror.describe()
        assert (holds / f"{point}.reached").exists()
        mirror = mirror_process(*arguments)
        workload.wait_for(20)

    def same() -> bool:
        try:
            return not any(
                table_difference(database.dsn, replica_database, table) for table in Workload.TABLES
            )
        except psycopg.Error:
            return False  # a table is not there yet

    wait_until(same, 60, mirror.describe)


async def test_a_table_that_is_not_published_any_more_does_not_keep_others_from_repair(
    database: Any, bridge_process: Any, mirror_process: Any, nats_client: Any, prefix: str,
    run_command: Any, tmp_path: Path,
) -> None:  # fmt: skip
    make_users(database)
    database.execute("CREATE TABLE others (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO others VALUES (1, 'kept')")
    database.execute("ALTER PUBLICATION pub ADD TABLE others")
    bridge_process()
    path = tmp_path / "replica.db"
    into = ("--into", f"sqlite:///{path}")
    mirror = mirror_process("--all", *into)
    wait_equal(database.dsn, path, "users", "others", mirror=mirror)
    mirror.kill()
    database.execute("ALTER PUBLICATION pub DROP TABLE others")
    database.execute("UPDATE others SET v = 'unseen'")
    database.execute("UPDATE users SET v = 'seen'")

    def published() -> str:
        return str(run_command("cdc", "tables", "--prefix", prefix).stdout)

    wait_until(lambda: "others" not in published(), 30, published)
    await nats_client.jetstream().purge_stream(Subjects(prefix).cdc_stream)
    for arguments in (("--all",), ("users",)):
        mirror = mirror_process(*arguments, *into)
        wait_equal(database.dsn, path, "users", mirror=mirror)
        database.execute("UPDATE users SET v = v || '.'")
        wait_equal(database.dsn, path, "users", mirror=mirror)
        mirror.kill()
    assert sqlite_rows(path, "others") == [{"id": 1, "v": "kept"}]
    # It is followed again when it comes back.
    database.execute("ALTER PUBLICATION pub ADD TABLE others")
    database.execute("INSERT INTO others VALUES (2, 'back')")
    mirror = mirror_process("--all", *into)
    wait_equal(database.dsn, path, "users", "others", mirror=mirror)
