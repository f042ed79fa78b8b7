"""The hand-off from a snapshot to the changes after it, with the real bridge.

The oracle: rows of the snapshot, then every event whose commit LSN is not below the snapshot's,
read from `cdc_seq` on, must give the source row by row.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from consumer_sdk.wire import Subjects
from tests.fixtures.postgres import Database, both_versions
from tests.fixtures.snapshots import Snapshots
from tests.fixtures.stored import stored_events
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nats.aio.client import Client

    from bridge.embedded import NatsServer, PostgresServer
    from consumer_sdk.wire import Event
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.snapshots import Holds, ReadSnapshot

LONG = os.environ.get("TAILRACE_LONG") == "1"
ROWS = 1_000_000 if LONG else 20_000

PAUSE_SECONDS = 0.005

Key = tuple[Any, ...]


@pytest.fixture
async def reader(
    nats_client: Client, nats_server: NatsServer, database: Database, prefix: str
) -> AsyncIterator[Snapshots]:
    """Asks for snapshots and reads them; the bridge is started by the test."""
    async with AsyncExitStack() as stack:
        harness = Snapshots(nats_client, nats_server.bridge_url, database, Subjects(prefix), stack)
        await harness.listen()
        yield harness


class Fold:
    """A table rebuilt from a snapshot and the events after it; refuses what does not fit."""

    def __init__(self, read: ReadSnapshot, key: tuple[str, ...]) -> None:
        self._key = key
        self.rows = {self._key_of(row): row for row in read.rows}
        assert len(self.rows) == len(read.rows), "a row twice in the snapshot"
        self._lsn = read.meta["lsn"]
        self.applied = 0

    def _key_of(self, row: dict[str, Any]) -> Key:
        return tuple(row[name] for name in self._key)

    def apply(self, event: Event) -> None:
        if event.commit_lsn < self._lsn:
            return
        self.applied += 1
        if event.operation == "INSERT":
            key = self._key_of(event.data)
            assert key not in self.rows, f"{key} inserted twice"
            self.rows[key] = event.data
        elif event.operation == "DELETE":
            del self.rows[self._key_of(event.data)]
        elif event.operation == "TRUNCATE":
            self.rows.clear()
        else:
            before = self.rows.pop(self._key_of(event.old or event.data))
            kept = {name: before[name] for name in event.unchanged}
            self.rows[self._key_of(event.data)] = {**event.data, **kept}


async def rebuilt(
    reader: Snapshots, table: str, read: ReadSnapshot, key: tuple[str, ...] = ("id",)
) -> Fold:
    """Fold everything that the source has committed until now onto a snapshot."""
    marker = random.randrange(10**12)
    reader.database.execute("INSERT INTO marker VALUES (%s)", [marker])
    subjects = reader.subjects

    async def marked() -> bool:
        events = await stored_events(
            reader.client, subjects.prefix, subjects.table_filter("marker"), read.meta["cdc_seq"]
        )
        return any(event.data["id"] == marker for event in events)

    await eventually(marked, 60, "the marker in CDC")
    fold = Fold(read, key)
    for event in await stored_events(
        reader.client, subjects.prefix, subjects.table_filter(table), read.meta["cdc_seq"]
    ):
        fold.apply(event)
    return fold


def source_rows(database: Database, table: str, key: tuple[str, ...]) -> dict[Key, dict[str, Any]]:
    with database.connect(row_factory=psycopg.rows.dict_row) as connection:
        rows = connection.execute(f"SELECT * FROM {table}").fetchall()
    return {tuple(row[name] for name in key): row for row in rows}


def create_accounts(database: Database, rows: int) -> None:
    database.execute(
        "CREATE TABLE accounts (id int PRIMARY KEY, owner text, balance int, note text);"
        "CREATE TABLE marker (id bigint PRIMARY KEY);"
        "INSERT INTO accounts SELECT g, 'owner ' || g, g % 1000,"
        " CASE WHEN g % 500 = 0 THEN repeat('long ', 2000) END FROM generate_series(1,"
        f" {rows}) g"
    )
    database.publish("accounts", "marker")


@both_versions
async def test_a_transaction_in_flight_is_neither_lost_nor_applied_twice(
    database: Database, reader: Snapshots, bridge_process: Callable[..., BridgeProcess]
) -> None:
    create_accounts(database, 100)
    bridge_process()
    with (
        database.connect(autocommit=False, application_name="in flight") as early,
        database.connect(autocommit=False) as late,
    ):
        early.execute("INSERT INTO accounts VALUES (1001, 'early', 1, NULL)")
        early.execute("DELETE FROM accounts WHERE id = 5")
        answer = await reader.begin("accounts")
        await eventually(
            lambda: any("in flight" in s for d in reader.progress for s in d["waiting_for"])
        )
        # This one begins while the snapshot waits, and is still open when it has its point.
        late.execute("UPDATE accounts SET id = 2002 WHERE id = 2")
        database.execute("UPDATE accounts SET balance = -1 WHERE id = 3")
        early.commit()
        await eventually(
            lambda: any(
                d["state"] != "waiting" or f"pid {late.info.backend_pid} " in str(d["waiting_for"])
                for d in reader.progress
            )
        )
        late.commit()
    read = await reader.read("accounts", answer["snapshot_id"])
    fold = await rebuilt(reader, "accounts", read)
    assert fold.rows == source_rows(database, "accounts", ("id",))


async def test_a_transaction_waiting_for_a_standby_is_neither_lost_nor_applied_twice(
    reader: Snapshots,
    bridge_process: Callable[..., BridgeProcess],
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres()
    server.create_database("sync")
    own = reader.database = Database(server, "sync")
    create_accounts(own, 100)
    bridge_process(database_url=own.dsn)

    def set_standbys(names: str) -> None:
        with own.connect() as connection:
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
            connection.execute("SELECT pg_reload_conf()")

    set_standbys("missing")
    await eventually(lambda: own.value("SHOW synchronous_standby_names") == "missing")
    statement = (
        "INSERT INTO accounts VALUES (777, 'waits', 1, NULL);"
        "UPDATE accounts SET balance = 7 WHERE id = 7"
    )
    committing = asyncio.create_task(asyncio.to_thread(own.execute, statement))
    stuck = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    await eventually(lambda: own.value(stuck) == 1)
    answer = await reader.begin("accounts")
    await eventually(
        lambda: any(
            "waiting for a synchronous standby" in s
            for d in reader.progress
            for s in d["waiting_for"]
        )
    )
    set_standbys("")
    await committing
    read = await reader.read("accounts", answer["snapshot_id"])
    fold = await rebuilt(reader, "accounts", read)
    assert fold.rows == source_rows(own, "accounts", ("id",))
    assert fold.rows[(777,)]["owner"] == "waits"


class Writers:
    """Three sessions that insert, update, delete and move keys, some of it rolled back."""

    def __init__(self, database: Database, rows: int) -> None:
        self._database = database
        self._rows = rows
        self._stop = threading.Event()
        self.transactions = 0
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(3)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, number: int) -> None:
        rng = random.Random(number)
        fresh = self._rows * 10 + number
        with self._database.connect(autocommit=False) as connection:
            while not self._stop.is_set():
                for _ in range(rng.randint(1, 6)):
                    # Every writer has rows of its own, so that they never wait for each other.
                    target = rng.randrange(self._rows // 3) * 3 + number + 1
                    match rng.randrange(5):
                        case 0:
                            fresh += 3
                            connection.execute(
                                "INSERT INTO accounts VALUES (%s, %s, 0, NULL)", [fresh, "new"]
                            )
                        case 1:
                            connection.execute("DELETE FROM accounts WHERE id = %s", [target])
                        case 2:
                            fresh += 3
                            connection.execute(
                                "UPDATE accounts SET id = %s WHERE id = %s", [fresh, target]
                            )
                        case _:
                            connection.execute(
                                "UPDATE accounts SET balance = balance + 1 WHERE id = %s", [target]
                            )
                if rng.random() < 0.1:
                    connection.rollback()
                else:
                    connection.commit()
                self.transactions += 1
                # A pace that leaves the machine room for what is tested.
                self._stop.wait(PAUSE_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(900 if LONG else 240)
@pytest.mark.parametrize("flags", [(), ("--pack", "--zstd")], ids=["plain", "packed"])
async def test_a_snapshot_under_writes_and_its_changes_give_the_source(
    database: Database,
    reader: Snapshots,
    bridge_process: Callable[..., BridgeProcess],
    flags: tuple[str, ...],
) -> None:
    create_accounts(database, ROWS)
    bridge_process("--snapshot-workers", "2", *flags)
    reads = []
    with Writers(database, ROWS) as writers:
        for form in ("msgpack", "arrow"):
            seen = writers.transactions
            await eventually(lambda seen=seen: writers.transactions > seen + 30)
            reads.append(await reader.take("accounts", timeout=300, fresh=True, format=form))
    expected = source_rows(database, "accounts", ("id",))
    for read in reads:
        fold = await rebuilt(reader, "accounts", read)
        assert fold.applied > 0
        assert fold.rows == expected
    assert len({read.meta["lsn"] for read in reads}) == 2


async def test_killing_the_bridge_ends_its_snapshots_and_its_workers(
    database: Database,
    reader: Snapshots,
    bridge_process: Callable[..., BridgeProcess],
    holds: Holds,
) -> None:
    create_accounts(database, 5000)
    bridge = bridge_process("--snapshot-chunk-rows", "1000")
    holds.set("snapshot.chunk.2")
    answer = await reader.begin("accounts")
    await holds.wait_reached("snapshot.chunk.2")
    assert len(await reader.record_keys()) == 1
    workers = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tailrace snapshot'"
        " AND datname = current_database()"
    )
    assert database.value(workers) == 1
    bridge.kill()
    await eventually(lambda: database.value(workers) == 0, what="the worker dies with the bridge")
    assert await reader.metas("accounts") == []
    holds.release("snapshot.chunk.2")
    bridge_process()
    reason = await reader.failure("accounts", answer["snapshot_id"])
    assert "the bridge stopped" in reason
    assert await reader.chunk_count("accounts", answer["snapshot_id"]) == 0
    assert await reader.record_keys() == []
    read = await reader.take("accounts")
    assert (await rebuilt(reader, "accounts", read)).rows == source_rows(
        database, "accounts", ("id",)
    )


@both_versions
async def test_the_columns_of_a_meta_are_those_of_the_schema(
    database: Database, reader: Snapshots, cdc: CdcLog, bridge_process: Callable[..., BridgeProcess]
) -> None:
    database.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    database.execute(
        "CREATE TABLE t (a int DEFAULT 7, gone int, id serial, m mood NOT NULL DEFAULT 'sad',"
        " u text UNIQUE NOT NULL, PRIMARY KEY (id, m))"
    )
    database.execute("ALTER TABLE t DROP gone")
    database.publish("t")
    bridge_process()
    for identity in ("DEFAULT", "USING INDEX t_u_key", "FULL", "NOTHING"):
        database.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}")
        meta = (await reader.take("t")).meta
        schema = await cdc.schema("t")
        assert schema is not None
        assert meta["schema_version"] == schema["schema_version"]
        assert meta["columns"] == schema["columns"]
        meta = (await reader.take("t", columns=["m", "u"])).meta
        assert meta["columns"] == schema["columns"][2:]


async def test_snapshot_values_equal_event_values(
    database: Database, reader: Snapshots, bridge_process: Callable[..., BridgeProcess]
) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN cents AS numeric(9,2)"
    )
    database.execute(
        "CREATE TABLE v (id int PRIMARY KEY, b bool, f4 float4, f8 float8, n numeric, c cents,"
        " t text, ch char(5), by bytea, ts timestamp, tz timestamptz, d date, tm time, i interval,"
        " j json, jb jsonb, u uuid, m mood, r int4range, a int[], aa text[][], ip inet, mo money,"
        " bits bit(3), p point)"
    )
    database.execute("CREATE TABLE marker (id bigint PRIMARY KEY)")
    database.publish("v", "marker")
    bridge_process()
    database.execute(
        "INSERT INTO v VALUES"
        " (1, true, 0.1, 1e-320, 1.10, 12.30, E'a\\tb\\\\N', 'ab', '\\x00ff5c',"
        " '2024-02-29 01:02:03.5', '2024-02-29 01:02:03.000001+02', '2024-02-29',"
        " '23:59:59.999999', '1 year 2 days 03:04:05',"
        """ '{"a": 1, "a": 2}', '{"k": [1, 2.50, "x"]}', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11',"""
        " 'happy', '[1,5)', '{1,NULL,3}', '{{a,\"b,c\"},{NULL,\"\"}}', '10.0.0.1/8', 12.34,"
        " B'101', '(1,2)'),"
        " (2, false, 'NaN', '-Infinity', 'NaN', NULL, '', '', '', 'infinity', '-infinity',"
        " '0044-03-15 BC', '00:00', '-1 days', 'null', '1e400', NULL, 'sad', 'empty', '{}', '{}',"
        " NULL, NULL, B'000', NULL),"
        " (3, NULL, NULL, NULL, 1e-20, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,"
        " '12345678901234567890123', NULL, NULL, NULL, '[2:3]={7,8}', NULL, NULL, NULL, NULL, NULL)"
    )
    await reader_has_marker(reader)
    read = await reader.take("v", fresh=True)
    events = await stored_events(
        reader.client, reader.subjects.prefix, reader.subjects.table_filter("v")
    )
    from_events = {event.data["id"]: repr(event.data) for event in events}
    from_snapshot = {row["id"]: repr(row) for row in read.rows}
    assert from_snapshot == from_events
    (document,) = read.documents
    raw = {n: {*document["raw_columns"], *document["raw"].get(str(i), [])}
           for i, n in enumerate(row["id"] for row in read.rows)}  # fmt: skip
    for event in events:
        present = {name for name in raw[event.data["id"]] if event.data[name] is not None}
        assert set(event.raw) == present


async def reader_has_marker(reader: Snapshots) -> None:
    """Wait until CDC holds everything committed so far."""
    reader.database.execute("INSERT INTO marker VALUES (1)")

    async def marked() -> bool:
        return bool(
            await stored_events(
                reader.client, reader.subjects.prefix, reader.subjects.table_filter("marker")
            )
        )

    await eventually(marked, 30)
