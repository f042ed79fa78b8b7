"""Large tables, copied in groups of key ranges: each group is exact at a point of its own."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.postgres import both_versions
from tests.fixtures.snapshots import chunk_points
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Holds, ReadSnapshot, Snapshots

PAUSE_SECONDS = 0.01
SMALL = {"export_limit": 0.0001, "chunk_rows": 50}
"""Settings with which each group is one piece of 50 rows."""


def create_users(database: Database, rows: int = 500) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute(f"INSERT INTO users SELECT g, 'user ' || g FROM generate_series(1, {rows}) g")
    database.publish("users")


def groups_of(read: ReadSnapshot) -> dict[int, list[dict[str, Any]]]:
    """The rows of each group, by its point."""
    found = defaultdict(list)
    for document in read.documents:
        found[document["lsn"]] += document["data"]
    return found


class Ends:
    """Where each group of a snapshot ended, from its record in KV."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self.starts: dict[int, list[str] | None] = {}
        """Where the next group starts, by the point of a group."""

    async def watch(self) -> None:
        names = self._snapshots.subjects
        bucket = f"$KV.{names.bridge_bucket}.snapshot.*"

        async def note(message: Any) -> None:
            division = json.loads(message.data or b"{}").get("division")
            if division and division["groups"]:
                self.starts[division["groups"][-1][0]] = division["start"]

        await self._snapshots.client.subscribe(bucket, cb=note)


class Writer:
    """One session that writes all the time; remembers what each transaction did."""

    def __init__(self, database: Database, rows: int) -> None:
        self._database = database
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._rng = random.Random(7)
        self.first = {n: f"user {n}" for n in range(1, rows + 1)}
        self.transactions: list[tuple[int, dict[int, str | None]]] = []
        """The xid of each, and the rows it set, or deleted if None."""

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        now: dict[int, str | None] = dict(self.first)
        with self._database.connect(autocommit=False) as connection:
            while not self._stop.is_set():
                changes: dict[int, str | None] = {}
                for _ in range(self._rng.randint(1, 5)):
                    present = [key for key, value in now.items() if value is not None]
                    key, other = self._rng.choice(present), self._rng.randrange(1, 2000)
                    text = f"text {self._rng.random()}"
                    if self._rng.random() < 0.4:
                        connection.execute("UPDATE users SET name = %s WHERE id = %s", [text, key])
                        step: dict[int, str | None] = {key: text}
                    elif self._rng.random() < 0.3 and len(present) > 400:
                        connection.execute("DELETE FROM users WHERE id = %s", [key])
                        step = {key: None}
                    elif now.get(other) is None:
                        connection.execute(
                            "UPDATE users SET id = %s, name = %s WHERE id = %s", [other, text, key]
                        )
                        step = {key: None, other: text}
                    else:
                        continue
                    changes |= step
                    now |= step
                if changes:
                    xid = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
                    assert xid is not None
                    self.transactions.append((int(xid[0]), changes))
                connection.commit()
                # A pace that leaves the machine room for what is tested.
                self._stop.wait(PAUSE_SECONDS)

    def rows_at(self, lsn: int, commits: dict[int, int]) -> dict[int, str]:
        """The table at a consistent point, given the commit LSN of each xid."""
        rows: dict[int, str | None] = dict(self.first)
        for xid, changes in self.transactions:
            if commits[xid] < lsn:
                rows |= changes
        return {key: value for key, value in rows.items() if value is not None}


def commit_lsns(database: Database, slot: str) -> dict[int, int]:
    """The commit LSN of each transaction since the slot was created, as events have it."""
    found = {}
    query = (
        "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')"
    )
    for (data,) in database.execute(query, [slot]):
        if data[:1] == b"B":
            found[int.from_bytes(data[17:21])] = int.from_bytes(data[1:9])
    return found


@both_versions
async def test_each_group_has_the_rows_of_its_range_at_its_point(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    slot = f"model_{database.name}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    ends = Ends(snapshots)
    await ends.watch()
    await snapshots.start(**SMALL)
    with Writer(database, 500) as writer:
        await eventually(lambda: len(writer.transactions) > 5)
        read = await snapshots.take("users")
    commits = commit_lsns(database, slot)
    database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    groups = groups_of(read)
    assert len(groups) > 5
    assert read.meta["exact_lsn"] == max(groups) == read.meta["pieces"][-1]["lsn"]
    assert read.meta["lsn"] == min(groups) == read.meta["pieces"][0]["lsn"]
    assert [piece["lsn"] for piece in read.meta["pieces"]] == sorted(groups)
    start = 0
    states = set()
    for lsn, rows in groups.items():
        following = ends.starts[lsn]
        end = 10**9 if following is None else int(following[0])
        model = writer.rows_at(lsn, commits)
        states.add(frozenset(model.items()))
        expected = {key: name for key, name in model.items() if start <= key < end}
        assert {row["id"]: row["name"] for row in rows} == expected
        assert len(rows) == len(expected)
        start = end
    assert start == 10**9
    assert len(states) > 3, "the table changed between the groups"


KEYS = {
    "int8": ("id bigint", "g"),
    "text": ("id text", "'Größe ''\\' || g"),
    "text C": ('id text COLLATE "C"', "'x' || g"),
    "text collated": ('id text COLLATE "pg_unicode_fast"', "'É\"' || g"),
    "varchar": ("id varchar(40)", "'v%s' || g"),
    "char": ("id char(12)", "'c ' || g"),
    "numeric": ("id numeric", "g / 7.0"),
    "timestamptz": ("id timestamptz", "'2025-01-01'::timestamptz + g * interval '1.5 s'"),
    "uuid": ("id uuid", "md5(g::text)::uuid"),
    "bytea": ("id bytea", "decode(md5(g::text), 'hex')"),
    "enum": ('id "Odd.%s type"', "('v' || g)::\"Odd.%s type\""),
    "float8": ("id float8", "g / 3.0::float8"),
    "interval": ("id interval", "g * interval '1 minute'"),
    "inet": ("id inet", "'10.0.0.0'::inet + g"),
    "domain": ("id positive", "g"),
    "quoted name": ('"ID ""x" int', "g"),
    "composite": ("a bool, b text, id int", "g % 2 = 0, (g % 7)::text, g"),
}


@pytest.mark.parametrize("kind", KEYS)
async def test_a_key_of_any_type_is_copied_in_groups(
    database: Database, snapshots: Snapshots, kind: str
) -> None:
    columns, values = KEYS[kind]
    labels = ", ".join(f"'v{n}'" for n in range(1, 301))
    names = ", ".join(part.split(" ")[0] for part in columns.split(", "))
    if kind == "quoted name":
        names = '"ID ""x"'
    with database.connect() as connection:
        for statement in (
            f'CREATE TYPE "Odd.%s type" AS ENUM ({labels})',
            "CREATE DOMAIN positive AS int CHECK (value > 0)",
            f'CREATE TABLE "T %s" ({columns}, n int, PRIMARY KEY ({names}))',
            f'INSERT INTO "T %s" SELECT {values}, g FROM generate_series(1, 300) g',
        ):
            connection.execute(statement.encode())
    database.publish('"T %s"')
    await snapshots.start(**SMALL)
    read = await snapshots.take('"T %s"')
    assert len(read.meta["pieces"]) == 6
    assert sorted(row["n"] for row in read.rows) == list(range(1, 301))


async def test_filters_columns_partitions_and_identities_hold_in_each_group(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE part (id int, region text, secret text, twice int GENERATED ALWAYS AS"
        " (id * 2) STORED, PRIMARY KEY (id, region)) PARTITION BY LIST (region);"
        "CREATE TABLE part_a PARTITION OF part FOR VALUES IN ('a');"
        "CREATE TABLE part_b PARTITION OF part FOR VALUES IN ('b');"
        "INSERT INTO part SELECT g, CASE g % 2 WHEN 0 THEN 'a' ELSE 'b' END, 's'"
        " FROM generate_series(1, 300) g;"
        "CREATE TABLE ident (b int NOT NULL, a text NOT NULL, n int);"
        "CREATE UNIQUE INDEX ident_key ON ident (a, b);"
        "ALTER TABLE ident REPLICA IDENTITY USING INDEX ident_key;"
        "INSERT INTO ident SELECT g, 'x' || g % 3, g FROM generate_series(1, 300) g;"
        "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent);"
        "INSERT INTO parent SELECT generate_series(1, 300); INSERT INTO child VALUES (7), (1000)"
    )
    database.execute(
        "CREATE PUBLICATION pub FOR TABLE part (id, region) WHERE (id % 3 = 0), ident, ONLY parent"
        " WITH (publish_via_partition_root)"
    )
    await snapshots.start(**SMALL)
    read = await snapshots.take("part")
    assert len(read.meta["pieces"]) == 6
    assert sorted(row["id"] for row in read.rows) == list(range(3, 301, 3))
    assert all(set(row) == {"id", "region"} for row in read.rows)
    read = await snapshots.take("ident", format="json")
    assert len(read.meta["pieces"]) == 6
    assert sorted(row["n"] for row in read.rows) == list(range(1, 301))
    read = await snapshots.take("parent", format="arrow", zstd=True)
    assert len(read.meta["pieces"]) == 6
    assert sorted(row["id"] for row in read.rows) == list(range(1, 301))


async def test_groups_without_rows_count_for_the_point_but_have_no_chunks(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    database.execute("ALTER PUBLICATION pub SET TABLE users WHERE (id BETWEEN 120 AND 130)")
    await snapshots.start(**SMALL)
    read = await snapshots.take("users")
    assert [row["id"] for row in read.rows] == list(range(120, 131))
    (piece,) = read.meta["pieces"]
    assert piece["chunks"] == [0, 0]
    assert read.meta["lsn"] < piece["lsn"] < read.meta["exact_lsn"]


NOT_DIVIDED = {
    "no key": "CREATE TABLE t (id int, n int)",
    "deferrable": "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, n int)",
    "full without a key": "CREATE TABLE t (id int, n int); ALTER TABLE t REPLICA IDENTITY FULL",
    "nothing": "CREATE TABLE t (id int PRIMARY KEY, n int); ALTER TABLE t REPLICA IDENTITY NOTHING",
    "other order": "CREATE TABLE t (id int NOT NULL, n int);"
    "CREATE UNIQUE INDEX t_i ON t (id DESC); ALTER TABLE t REPLICA IDENTITY USING INDEX t_i",
    "array": "CREATE TABLE t (a int[], id int, n int, PRIMARY KEY (a, id))",
}


@pytest.mark.parametrize("create", NOT_DIVIDED.values(), ids=NOT_DIVIDED.keys())
async def test_a_table_whose_key_has_no_ranges_keeps_one_export(
    database: Database, snapshots: Snapshots, create: str
) -> None:
    database.execute(create)
    values = "'{1}', g, g" if "int[]" in create else "g, g"
    database.execute(f"INSERT INTO t SELECT {values} FROM generate_series(1, 200) g")
    database.publish("t")
    await snapshots.start(**SMALL)
    read = await snapshots.take("t")
    assert "pieces" not in read.meta
    assert len(read.rows) == 200
    refused = await snapshots.ask("t", where={"keys": [[1]]})
    assert "option where needs a key" in refused["error"]


async def test_who_cannot_use_several_points_gets_one(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(**SMALL)
    several = await snapshots.take("users")
    assert len(several.meta["pieces"]) == 10
    assert (await snapshots.begin("users"))["snapshot_id"] == several.meta["snapshot_id"]
    one = await snapshots.take("users", pieces=False)
    assert one.meta["snapshot_id"] != several.meta["snapshot_id"]
    assert "pieces" not in one.meta
    assert one.meta["options"] == several.meta["options"] == {}
    for options in ({}, {"pieces": False}, {"pieces": True}):
        answer = await snapshots.begin("users", **options)
        assert answer["snapshot_id"] == one.meta["snapshot_id"]
    refused = await snapshots.ask("users", pieces="no")
    assert refused["error"] == "option pieces must be true or false"
    # Without the key's columns, nobody could replay changes onto the rows.
    assert "pieces" not in (await snapshots.take("users", columns=["name"])).meta


async def test_between_groups_nothing_holds_back_vacuum(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start(**SMALL)
    holds.set("snapshot.group.finished")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.group.finished")
    held = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'tailrace snapshot%'"
        " AND datname = current_database() AND (backend_xmin IS NOT NULL OR xact_start IS NOT NULL)"
    )
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    await eventually(lambda: database.value(slots) == 0)
    await eventually(lambda: database.value(held) == 0)
    snapshots.progress.clear()
    await eventually(lambda: snapshots.progress)
    assert snapshots.progress[-1]["group"] == 2
    assert snapshots.stats.snapshots[answer["snapshot_id"]].state == "copying"
    # Another table does not wait for the groups of this one.
    database.execute("CREATE TABLE other (n int); INSERT INTO other VALUES (1)")
    database.execute("ALTER PUBLICATION pub ADD TABLE other")
    assert len((await snapshots.take("other")).rows) == 1
    holds.release("snapshot.group.finished")
    assert len((await snapshots.read("users", answer["snapshot_id"])).rows) == 500


DDL = {
    "add column": "ALTER TABLE users ADD COLUMN extra int DEFAULT 7",
    "rewrite": "ALTER TABLE users ALTER COLUMN id TYPE bigint",
    "same type": "ALTER TABLE users ALTER COLUMN name TYPE text USING name || '!'",
    "filter": "ALTER PUBLICATION pub SET TABLE users WHERE (id <= 5)",
    "truncate": "TRUNCATE users",
}


@pytest.mark.parametrize("statement", DDL.values(), ids=DDL.keys())
async def test_ddl_between_groups_ends_the_snapshot_and_says_so(
    database: Database, snapshots: Snapshots, holds: Holds, statement: str
) -> None:
    create_users(database)
    await snapshots.start(**SMALL)
    holds.set("snapshot.group.finished")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.group.finished")
    database.execute(statement)
    holds.release("snapshot.group.finished")
    reason = await snapshots.failure("users", answer["snapshot_id"])
    assert reason == "the structure of users changed; ask again"
    assert (await snapshots.errors("users"))[-1]["retry"] is True
    await eventually(lambda: _is_gone(snapshots, answer["snapshot_id"]))


async def _is_gone(snapshots: Snapshots, snapshot_id: str) -> bool:
    stored = await snapshots.chunk_count("users", snapshot_id)
    return not stored and not await snapshots.record_keys()


async def test_a_chunk_of_another_bridge_is_never_taken_for_ours(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start(**SMALL)
    holds.set("snapshot.group.finished")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.group.finished")
    js = snapshots.client.jetstream()
    # The next group gets chunk 1; 30 is beyond the last.
    for number in (1, 30):
        subject = snapshots.subjects.chunk("users", answer["snapshot_id"], number)
        await js.publish(subject, b"stale", headers={"Cdc-Sha256": "00"})
    holds.release("snapshot.group.finished")
    read = await snapshots.read("users", answer["snapshot_id"])
    assert sorted(row["id"] for row in read.rows) == list(range(1, 501))
    assert len(read.meta["pieces"]) == 10


async def test_wide_rows_of_an_attempt_that_failed_are_removed(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    database.execute("ALTER TABLE users ALTER name SET STORAGE EXTERNAL")
    database.execute("UPDATE users SET name = repeat('w', 2000000) WHERE id % 100 = 60")
    await snapshots.start(**SMALL)
    holds.set("snapshot.group.finished")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.group.finished")
    js = snapshots.client.jetstream()
    subject = snapshots.subjects.chunk("users", answer["snapshot_id"], 1)
    await js.publish(subject, b"stale", headers={"Cdc-Sha256": "00"})
    holds.release("snapshot.group.finished")
    read = await snapshots.read("users", answer["snapshot_id"])
    assert sum(len(row["name"]) for row in read.rows) > 10_000_000
    used = [
        row["$ref"]["name"]
        for document in read.documents
        for row in document["data"]
        if "$ref" in row
    ]
    assert sorted(await snapshots.object_names()) == sorted(used)
    assert len(used) == 5


async def test_a_group_that_takes_too_long_lets_its_export_go(
    database: Database, snapshots: Snapshots, holds: Holds, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = "bridge.snapshot.coordinator.groups.LEAST_GROUP_SECONDS"
    create_users(database, 200)
    await snapshots.start(**SMALL)
    holds.set("snapshot.group.finished")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.group.finished")
    # From now on the workers are warm.
    monkeypatch.setattr(least, 2.0)
    holds.set("snapshot.chunk.2")
    holds.release("snapshot.group.finished")
    held = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tailrace snapshot'"
        " AND datname = current_database()"
    )
    await holds.wait_reached("snapshot.chunk.2")
    await eventually(
        lambda: any(
            "another attempt at this group: a group took longer" in one
            for document in snapshots.progress
            for one in document["waiting_for"]
        )
    )
    await eventually(lambda: database.value(held) == 0, what="the export has ended")
    monkeypatch.setattr(least, 60.0)
    holds.release("snapshot.chunk.2")
    read = await snapshots.read("users", answer["snapshot_id"])
    assert sorted(row["id"] for row in read.rows) == list(range(1, 201))
    assert len(chunk_points(read.meta)) >= 4


async def test_requests_while_groups_are_copied_share_the_snapshot(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start(**SMALL)
    holds.set("snapshot.group.finished")
    answer = await snapshots.begin("users")
    await holds.wait_reached("snapshot.group.finished")
    again = await asyncio.gather(*(snapshots.begin("users") for _ in range(3)))
    assert {one["snapshot_id"] for one in again} == {answer["snapshot_id"]}
    assert {one["state"] for one in again} == {"copying"}
    one_point = await snapshots.begin("users", pieces=False)
    assert one_point["snapshot_id"] != answer["snapshot_id"]
    assert "pieces" not in (await snapshots.read("users", one_point["snapshot_id"])).meta
    holds.release("snapshot.group.finished")
    await snapshots.read("users", answer["snapshot_id"])
    assert await snapshots.record_keys() == []


async def test_several_workers_copy_the_ranges_of_a_group(
    database: Database, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.snapshot.tables.PIECE_BYTES", 8192)
    monkeypatch.setattr("bridge.snapshot.coordinator.groups.DEFAULT_BYTES_PER_SECOND", 1.0)
    create_users(database, 5000)
    await snapshots.start(workers=3, chunk_rows=50, export_limit=0.5)
    read = await snapshots.take("users")
    assert sorted(row["id"] for row in read.rows) == list(range(1, 5001))
