"""Schemas and snapshots of the SDK against a real server, with the bridge's part played here."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgpack
import pyarrow as pa
import pytest

from consumer_sdk.errors import (
    CorruptData,
    NotAvailable,
    SnapshotFailed,
    UnknownTable,
    UsageError,
    VersionTooNew,
)
from consumer_sdk.mirror import MemoryTarget, mirror
from consumer_sdk.snapshot.snapshot import is_reusable
from consumer_sdk.wire.envelope import ARROW, encode
from tests.fixtures.publisher import COLUMNS, EPOCH, Publisher
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from nats.aio.client import Client as NatsClient
    from nats.aio.msg import Msg

    from bridge.embedded import NatsServer
    from consumer_sdk.client import Client
    from consumer_sdk.snapshot.request import SnapshotProgress

ROWS = [[{"id": 1, "body": b"a"}, {"id": 2, "body": None}], [{"id": 3, "body": b"c"}]]
FLAT = [row for chunk in ROWS for row in chunk]


@pytest.fixture
async def publisher(publisher: Publisher) -> Publisher:
    await publisher.put_schema()
    await publisher.progress()
    return publisher


async def all_rows(client: Client, **options: Any) -> list[dict[str, Any]]:
    snapshot = await client.snapshot("users", **options)
    return [row async for row in snapshot.rows()]


@asynccontextmanager
async def answering(
    publisher: Publisher, answer: Callable[[Msg, dict[str, Any]], Any]
) -> AsyncIterator[list[dict[str, Any]]]:
    """Play the bridge's part for requests; yields the requests as they come."""
    requests: list[dict[str, Any]] = []

    async def on_request(message: Msg) -> None:
        options = msgpack.unpackb(message.data) if message.data else {}
        requests.append(options)
        await answer(message, options)

    subscription = await publisher.client.subscribe(
        publisher.subjects.snapshot_request("users"), cb=on_request
    )
    await publisher.client.flush()
    yield requests
    await subscription.unsubscribe()


# schemas


async def test_a_schema_is_read_from_the_bucket(publisher: Publisher, client: Client) -> None:
    await publisher.put_schema("Odd Table.1", "sales", version=7)
    schema = await client.schema('sales."Odd Table.1"')
    assert (schema.schema, schema.table, schema.schema_version) == ("sales", "Odd Table.1", 7)
    assert [column.name for column in schema.columns] == ["id", "body"]


async def test_tables_are_listed_by_name_newest_version_only(
    publisher: Publisher, client: Client
) -> None:
    for number in range(30):
        await publisher.put_schema(f"t{number:02}", version=1)
    await publisher.put_schema("users", version=9)
    bucket = await publisher.js.key_value(publisher.subjects.schemas_bucket)
    await bucket.delete("t07")
    tables = await client.tables()
    assert [one.table for one in tables] == [
        *[f"t{number:02}" for number in range(30) if number != 7],
        "users",
    ]
    assert tables[-1].schema_version == 9


async def test_no_tables_are_an_empty_list(
    nats_client: NatsClient, prefix: str, client: Client
) -> None:
    await Publisher(nats_client, prefix).create_streams()
    assert await client.tables() == []


async def test_an_unknown_table_names_similar_ones(publisher: Publisher, client: Client) -> None:
    await publisher.put_schema("orders", "sales")
    with pytest.raises(UnknownTable) as caught:
        await client.schema("user")
    assert caught.value.near == ("users",)
    assert "did you mean users?" in str(caught.value)
    with pytest.raises(UnknownTable, match="cdc tables"):
        await client.schema("zzzzzzzz")


async def test_without_a_bucket_nothing_is_available(client: Client) -> None:
    for asking in (client.schema("users"), client.tables(), client.snapshot("users")):
        with pytest.raises(NotAvailable, match="has a bridge run"):
            await asking


async def test_what_is_no_table_name_is_a_usage_error(client: Client) -> None:
    with pytest.raises(UsageError, match="not a table name"):
        await client.schema("a.b.c")


@pytest.mark.parametrize("value", [b"", b"\xc1", b"{", b"[]", encode({"v": 1, "columns": 5})])
async def test_a_damaged_schema_is_corrupt(
    publisher: Publisher, client: Client, value: bytes
) -> None:
    bucket = await publisher.js.key_value(publisher.subjects.schemas_bucket)
    await bucket.put("users", value)
    with pytest.raises(CorruptData, match="schema users"):
        await client.schema("users")


async def test_a_newer_schema_format_is_refused(publisher: Publisher, client: Client) -> None:
    await publisher.put_schema(v=2)
    with pytest.raises(VersionTooNew):
        await client.schema("users")


async def test_watching_schemas_shows_all_then_each_new_version(
    publisher: Publisher, client: Client
) -> None:
    watching = client.watch_schemas()
    async with asyncio.timeout(10):
        assert (await anext(watching)).schema_version == 1
        await publisher.put_schema(version=2)
        assert (await anext(watching)).schema_version == 2
        await publisher.put_schema("orders")
        assert (await anext(watching)).table == "orders"
    await watching.aclose()


async def test_watching_survives_a_restarted_server(
    nats_server: NatsServer, publisher: Publisher, client: Client
) -> None:
    watching = client.watch_schemas()
    async with asyncio.timeout(30):
        await anext(watching)
        nats_server.kill()
        following = asyncio.ensure_future(anext(watching))
        await eventually(lambda: not publisher.client.is_connected)
        nats_server.start()
        await eventually(lambda: publisher.client.is_connected)
        await publisher.put_schema("orders")
        assert (await following).table == "orders"
    await watching.aclose()


# reuse


async def test_a_retained_snapshot_is_reused(publisher: Publisher, client: Client) -> None:
    await publisher.snapshot(ROWS)
    snapshot = await client.snapshot("users")
    assert snapshot.reused
    assert (snapshot.meta.snapshot_id, snapshot.meta.snapshot_lsn) == ("snap1", 0x5000)
    assert [row async for row in snapshot.rows()] == FLAT
    assert [list(chunk) async for chunk in snapshot.chunks()] == ROWS
    assert list(await snapshot.chunk(1)) == ROWS[1]


async def test_an_empty_snapshot_has_no_rows(publisher: Publisher, client: Client) -> None:
    await publisher.snapshot([])
    assert await all_rows(client) == []


@pytest.mark.parametrize("zstd", [False, True])
async def test_json_chunks_give_the_same_rows(
    nats_client: NatsClient, prefix: str, client: Client, zstd: bool
) -> None:
    publisher = Publisher(nats_client, prefix, as_json=True)
    await publisher.create_streams()
    await publisher.put_schema()
    await publisher.progress()
    await publisher.snapshot(ROWS, zstd=zstd)
    assert await all_rows(client) == FLAT


async def refuses_to_reuse(publisher: Publisher, client: Client, **options: Any) -> None:
    """No bridge answers here, so that asking for a new one shows as NotAvailable."""
    with pytest.raises(NotAvailable, match="no bridge answers for table users"):
        await client.snapshot("users", **options)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumer_sdk.snapshot.request.ANSWER_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "change",
    [
        {"epoch": EPOCH - 1},
        {"schema_version": 0},
        {"stream": "OTHER"},
        {"stream_created": 1},
        {"options": {"columns": ["id"]}},
        {"cdc_seq": 1},
        {"batch_count": 3},
    ],
)
async def test_a_snapshot_that_no_longer_fits_is_not_reused(
    publisher: Publisher, client: Client, change: dict[str, Any]
) -> None:
    await publisher.insert(1)
    await publisher.progress()
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, keep=1)
    await publisher.snapshot(ROWS, meta_changes=change)
    await refuses_to_reuse(publisher, client)


@pytest.mark.usefixtures("impatient")
async def test_other_options_or_fresh_ask_for_a_new_one(
    publisher: Publisher, client: Client
) -> None:
    await publisher.snapshot(ROWS)
    await refuses_to_reuse(publisher, client, columns=["id"])
    await refuses_to_reuse(publisher, client, format="json")
    await refuses_to_reuse(publisher, client, fresh=True)


async def test_a_request_that_cannot_work_is_refused_before_it_is_sent(
    publisher: Publisher, client: Client
) -> None:
    with pytest.raises(UsageError, match="no column 'nope'"):
        await client.snapshot("users", columns=["nope"])
    with pytest.raises(UsageError, match="no snapshot format"):
        await client.snapshot("users", format="xml")
    with pytest.raises(UnknownTable):
        await client.snapshot("absent")


# asking the bridge


async def test_a_new_snapshot_is_asked_for_and_waited_for(
    publisher: Publisher, client: Client
) -> None:
    seen: list[SnapshotProgress] = []

    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "new", "state": "running"}))
        await publisher.client.publish(
            publisher.subjects.snapshot_progress("users", "new"),
            encode({"v": 1, "state": "copying", "rows": 2, "estimated_rows": 3}),
        )
        await publisher.snapshot(ROWS, snapshot_id="old", lsn=1)
        await publisher.snapshot(ROWS, snapshot_id="new", options=options)

    async with answering(publisher, bridge) as requests:
        snapshot = await client.snapshot("users", columns=["id", "body"], progress=seen.append)
    assert requests == [{"columns": ["body", "id"], "pieces": False}]
    assert not snapshot.reused
    assert snapshot.meta.snapshot_id == "new"
    assert [row async for row in snapshot.rows()] == FLAT
    assert [(one.state, one.rows, one.estimated_rows) for one in seen] == [("copying", 2, 3)]


async def test_fresh_says_so_to_the_bridge(publisher: Publisher, client: Client) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(b'{"ok":true,"snapshot_id":"s9","state":"running"}')
        await publisher.snapshot(ROWS, snapshot_id="s9")

    async with answering(publisher, bridge) as requests:
        assert (await client.snapshot("users", fresh=True)).meta.snapshot_id == "s9"
    assert requests == [{"fresh": True, "pieces": False}]


# several consistent points


PIECES = [{"lsn": 0x5000, "chunks": [0, 0]}, {"lsn": 0x6000, "chunks": [1, 1]}]


async def test_a_snapshot_of_several_points_is_read_by_those_who_can_use_it(
    publisher: Publisher, client: Client
) -> None:
    await publisher.snapshot(ROWS, pieces=PIECES)
    snapshot = await client.snapshot("users", pieces=True)
    assert snapshot.reused
    assert (snapshot.meta.snapshot_lsn, snapshot.meta.exact_lsn) == (0x5000, 0x6000)
    assert [snapshot.meta.lsn_of(chunk) for chunk in (0, 1)] == [0x5000, 0x6000]
    assert [row async for row in snapshot.rows()] == FLAT


async def test_those_who_need_one_point_get_no_snapshot_of_several(
    publisher: Publisher, client: Client
) -> None:
    await publisher.snapshot(ROWS, snapshot_id="several", pieces=PIECES)

    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "one", "state": "running"}))
        await publisher.snapshot(ROWS, snapshot_id="one")

    async with answering(publisher, bridge) as requests:
        assert (await client.snapshot("users")).meta.snapshot_id == "one"
    assert requests == [{"pieces": False}]
    # One point serves everybody.
    assert (await client.snapshot("users", pieces=True)).reused


async def test_a_bridge_that_sends_several_points_unasked_is_not_believed(
    publisher: Publisher, client: Client
) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "several", "state": "running"}))
        await publisher.snapshot(ROWS, snapshot_id="several", pieces=PIECES)

    async with answering(publisher, bridge):
        with pytest.raises(SnapshotFailed, match="several consistent points"):
            await client.snapshot("users")


async def test_a_file_has_one_state_of_the_table(
    publisher: Publisher, run_command: Any, nats_server: NatsServer, prefix: str, tmp_path: Path
) -> None:
    await publisher.snapshot(ROWS, snapshot_id="several", pieces=PIECES)

    async def cdc(*arguments: str) -> Any:
        options = ("--prefix", prefix)
        return await asyncio.to_thread(run_command, "cdc", "snapshot", *arguments, *options)

    verified = await cdc("users")
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "3 rows, verified; snapshot several at 0/5000 to 0/6000, reused" in verified.stdout

    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "one", "state": "running"}))
        await publisher.snapshot(ROWS, snapshot_id="one")

    async with answering(publisher, bridge) as requests:
        written = await cdc("users", "--out", str(tmp_path / "users.jsonl"))
    assert requests == [{"pieces": False}]
    assert "snapshot one at 0/5000, new" in written.stdout, written.stderr


async def test_a_chunk_of_another_point_is_corrupt(publisher: Publisher, client: Client) -> None:
    await publisher.snapshot(ROWS, pieces=PIECES, chunk_changes={"lsn": 0x5000})
    snapshot = await client.snapshot("users", pieces=True)
    with pytest.raises(CorruptData, match=r"chunk 1: .* lsn is 20480, the snapshot's is 24576"):
        [row async for row in snapshot.rows()]


async def test_rows_are_asked_for_by_key(publisher: Publisher, client: Client) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "some", "state": "running"}))
        await publisher.snapshot(ROWS[1:], snapshot_id="some", options={"where": options["where"]})

    async with answering(publisher, bridge) as requests:
        some = await client.snapshot("users", where={"keys": [(3,)]})
        assert [row["id"] async for row in some.rows()] == [3]
        assert (await client.snapshot("users", where={"keys": [[3]]})).reused
        assert not (await client.snapshot("users", where={"from": [1], "to": [4]})).reused
        # What holds some of the rows is no snapshot of the table.
        assert not await is_reusable(client.deployment, some.meta, {})
    assert requests == [
        {"pieces": False, "where": {"keys": [[3]]}},
        {"pieces": False, "where": {"from": [1], "to": [4]}},
    ]


async def test_answers_with_some_rows_do_not_hide_the_snapshot_of_the_table(
    publisher: Publisher, client: Client
) -> None:
    await publisher.snapshot(ROWS, snapshot_id="older")
    await publisher.snapshot(ROWS, snapshot_id="all", pieces=PIECES)
    for number in range(3):
        options = {"where": {"keys": [[number]]}}
        await publisher.snapshot(ROWS[1:], snapshot_id=f"some{number}", options=options)
    found = await client.snapshot("users", pieces=True)
    assert (found.meta.snapshot_id, found.reused) == ("all", True)

    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "all", "state": "complete"}))

    # The bridge may name a snapshot that other metas have followed.
    async with answering(publisher, bridge):
        found = await client.snapshot("users", pieces=True, zstd=False)
        assert found.meta.snapshot_id == "all"


async def test_a_mirror_uses_the_snapshot_that_the_next_bridge_finishes(
    publisher: Publisher, client: Client
) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "long", "state": "running"}))
        if len(requests) == 1:
            error = {"v": 1, "snapshot_id": "long", "error": "stopped", "retry": True}
            await publisher.js.publish(publisher.subjects.error("users"), encode(error))
        else:
            await publisher.snapshot(ROWS, snapshot_id="long", lsn=publisher.lsn)

    target = MemoryTarget()
    async with answering(publisher, bridge) as requests, asyncio.timeout(30):
        await mirror(client, ["users"], target, once=True)
    assert [request.get("fresh", False) for request in requests] == [False, False]
    assert len(target.rows("users")) == len(FLAT)


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ({}, "either `keys`"),
        ({"keys": [[1]], "to": [2]}, "either `keys`"),
        ({"until": [2]}, "either `keys`"),
        ({"keys": [[1, 2]]}, "a list of 1 values: id"),
        ({"keys": ["1"]}, "a list of 1 values: id"),
        ({"from": [1], "to": []}, "a list of 1 values: id"),
        ({"keys": [[n] for n in range(1001)]}, "at most 1000"),
    ],
)
async def test_a_where_that_no_bridge_would_take_is_a_usage_error(
    publisher: Publisher, client: Client, where: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        await client.snapshot("users", where=where)
    await publisher.put_schema("bag", replica_identity="nothing")
    with pytest.raises(UsageError, match="has no key"):
        await client.snapshot("bag", where={"keys": [[1]]})


async def test_a_snapshot_that_is_complete_already_is_taken(
    publisher: Publisher, client: Client
) -> None:
    await publisher.snapshot(ROWS, snapshot_id="done", options={"zstd": True})

    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "done", "state": "complete"}))

    async with answering(publisher, bridge):
        assert (await client.snapshot("users")).meta.snapshot_id == "done"


async def test_a_refusal_gives_the_bridges_reason(publisher: Publisher, client: Client) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": False, "error": "not in the publication"}))

    async with answering(publisher, bridge):
        with pytest.raises(SnapshotFailed, match="refused: not in the publication"):
            await client.snapshot("users")


async def test_a_bridge_that_is_too_busy_to_look_is_asked_again(
    publisher: Publisher, client: Client
) -> None:
    asked = 0

    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        nonlocal asked
        asked += 1
        refusal = {"ok": False, "error": "too slow; ask again", "retry": asked < 3}
        await message.respond(encode(refusal))

    async with answering(publisher, bridge):
        with pytest.raises(SnapshotFailed, match="refused: too slow"):
            await client.snapshot("users")
    assert asked == 3


async def test_a_failure_gives_the_bridges_reason(publisher: Publisher, client: Client) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "bad", "state": "running"}))
        for snapshot_id, error in (("other", "not ours"), ("bad", "disk full")):
            await publisher.js.publish(
                publisher.subjects.error("users"),
                encode({"v": 1, "snapshot_id": snapshot_id, "error": error}),
            )

    async with answering(publisher, bridge):
        with pytest.raises(SnapshotFailed, match="failed: disk full"):
            await client.snapshot("users")


@pytest.mark.usefixtures("impatient")
async def test_a_bridge_that_hears_but_does_not_answer(
    publisher: Publisher, client: Client
) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        pass

    async with answering(publisher, bridge):
        await refuses_to_reuse(publisher, client)


async def test_a_snapshot_that_never_completes_is_given_up(
    publisher: Publisher, client: Client
) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "slow", "state": "waiting"}))
        await publisher.snapshot(ROWS, snapshot_id="slow", finish=False)

    async with answering(publisher, bridge):
        with pytest.raises(SnapshotFailed, match=r"no progress for 0\.3 s \(last state: waiting\)"):
            await client.snapshot("users", stall_timeout=0.3)


@pytest.mark.parametrize("state", ["copying", "waiting"])
async def test_a_bridge_that_lives_while_its_worker_hangs_is_not_waited_for(
    publisher: Publisher, client: Client, state: str
) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        subject = publisher.subjects.snapshot_progress("users", "slow")
        said = {"v": 1, "snapshot_id": "slow", "state": state, "rows": 5, "chunks": 1}
        for ticks in range(1, 21):  # noqa: B007 - read by the test
            await publisher.client.publish(subject, encode(said))
            await asyncio.sleep(0.1)

    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(encode({"ok": True, "snapshot_id": "slow", "state": "waiting"}))
        tasks.append(asyncio.create_task(tick()))

    tasks: list[asyncio.Task[None]] = []
    async with answering(publisher, bridge):
        with pytest.raises(SnapshotFailed, match=rf"no progress .*last state: {state}"):
            await client.snapshot("users", stall_timeout=0.5)
    # What waits for sessions or for its turn is limited by the bridge.
    assert ticks < 15 if state == "copying" else ticks == 20
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("answer", [b"", b"\xc1", b"{", b"[1]", b"hello"])
async def test_an_answer_that_makes_no_sense_is_a_refusal(
    publisher: Publisher, client: Client, answer: bytes
) -> None:
    async def bridge(message: Msg, options: dict[str, Any]) -> None:
        await message.respond(answer)

    async with answering(publisher, bridge):
        with pytest.raises(SnapshotFailed, match="gave no reason"):
            await client.snapshot("users")


# damage


@pytest.mark.parametrize(
    ("meta", "chunk", "message"),
    [
        ({"row_count": 4}, {}, "3 rows read, 4 written"),
        ({"checksum": "0" * 64}, {}, "checksum"),
        ({}, {"snapshot_id": "other"}, "snapshot_id"),
        ({}, {"lsn": 1}, "lsn"),
        ({}, {"epoch": 1}, "epoch"),
        ({}, {"table": "orders"}, "table"),
        ({}, {"chunk": 9}, "chunk"),
        ({}, {"data": 5}, "list of rows"),
        ({}, {"data": [5]}, "list of rows"),
        ({}, {"raw_columns": 5}, "raw_columns"),
        ({}, {"raw": [5]}, "raw"),
        ({}, {"data": [{"$ref": {"bucket": "elsewhere"}}]}, "outside this deployment"),
    ],
)
async def test_a_damaged_snapshot_is_corrupt(
    publisher: Publisher, client: Client, meta: dict[str, Any], chunk: dict[str, Any], message: str
) -> None:
    await publisher.snapshot(ROWS, meta_changes=meta, chunk_changes=chunk)
    with pytest.raises(CorruptData, match=message):
        await all_rows(client)


async def test_a_chunk_of_a_newer_format_is_refused(publisher: Publisher, client: Client) -> None:
    await publisher.snapshot(ROWS, chunk_changes={"v": 2})
    with pytest.raises(VersionTooNew):
        await all_rows(client)


async def test_a_chunk_changed_after_it_was_written_is_corrupt(
    publisher: Publisher, client: Client
) -> None:
    meta = await publisher.snapshot(ROWS[:1], finish=False)
    subject = publisher.subjects.chunk("users", "snap1", 1)
    payload = encode({"v": 1})
    wrong = {"Content-Type": "application/msgpack", "Cdc-Sha256": hashlib.sha256(b"").hexdigest()}
    await publisher.js.publish(subject, payload, headers=wrong)
    meta |= {"batch_count": 2}
    await publisher.js.publish(publisher.subjects.meta("users"), encode(meta))
    snapshot = await client.snapshot("users")
    with pytest.raises(CorruptData, match="chunk 1 does not have its sha256"):
        [row async for row in snapshot.rows()]
    with pytest.raises(CorruptData):
        await snapshot.chunk(1)


async def test_a_chunk_that_is_gone_fails_the_snapshot(
    publisher: Publisher, client: Client
) -> None:
    await publisher.snapshot(ROWS)
    snapshot = await client.snapshot("users")
    await publisher.js.purge_stream(
        publisher.subjects.init_stream, subject=publisher.subjects.chunk("users", "snap1", 1)
    )
    with pytest.raises(SnapshotFailed, match="chunk 1 is no longer stored"):
        [row async for row in snapshot.rows()]
    with pytest.raises(SnapshotFailed):
        await snapshot.chunk(1)


# what chunks can hold


async def test_wide_rows_are_fetched_from_the_object_store(
    publisher: Publisher, client: Client
) -> None:
    row = {"id": 7, "body": b"x" * 1_500_000}
    ref = await publisher.put_object("wide", encode(row))
    await publisher.snapshot([[{"id": 1, "body": None}, {"$ref": ref}]])
    assert (await all_rows(client))[1] == row


async def test_raw_columns_are_told_by_row(publisher: Publisher, client: Client) -> None:
    await publisher.snapshot(
        [[{"id": 1}, {"id": 2}]], chunk_changes={"raw_columns": ["doc"], "raw": {"1": ["extra"]}}
    )
    chunk = await (await client.snapshot("users")).chunk(0)
    assert (chunk.raw(0), chunk.raw(1)) == (("doc",), ("doc", "extra"))


def arrow_column(name: str, oid: int, **fields: Any) -> dict[str, Any]:
    return {**COLUMNS[0], "name": name, "type_oid": oid, "base_type_oid": oid, **fields}


async def test_arrow_chunks_give_rows_as_the_other_formats_do(
    publisher: Publisher, client: Client
) -> None:
    from datetime import UTC, date, datetime
    from decimal import Decimal

    columns = [
        arrow_column("id", 23),
        arrow_column("at", 1184),
        arrow_column("local", 1114),
        arrow_column("day", 1082),
        arrow_column("price", 1700, type_modifier=(10 << 16 | 2) + 4),
        arrow_column("ratio", 700),
        arrow_column("doc", 3802),
        arrow_column("tags", 1009, element_oid=25),
        arrow_column("blob", 17),
    ]
    batch = pa.record_batch(
        {
            "id": pa.array([1, 2, 3], pa.int32()),
            "at": pa.array(
                [datetime(2025, 12, 12, 12, 0, 34, 338500, UTC), None,
                 datetime(2025, 1, 1, tzinfo=UTC)], pa.timestamp("us", tz="UTC"),
            ),
            "local": pa.array([datetime(2025, 1, 2, 3, 4, 5), None, None], pa.timestamp("us")),  # noqa: DTZ001
            "day": pa.array([date(2025, 1, 2), None, date(1, 1, 1)], pa.date32()),
            "price": pa.array([Decimal("0.00"), Decimal("12.30"), None], pa.decimal128(10, 2)),
            "ratio": pa.array([0.1, 3.4028235e38, 1e-45], pa.float32()),
            "doc": pa.array(['{"a": 1}', None, "[]"], pa.string()),
            "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
            "blob": pa.array([b"\xff", b"", None], pa.binary()),
        }
    )  # fmt: skip
    head = {
        "v": 1, "source": "shop", "epoch": EPOCH, "table": "users", "schema": "public",
        "operation": "snapshot", "snapshot_id": "snap1", "chunk": 0, "lsn": 0x5000,
        "odd": {"at": {"1": "infinity"}},
    }  # fmt: skip
    schema = batch.schema.with_metadata({b"cdc": encode(head, as_json=True)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    payload = sink.getvalue().to_pybytes()
    digest = hashlib.sha256(payload).hexdigest()
    await publisher.js.publish(
        publisher.subjects.chunk("users", "snap1", 0),
        payload,
        headers={"Content-Type": ARROW, "Cdc-Sha256": digest},
    )
    await publisher.snapshot([], finish=False)
    meta = await publisher.snapshot([], finish=False)
    meta |= {
        "batch_count": 1,
        "row_count": 3,
        "columns": columns,
        "format": "arrow",
        "options": {"format": "arrow"},
        "checksum": hashlib.sha256(digest.encode()).hexdigest(),
    }
    await publisher.js.publish(publisher.subjects.meta("users"), encode(meta))
    snapshot = await client.snapshot("users", format="arrow")
    rows = [row async for row in snapshot.rows()]
    assert rows[0] == {
        "id": 1,
        "at": "2025-12-12T12:00:34.3385Z",
        "local": "2025-01-02T03:04:05",
        "day": "2025-01-02",
        "price": "0.00",
        "ratio": 0.1,
        "doc": '{"a": 1}',
        "tags": ["a", None],
        "blob": b"\xff",
    }
    assert (rows[1]["at"], rows[2]["at"]) == ("infinity", "2025-01-01T00:00:00Z")
    assert (rows[1]["price"], rows[1]["ratio"], rows[2]["ratio"]) == ("12.30", 3.4028235e38, 1e-45)
    assert rows[2]["day"] == "0001-01-01"
    assert (await snapshot.chunk(0)).raw(0) == ("doc",)


async def test_a_damaged_arrow_chunk_is_corrupt(publisher: Publisher, client: Client) -> None:
    payload = b"not arrow"
    digest = hashlib.sha256(payload).hexdigest()
    await publisher.js.publish(
        publisher.subjects.chunk("users", "snap1", 0),
        payload,
        headers={"Content-Type": ARROW, "Cdc-Sha256": digest},
    )
    meta = await publisher.snapshot([], finish=False)
    meta |= {"batch_count": 1, "row_count": 1}
    await publisher.js.publish(publisher.subjects.meta("users"), encode(meta))
    with pytest.raises(CorruptData, match="Arrow"):
        await all_rows(client)


async def test_progress_of_a_source_is_the_newest_of_stream_and_bucket(
    publisher: Publisher, client: Client
) -> None:
    await publisher.progress(lsn=0x700)
    found = await client.progress("shop")
    assert found is not None
    assert (found.lsn, found.epoch, found.gap) == (0x700, EPOCH, None)
    bucket = await publisher.js.key_value(publisher.subjects.bridge_bucket)
    await bucket.put("progress.shop", encode({**found.document, "lsn": 0x900}))
    assert (await client.progress("shop")).lsn == 0x900  # type: ignore[union-attr]
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    assert (await client.progress("shop")).lsn == 0x900  # type: ignore[union-attr]
    assert await client.progress("nobody") is None


async def test_a_stream_recreated_under_a_reader_is_a_failed_snapshot_and_no_gap(
    publisher: Publisher, client: Client
) -> None:
    await publisher.put_schema()
    await publisher.progress()
    await publisher.snapshot([[{"id": number}] for number in range(100)])
    snapshot = await client.snapshot("users")
    stream = publisher.subjects.init_stream
    async with aclosing(snapshot.chunks()) as chunks:
        await anext(chunks)
        await publisher.js.delete_stream(stream)
        await publisher.js.add_stream(name=stream, subjects=[publisher.subjects.init_all])
        with pytest.raises(SnapshotFailed, match="ask for a fresh snapshot"):
            async for _ in chunks:
                pass
