"""The feed and the log reader against a real server, with messages in the wire format."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.client import Client, connect
from consumer_sdk.errors import (
    AccessDenied,
    CorruptData,
    GapError,
    NotAvailable,
    UsageError,
    VersionTooNew,
)
from consumer_sdk.log import read_log_blocking, read_log_blocking_raw
from consumer_sdk.starting_point import SourcePosition
from consumer_sdk.wire.envelope import encode
from consumer_sdk.wire.position import Position
from tests.fixtures.publisher import EPOCH, Publisher
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nats.aio.client import Client as NatsClient

    from bridge.demo.servers import NatsServer
    from consumer_sdk.changes import ChangeFeed
    from consumer_sdk.decoder import Stored
    from consumer_sdk.pull import PullConsumer
    from consumer_sdk.transactions import Transaction
    from tests.fixtures.tcp_proxy import TcpProxy


@pytest.fixture
async def publisher(nats_client: NatsClient, prefix: str) -> Publisher:
    publisher = Publisher(nats_client, prefix)
    await publisher.create_streams()
    return publisher


@pytest.fixture
async def client(nats_server: NatsServer, prefix: str) -> AsyncIterator[Client]:
    async with connect(nats_server.url, prefix=prefix) as client:
        yield client


async def read_events(feed: ChangeFeed, count: int, timeout: float = 20) -> list[Stored]:
    """The next `count` events of a feed."""
    stored: list[Stored] = []
    async with asyncio.timeout(timeout):
        while len(stored) < count:
            stored += await anext(feed)
    return stored


def ids(stored: list[Stored]) -> list[Any]:
    return [one.event.data["id"] for one in stored if one.event.data]


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
        await eventually(lambda: publisher_has_consumer(publisher))
        await publisher.insert(1)
        assert ids(await asyncio.wait_for(waiting, 5)) == [1]


async def publisher_has_consumer(publisher: Publisher) -> bool:
    info = await publisher.js.stream_info(publisher.subjects.cdc_stream)
    return bool(info.state.consumer_count)


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
        held = feed._consumer._in
        await eventually(lambda: held._demand == 0 or held._bytes > 16_000_000)
        assert held._bytes < 48_000_000
        stored += await read_events(feed, 699)
    assert ids(stored) == list(range(700))


async def test_a_cut_connection_is_restored_without_loss_or_repetition(
    publisher: Publisher,
    nats_server: NatsServer,
    prefix: str,
    tcp_proxy: Callable[[int], TcpProxy],
) -> None:
    proxy = tcp_proxy(nats_server.port)
    async with (
        connect(proxy.through(nats_server.url), prefix=prefix) as client,
        client.feed(["users"], 1, max_batch=2) as feed,
    ):
        seen: list[Any] = []
        for first in range(0, 40, 10):
            await publisher.insert(*range(first, first + 10))
            seen += ids(await read_events(feed, 4))
            proxy.cut()
        seen += ids(await read_events(feed, 40 - len(seen), timeout=30))
        assert feed.reopened >= 3
    assert seen == list(range(40))


async def test_a_restarted_server_is_waited_for(
    nats_server: NatsServer, publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    async with client.feed(["users"], 1) as feed:
        assert ids(await read_events(feed, 1)) == [1]
        nats_server.kill()
        waiting = asyncio.ensure_future(anext(feed))
        await eventually(lambda: not client.nc.is_connected)
        nats_server.start()
        await eventually(lambda: publisher.client.is_connected)
        await publisher.insert(2)
        assert ids(await asyncio.wait_for(waiting, 20)) == [2]


async def test_a_deaf_connection_is_noticed_by_missing_heartbeats(
    publisher: Publisher,
    nats_server: NatsServer,
    prefix: str,
    tcp_proxy: Callable[[int], TcpProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("consumer_sdk.deliveries.HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr("consumer_sdk.deliveries.STALL_SECONDS", 0.6)
    monkeypatch.setattr("consumer_sdk.connection.API_TIMEOUT_SECONDS", 0.5)
    proxy = tcp_proxy(nats_server.port)
    async with connect(proxy.through(nats_server.url), prefix=prefix) as client:
        feed = client.feed(["users"], 1)
        await publisher.insert(1)
        assert ids(await read_events(feed, 1)) == [1]
        # What the server sends from here on is lost, as if this client had dropped it.
        tap = client.nc._taps.popitem()
        client.nc._taps[tap[0]] = lambda *_: None
        await publisher.insert(2)
        assert ids(await read_events(feed, 1)) == [2]
        assert feed.reopened == 1
        await feed.close()


async def test_a_lost_delivery_is_noticed_by_its_number(
    publisher: Publisher, client: Client
) -> None:
    feed = client.feed(["users"], 1)
    await publisher.insert(1)
    assert ids(await read_events(feed, 1)) == [1]
    [(sid, tap)] = client.nc._taps.items()
    lost: list[bytes] = []

    def drop_first(subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        if not lost:
            lost.append(payload)
        else:
            tap(subject, reply, payload, headers)

    client.nc._taps[sid] = drop_first
    await publisher.insert(2, 3, 4)
    assert ids(await read_events(feed, 3)) == [2, 3, 4]
    assert lost
    assert feed.reopened == 1
    await feed.close()


async def test_a_foreign_message_in_the_inbox_is_no_delivery(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    feed = client.feed(["users"], 1)
    assert ids(await read_events(feed, 1)) == [1]
    inbox = feed._consumer._inbox
    for reply in ("$JS.ACK.x", "$JS.ACK.a.b.1.x.y.z.0", "elsewhere"):
        await publisher.client.publish(inbox, b"boo", reply=reply, headers={"A": "b"})
    await publisher.client.publish(inbox, b"boo")
    await publisher.insert(2)
    assert ids(await read_events(feed, 1)) == [2]
    await feed.close()


async def test_without_the_fast_lane_the_subscription_delivers_the_same(
    publisher: Publisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nats.protocol.parser import Parser

    from consumer_sdk.connection import LogConnection

    monkeypatch.delattr(LogConnection, "_process_msg")
    monkeypatch.setattr(client.nc, "_ps", Parser(client.nc))
    for first in range(0, 30, 3):
        await publisher.insert(*range(first, first + 3))
    async with client.feed(["users"], 1, max_batch=4) as feed:
        assert ids(await read_events(feed, 30)) == list(range(30))


async def test_a_purged_stream_is_a_gap(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1, 2, 3)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    await publisher.insert(4)
    with pytest.raises(GapError) as caught:
        await anext(client.feed(["users"], 1))
    assert (caught.value.wanted, caught.value.first_available) == (1, 4)


async def test_a_purge_under_a_lagging_feed_is_a_gap(publisher: Publisher, client: Client) -> None:
    await publisher.insert(*range(300))
    feed = client.feed(["users"], 1, max_batch=1)
    feed._consumer._window = 4
    assert ids(await read_events(feed, 1)) == [0]
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    await publisher.insert(1000)
    with pytest.raises(GapError):
        await read_events(feed, 300)
    await feed.close()


async def test_trimming_other_tables_is_no_gap_for_an_idle_feed(
    publisher: Publisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer_sdk.deliveries.EXPIRES_SECONDS", 1.0)
    monkeypatch.setattr("consumer_sdk.deliveries.HEARTBEAT_SECONDS", 0.3)
    await publisher.insert(1)
    feed = client.feed(["users"], 1)
    assert ids(await read_events(feed, 1)) == [1]
    await publisher.insert(*range(20), table="orders")
    async with asyncio.timeout(10):
        while feed.next_sequence < 22:
            assert await feed.next(0.1) == []
    assert feed.caught_up
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    await publisher.insert(2)
    assert ids(await read_events(feed, 1)) == [2]
    await feed.close()


async def test_a_recreated_stream_is_a_gap(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1)
    feed = client.feed(["users"], 1)
    await read_events(feed, 1)
    await publisher.js.delete_stream(publisher.subjects.cdc_stream)
    await publisher.js.add_stream(
        name=publisher.subjects.cdc_stream, subjects=[publisher.subjects.cdc_all]
    )
    await publisher.insert(2, 3)
    with pytest.raises(GapError, match="recreated"):
        await read_events(feed, 1)


async def test_a_deleted_stream_is_a_gap(
    publisher: Publisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer_sdk.pull.STREAM_GONE_SECONDS", 0.5)
    await publisher.insert(1)
    feed = client.feed(["users"], 1)
    await read_events(feed, 1)
    await publisher.js.delete_stream(publisher.subjects.cdc_stream)
    with pytest.raises(GapError, match="gone"):
        await read_events(feed, 1)


async def test_a_stream_that_ends_before_the_start_is_a_gap(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    with pytest.raises(GapError, match="ends before"):
        await anext(client.feed(["users"], 10))


async def test_a_missing_stream_is_not_available(nats_server: NatsServer, prefix: str) -> None:
    async with connect(nats_server.url, prefix=prefix) as client:
        with pytest.raises(NotAvailable, match="has a bridge run"):
            await anext(client.feed(None, 1))


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


# transactions


async def next_transactions(source: Any, count: int) -> list[Transaction]:
    async with asyncio.timeout(20):
        return [await anext(source) for _ in range(count)]


async def test_a_transaction_ends_at_the_first_end_of_the_tables_read(
    publisher: Publisher, client: Client
) -> None:
    lsn = await publisher.transaction(
        ("users", "INSERT", {"id": 1}),
        ("orders", "INSERT", {"id": 2}),
        ("users", "UPDATE", {"id": 1}),
        ("items", "INSERT", {"id": 3}),
    )
    await publisher.insert(4)
    for tables, expected in (
        (["users"], [[1, 1], [4]]),
        (["orders", "users"], [[1, 2, 1], [4]]),
        (None, [[1, 2, 1, 3], [4]]),
        (["items", "users"], [[1, 1, 3], [4]]),
    ):
        changes = client.changes(tables, after="start")
        found = await next_transactions(changes, 2)
        assert [[event.data["id"] for event in one.events] for one in found] == expected
        assert found[0].commit_lsn == lsn
        assert found[0].end_lsn == lsn + 0x30
        await changes.aclose()


async def test_following_from_now_leaves_out_what_is_stored(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    changes = client.changes(["users"])
    waiting = asyncio.ensure_future(anext(changes))
    await eventually(lambda: publisher_has_consumer(publisher))
    await publisher.insert(2)
    assert [event.data["id"] for event in (await waiting).events] == [2]
    await changes.aclose()


async def test_a_transaction_under_way_at_the_start_is_left_out(
    publisher: Publisher, client: Client
) -> None:
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 1}))
    changes = client.changes(["users"])
    waiting = asyncio.ensure_future(anext(changes))
    await eventually(lambda: publisher_has_consumer(publisher))
    await publisher.send(
        publisher.event("users", "INSERT", lsn=0x900, seq=1, data={"id": 2}, last=True)
    )
    await publisher.insert(3)
    assert [event.data["id"] for event in (await waiting).events] == [3]
    await changes.aclose()


async def test_transactions_under_way_in_two_sources_are_left_out(
    publisher: Publisher, client: Client
) -> None:
    other = Publisher(publisher.client, publisher.subjects.prefix, source="crm")
    await other.send(other.event("accounts", "INSERT", lsn=0x700, seq=0, data={"id": 1}))
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 2}))
    await publisher.send_raw(publisher.subjects.change("users", "insert"), b"damaged", None)
    changes = client.changes(None, after=3)
    for one, table, lsn in ((other, "accounts", 0x700), (publisher, "users", 0x900)):
        await one.send(one.event(table, "INSERT", lsn=lsn, seq=1, data={"id": 3}, last=True))
    await other.insert(4, table="accounts")
    [found] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in found.events] == [4]
    await changes.aclose()


async def test_a_transaction_whose_beginning_was_trimmed_is_left_out(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1, 2, 3)
    await publisher.insert(4)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=3)
    changes = client.changes(None, after="start")
    [first] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in first.events] == [4]
    await changes.aclose()


async def test_following_after_a_sequence(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1)
    await publisher.insert(2)
    await publisher.insert(3)
    changes = client.changes(None, after=2)
    [found] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in found.events] == [3]
    await changes.aclose()


async def test_following_from_a_time(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1)
    info = await publisher.js.get_msg(publisher.subjects.cdc_stream, 1)
    await publisher.insert(2)
    stored = await publisher.js.get_msg(publisher.subjects.cdc_stream, 2)
    assert info.time is not None
    assert stored.time is not None
    changes = client.changes(None, after=stored.time)
    [found] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in found.events] == [2]
    await changes.aclose()
    with pytest.raises(UsageError, match="time zone"):
        await anext(client.changes(None, after=datetime(2030, 1, 1)))  # noqa: DTZ001
    changes = client.changes(None, after=datetime(2090, 1, 1, tzinfo=UTC))
    waiting = asyncio.ensure_future(anext(changes))
    await eventually(lambda: publisher_has_consumer(publisher))
    await publisher.insert(3)
    assert [event.data["id"] for event in (await waiting).events] == [3]
    await changes.aclose()


@pytest.mark.parametrize("wanted", range(0, 60, 7))
async def test_following_after_a_position_of_each_source(
    publisher: Publisher, client: Client, wanted: int
) -> None:
    other = Publisher(publisher.client, publisher.subjects.prefix, source="crm")
    positions = []
    for number in range(60):
        lsn = await publisher.insert(number)
        positions.append(SourcePosition(EPOCH, lsn, 0))
        if number % 9 == 0:
            await other.insert(1000 + number, table="accounts")
            await publisher.progress()
    last = SourcePosition(EPOCH, other.lsn, 0)
    changes = client.changes(None, after={"shop": positions[wanted], "crm": last})
    if wanted < 59:
        found = await next_transactions(changes, 59 - wanted)
        assert [one.events[0].data["id"] for one in found] == list(range(wanted + 1, 60))
    await changes.aclose()


async def test_a_position_that_was_trimmed_is_a_gap(publisher: Publisher, client: Client) -> None:
    lsn = await publisher.insert(1)
    await publisher.insert(2)
    await publisher.insert(3)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=3)
    with pytest.raises(GapError, match="position of source shop"):
        await anext(client.changes(None, after={"shop": SourcePosition(EPOCH, lsn, 0)}))


async def test_a_new_epoch_after_the_position_is_a_gap(
    publisher: Publisher, client: Client
) -> None:
    lsn = await publisher.insert(1)
    publisher.epoch += 1
    await publisher.insert(2)
    with pytest.raises(GapError, match="new epoch"):
        await anext(client.changes(None, after={"shop": SourcePosition(EPOCH, lsn, 0)}))


async def test_logical_messages_join_their_transaction(
    publisher: Publisher, client: Client
) -> None:
    await publisher.message("outbox", "alone")
    await publisher.progress()
    changes = client.changes(["users"], after="start", messages=True)
    [found] = await next_transactions(changes, 1)
    assert [event.data for event in found.events] == ["alone"]
    await changes.aclose()


async def test_logical_messages_of_one_prefix(publisher: Publisher, client: Client) -> None:
    await publisher.message("outbox", "one")
    await publisher.message("other.prefix", "two")
    await publisher.message("outbox", "three")
    messages = client.messages("outbox", after="start")
    async with asyncio.timeout(10):
        assert [(await anext(messages)).event.data for _ in range(2)] == ["one", "three"]
    await messages.aclose()


async def test_single_events_stream_before_their_transaction_ends(
    publisher: Publisher, client: Client
) -> None:
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 1}))
    events = client.changes(["users"], after="start", as_events=True)
    async with asyncio.timeout(10):
        assert (await anext(events)).event.data == {"id": 1}
    await events.aclose()


async def test_a_foreign_starting_point_is_refused(publisher: Publisher, client: Client) -> None:
    for after in ("yesterday", True, None, -1, {}):
        with pytest.raises(UsageError):
            await anext(client.changes(None, after=after))  # type: ignore[call-overload]


# the log by sequence


async def test_slices_of_the_log_put_together_are_the_log(
    publisher: Publisher, client: Client
) -> None:
    for number in range(40):
        await publisher.insert(number, table="users" if number % 3 else "orders")
    log = client.log()
    bounds = await log.bounds()
    assert (bounds.first, bounds.last) == (1, 40)
    for subjects in (None, [client.subjects.table_filter("orders")]):
        whole = await read_slice(client, 1, 41, subjects)
        for cut in (1, 2, 13, 39, 40):
            parts = await asyncio.gather(
                read_slice(client, 1, cut, subjects), read_slice(client, cut, 41, subjects)
            )
            assert parts[0] + parts[1] == whole
    assert len(whole) == 14


async def read_slice(
    client: Client, first: int, end: int, subjects: list[str] | None
) -> list[tuple[int, Any]]:
    async with asyncio.timeout(20):
        return [
            (one.stream_seq, one.event.data["id"])
            async for batch in client.log().read(first, end, subjects)
            for one in batch
        ]


async def test_a_purged_range_is_an_error(publisher: Publisher, client: Client) -> None:
    await publisher.insert(*range(10))
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=5)
    with pytest.raises(GapError):
        await read_slice(client, 4, 8, None)
    assert len(await read_slice(client, 5, 8, None)) == 3
    with pytest.raises(UsageError, match="goes beyond"):
        await read_slice(client, 5, 12, None)
    with pytest.raises(UsageError):
        await read_slice(client, 6, 5, None)
    assert await read_slice(client, 2, 2, None) == []


async def test_another_stream_than_expected_is_an_error(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    with pytest.raises(GapError, match="recreated"):
        async for _ in client.log().read(1, 2, created=12345):
            pass


async def test_polling_returns_when_something_is_stored(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    log = client.log()
    assert (await log.poll(0)).last == 1
    assert (await log.poll(1, timeout=0.05)).last == 1
    waiting = asyncio.ensure_future(log.poll(1, timeout=30))
    await eventually(lambda: publisher_has_consumer(publisher))
    await publisher.insert(2)
    assert (await asyncio.wait_for(waiting, 5)).last == 2


async def test_the_log_can_be_read_without_an_event_loop(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(*range(25))

    def read() -> tuple[list[Any], int]:
        decoded = [
            one.event.data["id"]
            for batch in read_log_blocking(client.settings, 3, 20, max_batch=4)
            for one in batch
        ]
        raw = sum(len(batch) for batch in read_log_blocking_raw(client.settings, 1, 26))
        unfinished = read_log_blocking(client.settings, 1, 26, max_batch=2)
        next(iter(unfinished))
        unfinished.close()  # type: ignore[attr-defined]
        return decoded, raw

    assert await asyncio.to_thread(read) == (list(range(2, 19)), 25)
    await eventually(lambda: no_consumers(publisher))


async def no_consumers(publisher: Publisher) -> bool:
    return not await publisher_has_consumer(publisher)


async def test_closing_a_feed_removes_its_consumer(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1)
    feed = client.feed(None, 1)
    await read_events(feed, 1)
    assert await publisher_has_consumer(publisher)
    await feed.close()
    await feed.close()
    await eventually(lambda: no_consumers(publisher))
    with pytest.raises(NotAvailable, match="closed"):
        await anext(feed)


# connecting


async def test_an_absent_server_is_not_available() -> None:
    with pytest.raises(NotAvailable, match=r"no NATS server at nats://127\.0\.0\.1:1 within 1 s"):
        async with connect("nats://user:secret@127.0.0.1:1", timeout=1):
            pass


async def test_refused_credentials_are_said_at_once_and_not_shown(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats(config='authorization { user: "u", password: "right" }')
    with pytest.raises(AccessDenied) as caught:
        async with connect(server.url_as("u", "wrong-secret"), timeout=30):
            pass
    assert "wrong-secret" not in str(caught.value)
    async with connect(server.url_as("u", "right")) as client:
        assert client.nc.is_connected


async def test_missing_permissions_are_named(own_nats: Callable[..., NatsServer]) -> None:
    server = own_nats(
        config='authorization { users: [ { user: "u", password: "p", permissions: '
        '{ publish: ["nothing"], subscribe: [">"] } } ] }'
    )
    async with connect(server.url_as("u", "p")) as client:
        with pytest.raises(AccessDenied, match=r"(?i)permissions violation for publish"):
            await client.log().bounds()


async def test_naming_no_table_is_refused(publisher: Publisher, client: Client) -> None:
    with pytest.raises(UsageError, match="no table is named"):
        client.feed([], 1)


async def test_a_stream_deleted_under_a_filtered_feed_is_a_gap(
    publisher: Publisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer_sdk.pull.STREAM_GONE_SECONDS", 0.5)
    for number in range(20):
        await publisher.insert(number, table="users" if number % 2 else "orders")
    feed = client.feed(["users"], 1, max_batch=1)
    assert ids(await read_events(feed, 1)) == [1]
    await eventually(lambda: len(feed._consumer._in.buffer) == 9)
    await publisher.js.delete_stream(publisher.subjects.cdc_stream)
    with pytest.raises(GapError, match="gone"):
        await read_events(feed, 20)


async def test_a_reader_with_a_timeout_gives_up_on_a_lost_server(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats()
    async with connect(server.url, prefix="p") as client:
        publisher = Publisher(client.nc, "p")
        await publisher.create_streams()
        await publisher.insert(1)
        feed = client.feed(None, 1, timeout=0.3)
        await read_events(feed, 1)
        server.kill()
        with pytest.raises(NotAvailable):
            await read_events(feed, 1)
        await feed.close()


async def test_a_consumer_removed_on_the_server_is_replaced(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    feed = client.feed(None, 1)
    await read_events(feed, 1)
    consumer: PullConsumer = feed._consumer
    await publisher.js.delete_consumer(publisher.subjects.cdc_stream, consumer._consumer)
    await publisher.insert(2)
    assert ids(await read_events(feed, 1)) == [2]
    await feed.close()
