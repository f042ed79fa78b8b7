"""How snapshots wait, begin again, fail, and what is left of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from nats.js.api import DiscardPolicy

from bridge.snapshot.tables import PIECE_BYTES
from tests.fixtures.postgres import both_versions
from tests.fixtures.snapshots import Snapshots as Harness
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import PostgresServer
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Holds, Snapshots


def create_users(database: Database, rows: int = 10) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute(f"INSERT INTO users SELECT g, 'user ' || g FROM generate_series(1, {rows}) g")
    database.publish("users")


def worker_pids() -> list[int]:
    """Processes of snapshot workers that this process has started."""
    listed = subprocess.run(
        ["ps", "-ww", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    fields = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return [
        int(pid)
        for pid, parent, arguments in (entry for entry in fields if len(entry) == 3)
        if int(parent) == os.getpid() and "bridge.snapshot.worker.process" in arguments
    ]


async def nothing_left(snapshots: Snapshots, table: str, snapshot_id: str) -> bool:
    """No meta, chunk, object or record of a snapshot."""
    return (
        not any(m["snapshot_id"] == snapshot_id for m in await snapshots.metas(table))
        and not await snapshots.chunk_count(table, snapshot_id)
        and not await snapshots.object_names()
        and not await snapshots.record_keys()
    )


@both_versions
async def test_waiting_for_a_running_transaction_is_reported_and_names_it(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start()
    with database.connect(autocommit=False, application_name="slow importer") as writer:
        writer.execute("INSERT INTO users VALUES (100, 'open')")
        answer = await snapshots.begin("users")

        def waits() -> list[str]:
            return [
                session
                for document in snapshots.progress
                for session in document["waiting_for"]
                if document["state"] == "waiting"
            ]

        await eventually(waits)
        assert f"pid {writer.info.backend_pid} " in waits()[0]
        assert "slow importer" in waits()[0]
        assert "idle in transaction" in waits()[0]
        assert "INSERT" not in waits()[0], "statements can hold values of rows"
        status = snapshots.stats.snapshots[answer["snapshot_id"]]
        assert (status.state, bool(status.waiting_for)) == ("waiting", True)
        writer.commit()
    read = await snapshots.read("users", answer["snapshot_id"])
    assert len(read.rows) == 11
    assert snapshots.progress[-1]["waiting_for"] == []


async def test_waiting_for_workers_to_start_is_said(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start()
    holds.set("snapshot.start")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.start")

    def newest() -> dict[str, Any]:
        return snapshots.progress[-1] if snapshots.progress else {}

    await eventually(
        lambda: newest().get("waiting_for") == ["the snapshot's worker processes to start"]
    )
    assert newest()["state"] == "waiting"
    holds.release("snapshot.start")
    read = await snapshots.read("users", answer["snapshot_id"])
    assert len(read.rows) == 10
    assert newest()["waiting_for"] == []


async def test_a_prepared_transaction_is_named_too(
    snapshots: Snapshots, own_postgres: Callable[..., PostgresServer]
) -> None:
    from tests.fixtures.postgres import Database

    server = own_postgres(settings={"max_prepared_transactions": 5})
    server.create_database("prepared")
    own = Database(server, "prepared")
    create_users(own)
    own.execute("BEGIN; INSERT INTO users VALUES (50, 'p'); PREPARE TRANSACTION 'half way'")
    await snapshots.start(conninfo=own.dsn)
    answer = await snapshots.begin("users")
    await eventually(
        lambda: any("'half way'" in s for d in snapshots.progress for s in d["waiting_for"])
    )
    with own.connect() as connection:
        connection.execute("COMMIT PREPARED 'half way'")
    assert len((await snapshots.read("users", answer["snapshot_id"])).rows) == 11


async def test_waiting_has_a_limit_and_ends_in_a_clear_error(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(wait_limit=1.5)
    with database.connect(autocommit=False, application_name="forgotten session") as writer:
        writer.execute("INSERT INTO users VALUES (100, 'open')")
        answer = await snapshots.begin("users")
        reason = await snapshots.failure("users", answer["snapshot_id"])
        assert "waited 1.5 s for running transactions" in reason
        assert f"pid {writer.info.backend_pid}" in reason
        assert "forgotten session" in reason
        assert "--snapshot-wait" in reason
        await eventually(lambda: nothing_left(snapshots, "users", answer["snapshot_id"]))
        slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
        await eventually(lambda: database.value(slots) == 0, what="temporary slot dropped")
        writer.rollback()
    assert len((await snapshots.take("users")).rows) == 10


async def test_limits_of_the_database_on_transactions_do_not_end_an_export(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    database.execute(f"ALTER DATABASE {database.name} SET transaction_timeout = '100ms'")
    database.execute(f"ALTER DATABASE {database.name} SET statement_timeout = '100ms'")
    await snapshots.start()
    assert len((await snapshots.take("users")).rows) == 10


async def test_a_table_locked_by_another_session_is_waited_for_and_named(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start()
    holds.set("snapshot.lock")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.lock")
    with database.connect(autocommit=False, application_name="locker") as locker:
        locker.execute("LOCK TABLE users IN ACCESS EXCLUSIVE MODE")
        holds.release("snapshot.lock")
        await eventually(
            lambda: any("locker" in s for d in snapshots.progress for s in d["waiting_for"])
        )
        locker.rollback()
    assert len((await snapshots.read("users", answer["snapshot_id"])).rows) == 10


DDL = {
    "rewrite": "ALTER TABLE users ALTER COLUMN id TYPE bigint",
    "rename column": "ALTER TABLE users RENAME COLUMN name TO title",
    "add column": "ALTER TABLE users ADD COLUMN extra int DEFAULT 7",
    "drop column": "ALTER TABLE users DROP COLUMN name",
    "truncate": "TRUNCATE users; INSERT INTO users VALUES (1, 'new')",
    "vacuum full": "VACUUM FULL users",
    "filter": "ALTER PUBLICATION pub SET TABLE users WHERE (id <= 5)",
}


@pytest.mark.parametrize("statement", DDL.values(), ids=DDL.keys())
@pytest.mark.parametrize("point", ["snapshot.exported", "snapshot.lock"])
async def test_ddl_between_the_consistent_point_and_the_read_begins_it_again(
    database: Database, snapshots: Snapshots, holds: Holds, statement: str, point: str
) -> None:
    create_users(database)
    await snapshots.start()
    holds.set(point)
    answer = await snapshots.begin("users")
    await holds.wait_reached(point)
    with database.connect() as connection:
        for part in statement.split("; "):
            connection.execute(part)
    holds.release(point)
    read = await snapshots.read("users", answer["snapshot_id"])
    with database.connect(row_factory=psycopg.rows.dict_row) as connection:
        where = "WHERE id <= 5" if "PUBLICATION" in statement else ""
        expected = connection.execute(f"SELECT * FROM users {where} ORDER BY id").fetchall()
    assert sorted(read.rows, key=lambda row: row["id"]) == expected
    assert [c["name"] for c in read.meta["columns"]] == list(expected[0])


async def test_ddl_while_rows_travel_waits_for_the_snapshot(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database, 5000)
    await snapshots.start(chunk_rows=1000)
    holds.set("snapshot.chunk.3")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.chunk.3")
    altering = asyncio.create_task(
        asyncio.to_thread(database.execute, "ALTER TABLE users ALTER COLUMN id TYPE bigint")
    )
    blocked = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        " AND datname = current_database()"
    )
    await eventually(lambda: database.value(blocked) == 1)
    holds.release("snapshot.chunk.3")
    read = await snapshots.read("users", answer["snapshot_id"])
    assert sorted(row["id"] for row in read.rows) == list(range(1, 5001))
    await altering


@pytest.mark.parametrize("workers", [1, 2])
async def test_whoever_waits_for_our_locks_does_not_wait_for_ever(
    database: Database, snapshots: Snapshots, holds: Holds, workers: int
) -> None:
    """He waits for our first lock, our next one and our next look wait for him."""
    create_users(database, 20)
    database.execute("ALTER TABLE users ALTER COLUMN name SET STORAGE EXTERNAL")
    if workers > 1:
        wide = PIECE_BYTES // 20
        database.execute("UPDATE users SET name = repeat('w', %s)", [wide])
    await snapshots.start(workers=workers, wait_limit=300)
    holds.set("snapshot.locked")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.locked")
    emptying = asyncio.create_task(asyncio.to_thread(database.execute, "TRUNCATE users"))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
    await eventually(lambda: database.value(waiting) == 1)
    holds.release("snapshot.locked")
    async with asyncio.timeout(60):
        await emptying
        read = await snapshots.read("users", answer["snapshot_id"])
    assert read.rows == []


async def test_a_structure_that_never_rests_ends_in_a_clear_error(
    database: Database, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_users(database)
    database.execute("CREATE TABLE quiet (id int); INSERT INTO quiet VALUES (1)")
    database.execute("ALTER PUBLICATION pub ADD TABLE quiet")
    columns = itertools.count()

    async def alter_when_exported(_: str) -> None:
        database.execute(f"ALTER TABLE users ADD COLUMN c{next(columns)} int")

    monkeypatch.setattr("bridge.snapshot.coordinator.run.hold_async", alter_when_exported)
    await snapshots.start()
    answers = await asyncio.gather(snapshots.ask("users"), snapshots.ask("quiet"))
    reason = await snapshots.failure("users", answers[0]["snapshot_id"])
    assert "changed during each of 5 attempts" in reason
    assert next(columns) == 5
    # Its neighbour in the first export was not held up by it.
    assert len((await snapshots.read("quiet", answers[1]["snapshot_id"])).rows) == 1


async def test_a_dropped_table_ends_its_snapshot(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start()
    holds.set("snapshot.lock")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.lock")
    database.execute("DROP TABLE users")
    holds.release("snapshot.lock")
    assert "does not exist" in await snapshots.failure("users", answer["snapshot_id"])


async def test_a_killed_worker_fails_the_snapshot_and_leaves_nothing(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database, 5000)
    database.execute("INSERT INTO users VALUES (0, repeat('w', 2000000))")
    await snapshots.start(chunk_rows=1000)
    holds.set("snapshot.chunk.3")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.chunk.3")
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGKILL)
    reason = await snapshots.failure("users", answer["snapshot_id"])
    assert "SIGKILL" in reason
    await eventually(lambda: nothing_left(snapshots, "users", answer["snapshot_id"]))
    holds.release("snapshot.chunk.3")
    assert snapshots.stats.snapshots[answer["snapshot_id"]].state == "failed"
    assert len((await snapshots.take("users")).rows) == 5001


async def test_a_worker_that_hangs_is_ended_and_its_snapshot_fails(
    database: Database, snapshots: Snapshots, holds: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_users(database, 5000)
    await snapshots.start(chunk_rows=1000)
    holds.set("snapshot.chunk.3")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.chunk.3")
    (pid,) = worker_pids()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("bridge.snapshot.coordinator.worker_pool.SILENCE_STEP_SECONDS", 0.2)
    reason = await snapshots.failure("users", answer["snapshot_id"])
    assert f"process {pid}" in reason
    assert "no sign of life" in reason
    assert worker_pids() == []
    await eventually(lambda: nothing_left(snapshots, "users", answer["snapshot_id"]))
    holds.release("snapshot.chunk.3")
    monkeypatch.undo()
    assert len((await snapshots.take("users")).rows) == 5000


async def test_locks_of_a_worker_that_nobody_tells_on_do_not_last(
    database: Database, snapshots: Snapshots, holds: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the bridge is frozen: applications must be able to change their tables."""
    create_users(database)
    await snapshots.start()
    monkeypatch.setattr("bridge.snapshot.coordinator.run.IDLE_LOCK_SECONDS", 0.5)
    holds.set("snapshot.locked")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.locked")
    with database.connect() as application:
        application.execute("SET lock_timeout = '10s'")
        application.execute("ALTER TABLE users ADD COLUMN more int")
    monkeypatch.undo()
    holds.release("snapshot.locked")
    # The table is another one now, so it is begun again.
    taken = await snapshots.read("users", answer["snapshot_id"])
    assert [sorted(row) for row in taken.rows[:1]] == [["id", "more", "name"]]


async def test_workers_serve_the_next_snapshot_and_end_when_idle(
    database: Database, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_users(database)
    await snapshots.start()
    await snapshots.take("users")
    (first,) = worker_pids()
    await snapshots.take("users", fresh=True, format="arrow")
    assert worker_pids() == [first]
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: worker_pids() == [])
    monkeypatch.setattr("bridge.snapshot.coordinator.worker_pool.IDLE_SECONDS", 0.1)
    assert len((await snapshots.take("users", fresh=True)).rows) == 10
    await eventually(lambda: worker_pids() == [], what="idle workers end")


async def test_stopping_ends_what_is_under_way_and_says_so(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database, 5000)
    service = await snapshots.start(chunk_rows=1000)
    holds.set("snapshot.chunk.3")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.chunk.3")
    await service.stop()
    assert worker_pids() == []
    reason = await snapshots.failure("users", answer["snapshot_id"], timeout=1)
    assert "the bridge stopped" in reason
    assert await nothing_left(snapshots, "users", answer["snapshot_id"])
    assert snapshots.stats.snapshots[answer["snapshot_id"]].state == "cancelled"
    holds.release("snapshot.chunk.3")
    await snapshots.start()
    assert len((await snapshots.take("users")).rows) == 5000


async def test_the_next_bridge_announces_what_a_dead_one_left_under_way(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database, 5000)
    database.execute("INSERT INTO users VALUES (0, repeat('w', 2000000))")
    first = await snapshots.start(chunk_rows=1000)
    holds.set("snapshot.chunk.3")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.chunk.3")
    # A second bridge becomes active while the first, cut off, believes that it still is.
    await snapshots.start()
    reason = await snapshots.failure("users", answer["snapshot_id"], timeout=2)
    assert "the bridge stopped" in reason
    assert await snapshots.record_keys() == []
    holds.release("snapshot.chunk.3")

    def first_is_over() -> bool:
        return snapshots.stats.snapshots[answer["snapshot_id"]].finished_at is not None

    await eventually(first_is_over)
    assert snapshots.stats.snapshots[answer["snapshot_id"]].state == "failed"
    assert "taken over" in str(snapshots.stats.snapshots[answer["snapshot_id"]].error)
    await eventually(lambda: nothing_left(snapshots, "users", answer["snapshot_id"]))
    await first.stop()


async def test_records_of_other_sources_are_left_alone(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start(source="first")
    holds.set("snapshot.piece")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.piece")
    await snapshots.start(source="second")
    assert len(await snapshots.record_keys()) == 1
    holds.release("snapshot.piece")
    await snapshots.read("users", answer["snapshot_id"])


async def test_a_failing_table_does_not_take_its_neighbours_along(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE good (id int); INSERT INTO good VALUES (1);"
        "CREATE TABLE bad (id int); INSERT INTO bad VALUES (6), (7), (8)"
    )
    database.execute("CREATE PUBLICATION pub FOR TABLE good, bad WHERE (1 / (id - 7) < 9)")
    await snapshots.start()
    answers = await asyncio.gather(snapshots.ask("bad"), snapshots.ask("good"))
    reason = await snapshots.failure("bad", answers[0]["snapshot_id"])
    assert reason == "division by zero"
    assert len((await snapshots.read("good", answers[1]["snapshot_id"])).rows) == 1


async def test_a_full_init_stream_is_a_failure_not_a_hole(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database, 30_000)
    js = snapshots.client.jetstream()
    names = snapshots.subjects
    await js.delete_stream(names.init_stream)
    await js.add_stream(name=names.init_stream, subjects=[names.init_all], max_bytes=300_000)
    await snapshots.start(chunk_rows=2000)
    answer = await snapshots.begin("users")
    reason = await snapshots.failure("users", answer["snapshot_id"])
    assert "look at its limits" in reason
    assert await snapshots.metas("users") == []


async def test_superseded_snapshots_make_room_for_new_ones(
    database: Database, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_users(database, 10_000)
    js = snapshots.client.jetstream()
    names = snapshots.subjects
    await js.delete_stream(names.init_stream)
    await js.add_stream(
        name=names.init_stream,
        subjects=[names.init_all],
        max_bytes=1_000_000,
        discard=DiscardPolicy.NEW,
    )
    await snapshots.start()
    taken: list[str] = []

    async def has_ended(snapshot_id: str) -> bool:
        ended = await snapshots.metas("users") + await snapshots.errors("users")
        return any(one["snapshot_id"] == snapshot_id for one in ended)

    while not await snapshots.errors("users"):
        taken.append((await snapshots.begin("users", fresh=True))["snapshot_id"])
        await eventually(lambda: has_ended(taken[-1]), what="the end of a snapshot")
    (error,) = await snapshots.errors("users")
    assert error["snapshot_id"] == taken.pop()
    assert "is full" in error["error"]
    # Those who read the older ones may not have finished.
    assert len(taken) > 1
    assert [await snapshots.chunk_count("users", one) for one in taken] == [1] * len(taken)
    monkeypatch.setattr("bridge.snapshot.coordinator.store.SUPERSEDED_SECONDS", 0)
    assert len((await snapshots.take("users", fresh=True)).rows) == 10_000
    kept = [await snapshots.chunk_count("users", one) for one in taken]
    assert kept == [0] * (len(taken) - 1) + [1], "the newest is used until there is a newer one"


async def test_a_nats_restart_in_the_middle_is_survived(
    database: Database, snapshots: Snapshots, holds: Holds, own_nats: Any, prefix: str
) -> None:
    import nats

    from consumer_sdk.wire import Subjects

    server = own_nats()
    create_users(database, 20_000)
    client = await nats.connect(
        server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=_ignore
    )
    own = Harness(client, server.url, database, Subjects(prefix), snapshots.stack)
    await own.prepare()
    await own.start(chunk_rows=500)
    holds.set("snapshot.chunk.3")
    answer = await own.begin("users")
    await holds.wait_reached("snapshot.chunk.3")
    await asyncio.to_thread(server.kill)
    holds.release("snapshot.chunk.3")
    await asyncio.to_thread(server.start)
    await eventually(lambda: client.is_connected)
    read = await own.read("users", answer["snapshot_id"])
    assert sorted(row["id"] for row in read.rows) == list(range(1, 20_001))
    own.stack.push_async_callback(client.close)


async def _ignore(_: Exception) -> None:
    """Losing the connection is what the test is about."""


async def test_worker_arguments_and_environment_hold_no_secret(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start()
    holds.set("snapshot.piece")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.piece")
    (pid,) = worker_pids()
    password = database.server.password
    shown = subprocess.run(
        ["ps", "eww", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout
    assert "bridge.snapshot.worker.process" in shown
    assert password not in shown
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, os.getpid())
    holds.release("snapshot.piece")
    await snapshots.read("users", answer["snapshot_id"])
