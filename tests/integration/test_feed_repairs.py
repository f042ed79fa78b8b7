"""A feed whose connection, consumer or server goes away loses nothing and repeats nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import nats
import pytest

from consumer_sdk.client import Client, connect
from consumer_sdk.errors import (
    AccessDenied,
    NotAvailable,
)
from consumer_sdk.transport.api import leader_of
from tests.fixtures.publisher import Publisher, ids, read_events
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsCluster, NatsServer
    from consumer_sdk.reading.pull import PullConsumer
    from tests.fixtures.tcp_proxy import TcpProxy


async def test_a_cut_connection_is_restored_without_loss_or_repetition(
    publisher: Publisher,
    nats_server: NatsServer,
    prefix: str,
    tcp_proxy: Callable[[int], TcpProxy],
) -> None:
    proxy = tcp_proxy(nats_server.port)
    async with (
        connect(proxy.through(nats_server.reader_url), prefix=prefix) as client,
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
    monkeypatch.setattr("consumer_sdk.reading.demand.HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr("consumer_sdk.reading.demand.STALL_SECONDS", 0.6)
    monkeypatch.setattr("consumer_sdk.transport.api.API_TIMEOUT_SECONDS", 0.5)
    proxy = tcp_proxy(nats_server.port)
    async with connect(proxy.through(nats_server.reader_url), prefix=prefix) as client:
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

    from consumer_sdk.transport.connection import NatsConnection

    monkeypatch.delattr(NatsConnection, "_process_msg")
    monkeypatch.setattr(client.nc, "_ps", Parser(client.nc))
    for first in range(0, 30, 3):
        await publisher.insert(*range(first, first + 3))
    async with client.feed(["users"], 1, max_batch=4) as feed:
        assert ids(await read_events(feed, 30)) == list(range(30))


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


async def test_a_replica_that_lags_hides_nothing_from_an_idle_feed(
    nats_cluster: NatsCluster,
) -> None:
    first = await nats.connect(nats_cluster.servers[0].url)
    await Publisher(first, "lag").create_streams(num_replicas=3)
    info = await first.jetstream().stream_info("lag_CDC")
    await first.close()
    assert info.cluster is not None
    servers = {server.name: server for server in nats_cluster.servers}
    leader = servers[info.cluster.leader or ""]
    connection = await nats.connect(leader.url)
    publisher = Publisher(connection, "lag")
    await publisher.insert(0)
    async with connect(leader.url, prefix="lag") as client:
        while True:
            feed = client.feed(["users"], 1)
            await anext(feed)
            name = feed._consumer._consumer
            home = leader_of(await client.nc.api(f"CONSUMER.INFO.lag_CDC.{name}"))
            if home != leader.name:
                break
            await feed.close()
        seen: list[Any] = []
        for number in range(1, 101):
            # As after a pull request that has expired: it looks how far the stream goes.
            feed._consumer._demand.exhausted = True
            servers[home].freeze()
            await publisher.insert(number)
            looking = asyncio.ensure_future(read_events(feed, 1))
            await asyncio.sleep(0.02)
            servers[home].thaw()
            seen += ids(await looking)
        assert seen == list(range(1, 101))
        bounds = await client.log().bounds()
        subjects = [client.subjects.table_filter("users")]
        stored = [
            one async for batch in client.log().read(1, bounds.last + 1, subjects) for one in batch
        ]
        assert ids(stored) == list(range(101))
        await feed.close()
    await connection.close()
