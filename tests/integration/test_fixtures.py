"""The tools that other tests rely on: clean-up, proxy, oracle."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from nats.js.api import KeyValueConfig, StreamConfig

from consumer_sdk.wire import Subjects
from tests.fixtures.nats import delete_streams
from tests.fixtures.oracle import read_table, read_table_as_text, table_difference
from tests.fixtures.stored import stored_messages
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nats.aio.client import Client

    from bridge.embedded import NatsServer, PostgresServer
    from tests.fixtures.postgres import Database
    from tests.fixtures.tcp_proxy import TcpProxy


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while chunk := connection.recv(65536):
                    connection.sendall(chunk)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    acceptor.join(5)


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size and (chunk := connection.recv(size - len(received))):
        received += chunk
    return received


def test_a_dropped_database_takes_sessions_slots_and_roles_along(pg: PostgresServer) -> None:
    dsn = pg.create_database("doomed")
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute("SELECT pg_create_logical_replication_slot('doomed', 'pgoutput')")
        pg.drop_database("doomed")
    with psycopg.connect(pg.dsn()) as connection:
        for query in (
            "SELECT 1 FROM pg_database WHERE datname = 'doomed'",
            "SELECT 1 FROM pg_replication_slots WHERE database = 'doomed'",
        ):
            assert connection.execute(query).fetchone() is None


def test_a_role_connects_with_its_own_password(database: Database) -> None:
    dsn = database.role("LOGIN REPLICATION")
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT current_user").fetchone() == (database.roles[0],)


async def test_stored_messages_are_all_and_in_order(nats_client: Client, prefix: str) -> None:
    subjects = Subjects(prefix)
    jetstream = nats_client.jetstream()
    assert await stored_messages(nats_client, subjects.cdc_stream) == []
    await jetstream.add_stream(StreamConfig(name=subjects.cdc_stream, subjects=[subjects.cdc_all]))
    assert await stored_messages(nats_client, subjects.cdc_stream) == []
    for number in range(2500):
        token = "even" if number % 2 == 0 else "odd"
        await nats_client.publish(subjects.change(token, "insert"), b"%d" % number)
    await nats_client.flush()
    manager = nats_client.jsm()

    async def complete() -> bool:
        return (await manager.stream_info(subjects.cdc_stream)).state.messages == 2500

    await eventually(complete)
    found = await stored_messages(nats_client, subjects.cdc_stream)
    assert [int(message.data) for message in found] == list(range(2500))
    assert [message.sequence for message in found] == list(range(1, 2501))
    odd = await stored_messages(
        nats_client, subjects.cdc_stream, subjects.table_filter("odd"), start_sequence=101
    )
    assert [int(message.data) for message in odd] == list(range(101, 2500, 2))


async def test_a_prefix_is_swept_without_touching_its_neighbours(
    nats_client: Client, nats_server: NatsServer, prefix: str
) -> None:
    jetstream = nats_client.jetstream()
    for name in (f"{prefix}1", f"{prefix}11"):
        subjects = Subjects(name)
        await jetstream.add_stream(name=subjects.cdc_stream, subjects=[subjects.cdc_all])
        await jetstream.create_key_value(KeyValueConfig(bucket=subjects.schemas_bucket))
        await jetstream.create_object_store(subjects.objects_bucket)

    async def left() -> int:
        names = [info.config.name or "" for info in await nats_client.jsm().streams_info()]
        return sum(prefix in name for name in names)

    assert await left() == 6
    await delete_streams(nats_server.url, f"{prefix}1")
    assert await left() == 3
    await delete_streams(nats_server.url, f"{prefix}11")
    assert await left() == 0


def test_the_oracle_sees_values_duplicates_and_odd_names(database: Database) -> None:
    database.execute(
        """
        CREATE SCHEMA sales;
        CREATE TABLE sales."Odd Table.1" ("a b" int, t timestamptz, f float8);
        INSERT INTO sales."Odd Table.1"
            VALUES (1, '2025-12-12 13:00:34.338547+01', 0.1), (1, NULL, 'NaN'), (1, NULL, 'NaN')
        """
    )
    table = 'sales."Odd Table.1"'
    assert len(read_table(database.dsn, table)) == 3
    assert {"a b": "1", "t": "2025-12-12 12:00:34.338547+00", "f": "0.1"} in read_table_as_text(
        database.dsn, table
    )
    assert table_difference(database.dsn, database.dsn, table) == {}


def test_the_oracle_counts_duplicates(database: Database, pg: PostgresServer) -> None:
    other = pg.create_database(f"{database.name}_replica")
    try:
        for dsn, rows in ((database.dsn, 2), (other, 1)):
            with psycopg.connect(dsn) as connection:
                connection.execute("CREATE TABLE t (a int)")
                connection.execute("INSERT INTO t SELECT 1 FROM generate_series(1, %s)", [rows])
        difference = table_difference(database.dsn, other, "t")
        assert difference == {"missing": [(("a", "1"),)], "extra": []}
    finally:
        pg.drop_database(f"{database.name}_replica")


def test_the_proxy_carries_a_database_session(
    database: Database, tcp_proxy: Callable[[int], TcpProxy]
) -> None:
    proxy = tcp_proxy(database.server.port)
    with psycopg.connect(proxy.through(database.dsn)) as connection:
        row = connection.execute("SELECT repeat('x', 1000000)").fetchone()
        assert row is not None
        assert len(row[0]) == 1_000_000
    assert proxy.bytes_forwarded["down"] > 1_000_000


def test_a_cut_connection_fails_and_a_new_one_works(
    tcp_proxy: Callable[[int], TcpProxy], echo: int
) -> None:
    proxy = tcp_proxy(echo)
    with connect(proxy) as first:
        first.sendall(b"a")
        assert first.recv(1) == b"a"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            first.recv(1)
    with connect(proxy) as second:
        second.sendall(b"b")
        assert second.recv(1) == b"b"
    wait_until(lambda: proxy.connections == 0, 5)
    assert proxy.connections_accepted == 2


def test_a_stopped_proxy_refuses_until_it_is_started_again(
    tcp_proxy: Callable[[int], TcpProxy], echo: int
) -> None:
    proxy = tcp_proxy(echo)
    proxy.stop()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.start()
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_a_deaf_proxy_holds_everything_back_and_then_delivers_it(
    tcp_proxy: Callable[[int], TcpProxy], echo: int, direction: str
) -> None:
    proxy = tcp_proxy(echo)
    with connect(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.deaf(direction)
        connection.sendall(b"bc")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.hear()
        connection.settimeout(5)
        assert receive(connection, 2) == b"bc"


def test_delay_and_throttle_cost_the_time_they_should(
    tcp_proxy: Callable[[int], TcpProxy], echo: int
) -> None:
    proxy = tcp_proxy(echo)
    with connect(proxy) as connection:
        proxy.delay(0.1)
        started = time.monotonic()
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        assert time.monotonic() - started >= 0.2
        proxy.delay(0)
        proxy.throttle(100_000)
        started = time.monotonic()
        connection.sendall(bytes(50_000))
        assert receive(connection, 50_000) == bytes(50_000)
        assert time.monotonic() - started >= 0.4


def test_waiting_fails_at_the_deadline_and_says_for_what() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.1 s: pigs to fly"):
        wait_until(lambda: False, 0.1, "pigs to fly")


@pytest.mark.parametrize("turn", [1, 2])
def test_a_killed_nats_runs_again_for_the_next_test(
    nats_server: NatsServer, prefix: str, turn: int
) -> None:
    assert nats_server.running
    nats_server.kill()


@pytest.mark.parametrize("turn", [1, 2])
def test_a_killed_postgres_runs_again_for_the_next_test(database: Database, turn: int) -> None:
    assert database.value("SELECT 1") == 1
    database.server.kill()
