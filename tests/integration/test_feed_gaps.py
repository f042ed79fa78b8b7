"""What a feed can no longer read is a gap, and nothing else is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from consumer_sdk.client import Client, connect
from consumer_sdk.errors import (
    GapError,
    NotAvailable,
)
from tests.fixtures.publisher import Publisher, ids, read_events
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from bridge.embedded import NatsServer


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
    feed._consumer._demand._window = 4
    assert ids(await read_events(feed, 1)) == [0]
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    await publisher.insert(1000)
    with pytest.raises(GapError):
        await read_events(feed, 300)
    await feed.close()


async def test_trimming_other_tables_is_no_gap_for_an_idle_feed(
    publisher: Publisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer_sdk.reading.demand.EXPIRES_SECONDS", 1.0)
    monkeypatch.setattr("consumer_sdk.reading.demand.HEARTBEAT_SECONDS", 0.3)
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
    monkeypatch.setattr("consumer_sdk.reading.pull.STREAM_GONE_SECONDS", 0.5)
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
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        with pytest.raises(NotAvailable, match="has a bridge run"):
            await anext(client.feed(None, 1))


async def test_a_stream_deleted_under_a_filtered_feed_is_a_gap(
    publisher: Publisher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer_sdk.reading.pull.STREAM_GONE_SECONDS", 0.5)
    for number in range(20):
        await publisher.insert(number, table="users" if number % 2 else "orders")
    feed = client.feed(["users"], 1, max_batch=1)
    assert ids(await read_events(feed, 1)) == [1]
    await eventually(lambda: len(feed._consumer._demand.buffer) == 9)
    await publisher.js.delete_stream(publisher.subjects.cdc_stream)
    with pytest.raises(GapError, match="gone"):
        await read_events(feed, 20)
