"""Requests for rows by their key: `where` in all its forms, and in all wrong ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from tests.fixtures.postgres import both_versions, versions_since
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import ReadSnapshot, Snapshots

# No test here is about how often snapshots may begin, except the last ones.
OFTEN = {"interval": 0.0, "export_limit": 0.0001, "chunk_rows": 50}


def create_users(database: Database, rows: int = 300) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute(f"INSERT INTO users SELECT g, 'user ' || g FROM generate_series(1, {rows}) g")
    database.publish("users")


def ids(read: ReadSnapshot) -> list[int]:
    return sorted(row["id"] for row in read.rows)


@both_versions
async def test_ranges_and_lists_choose_rows_at_one_point(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(**OFTEN)
    for where, expected in (
        ({"keys": [[7], [5], [7], [9999]]}, [5, 7]),
        ({"from": [10], "to": [13]}, [10, 11, 12]),
        ({"from": [299]}, [299, 300]),
        ({"to": [3]}, [1, 2]),
        ({"from": [13], "to": [10]}, []),
        ({"from": [1]}, list(range(1, 301))),
        ({"keys": [[n] for n in range(1, 1001)]}, list(range(1, 301))),
    ):
        read = await snapshots.take("users", where=where)
        assert ids(read) == expected
        assert "pieces" not in read.meta
        assert "exact_lsn" not in read.meta


@versions_since(15)
async def test_rows_by_key_obey_a_row_filter_in_every_format(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(**OFTEN)
    database.execute("ALTER PUBLICATION pub SET TABLE users WHERE (id % 2 = 0)")
    for form in ("json", "arrow"):
        read = await snapshots.take(
            "users", where={"to": [9]}, format=form, columns=["id"], zstd=True
        )
        assert read.rows == [{"id": 2}, {"id": 4}, {"id": 6}, {"id": 8}]


KEYS: dict[str, tuple[str, str, Any]] = {
    "text": ("id text", "'a''\\b'", "a'\\b"),
    "injected": ("id text", "'x'", "x') OR true --"),
    "numeric": ("id numeric(10, 2)", "12.5", "12.50"),
    "timestamptz": (
        "id timestamptz",
        "'2025-12-12 12:00:34.338547+00'",
        "2025-12-12T12:00:34.338547Z",
    ),
    "uuid": ("id uuid", "'6f1c0c5e-7c0f-4ad0-9d0d-5a3b8f0e6a11'",
             "6F1C0C5E-7c0f-4ad0-9d0d-5a3b8f0e6a11"),
    "bytea": ("id bytea", "'\\x00ff5c27'", b"\x00\xff\\'"),
    "enum": ("id mood", "'it''s 100%'", "it's 100%"),
    "bool": ("id bool", "true", True),
    "float8": ("id float8", "0.1", 0.1),
    "char": ("id char(5)", "'ab'", "ab"),
    "domain": ("id small", "7", 7),
    "bigint": ("id bigint", "9007199254740993", 9007199254740993),
    "date": ("id date", "'infinity'", "infinity"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KEYS)
async def test_a_value_of_any_type_finds_its_row_and_nothing_else(
    database: Database, snapshots: Snapshots, kind: str
) -> None:
    column, value, wire = KEYS[kind]
    with database.connect() as connection:
        for statement in (
            "CREATE TYPE mood AS ENUM ('it''s 100%', 'other')",
            "CREATE DOMAIN small AS int CHECK (value < 100)",
            f"CREATE TABLE t ({column} PRIMARY KEY, n int)",
            f"INSERT INTO t VALUES ({value}, 1)",
        ):
            connection.execute(statement.encode())
    database.publish("t")
    await snapshots.start(**OFTEN)
    expected = 0 if kind == "injected" else 1
    read = await snapshots.take("t", where={"keys": [[wire]]})
    assert len(read.rows) == expected
    if expected and kind != "char":
        # The option is written as the row has the value, so that equal requests are recognised.
        assert read.meta["options"]["where"] == {"keys": [[read.rows[0]["id"]]]}
        again = await snapshots.begin("t", where={"keys": [[read.rows[0]["id"]]]})
        assert again["snapshot_id"] == read.meta["snapshot_id"]
    if kind in ("bytea", "bigint"):
        text = {"bytea": "AP9cJw==", "bigint": "9007199254740993"}[kind]
        body = json.dumps({"where": {"keys": [[text]]}, "format": "json"}).encode()
        answer = await snapshots.ask("t", body)
        assert len((await snapshots.read("t", answer["snapshot_id"])).rows) == 1


async def test_a_key_of_several_columns_has_their_order(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE t (a int, b text, n int, PRIMARY KEY (b, a));"
        "INSERT INTO t SELECT g, 'x' || g % 2, g FROM generate_series(1, 20) g;"
        "CREATE TABLE i (a int NOT NULL, b text NOT NULL, n int);"
        "CREATE UNIQUE INDEX i_key ON i (b, a); INSERT INTO i TABLE t;"
        "ALTER TABLE i REPLICA IDENTITY USING INDEX i_key"
    )
    database.publish("t", "i")
    await snapshots.start(**OFTEN)
    where: dict[str, Any] = {"from": ["x0", 18], "to": ["x1", 3]}
    assert sorted(row["n"] for row in (await snapshots.take("t", where=where)).rows) == [1, 18, 20]
    where = {"keys": [["x1", 3], ["x0", 3]]}
    assert [row["n"] for row in (await snapshots.take("t", where=where)).rows] == [3]
    # Without a primary key, the columns of the identity have the order of the table.
    where = {"keys": [[3, "x1"], [4, "x1"]]}
    assert [row["n"] for row in (await snapshots.take("i", where=where)).rows] == [3]


BAD = {
    "no map": [1],
    "empty": {},
    "only null": {"from": None},
    "unknown": {"like": ["a"]},
    "both": {"keys": [[1]], "from": [1]},
    "no list": {"keys": 1},
    "no keys": {"keys": []},
    "no key": {"keys": [1]},
    "empty key": {"from": []},
    "null": {"keys": [[None]]},
    "nested": {"keys": [[[1]]]},
    "map": {"to": [{"a": 1}]},
    "too many values": {"keys": [[1, 2]]},
    "another number": {"from": [1, 2]},
    "another type": {"keys": [["one"]]},
    "bool": {"keys": [[True]]},
    "float": {"keys": [[1.5]]},
    "bytes": {"keys": [[b"1"]]},
    "out of range": {"keys": [[2**40]]},
    "zero byte": {"keys": [["1\0"]]},
    "too many": {"keys": [[n] for n in range(1001)]},
}


@pytest.mark.parametrize("where", BAD.values(), ids=BAD.keys())
async def test_a_wrong_where_is_refused_with_its_reason(
    database: Database, snapshots: Snapshots, where: Any
) -> None:
    create_users(database, 5)
    await snapshots.start(**OFTEN)
    answer = await snapshots.ask("users", where=where)
    assert answer["ok"] is False
    assert answer["error"].startswith("option where"), answer
    assert "retry" not in answer
    assert await snapshots.record_keys() == []


async def test_equal_rows_share_a_snapshot_and_do_not_replace_that_of_the_table(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(**OFTEN)
    whole = (await snapshots.take("users")).meta["snapshot_id"]
    first = await snapshots.take("users", where={"keys": [[2], [1]]})
    for same in ([[1], [2]], [[2], [1], [2]], [["1"], [2]]):
        body = json.dumps({"where": {"keys": same}, "format": "msgpack"}).encode()
        answer = await snapshots.ask("users", body)
        assert (answer["snapshot_id"], answer["state"]) == (first.meta["snapshot_id"], "ready")
        # It is found again after the request, as a reader waits for it.
        assert (await snapshots.metas("users"))[-2]["snapshot_id"] == first.meta["snapshot_id"]
    other = await snapshots.take("users", where={"keys": [[1]]})
    assert other.meta["snapshot_id"] != first.meta["snapshot_id"]
    # Who looks at the newest meta, or asks, still finds the whole table.
    assert (await snapshots.metas("users"))[-1]["snapshot_id"] == whole
    assert (await snapshots.begin("users"))["snapshot_id"] == whole
    assert msgpack.packb(other.meta["options"]) == msgpack.packb({"where": {"keys": [[1]]}})


async def test_requests_for_rows_have_a_limit_of_their_own(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(interval=3600.0, export_limit=0.0001, chunk_rows=50)
    for number in range(10):
        read = await snapshots.take("users", where={"keys": [[number]]})
    answer = await snapshots.ask("users", where={"keys": [[77]]})
    assert "too many snapshots of rows of users" in answer["error"]
    assert answer["retry"] is True
    assert read.meta["batch_count"] == 1
    assert len((await snapshots.take("users")).rows) == 300


async def test_old_snapshots_of_rows_do_not_stay(
    database: Database, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.snapshot.coordinator.store.SUPERSEDED_SECONDS", 0.0)
    monkeypatch.setattr("bridge.snapshot.coordinator.store.MOST_KEPT_METAS", 4)
    create_users(database)
    await snapshots.start(**OFTEN)
    whole = (await snapshots.take("users")).meta["snapshot_id"]
    answers = []
    for number in range(6):
        answer = await snapshots.begin("users", where={"keys": [[number]]})
        answers.append(answer["snapshot_id"])
        await eventually(lambda: _is_idle(snapshots))
    for snapshot_id in answers[:-1]:
        assert await snapshots.chunk_count("users", snapshot_id) == 0
    metas = [meta["snapshot_id"] for meta in await snapshots.metas("users")]
    assert len(metas) == 4
    assert metas[-1] == whole
    assert (await snapshots.begin("users"))["snapshot_id"] == whole


async def _is_idle(snapshots: Snapshots) -> bool:
    return not await snapshots.record_keys()
