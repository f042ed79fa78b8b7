"""The feed of changes: order, filters, bounds, and what it makes of each kind of message."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.errors import (
    CorruptData,
    NotAvailable,
    UsageError,
    VersionTooNew,
)
from consumer_sdk.wire.envelope import encode
from consumer_sdk.wire.position import Position
from tests.fixtures.publisher import COLUMNS, EPOCH, Publisher, ids, read_events
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient

    from consumer_sdk.client import Client


async def test_events_come_in_stream_order_with_their_sequence(
    publisher: Publisher, client: Client
) -> None:
    for first in range(0, 50, 5):
        await publisher.insert(*range(first, first + 5))
    async with client.feed(None, 1, max_batch=7) as feed:
        stored = await read_events(feed, 50)
    assert ids(stored) == list(range(50))
    assert [one.stream_seq for one in stored] == list(range(1, 51))
    assert feed.next_sequence == 51


async def test_a_feed_of_some_tables_leaves_out_the_others(
    publisher: Publisher, client: Client
) -> None:
    await publisher.transaction(
        ("users", "INSERT", {"id": 1}),
        ("orders", "INSERT", {"id": 2}),
        ("users", "INSERT", {"id": 3}),
    )
    await publisher.insert(4, table="items")
    async with client.feed(["users", ("public", "items")], 1) as feed:
        assert ids(await read_events(feed, 3)) == [1, 3, 4]


async def test_new_events_reach_a_waiting_feed(publisher: Publisher, client: Client) -> None:
    async with client.feed(["users"], 1) as feed:
        waiting = asyncio.ensure_future(anext(feed))
        await eventually(publisher.is_read)
        await publisher.insert(1)
        assert ids(await asyncio.wait_for(waiting, 5)) == [1]


async def test_cancelling_a_pending_read_loses_nothing(
    publisher: Publisher, client: Client
) -> None:
    async with client.feed(["users"], 1, max_batch=3) as feed:
        seen: list[Any] = []
        for first in range(0, 60, 6):
            await publisher.insert(*range(first, first + 6))
            while True:
                try:
                    async with asyncio.timeout(0.001):
                        seen += ids(await anext(feed))
                except TimeoutError:
                    break
        async with asyncio.timeout(10):
            while len(seen) < 60:
                seen += ids(await anext(feed))
    assert seen == list(range(60))


async def test_an_unread_feed_holds_a_bounded_number_of_messages(
    publisher: Publisher, client: Client, nats_client: NatsClient
) -> None:
    blob = b"x" * 60_000
    headers = {"Content-Type": "application/msgpack"}
    for number in range(700):
        document = publisher.event(
            "users", "INSERT", lsn=5000 + number, data={"id": number, "b": blob}
        )
        await nats_client.publish(document["subject"], encode(document), headers=headers)
    await nats_client.flush()
    async with client.feed(None, 1, max_batch=1) as feed:
        stored = await anext(feed)
        held = feed._consumer._demand
        await eventually(lambda: held._requested == 0 or held._buffered_bytes > 16_000_000)
        assert held._buffered_bytes < 48_000_000
        stored += await read_events(feed, 699)
    assert ids(stored) == list(range(700))


async def test_repeated_positions_are_dropped(publisher: Publisher, client: Client) -> None:
    first = publisher.event("users", "INSERT", lsn=0x2000, seq=0, data={"id": 1})
    second = publisher.event("users", "INSERT", lsn=0x2000, seq=1, data={"id": 2}, last=True)
    for document in (first, second, first, second):
        await publisher.send({**document, "msg_id": ""})
    other = publisher.event("users", "INSERT", lsn=0x1000, seq=0, data={"id": 3}, last=True)
    await publisher.send({**other, "epoch": EPOCH + 1, "msg_id": ""})
    async with client.feed(None, 1) as feed:
        assert ids(await read_events(feed, 3)) == [1, 2, 3]


async def test_positions_already_seen_are_dropped(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1, 2)
    lsn = await publisher.insert(3, 4)
    after = {(publisher.source, EPOCH): Position(lsn, 0)}
    async with client.feed(None, 1, after=after) as feed:
        assert ids(await read_events(feed, 1)) == [4]


async def test_packed_rows_come_out_one_by_one(publisher: Publisher, client: Client) -> None:
    rows = [{"data": {"id": number}} for number in range(5)]
    await publisher.send(publisher.event("users", "INSERT", lsn=0x2000, rows=rows, last=True))
    async with client.feed(None, 1) as feed:
        stored = await read_events(feed, 5)
    assert [(one.event.seq, one.event.last) for one in stored] == [
        (0, False), (1, False), (2, False), (3, False), (4, True),
    ]  # fmt: skip


async def test_batches_of_packed_rows_stay_small(publisher: Publisher, client: Client) -> None:
    for number in range(20):
        rows = [{"data": {"id": 30 * number + place}} for place in range(30)]
        await publisher.send(
            publisher.event("users", "INSERT", lsn=0x2000 + number, rows=rows, last=True)
        )
    async with client.feed(None, 1, max_batch=100) as feed:
        batches = [await anext(feed)]
        assert feed.next_sequence == 5
        assert not feed.caught_up
        while sum(map(len, batches)) < 600:
            batches.append(await anext(feed))
    assert {len(batch) for batch in batches} == {120}
    assert [one for batch in batches for one in ids(batch)] == list(range(600))


async def test_json_values_get_their_types_back(
    nats_client: NatsClient, prefix: str, client: Client
) -> None:
    publisher = Publisher(nats_client, prefix, as_json=True)
    await publisher.create_streams()
    await publisher.put_schema()
    await publisher.insert(1, body=b"\x00\xff")
    async with client.feed(["users"], 1) as feed:
        [stored] = await read_events(feed, 1)
    assert stored.event.data == {"id": 1, "body": b"\x00\xff"}


async def test_json_values_get_the_types_of_their_own_schema_version(
    publisher: Publisher, client: Client
) -> None:
    publisher.as_json = True
    subject = publisher.subjects.change("users", "schema")
    was_text = [
        COLUMNS[0],
        {**COLUMNS[1], "data_type": "text", "type_oid": 25, "base_type_oid": 25},
    ]
    first = publisher.schema_document(columns=was_text, operation="SCHEMA")
    await publisher.send(first, subject=subject)
    await publisher.insert(1, body="abcd")
    second = publisher.schema_document(version=2, operation="SCHEMA")
    await publisher.send(second, subject=subject)
    await publisher.put_schema("users", version=2)
    for start in (1, 2):
        async with client.feed(None, start) as feed:
            stored = await read_events(feed, 4 - start)
        rows = [one.event.data for one in stored if one.event.operation == "INSERT"]
        assert rows == [{"id": 1, "body": "abcd"}]


async def test_dictionaries_are_fetched_once(publisher: Publisher, client: Client) -> None:
    content = encode(publisher.event("users", "INSERT", lsn=1, data={"id": 1, "name": "x" * 64}))
    bucket = await publisher.js.key_value(publisher.subjects.dicts_bucket)
    await bucket.put("7", content)
    for number in range(3):
        document = publisher.event("users", "INSERT", lsn=0x2000 + number, data={"id": number})
        await publisher.send(document, dictionary=("7", content))
    await publisher.send(
        publisher.event("users", "INSERT", lsn=0x3000, data={"id": 3}), dictionary=("", None)
    )
    async with client.feed(None, 1) as feed:
        stored = await read_events(feed, 3)
        await bucket.delete("7")
        stored += await read_events(feed, 4 - len(stored)) if len(stored) < 4 else []
    assert ids(stored) == [0, 1, 2, 3]


async def test_an_unknown_dictionary_stops_the_reader(publisher: Publisher, client: Client) -> None:
    document = publisher.event("users", "INSERT", lsn=0x2000, data={"id": 1})
    await publisher.send(document, dictionary=("99", encode(document)))
    with pytest.raises(CorruptData, match="dictionary '99'"):
        await anext(client.feed(None, 1))


async def test_rows_kept_as_objects_are_put_in_place(publisher: Publisher, client: Client) -> None:
    row = {"data": {"id": 1, "body": b"x" * 2_000_000}, "old": {"id": 0}, "unchanged": ["other"]}
    ref = await publisher.put_object("wide", encode(row))
    await publisher.send(publisher.event("users", "UPDATE", lsn=0x2000, ref=ref, last=True))
    async with client.feed(None, 1) as feed:
        [stored] = await read_events(feed, 1)
    event = stored.event
    assert (event.data, event.old, event.unchanged) == (row["data"], row["old"], ("other",))
    assert event.ref is None
    assert event.last


@pytest.mark.parametrize("as_json", [False, True])
async def test_wide_logical_messages_are_put_in_place(
    publisher: Publisher, client: Client, as_json: bool
) -> None:
    publisher.as_json = as_json
    content = b"\xff" * 100
    body = encode({"data": content, "encoding": "binary"}, as_json=as_json)
    ref = await publisher.put_object("wide", body)
    await publisher.message("outbox", "", ref=ref, data=None)
    messages = client.messages("outbox", after="start")
    assert (await anext(messages)).event.data == content
    await messages.aclose()


@pytest.mark.parametrize(
    "change",
    [{"size": 5}, {"sha256": "0" * 64}, {"name": "absent"}, {"bucket": "other"}, {"size": "big"}],
)
async def test_a_damaged_reference_stops_the_reader(
    publisher: Publisher, client: Client, change: dict[str, Any]
) -> None:
    ref = await publisher.put_object("wide", encode({"data": {"id": 1}}))
    await publisher.send(publisher.event("users", "INSERT", lsn=0x2000, ref={**ref, **change}))
    with pytest.raises(CorruptData):
        await anext(client.feed(None, 1))


@pytest.mark.parametrize(
    ("payload", "headers"),
    [
        (b"", None),
        (b"\xc1", {"Content-Type": "application/msgpack"}),
        (b"[]", {"Content-Type": "application/json"}),
        (b"{}", {"Content-Type": "application/json"}),
        (b"hello", {"Content-Type": "text/plain"}),
        (b"hello", {"Content-Type": "application/msgpack", "Content-Encoding": "zstd"}),
        (b"hello", {"Content-Type": "application/msgpack", "Content-Encoding": "gzip"}),
        (encode({"v": 1}), {"Content-Type": "application/msgpack"}),
        (encode({"v": 1, "operation": "NONSENSE"}), {"Content-Type": "application/msgpack"}),
        (b"\x93\x01\x02\x03", {"Content-Type": "application/msgpack"}),
        (b"\xdf\xff\xff\xff\xff", {"Content-Type": "application/msgpack"}),
        (json.dumps({"v": True}).encode(), {"Content-Type": "application/json"}),
    ],
)
async def test_a_foreign_message_stops_the_reader(
    publisher: Publisher, client: Client, payload: bytes, headers: dict[str, str] | None
) -> None:
    await publisher.insert(1)
    await publisher.send_raw(publisher.subjects.change("users", "insert"), payload, headers)
    async with client.feed(None, 1) as feed:
        with pytest.raises(CorruptData, match="message 2 of the change stream"):
            await read_events(feed, 2)
        # It is not skipped: asking again meets it again.
        with pytest.raises(CorruptData):
            await anext(feed)


async def test_a_newer_wire_version_stops_the_reader(publisher: Publisher, client: Client) -> None:
    await publisher.send({**publisher.event("users", "INSERT", lsn=1, data={}), "v": 2})
    with pytest.raises(VersionTooNew, match="upgrade"):
        await anext(client.feed(None, 1))


async def test_fences_and_unknown_service_messages_are_left_out(
    publisher: Publisher, client: Client
) -> None:
    await publisher.send_raw(publisher.subjects.fence("shop"), b"anything", None)
    await publisher.send_raw(f"{publisher.subjects.cdc}.$later.thing", b"\xc1", None)
    await publisher.progress()
    await publisher.insert(1)
    async with client.feed(None, 1) as feed:
        stored = await read_events(feed, 2)
    assert [one.event.operation for one in stored] == ["PROGRESS", "INSERT"]


async def test_closing_a_feed_removes_its_consumer(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1)
    feed = client.feed(None, 1)
    await read_events(feed, 1)
    assert await publisher.is_read()
    await feed.close()
    await feed.close()
    await eventually(publisher.is_left_alone)
    with pytest.raises(NotAvailable, match="closed"):
        await anext(feed)


async def test_naming_no_table_is_refused(publisher: Publisher, client: Client) -> None:
    with pytest.raises(UsageError, match="no table is named"):
        client.feed([], 1)
