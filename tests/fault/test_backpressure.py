"""Sizes and limits: large rows, small rings, full streams, an absent NATS, bounded memory."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import psycopg
import pytest
from nats.js.errors import APIError

from consumer_sdk.wire import parse_lsn
from tests.fault.conftest import prepare
from tests.fault.nats_store import full_disk
from tests.fault.scenario import create_stream
from tests.fixtures.waiting import eventually

MEGABYTE = 1024 * 1024


def _resident_bytes(pid, field="VmRSS"):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


async def test_an_idle_publication_beside_a_busy_table_does_not_pin_the_log(scenario):
    database = scenario.database
    database.execute("CREATE TABLE idle (id int PRIMARY KEY); CREATE TABLE busy (filler text)")
    database.publish("idle")
    scenario.bridge()

    def lag():
        return parse_lsn(database.current_lsn()) - scenario.confirmed_lsn()

    for _ in range(3):
        database.execute("INSERT INTO busy SELECT repeat('x', 1000) FROM generate_series(1, 4000)")
    await eventually(lambda: lag() < MEGABYTE, 30, "slot lag under 1 MB")
    database.execute("INSERT INTO idle VALUES (1)")
    await scenario.verdict(tables=["idle"])


async def test_a_row_of_20_megabytes_and_2000_of_4_kilobytes_arrive(scenario):
    database = scenario.database
    database.execute("CREATE TABLE large (id int PRIMARY KEY, body text)")
    database.publish("large")
    bridge = scenario.bridge()
    with psycopg.connect(database.dsn) as connection:
        connection.execute("INSERT INTO large VALUES (0, repeat('tailrace', 2621440))")
        connection.commit()
        connection.execute(
            "INSERT INTO large SELECT i, repeat(md5(i::text), 128) FROM generate_series(1, 2000) i"
        )
    await scenario.drained()
    history = await scenario.history()
    events = history.sources[scenario.slot].events
    assert [event.data["id"] if event.data else 0 for event in events] == list(range(2001))
    reference = events[0].ref
    assert reference is not None
    objects = await scenario.client.jetstream().object_store(reference["bucket"])
    content = (await objects.get(reference["name"])).data or b""
    assert len(content) == reference["size"] > 20 * MEGABYTE
    assert hashlib.sha256(content).hexdigest() == reference["sha256"]
    peak = _resident_bytes(bridge.pid, "VmHWM")
    print(f"peak {peak / MEGABYTE:.0f} MiB")
    assert peak < 16 * MEGABYTE + 4 * 20 * MEGABYTE + 100 * MEGABYTE
    # What held the row goes back to the system, all but libpq's buffer.
    assert _resident_bytes(bridge.pid) < peak - 2 * 20 * MEGABYTE


@pytest.mark.parametrize("flags", [(), ("--pack",)], ids=["single", "pack"])
async def test_a_transaction_far_larger_than_the_ring(scenario, flags):
    database = scenario.database
    database.execute("CREATE TABLE many (id int PRIMARY KEY, body text)")
    database.publish("many")
    bridge = scenario.bridge("--ring-slots", "64", "--ring-bytes", "65536", *flags)
    rows = 20_000
    database.execute(f"INSERT INTO many SELECT i, md5(i::text) FROM generate_series(1, {rows}) i")
    await eventually(
        lambda: bridge.status()["cdc_events_published"] > rows // 4, 60, "in the middle of it"
    )
    bridge.kill()
    scenario.bridge("--ring-slots", "64", "--ring-bytes", "65536", *flags)
    history = await scenario.verdict(tables=["many"])
    (transaction,) = [t for t in history.sources[scenario.slot].transactions if t.commit_lsn]
    assert transaction.changes == rows


async def _fill(scenario, stream):
    """Fill the stream to its limit with messages that are not of the bridge."""
    subject = f"{scenario.subjects.cdc}.$filler"
    js = scenario.client.jetstream()
    for size in (30_000, 1000, 1):
        while True:
            try:
                await js.publish(subject, b"x" * size, stream=stream)
            except APIError:
                break
    return subject


async def test_a_full_stream_is_announced_and_freed_by_itself(scenario, workload):
    bridge = scenario.bridge("--cdc-max-bytes", "3MB", "--wal-check-interval", "1s")
    workload.start()
    await scenario.grown(50)
    stream = scenario.subjects.cdc_stream
    filler = await _fill(scenario, stream)
    await eventually(
        lambda: any(w["key"] == "publish" for w in bridge.status()["warnings"]), 30, "announced"
    )
    warning = next(w for w in bridge.status()["warnings"] if w["key"] == "publish")
    assert "exceeded" in warning["text"]
    assert "free room" in warning["remedy"]
    assert bridge.status()["health"] == "warning"
    await eventually(
        lambda: any(w["key"] == "cdc-size" for w in bridge.status()["warnings"]), 30, "its size"
    )
    workload.stop()
    await scenario.api(f"STREAM.PURGE.{stream}", {"filter": filler})
    await scenario.verdict(workload)
    await eventually(lambda: bridge.status()["warnings"] == [], 20, "no warning is left")


async def test_a_stream_full_for_long_lets_go_of_the_slot_until_there_is_room(scenario, workload):
    await create_stream(scenario, allow_batched=True, max_bytes=3 * MEGABYTE, discard="new")
    bridge = scenario.bridge("--nats-away-limit", "2s")
    workload.start()
    await scenario.grown(50)
    stream = scenario.subjects.cdc_stream
    filler = await _fill(scenario, stream)
    await eventually(lambda: not _is_active(scenario), 40, "the slot is let go")
    assert bridge.http("/health").status == 200
    workload.stop()
    await scenario.api(f"STREAM.PURGE.{stream}", {"filter": filler})
    await eventually(lambda: _is_active(scenario), 40, "the slot is taken again")
    await scenario.verdict(workload)


async def test_a_disk_that_takes_no_more_is_waited_for(scenario_on):
    """What the server could not write is not acknowledged, and written after its restart."""
    scenario, server = await scenario_on()
    stream = scenario.subjects.cdc_stream
    load = prepare(scenario)
    bridge = scenario.bridge("--nats-away-limit", "4s")
    load.start()
    await scenario.grown(50)
    with scenario.sampling(), full_disk(server, stream, 5000):
        await eventually(
            lambda: any(w["key"] == "publish" for w in bridge.status()["warnings"]), 40, "announced"
        )
        await eventually(lambda: not _is_active(scenario), 40, "the slot is let go")
    load.stop()
    assert bridge.http("/health").status == 200
    server.kill()
    server.start()
    await eventually(lambda: _is_active(scenario), 60, "the slot is taken again")
    history = await scenario.verdict(load)
    assert len(history.sources[scenario.slot].epochs) == 1


def _is_active(scenario):
    slot = scenario.database.slot(scenario.slot)
    assert slot is not None
    return slot["active"]


async def test_postgres_can_shut_down_while_nats_is_away(scenario_on, pg):
    scenario, server = await scenario_on()
    load = prepare(scenario)
    bridge = scenario.bridge("--nats-away-limit", "3s")
    load.start()
    await scenario.grown(50)
    server.kill()
    await eventually(lambda: not _is_active(scenario), 40, "the slot is let go")
    assert bridge.running
    load.stop()
    pg.stop(timeout=20)
    pg.start()
    server.start()
    await eventually(lambda: _is_active(scenario), 60, "the slot is taken again")
    await scenario.verdict(load)
    assert len((await scenario.history()).sources[scenario.slot].epochs) == 1


async def test_an_idle_bridge_lets_go_of_the_slot_too_when_nats_is_away(scenario_on):
    scenario, server = await scenario_on()
    scenario.database.execute("CREATE TABLE quiet (id int PRIMARY KEY)")
    scenario.database.publish("quiet")
    scenario.bridge("--nats-away-limit", "2s")
    server.kill()
    await eventually(lambda: not _is_active(scenario), 40, "the slot is let go")
    server.start()
    await eventually(lambda: _is_active(scenario), 40, "the slot is taken again")


async def test_memory_stays_bounded_while_nats_stalls_under_load(scenario, tcp_proxy, nats_server):
    database = scenario.database
    database.execute("CREATE TABLE flood (id bigserial PRIMARY KEY, body text)")
    database.publish("flood")
    proxy = tcp_proxy(nats_server.port)
    bridge = scenario.bridge("--ring-bytes", "4MB", nats_url=proxy.through(scenario.nats_url))
    database.execute("INSERT INTO flood (body) VALUES ('first')")
    await scenario.drained()
    before = _resident_bytes(bridge.pid)
    proxy.deaf()
    for _ in range(10):
        database.execute(
            "INSERT INTO flood (body) SELECT repeat(md5(i::text), 30)"
            " FROM generate_series(1, 4000) i"
        )
    await eventually(lambda: bridge.status()["ring"]["bytes"] > 2 * MEGABYTE, 40, "the ring fills")
    peak = 0
    for _ in range(30):
        peak = max(peak, _resident_bytes(bridge.pid))
        await asyncio.sleep(0.1)
    proxy.hear()
    # 40 MB wait in PostgreSQL; here are the ring, the batch, libpq's buffer and Python's slack.
    assert peak - before < 40 * MEGABYTE
    await scenario.verdict(tables=["flood"])
    assert _resident_bytes(bridge.pid, "VmHWM") - before < 60 * MEGABYTE


@pytest.mark.parametrize("batched", [True, False], ids=["fast-ingest", "plain"])
async def test_a_message_that_the_stream_never_takes_is_not_sent_without_a_pause(scenario, batched):
    await create_stream(scenario, allow_batched=batched, max_msg_size=2000)
    database = scenario.database
    database.execute("CREATE TABLE t (id int PRIMARY KEY, body text)")
    database.publish("t")
    bridge = scenario.bridge()
    database.execute("INSERT INTO t VALUES (1, 'small')")
    await scenario.drained()
    before = await scenario.last_sequence()
    database.execute("INSERT INTO t VALUES (2, repeat('large', 1000))")
    await eventually(
        lambda: any(w["key"] == "publish" for w in bridge.status()["warnings"]), 30, "announced"
    )
    await asyncio.sleep(3)
    (warning,) = [w for w in bridge.status()["warnings"] if w["key"] == "publish"]
    assert "bridge check" in warning["remedy"]
    # Every attempt writes the fence anew.
    assert await scenario.last_sequence() - before < 12
    stream = scenario.subjects.cdc_stream
    config = (await scenario.api(f"STREAM.INFO.{stream}"))["config"]
    await scenario.api(f"STREAM.UPDATE.{stream}", {**config, "max_msg_size": -1})
    await scenario.verdict()
