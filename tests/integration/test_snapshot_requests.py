"""Requests for snapshots: answers, refusals, sharing, reuse."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import msgpack
import nats.errors
import pytest

from tests.fixtures.postgres import both_versions
from tests.fixtures.snapshots import gather
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Holds, Snapshots


def create_users(database: Database, rows: int = 10, *, publish: bool = True) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute(f"INSERT INTO users SELECT g, 'user ' || g FROM generate_series(1, {rows}) g")
    if publish:
        database.publish("users")


@both_versions
async def test_a_snapshot_holds_every_row_once(database: Database, snapshots: Snapshots) -> None:
    create_users(database, 25_000)
    await snapshots.start()
    read = await snapshots.take("users")
    assert sorted(row["id"] for row in read.rows) == list(range(1, 25_001))
    assert all(row["name"] == f"user {row['id']}" for row in read.rows)
    assert [len(document["data"]) for document in read.documents] == [10_000, 10_000, 5_000]
    meta = read.meta
    assert (meta["table"], meta["schema"]) == ("users", "public")
    assert [column["name"] for column in meta["columns"]] == ["id", "name"]
    assert (meta["format"], meta["options"], meta["source"]) == ("msgpack", {}, "src")
    assert (meta["stream"], meta["cdc_seq"]) == (snapshots.subjects.cdc_stream, 1)


async def test_the_end_of_a_snapshot_leaves_no_record_of_it(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start()
    read = await snapshots.take("users")

    async def no_records() -> bool:
        return not await snapshots.record_keys()

    await eventually(no_records)
    progress = snapshots.stats.snapshots[read.meta["snapshot_id"]]
    assert (progress.state, progress.rows, progress.chunks) == ("done", 10, 1)
    assert snapshots.progress[-1]["state"] == "ready"
    assert snapshots.progress[-1]["rows"] == 10


async def test_every_refusal_says_why(database: Database, snapshots: Snapshots) -> None:
    create_users(database)
    database.execute("CREATE TABLE hidden (id int); CREATE VIEW shown AS SELECT 1 AS one")
    await snapshots.start()

    async def refusal(table: str, body: bytes | None = None, **options: object) -> str:
        answer = await snapshots.ask(table, body, **options)
        assert answer["ok"] is False, answer
        return str(answer["error"])

    assert "does not exist" in await refusal("nothing")
    assert "ALTER PUBLICATION pub ADD TABLE hidden" in await refusal("hidden")
    assert "not a table" in await refusal("shown")
    assert "publishes no column 'nose'" in await refusal("users", columns=["id", "nose"])
    assert "one of msgpack, json, arrow" in await refusal("users", format="xml")
    assert "unknown option 'colour'" in await refusal("users", colour="red")
    assert "list of column names" in await refusal("users", columns="id")
    assert "twice" in await refusal("users", columns=["id", "id"])
    assert "true or false" in await refusal("users", fresh="yes")
    assert "neither JSON nor MessagePack" in await refusal("users", b"\xc1\xff\x00")
    assert "not a map" in await refusal("users", msgpack.packb([1, 2]))
    assert "neither JSON" in await refusal("users", b"{broken")
    assert "too long" in await refusal("users", b"x" * 200_000)
    reply = await snapshots.client.request(
        f"{snapshots.subjects.snapshot}.request.a.b.c", b"", timeout=2
    )
    assert msgpack.unpackb(reply.data)["ok"] is False
    # Nothing of all that has harmed the service.
    assert len((await snapshots.take("users")).rows) == 10


async def test_an_answer_has_the_encoding_of_the_request(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(as_json=True)
    subject = snapshots.subjects.snapshot_request("users")
    for body, kind in (
        (b"", "application/json"),
        (b'{"fresh": false}', "application/json"),
        (msgpack.packb({"fresh": False}), "application/msgpack"),
    ):
        reply = await snapshots.client.request(subject, body, timeout=2)
        assert reply.headers is not None
        assert reply.headers["Content-Type"] == kind
        read = json.loads if kind == "application/json" else msgpack.unpackb
        assert read(reply.data)["ok"] is True


async def test_a_request_without_reply_subject_is_valid(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start()
    await snapshots.client.publish(snapshots.subjects.snapshot_request("users"), b"")

    async def has_meta() -> bool:
        return bool(await snapshots.metas("users"))

    await eventually(has_meta)


async def test_a_hundred_requests_at_once_cost_one_copy(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    create_users(database)
    await snapshots.start()
    holds.set("snapshot.piece")
    began = time.monotonic()
    answers = await gather(*(snapshots.ask("users") for _ in range(100)))
    assert time.monotonic() - began < 2
    assert len({answer["snapshot_id"] for answer in answers}) == 1
    await holds.wait_reached("snapshot.piece")
    late = await snapshots.ask("users", fresh=True)
    assert (late["snapshot_id"], late["state"]) == (answers[0]["snapshot_id"], "copying")
    other = await snapshots.ask("users", columns=["id"])
    assert other["snapshot_id"] != late["snapshot_id"]
    holds.release("snapshot.piece")
    assert len((await snapshots.read("users", late["snapshot_id"])).rows) == 10
    narrow = await snapshots.read("users", other["snapshot_id"])
    assert narrow.rows[0] == {"id": narrow.rows[0]["id"]}
    assert narrow.meta["options"] == {"columns": ["id"]}
    assert len(await snapshots.metas("users")) == 2


async def test_tables_asked_for_together_share_one_consistent_point(
    database: Database, snapshots: Snapshots
) -> None:
    names = [f"t{n}" for n in range(6)]
    for name in names:
        database.execute(f"CREATE TABLE {name} (id int); INSERT INTO {name} VALUES (1), (2)")
    database.publish(*names)
    await snapshots.start()
    answers = await gather(*(snapshots.ask(name) for name in names))
    reads = [
        await snapshots.read(name, answer["snapshot_id"])
        for name, answer in zip(names, answers, strict=True)
    ]
    assert {len(read.rows) for read in reads} == {2}
    assert len({read.meta["lsn"] for read in reads}) == 1


async def test_at_most_two_exports_run_and_the_rest_waits_up_to_a_limit(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    names = [f"t{n}" for n in range(6)]
    for name in names:
        database.execute(f"CREATE TABLE {name} (id int); INSERT INTO {name} VALUES (1)")
    database.publish(*names)
    await snapshots.start(most_running=5)
    holds.set("snapshot.exported")
    answers = []
    for count, name in enumerate(names[:5], 1):
        answers.append(await snapshots.ask(name))
        wanted = min(count, 2)

        def exports() -> int:
            return int(
                database.value(
                    "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
                )
            )

        await eventually(lambda wanted=wanted: exports() == wanted, what=f"{wanted} exports")
    refused = await snapshots.ask(names[5])
    assert refused["ok"] is False
    assert "5 snapshots are under way" in refused["error"]
    again = await snapshots.ask(names[0])
    assert again["snapshot_id"] == answers[0]["snapshot_id"]
    queued = snapshots.stats.snapshots[answers[4]["snapshot_id"]]
    assert queued.waiting_for == ["one of the 2 exports under way to end"]
    assert snapshots.stats.snapshots[answers[0]["snapshot_id"]].waiting_for == []
    holds.release("snapshot.exported")
    lsns = []
    for name, answer in zip(names, answers, strict=False):
        lsns.append((await snapshots.read(name, answer["snapshot_id"])).meta["lsn"])
    assert lsns[2] == lsns[3] == lsns[4], "those that waited share the next export"


async def test_a_finished_snapshot_is_used_again_until_something_changes(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start()
    first = (await snapshots.take("users")).meta["snapshot_id"]

    async def state_of_next(**options: object) -> tuple[bool, str]:
        answer = await snapshots.ask("users", **options)
        assert answer["ok"], answer
        if answer["state"] != "ready":
            await snapshots.read("users", answer["snapshot_id"])
        return answer["state"] == "ready", answer["snapshot_id"]

    assert await state_of_next() == (True, first)
    assert await state_of_next(format="msgpack", zstd=False) == (True, first)
    for options in ({"fresh": True}, {"columns": ["id"]}, {"format": "json"}, {"zstd": True}):
        reused, _ = await state_of_next(**options)
        assert not reused, options
    reused, second = await state_of_next(fresh=True)
    assert not reused
    snapshots.schema_version = 2
    reused, third = await state_of_next()
    assert (reused, third != second) == (False, True)
    assert await state_of_next() == (True, third)
    database.execute("DROP TABLE users")
    create_users(database, publish=False)
    database.execute("ALTER PUBLICATION pub ADD TABLE users")
    reused, fourth = await state_of_next()
    assert (reused, fourth != third) == (False, True)
    assert await state_of_next() == (True, fourth)


async def test_a_snapshot_is_not_used_again_after_init_or_cdc_lost_messages(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start()
    js = snapshots.client.jetstream()
    names = snapshots.subjects
    ids = [(await snapshots.take("users")).meta["snapshot_id"]]

    async def retaken() -> bool:
        read = await snapshots.take("users")
        ids.append(read.meta["snapshot_id"])
        assert len(read.rows) == 10
        return ids[-1] != ids[-2]

    assert not await retaken()
    await js.purge_stream(names.init_stream)
    assert await retaken(), "INIT purged"
    await js.purge_stream(names.init_stream, subject=names.chunk("users", ids[-1], 0))
    assert await retaken(), "a chunk lost"
    for _ in range(3):
        await js.publish(names.change("users", "insert"), b"x")
    assert not await retaken(), "CDC still holds everything since"
    await js.purge_stream(names.cdc_stream, keep=1)
    assert await retaken(), "CDC trimmed"
    await js.delete_stream(names.cdc_stream)
    await js.add_stream(name=names.cdc_stream, subjects=[names.cdc_all])
    assert await retaken(), "CDC made anew"
    database.execute("ALTER PUBLICATION pub SET TABLE users WHERE (id > 0)")
    assert await retaken(), "row filter changed"
    assert not await retaken()


async def test_tables_of_other_sources_are_left_to_their_bridge(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    database.execute("CREATE TABLE theirs (id int)")
    schemas = await snapshots.client.jetstream().key_value(snapshots.subjects.schemas_bucket)
    document = {"v": 1, "source": "other", "columns": []}
    await schemas.put("theirs", msgpack.packb(document))
    await schemas.put("ours", msgpack.packb({**document, "source": "src"}))
    await snapshots.start()
    with pytest.raises(nats.errors.TimeoutError):
        await snapshots.ask("theirs")
    assert "does not exist" in (await snapshots.ask("ours"))["error"]


async def test_an_unreachable_database_is_a_refusal_within_a_second(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(conninfo="host=127.0.0.1 port=1 dbname=x user=x connect_timeout=1")
    began = time.monotonic()
    answer = await snapshots.ask("users")
    assert time.monotonic() - began < 1.2
    assert answer["ok"] is False
    assert "PostgreSQL" in answer["error"]


@both_versions
async def test_a_locked_table_is_said_to_be_and_holds_no_session_up(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start()
    with database.connect(autocommit=False) as locker:
        locker.execute("LOCK TABLE users IN ACCESS EXCLUSIVE MODE")
        for _ in range(2):
            answer = await snapshots.ask("users")
            assert "another session has locked" in answer["error"]
            assert answer["retry"] is True
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await eventually(lambda: database.value(waiting) == 0)
        locker.rollback()
    assert len((await snapshots.take("users")).rows) == 10


async def test_a_lost_catalog_session_is_replaced(database: Database, snapshots: Snapshots) -> None:
    create_users(database)
    await snapshots.start()
    await snapshots.take("users")
    database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'tailrace snapshot requests' AND datname = current_database()"
    )
    assert (await snapshots.ask("users"))["ok"] is True


async def test_a_role_without_select_is_told_the_grant(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    dsn = database.role("LOGIN REPLICATION")
    await snapshots.start(conninfo=dsn)
    answer = await snapshots.ask("users")
    assert answer["ok"] is False
    assert "GRANT SELECT ON users" in answer["error"]
    role = database.roles[0]
    database.execute(f"GRANT SELECT ON users TO {role}")
    assert len((await snapshots.take("users")).rows) == 10


@pytest.mark.parametrize("form", ["msgpack", "json", "arrow"])
async def test_row_security_is_an_error_not_a_filter(
    database: Database, snapshots: Snapshots, form: str
) -> None:
    create_users(database)
    dsn = database.role("LOGIN REPLICATION")
    database.execute(
        f"GRANT SELECT ON users TO {database.roles[0]};"
        "ALTER TABLE users ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON users USING (id < 3)"
    )
    await snapshots.start(conninfo=dsn)
    answer = await snapshots.ask("users", format=form)
    reason = await snapshots.failure("users", answer["snapshot_id"])
    assert "row-level security" in reason or "row security" in reason
    assert await snapshots.metas("users") == []
