"""No error of NATS ends a connection for good: what reads goes on, without loss or repetition."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import nats.errors
import pytest
from nats.aio.client import Client as NatsClient

from bridge.preflight.permissions import BRIDGE_USER, READER_USER
from consumer_sdk import sync
from consumer_sdk.client import Client, connect
from consumer_sdk.transport.connection import NatsConnection, open_connection
from consumer_sdk.transport.refusals import is_forbidden, is_refused
from consumer_sdk.transport.settings import NatsSettings
from tests.fixtures.mirror import wait_equal
from tests.fixtures.nats import PASSWORD, READER_ENVIRONMENT, accounts
from tests.fixtures.nats_accounts import Operator, replace_file
from tests.fixtures.publisher import Publisher, ids, read_events
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.mirror import MirrorProcess
    from tests.fixtures.postgres import Database

    Trouble = Callable[["Reader"], AbstractAsyncContextManager[None]]

NOTHING = 'publish: { deny: ">" }, subscribe: { deny: ">" }'


def configuration(password: str | None = "first", permissions: str = "", more: str = "") -> str:
    """A server with an administrator and a reader, who may be missing or restricted."""
    reader = ""
    if password is not None:
        limited = f", permissions: {{ {permissions} }}" if permissions else ""
        reader = f"{{ user: reader, password: {password}{limited} }}"
    return f"{more}\nauthorization {{ users: [ {{ user: admin, password: admin }}, {reader} ] }}"


class Reader:
    """A reader's connection, its server, and an administrator who publishes."""

    def __init__(self, server: NatsServer, password_file: Path) -> None:
        self.server = server
        self.password_file = password_file
        self.settings = NatsSettings.resolve(
            prefix="e",
            environment={
                "NATS_URL": server.url,
                "NATS_BRIDGE_USER": "reader",
                "NATS_PASSWORD_FILE": str(password_file),
            },
        )
        self.connection: NatsConnection
        self.publisher: Publisher

    async def open(self) -> None:
        # nats-py's own client would be closed for good by what happens here.
        admin = await open_connection(
            NatsSettings.resolve(self.server.url_as("admin", "admin"), environment={})
        )
        self.publisher = Publisher(admin, "e")
        await self.publisher.create_streams()
        await self.publisher.put_schema()
        self.connection = await open_connection(self.settings)
        for one in (admin, self.connection):
            one.options["reconnect_time_wait"] = 0.1

    async def close(self) -> None:
        await self.connection.close()
        await self.publisher.client.close()

    def load(self, config: str) -> None:
        self.server.config = config
        self.server.reload()

    def refusals(self) -> int:
        return self.server.log_path.read_text().count("authentication error")

    async def refused(self) -> None:
        """Wait until the server has refused some attempts from here on."""
        before = self.refusals()
        await eventually(lambda: self.refusals() > before + 2)

    def write(self, frame: bytes) -> None:
        """Send bytes to the server as they are."""
        assert self.connection._transport is not None
        self.connection._transport.write(frame)

    async def reconnected(self, before: int) -> None:
        await eventually(lambda: self.connection.stats["reconnects"] > before)


@pytest.fixture
async def reader(own_nats: Callable[..., NatsServer], tmp_path: Path) -> AsyncIterator[Reader]:
    password = tmp_path / "password"
    replace_file(password, "first")
    reader = Reader(own_nats(config=configuration()), password)
    await reader.open()
    yield reader
    await reader.close()


@asynccontextmanager
async def revoked(reader: Reader) -> AsyncIterator[None]:
    reader.load(configuration(None))
    await reader.refused()
    yield
    reader.load(configuration())


@asynccontextmanager
async def without_permissions(reader: Reader) -> AsyncIterator[None]:
    reader.load(configuration(permissions=NOTHING))
    # Long enough for the feed to find out, and for a call to go without an answer.
    denied = f"CONSUMER.CREATE.{reader.publisher.subjects.cdc_stream}"
    await eventually(lambda: reader.server.log_path.read_text().count(denied) > 1, 40)
    yield
    reader.load(configuration())


@asynccontextmanager
async def restarted_with_another_password(reader: Reader) -> AsyncIterator[None]:
    reader.server.config = configuration("second")
    await asyncio.to_thread(reader.server.restart)
    await reader.refused()
    await eventually(lambda: reader.publisher.client.is_connected)
    yield
    replace_file(reader.password_file, "second")


@asynccontextmanager
async def too_many_connections(reader: Reader) -> AsyncIterator[None]:
    reader.load(configuration(more="max_connections: 1"))
    await eventually(lambda: "maximum connections" in str(reader.connection.latest_error).lower()
                     or not reader.publisher.client.is_connected)  # fmt: skip
    reader.load(configuration())
    await eventually(lambda: reader.publisher.client.is_connected)
    yield


@asynccontextmanager
async def read_too_slowly(reader: Reader) -> AsyncIterator[None]:
    reader.load(configuration(more='max_pending: 65536\nwrite_deadline: "100ms"'))
    before = reader.connection.stats["reconnects"]
    await reader.connection.tap("flood", lambda *_: None)
    await reader.connection.flush()
    assert reader.connection._transport is not None
    transport = reader.connection._transport._io_writer.transport  # type: ignore[attr-defined]
    transport.pause_reading()

    async def is_closed() -> bool:
        for _ in range(20):
            await reader.publisher.client.publish("flood", bytes(60_000))
        await reader.publisher.client.flush()
        return "Slow Consumer Detected" in reader.server.log_path.read_text()

    await eventually(is_closed)
    transport.resume_reading()
    await reader.reconnected(before)
    yield


def misunderstood(frame: bytes) -> Trouble:
    """What the server answers with -ERR before it closes the connection, or without closing it."""

    @asynccontextmanager
    async def trouble(reader: Reader) -> AsyncIterator[None]:
        error = reader.connection.latest_error
        before = reader.connection.stats["reconnects"]
        reader.write(frame)
        await eventually(lambda: reader.connection.latest_error is not error)
        await reader.reconnected(before)
        yield

    return trouble


@asynccontextmanager
async def closed_from_inside(reader: Reader) -> AsyncIterator[None]:
    before = reader.connection.stats["reconnects"]
    await reader.connection._close(NatsClient.CLOSED)
    await reader.reconnected(before)
    yield


@asynccontextmanager
async def reading_fails(reader: Reader) -> AsyncIterator[None]:
    def fail(*_: object) -> None:
        raise LookupError("not expected")

    before = reader.connection.stats["reconnects"]
    subscription = await reader.connection.tap("odd", fail)
    await reader.connection.flush()
    await reader.publisher.client.publish("odd")
    await reader.publisher.client.flush()
    await reader.reconnected(before)
    await reader.connection.untap(subscription)
    yield


@asynccontextmanager
async def a_callback_fails(reader: Reader) -> AsyncIterator[None]:
    calls = []

    def fail() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise LookupError("not expected")

    reader.connection.add_listener(fail)
    await asyncio.to_thread(reader.server.restart)
    await eventually(lambda: len(calls) > 2)
    await eventually(lambda: reader.publisher.client.is_connected)
    yield


TROUBLES: dict[str, Trouble] = {
    "user revoked": revoked,
    "permissions taken away": without_permissions,
    "restarted with another password": restarted_with_another_password,
    "max_connections": too_many_connections,
    "slow consumer": read_too_slowly,
    "unknown operation": misunderstood(b"FOO\r\n"),
    "parser error": misunderstood(b"PUB \r\n"),
    "maximum payload": misunderstood(b"PUB x 99999999\r\n"),
    "invalid subject": misunderstood(b"SUB a..b 999\r\n"),
    "closed from inside": closed_from_inside,
    "reading fails": reading_fails,
    "a callback fails": a_callback_fails,
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
async def test_a_feed_goes_on_after_whatever_ended_its_connection(
    trouble: Trouble, reader: Reader
) -> None:
    publisher = reader.publisher
    await publisher.insert(1, 2)
    client = Client(reader.connection, reader.settings)
    async with client.feed(["users"], 1) as feed:
        assert ids(await read_events(feed, 2)) == [1, 2]
        reading = asyncio.ensure_future(read_events(feed, 4, timeout=90))
        async with trouble(reader):
            await eventually(lambda: publisher.client.is_connected)
            await publisher.insert(3, 4)
        await publisher.insert(5, 6)
        assert ids(await reading) == [3, 4, 5, 6]
    assert not reader.connection.is_closed
    # Calls that wait for an answer on the inbox of the connection work again too.
    assert [table.table for table in await client.tables()] == ["users"]
    assert (await client.schema("users")).primary_key == ("id",)


async def test_an_expired_account_is_waited_for_until_it_is_renewed(
    own_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    operator, creds = Operator(), tmp_path / "user.creds"
    operator.write_creds(creds)
    server = own_nats(config=operator.config(lives=3))
    environment = {"NATS_URL": server.url, "NATS_CREDS": str(creds)}
    connection = await open_connection(NatsSettings.resolve(environment=environment))
    connection.options["reconnect_time_wait"] = 0.1
    await eventually(lambda: is_refused(connection.latest_error) and not connection.is_connected)
    assert not connection.is_closed
    server.config = operator.config()
    server.reload()
    await eventually(lambda: connection.is_connected)
    await connection.api("INFO")
    await connection.close()


async def test_a_late_answer_to_a_flush_does_not_make_the_connection_deaf(reader: Reader) -> None:
    reader.server.freeze()
    with pytest.raises(nats.errors.TimeoutError):
        await reader.connection.flush(1)
    reader.server.thaw()
    for _ in range(3):
        await reader.connection.flush(5)
    await reader.connection.api("INFO")
    assert reader.connection.stats["reconnects"] == 0


async def test_what_was_never_permitted_is_reported_once(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats(config=configuration(permissions='subscribe: { deny: "secret" }'))
    settings = NatsSettings.resolve(server.url_as("reader", "first"), environment={})
    connection = await open_connection(settings)
    connection.options["reconnect_time_wait"] = 0.05
    reported: list[Exception] = []

    async def note(error: Exception) -> None:
        reported.append(error)

    connection._error_cb = note
    await connection.subscribe("secret")
    await eventually(lambda: server.log_path.read_text().count("Subscription Violation") > 3)
    assert [is_forbidden(error) for error in reported] == [True]
    await connection.close()


def test_the_facade_without_await_goes_on_too(
    own_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    password = tmp_path / "password"
    replace_file(password, "first")
    server = own_nats(config=configuration())
    reader = Reader(server, password)
    loop = sync.LoopThread()
    try:
        loop.run(reader.open())
        with sync.connect(settings=reader.settings) as cdc, cdc.changes(["users"]) as changes:
            with pytest.raises(TimeoutError):
                changes.next(0.5)
            before = reader.refusals()
            reader.load(configuration(None))
            wait_until(lambda: reader.refusals() > before + 1)
            loop.run(reader.publisher.insert(7))
            reader.load(configuration())
            (event,) = changes.next(30).events
            assert event.data is not None
            assert event.data["id"] == 7
        loop.run(reader.close())
    finally:
        loop.stop()


@pytest.fixture
def small_shop(database: Database) -> Database:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, body text)")
    database.execute("INSERT INTO t SELECT n, 'row ' || n FROM generate_series(1, 100) n")
    database.publish("t")
    return database


def test_bridge_and_mirror_wait_for_permissions_that_were_taken_away(
    small_shop: Database,
    own_nats: Callable[..., NatsServer],
    bridge_process: Callable[..., BridgeProcess],
    mirror_process: Callable[..., MirrorProcess],
    prefix: str,
    tmp_path: Path,
) -> None:
    server = own_nats(config=accounts(prefix))
    bridge = bridge_process(nats_url=server.url_as(BRIDGE_USER, PASSWORD))
    replica = tmp_path / "replica.db"
    mirror = mirror_process(
        "t", "--into", f"sqlite:///{replica}",
        environment={"NATS_URL": server.url_as(READER_USER, PASSWORD), **READER_ENVIRONMENT},
    )  # fmt: skip
    mirror.wait_logged("event=following", 60)
    server.config = accounts(prefix).replace("{ allow: [", '{ deny: ">", allow: [')
    server.reload()
    small_shop.execute("INSERT INTO t VALUES (101, 'meanwhile')")
    # The bridge has tried in vain to publish, and the mirror to read.
    wait_until(lambda: bridge.status()["warnings"], 60, bridge.log_text)
    denied = re.compile(rf'user:{READER_USER}" - Publish Violation - Subject "\$JS\.API')
    wait_until(lambda: denied.search(server.log_path.read_text()), 60)
    assert bridge.http("/health").status == 200
    assert bridge.status()["health"] == "warning"
    server.config = accounts(prefix)
    server.reload()
    small_shop.execute("INSERT INTO t VALUES (102, 'afterwards')")
    wait_equal(small_shop.dsn, replica, "t", timeout=90, mirror=mirror)
    bridge.wait_ready()
    wait_until(lambda: not bridge.status()["warnings"])
    assert bridge.log_text().count("nats disconnected") == 0


async def test_a_lower_limit_of_messages_is_kept_after_the_reconnect(
    small_shop: Database,
    own_nats: Callable[..., NatsServer],
    bridge_process: Callable[..., BridgeProcess],
    prefix: str,
) -> None:
    server = own_nats(config=accounts(prefix))
    bridge = bridge_process(nats_url=server.url_as(BRIDGE_USER, PASSWORD))
    server.config = f"max_payload: 32768\n{accounts(prefix)}"
    server.reload()
    # Encoded for the limit before, it is refused with -ERR, and so it is each time.
    small_shop.execute("UPDATE t SET body = repeat('x', 100000) WHERE id < 4")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 3, 60, bridge.log_text)
    async with (
        connect(server.url_as(READER_USER, PASSWORD), prefix=prefix) as client,
        client.feed(["t"], 1) as feed,
    ):
        rows = [one.event.data for one in await read_events(feed, 4) if one.event.data]
    assert [len(row["body"]) for row in rows] == [100_000] * 3
