"""Mirrors of snapshots with several consistent points, copied from PostgreSQL under a workload."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors

from consumer_sdk.wire import Subjects, decode_payload
from tests.fixtures.mirror import sqlite_rows, wait_equal
from tests.fixtures.oracle import table_difference
from tests.fixtures.stored import stored_messages
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.pieces import PiecedSnapshot, Pieces

KEYS = 1200
# Stored out of line; an update that leaves it alone does not send it.
WIDE = "(SELECT string_agg(md5({} || '-' || n), '') FROM generate_series(1, 150) n)"
RANGES = ("id < 400", "id >= 400 AND id < 800", "id >= 800")


class Items:
    """Random transactions on table `items`, in threads until stopped.

    If `moves_wide` is false, only rows with short bodies change their key: the event of such a
    change has the whole row.
    """

    def __init__(self, dsn: str, writers: int = 2, *, moves_wide: bool = False) -> None:
        self._dsn = dsn
        self._movable = "true" if moves_wide else "length(body) < 100"
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(seed,), daemon=True)
            for seed in range(writers)
        ]
        self.transactions = 0
        self.error: BaseException | None = None

    @staticmethod
    def create(database: Any) -> None:
        database.execute("CREATE TABLE items (id int PRIMARY KEY, name text, body text)")
        database.execute(
            f"INSERT INTO items SELECT i, 'row ' || i, CASE WHEN i % 3 = 0 THEN "
            f"{WIDE.format('i')} ELSE 'short' END FROM generate_series(1, {KEYS}, 2) i"
        )
        database.publish("items")

    def __enter__(self) -> Items:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self.error is not None:
            raise self.error

    async def wait_for(self, transactions: int) -> None:
        goal = self.transactions + transactions
        await eventually(lambda: self.transactions >= goal or self.error, 60, "the workload")

    def _write(self, seed: int) -> None:
        chance = random.Random(seed)
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                while not self._stop.is_set():
                    try:
                        with connection.transaction():
                            for _ in range(chance.randint(1, 8)):
                                self._change(connection, chance)
                    except (errors.UniqueViolation, errors.DeadlockDetected):
                        continue
                    self.transactions += 1
        except psycopg.Error as error:
            self.error = error

    def _change(self, connection: psycopg.Connection[Any], chance: random.Random) -> None:
        key, other = chance.randint(1, KEYS), chance.randint(1, KEYS)
        text = str(chance.random())
        body = WIDE.format(f"'{text}'") if chance.random() < 0.3 else "'short'"
        statement = chance.choice(
            [
                f"INSERT INTO items VALUES ({key}, '{text}', {body}) ON CONFLICT DO NOTHING",
                f"UPDATE items SET name = '{text}' WHERE id = {key}",
                f"UPDATE items SET name = '{text}' WHERE id BETWEEN {key} AND {key + 20}",
                f"UPDATE items SET body = {body} WHERE id = {key}",
                f"DELETE FROM items WHERE id = {key}",
                f"UPDATE items SET id = {other} WHERE id = {key} AND {self._movable}",
            ]
        )
        connection.execute(statement.encode())


async def copy_in_pieces(pieces: Pieces, workload: Items) -> PiecedSnapshot:
    """Three groups of a table that changes all the time."""
    await pieces.schema_published("items")
    snapshot = await pieces.begin("items")
    for condition in RANGES:
        await snapshot.add(condition)
        await workload.wait_for(250)
    await snapshot.finish()
    return snapshot


def stored_copy(path: Path) -> tuple[int, dict[str, Any]] | None:
    """The LSN up to which the hidden copy is applied, and its document; None if there is none."""
    if not path.exists():
        return None
    with closing(sqlite3.connect(path, timeout=30)) as file:
        found = file.execute(
            "SELECT applied_lsn, document FROM _tailrace_copies WHERE lane = 'next' AND loaded = 1"
        ).fetchone()
    return None if found is None else (found[0], json.loads(found[1])["$pieces"])


def differs(source: str, replica: str) -> Any:
    """What differs between the tables; a table that is not shown yet differs."""
    try:
        return table_difference(source, replica, "items")
    except errors.UndefinedTable:
        return "not shown"


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_mirror_of_several_points_equals_its_source(
    database: Any,
    pieces: Pieces,
    bridge_process: Any,
    mirror_process: Any,
    replica_database: str,
    tmp_path: Path,
    kind: str,
) -> None:
    Items.create(database)
    bridge_process()
    path = tmp_path / "replica.db"
    url = f"sqlite:///{path}" if kind == "sqlite" else replica_database
    with Items(database.dsn) as workload:
        snapshot = await copy_in_pieces(pieces, workload)
        mirror = mirror_process("items", "--into", url)
        await asyncio.to_thread(mirror.wait_logged, f"snapshot={snapshot.snapshot_id}", 60)
        await workload.wait_for(100)
    if kind == "sqlite":
        await asyncio.to_thread(wait_equal, database.dsn, path, "items", mirror=mirror)
    else:
        await asyncio.to_thread(mirror.wait_logged, "event=following", 60)
        await eventually(lambda: not differs(database.dsn, replica_database), 60, mirror.describe)
    assert "reused=1" in mirror.log_text()
    assert "event=gap" not in mirror.log_text(), mirror.describe()


async def test_a_mirror_killed_before_it_is_exact_shows_nothing_and_resumes(
    database: Any, pieces: Pieces, bridge_process: Any, mirror_process: Any, tmp_path: Path
) -> None:
    Items.create(database)
    bridge_process()
    path, holds = tmp_path / "replica.db", tmp_path / "holds"
    holds.mkdir()
    kill = holds / "mirror-after-commit.kill"
    kill.touch()
    with Items(database.dsn) as workload:
        snapshot = await copy_in_pieces(pieces, workload)
    arguments = ("items", "--into", f"sqlite:///{path}")
    kills = 0
    while kills < 3:
        mirror = mirror_process(*arguments, environment={"TAILRACE_HOLD": str(holds)})
        assert await asyncio.to_thread(mirror.wait) == 128 + signal.SIGKILL, mirror.describe()
        copy = stored_copy(path)
        if copy is None:
            break
        applied_lsn, document = copy
        assert document["exact_lsn"] == snapshot.exact_lsn
        if applied_lsn >= snapshot.exact_lsn:
            break
        kills += 1
        assert sqlite_rows(path, "items") is None, "shown before it is exact"
        # Loading happens once: what is in the target stays there.
        assert ("event=loaded" in mirror.log_text()) == (kills == 1)
    assert kills > 0, "no kill before the table was exact"
    kill.unlink()
    mirror = mirror_process(*arguments)
    await asyncio.to_thread(wait_equal, database.dsn, path, "items", mirror=mirror)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_groups_of_a_bridge_that_is_killed_reach_a_mirror_whole(
    database: Any,
    cdc: Any,
    prefix: str,
    nats_client: Any,
    bridge_process: Any,
    mirror_process: Any,
    replica_database: str,
    tmp_path: Path,
    kind: str,
) -> None:
    """The bridge copies in groups, dies between two of them, and answers for rows by key."""
    Items.create(database)
    database.execute("ANALYZE items")
    holds = tmp_path / "holds"
    holds.mkdir()
    flags = ("--snapshot-export-limit", "50ms", "--snapshot-chunk-rows", "50")
    path = tmp_path / "replica.db"
    url = f"sqlite:///{path}" if kind == "sqlite" else replica_database
    with Items(database.dsn, moves_wide=True) as workload:
        bridge = bridge_process(*flags, environment={"TAILRACE_HOLD": str(holds)})
        (holds / "snapshot.group.finished.kill").touch()
        mirror = mirror_process("items", "--into", url)
        await asyncio.to_thread(bridge.wait, 90)
        (holds / "snapshot.group.finished.kill").unlink()
        bridge_process(*flags)
        await asyncio.to_thread(mirror.wait_logged, "event=loaded", 90)
        await workload.wait_for(100)
    if kind == "sqlite":
        await asyncio.to_thread(wait_equal, database.dsn, path, "items", mirror=mirror)
    else:
        await asyncio.to_thread(mirror.wait_logged, "event=following", 90)
        await eventually(lambda: not differs(database.dsn, replica_database), 60, mirror.describe)
    names = Subjects(prefix)
    metas = await stored_messages(nats_client, names.init_stream, names.meta("items"))
    points = [len(decode_payload(one.headers, one.data).get("pieces", ())) for one in metas]
    assert max(points) > 1, points


# the row that nobody sends


async def leave_a_hole(database: Any, pieces: Pieces) -> PiecedSnapshot:
    """Row 900 becomes row 1 between the copies of key 1 and of key 900.

    Another row takes key 900 before it is copied: its body is not that of row 1.
    """
    await pieces.schema_published("items")
    snapshot = await pieces.begin("items")
    await snapshot.add("id < 400")
    with database.connect(autocommit=True) as connection:
        connection.execute("UPDATE items SET id = 1 WHERE id = 900")
        connection.execute(f"INSERT INTO items VALUES (900, 'another', {WIDE.format(7)})")
        connection.execute("UPDATE items SET name = 'renamed' WHERE id = 1")
    await snapshot.add("id >= 400")
    await snapshot.finish()
    # After this transaction the log is known to have passed the last point.
    database.execute("INSERT INTO items VALUES (950, 'after', NULL)")
    return snapshot


def create_wide_items(database: Any) -> None:
    database.execute("CREATE TABLE items (id int PRIMARY KEY, name text, body text)")
    for key in (2, 900):
        database.execute(f"INSERT INTO items VALUES ({key}, 'row {key}', {WIDE.format(key)})")
    database.publish("items")


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_value_that_nobody_sent_is_asked_for_by_key(
    database: Any,
    pieces: Pieces,
    bridge_process: Any,
    mirror_process: Any,
    replica_database: str,
    cdc: Any,
    tmp_path: Path,
    kind: str,
) -> None:
    create_wide_items(database)
    bridge = bridge_process()
    await leave_a_hole(database, pieces)
    await cdc.settle()
    # Without the bridge, the test alone answers requests.
    bridge.kill()
    path = tmp_path / "replica.db"
    url = f"sqlite:///{path}" if kind == "sqlite" else replica_database
    holds = tmp_path / "holds"
    holds.mkdir()
    # Killed when the incomplete row is stored, and while nobody answers.
    (holds / "mirror-after-commit.kill").touch()
    mirror = mirror_process("items", "--into", url, environment={"TAILRACE_HOLD": str(holds)})
    assert await asyncio.to_thread(mirror.wait) == 128 + signal.SIGKILL, mirror.describe()
    async with pieces.answering("items") as requests:
        mirror = mirror_process("items", "--into", url)
        await asyncio.to_thread(mirror.wait_logged, 'event="completing rows"', 60)
        await eventually(lambda: requests, 60, mirror.describe)
        if kind == "sqlite":
            assert sqlite_rows(path, "items") is None, "shown with a value missing"
        # The changes after the exact point, among them one of the row that was asked for.
        database.execute("UPDATE items SET name = 'last' WHERE id = 1")
        bridge_process()

        def equal() -> bool:
            if kind == "sqlite":
                return sqlite_rows(path, "items") is not None
            with psycopg.connect(replica_database) as connection:
                found = connection.execute("SELECT to_regclass('public.items')").fetchone()
            return found is not None and found[0] is not None

        await eventually(equal, 60, mirror.describe)
        if kind == "sqlite":
            await asyncio.to_thread(wait_equal, database.dsn, path, "items", mirror=mirror)
        else:
            await eventually(
                lambda: not table_difference(database.dsn, replica_database, "items"),
                60,
                mirror.describe,
            )
    for request in requests:
        assert (request["where"], request["fresh"]) == ({"keys": [[1]]}, True)


async def test_if_rows_cannot_be_asked_for_the_table_is_copied_at_one_point(
    database: Any,
    pieces: Pieces,
    bridge_process: Any,
    mirror_process: Any,
    cdc: Any,
    tmp_path: Path,
) -> None:
    create_wide_items(database)
    bridge = bridge_process()
    await leave_a_hole(database, pieces)
    await cdc.settle()
    bridge.kill()
    path = tmp_path / "replica.db"
    async with pieces.answering("items", refusal="unknown option 'where'") as requests:
        mirror = mirror_process("items", "--into", f"sqlite:///{path}")
        # The second request is for a whole snapshot.
        await eventually(lambda: len(requests) > 1, 60, mirror.describe)
    assert requests[1]["pieces"] is False
    assert sqlite_rows(path, "items") is None
    bridge_process()
    # It may have given up meanwhile.
    mirror.kill()
    mirror = mirror_process("items", "--into", f"sqlite:///{path}")
    await asyncio.to_thread(wait_until, lambda: sqlite_rows(path, "items") is not None, 60)
    await asyncio.to_thread(wait_equal, database.dsn, path, "items", mirror=mirror)
