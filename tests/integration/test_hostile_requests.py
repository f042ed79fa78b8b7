"""Attacks by somebody who may only send snapshot requests: none writes, stalls or fills."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import nats

from consumer_sdk.transport.connection import NatsConnection
from consumer_sdk.wire import Subjects
from tests.fixtures.snapshots import Snapshots, gather
from tests.fixtures.stored import stored_messages
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pytest
    from nats.aio.client import Client

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Holds

MEGABYTE = 1024 * 1024
FLOOD = 60_000
# A machine that runs other tests at the same time answers late; a stalled bridge took 10 s.
LATE_SECONDS = 0.03
LATEST_SECONDS = 3.0


def create_users(database: Database, rows: int = 10) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute(f"INSERT INTO users SELECT g, 'user ' || g FROM generate_series(1, {rows}) g")
    database.publish("users")


def send_raw(server: NatsServer, commands: Iterable[bytes]) -> None:
    """Send protocol lines that client libraries refuse to send, and wait until they are read."""
    with socket.create_connection((server.host, server.port), timeout=60) as connection:
        # The server closes a connection that does not log in within two seconds.
        connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        for some in batched(commands, 500):
            connection.sendall(b"".join(some))
        connection.sendall(b"PING\r\n")
        received = b""
        while b"PONG\r\n" not in received:
            part = connection.recv(65536)
            assert part, received
            received += part


def batched(items: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    rest = iter(items)
    while some := list(itertools.islice(rest, size)):
        yield some


def publish_line(subject: bytes, reply: bytes = b"", body: bytes = b"") -> bytes:
    words = [b"PUB", subject, *([reply] if reply else []), str(len(body)).encode()]
    return b" ".join(words) + b"\r\n" + body + b"\r\n"


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


async def test_the_bridge_answers_to_inboxes_and_nothing_else(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start()
    names, client = snapshots.subjects, snapshots.client
    subject = names.snapshot_request("users")
    own = [one.subject.rstrip("*>.") for one in snapshots.own_clients[0]._subs.values()]
    assert own
    forged = [
        f"$KV.{names.bridge_bucket}.coverage.src",
        f"$KV.{names.schemas_bucket}.users",
        f"$O.{names.objects_bucket}.C.x",
        f"$JS.API.STREAM.DELETE.{names.cdc_stream}",
        f"$JS.API.STREAM.PURGE.{names.init_stream}",
        names.fence("src"),
        names.progress("src"),
        names.change("users", "insert"),
        names.meta("users"),
        names.error("users"),
        names.chunk("users", "x", 0),
        names.snapshot_progress("users", "x"),
        subject,
        "somewhere.else",
        "_INBOX",
        "_INBOXES.a",
        "_RR_.a",
        "_INBOX.a.*",
        *(f"{inbox}.1" for inbox in own),
    ]
    seen: list[str] = []

    async def note(message: Any) -> None:
        seen.append(message.subject)

    await client.subscribe(">", cb=note)
    for reply in forged:
        await client.publish(subject, b'{"fresh": true}', reply=reply)
    await eventually(lambda: snapshots.stats.snapshot_requests["ignored"] == len(forged))
    await client.flush()
    assert set(seen) <= {subject}
    streams = [info.config.name or "" for info in await client.jsm().streams_info()]
    for name in streams:
        if name.removeprefix("KV_").removeprefix("OBJ_").startswith(f"{names.prefix}_"):
            assert await stored_messages(client, name) == []
    for inbox in ("_INBOX.mine.1", "_INBOX_alice.mine"):
        waiting = await client.subscribe(inbox)
        await client.publish(subject, b"", reply=inbox)
        answer = msgpack.unpackb((await waiting.next_msg(timeout=5)).data)
        assert answer["ok"] is True


async def test_a_reader_in_another_account_is_answered(
    database: Database, own_nats: Callable[..., NatsServer], snapshots: Snapshots
) -> None:
    names = Subjects("shop")
    requests = names.snapshot_request(">")
    server = own_nats(
        config=f"""accounts {{
          BRIDGE {{ jetstream: enabled, users: [{{user: bridge, password: b}}],
                    exports: [{{service: "{requests}"}}] }}
          READER {{ users: [{{user: reader, password: r}}],
                    imports: [{{service: {{account: BRIDGE, subject: "{requests}"}}}}] }}
        }}"""
    )
    create_users(database)
    url = server.url_as("bridge", "b")
    client = await nats.connect(url)
    reader = await nats.connect(server.url_as("reader", "r"))
    async with snapshots.stack:
        snapshots.stack.push_async_callback(client.close)
        snapshots.stack.push_async_callback(reader.close)
        own = Snapshots(client, url, database, names, snapshots.stack)
        await own.prepare()
        await own.start()
        reply = await reader.request(names.snapshot_request("users"), b"", timeout=2)
        assert msgpack.unpackb(reply.data)["ok"] is True
        # Of a reply subject that the bridge must not answer, the server makes an inbox of its own.
        await reader.publish(
            names.snapshot_request("users"), b"", reply=names.change("users", "insert")
        )
        await eventually(lambda: own.stats.snapshot_requests["granted"] == 2)
        assert await stored_messages(client, names.cdc_stream) == []


async def test_forged_flow_control_makes_nobody_publish(
    nats_client: Client, nats_server: NatsServer, prefix: str
) -> None:
    """nats-py answers flow control, so its messages could name any subject."""
    names = Subjects(prefix)
    await nats_client.jetstream().add_stream(name=names.cdc_stream, subjects=[names.cdc_all])
    reader = NatsConnection()
    await reader.connect(nats_server.url)
    try:
        js = reader.jetstream()
        reading = await js.subscribe(names.cdc_all, stream=names.cdc_stream, ordered_consumer=True)
        victim = f"{prefix}.victim"
        seen = await nats_client.subscribe(f"{victim}.>")
        inbox = reading._sub.subject.encode()
        heartbeat = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Consumer-Stalled: %s.1\r\n\r\n"
        for block, reply in (
            (heartbeat % victim.encode(), b""),
            (b"NATS/1.0 100 FlowControl Request\r\n\r\n", f" {victim}.2".encode()),
        ):
            size = len(block)
            line = b"HPUB %s%s %d %d\r\n%s\r\n" % (inbox, reply, size, size, block)
            await asyncio.to_thread(send_raw, nats_server, [line])
        await nats_client.publish(names.change("users", "insert"), b"real")
        assert (await reading.next_msg(timeout=5)).data == b"real"
        await reader.flush()
        await nats_client.flush()
        assert seen.pending_msgs == 0
    finally:
        await reader.close()


def insert_until(database: Database, is_over: threading.Event, first: int) -> None:
    """Commit a row every few milliseconds."""
    with database.connect() as connection:
        for number in itertools.count(first):
            connection.execute("INSERT INTO moving VALUES (%s)", [number])
            if is_over.wait(0.005):
                return


async def latencies(client: Client, prefix: str, first: int, below: int) -> list[float]:
    """Seconds from commit to storage of the rows with these ids, in order of size."""
    names = Subjects(prefix)
    found = []
    for message in await stored_messages(
        client, names.cdc_stream, names.change("moving", "insert")
    ):
        document = msgpack.unpackb(message.data)
        if first <= document["data"]["id"] < below:
            found.append(message.stored_at - document["ts"] / 1e6)
    return sorted(found)


async def test_a_flood_of_requests_delays_no_change_and_takes_no_memory(
    database: Database,
    cdc: CdcLog,
    prefix: str,
    nats_client: Client,
    nats_server: NatsServer,
    bridge_process: Callable[..., BridgeProcess],
) -> None:
    create_users(database)
    database.execute("CREATE TABLE moving (id int PRIMARY KEY)")
    database.execute("ALTER PUBLICATION pub ADD TABLE moving")
    bridge = bridge_process()
    names = Subjects(prefix)
    subject = names.snapshot_request("users").encode()
    # The first snapshot starts worker processes, which is not part of the measurement.
    await nats_client.request(subject.decode(), b"", timeout=2)

    async def has_meta() -> bool:
        return bool(await stored_messages(nats_client, names.init_stream, names.meta("users")))

    await eventually(has_meta)

    async def measure(first: int, work: Callable[[], None]) -> list[float]:
        is_over = threading.Event()
        writer = threading.Thread(target=insert_until, args=(database, is_over, first))
        writer.start()
        try:
            await asyncio.to_thread(work)
        finally:
            is_over.set()
            await asyncio.to_thread(writer.join)
        await cdc.settle()
        return await latencies(nats_client, prefix, first, first + 1_000_000)

    def outcomes() -> int:
        lines = bridge.http("/metrics").text.splitlines()
        return sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith("bridge_snapshot_requests_total")
        )

    flood = [publish_line(subject, b"_INBOX.flood.%d" % n, b"{}") for n in range(FLOOD)]

    def send_flood() -> None:
        send_raw(nats_server, flood)
        deadline = time.monotonic() + 30
        while outcomes() < FLOOD and time.monotonic() < deadline:
            time.sleep(0.2)

    quiet = await measure(0, lambda: time.sleep(1.5))
    before = resident_bytes(bridge.pid)
    flooded = await measure(1_000_000, send_flood)
    grown = resident_bytes(bridge.pid, "VmHWM") - before
    print(
        f"quiet p50 {statistics.median(quiet) * 1000:.1f} ms, max {quiet[-1] * 1000:.1f} ms; "
        f"flooded p50 {statistics.median(flooded) * 1000:.1f} ms, "
        f"p99 {flooded[int(len(flooded) * 0.99)] * 1000:.1f} ms, max {flooded[-1] * 1000:.1f} ms "
        f"of {len(flooded)}; memory +{grown / MEGABYTE:.1f} MB"
    )
    assert outcomes() >= FLOOD, "every request is counted"
    assert statistics.median(flooded) < 2 * statistics.median(quiet) + LATE_SECONDS
    assert flooded[-1] < LATEST_SECONDS
    assert grown < 50 * MEGABYTE
    reply = await nats_client.request(subject.decode(), b"", timeout=2)
    assert msgpack.unpackb(reply.data)["ok"] is True
    assert bridge.status()["nats_reconnect_count"] == 0


async def test_large_requests_take_no_memory_and_are_refused(
    database: Database,
    prefix: str,
    nats_client: Client,
    nats_server: NatsServer,
    bridge_process: Callable[..., BridgeProcess],
) -> None:
    create_users(database)
    bridge = bridge_process()
    subject = Subjects(prefix).snapshot_request("users").encode()
    before = resident_bytes(bridge.pid)
    body = b"{" + b" " * (MEGABYTE - 200)
    send_raw(nats_server, (publish_line(subject, b"_INBOX.large.1", body) for _ in range(200)))

    async def refused() -> bool:
        try:
            reply = await nats_client.request(subject.decode(), body, timeout=1)
        except nats.errors.Error:
            # The server has disconnected the bridge's connection for requests, which comes back.
            return False
        answer = json.loads(reply.data)
        assert answer["ok"] is False
        return "too long" in answer["error"]

    await eventually(refused, 30)
    assert resident_bytes(bridge.pid, "VmHWM") - before < 50 * MEGABYTE
    assert bridge.status()["nats_reconnect_count"] == 0


async def test_bytes_that_are_no_text_do_not_stop_the_connection(
    database: Database, snapshots: Snapshots, nats_server: NatsServer
) -> None:
    create_users(database)
    await snapshots.start()
    base = snapshots.subjects.snapshot_request("")
    token = base.encode()
    refusals = [
        publish_line(token + b"\xff\xfe", b"_INBOX.raw.1"),
        publish_line(token + b"users", b"_INBOX.\xff"),
        publish_line(token + b"*", b"_INBOX.raw.1"),
        publish_line(token + b">", b"_INBOX.raw.1"),
        publish_line(token + b"=FF", b"_INBOX.raw.1"),
        publish_line(token + b"a.b.c.d", b"_INBOX.raw.1"),
        publish_line(token + b"users", b"_INBOX.raw.1", b"\xc1" * 1000),
        publish_line(token + b"users", b"_INBOX.raw.1", b'{"columns":' + b"[" * 60_000),
        publish_line(token + b"users", b"_INBOX.raw.1", b"\x81\xa7columns" + b"\x91" * 60_000),
        publish_line(token + b"users", b"_INBOX.raw.1", b'{"v": ' + b"1" * 60_000 + b"}"),
        publish_line(token + b"users", b"_INBOX.raw.1", b"\xdf\xff\xff\xff\xff"),
    ]
    head = b"NATS/1.0\r\n\xff\xff: \xff\r\nContent-Type\r\n\r\n"
    strange = b"HPUB %susers _INBOX.raw.1 %d %d\r\n%s\r\n" % (token, len(head), len(head), head)
    await asyncio.to_thread(send_raw, nats_server, [*refusals, strange])
    counts = snapshots.stats.snapshot_requests
    await eventually(lambda: sum(counts.values()) == len(refusals) + 1, what=lambda: str(counts))
    assert (await snapshots.ask("users"))["ok"] is True


async def test_tables_that_do_not_exist_leave_no_trace(
    database: Database, snapshots: Snapshots, caplog: pytest.LogCaptureFixture
) -> None:
    create_users(database)
    service = await snapshots.start()
    answers = await gather(*(snapshots.ask(f"nothing_{n}") for n in range(100)))
    assert {answer["ok"] for answer in answers} == {False}
    assert snapshots.stats.snapshots == {}
    assert snapshots.stats.per_table == {}
    await eventually(lambda: not service._admissions)
    gc.collect()
    assert "nothing_" not in caplog.text
    assert "never retrieved" not in caplog.text


async def test_the_order_of_columns_makes_no_new_snapshot(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    database.execute("CREATE TABLE wide (a int, b int, c int, d int, e int)")
    database.publish("wide")
    await snapshots.start()
    holds.set("snapshot.piece")
    orders = list(itertools.permutations("abcd"))
    answers = await gather(*(snapshots.ask("wide", columns=list(order)) for order in orders))
    assert len({answer["snapshot_id"] for answer in answers}) == 1
    holds.release("snapshot.piece")
    read = await snapshots.read("wide", answers[0]["snapshot_id"])
    assert [column["name"] for column in read.meta["columns"]] == ["a", "b", "c", "d"]
    again = await snapshots.ask("wide", columns=["d", "c", "b", "a"])
    assert (again["snapshot_id"], again["state"]) == (answers[0]["snapshot_id"], "ready")


async def test_different_options_make_a_bounded_number_of_snapshots(
    database: Database, snapshots: Snapshots, holds: Holds
) -> None:
    database.execute("CREATE TABLE wide (a int, b int, c int, d int, e int)")
    database.execute("CREATE TABLE other (id int)")
    database.publish("wide", "other")
    await snapshots.start()
    holds.set("snapshot.piece")
    lists = [list(some) for size in (1, 2, 3) for some in itertools.combinations("abcde", size)]
    answers = await gather(*(snapshots.ask("wide", columns=some) for some in lists))
    granted = [answer for answer in answers if answer["ok"]]
    assert len(granted) == 8
    refused = [answer for answer in answers if not answer["ok"]]
    assert {answer["retry"] for answer in refused} == {True}
    assert "snapshots of wide are under way" in refused[0]["error"]
    assert (await snapshots.ask("other"))["ok"] is True
    holds.release("snapshot.piece")
    for answer in granted:
        await snapshots.read("wide", answer["snapshot_id"])


async def test_fresh_snapshots_of_a_table_have_a_rate(
    database: Database, snapshots: Snapshots
) -> None:
    create_users(database)
    await snapshots.start(interval=3600)
    taken = 0
    while (answer := await snapshots.ask("users", fresh=True))["ok"]:
        await snapshots.read("users", answer["snapshot_id"])
        taken += 1
    assert taken == 10
    assert answer["retry"] is True
    assert "too many snapshots of users have begun lately" in answer["error"]
    # A reader who needs no new one is not affected.
    assert (await snapshots.ask("users"))["state"] == "ready"
