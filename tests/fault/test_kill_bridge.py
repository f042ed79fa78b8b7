"""kill -9 of the bridge at any moment loses nothing and repeats nothing."""

from __future__ import annotations

import asyncio

import pytest

from consumer_sdk.wire import parse_lsn
from tests.fault.conftest import prepare
from tests.fault.nats_binaries import OLDEST
from tests.fault.scenario import ROUNDS, create_stream
from tests.fixtures.waiting import eventually

BEYOND_DEDUPLICATION = 1.2


async def _kill_and_pause(scenario, load, *flags):
    """In each round: run under load, kill at a random moment, wait longer than the window."""
    bridge = scenario.bridge(*flags)
    with load, scenario.sampling():
        for _ in range(ROUNDS):
            await scenario.grown(20)
            # The moment is random on purpose; the pause must be longer than the window.
            await asyncio.sleep(scenario.rng.random() * 0.7)
            bridge.kill()
            await asyncio.sleep(BEYOND_DEDUPLICATION)
            bridge = scenario.bridge(*flags)
        await scenario.grown(20)
    assert len(scenario.samples) > 10
    return bridge


@pytest.mark.parametrize("flags", [(), ("--pack",)], ids=["msgpack", "pack"])
async def test_kill_at_random_moments_leaves_every_change_once_and_in_order(scenario, flags):
    load = prepare(scenario)
    await _kill_and_pause(scenario, load, *flags)
    history = await scenario.verdict(load)
    source = history.sources[scenario.slot]
    assert len(source.epochs) == 1
    assert source.fences > ROUNDS
    assert not history.foreign


async def test_kill_at_random_moments_where_the_stream_takes_no_batches(scenario):
    await create_stream(scenario)
    load = prepare(scenario)
    bridge = await _kill_and_pause(scenario, load, "--json")
    assert bridge.status()["mode"] == "plain"
    history = await scenario.verdict(load)
    assert len(history.sources[scenario.slot].epochs) == 1


@pytest.mark.parametrize(("version", "flags"), [(OLDEST, ()), ("2.12.8", ("--pack",))])
async def test_kill_at_random_moments_on_an_older_server(scenario_on, version, flags):
    scenario, _ = await scenario_on(version)
    load = prepare(scenario)
    bridge = await _kill_and_pause(scenario, load, *flags)
    status = bridge.status()
    assert (status["mode"], status["versions"]["nats"]) == ("plain", version)
    history = await scenario.verdict(load)
    assert len(history.sources[scenario.slot].epochs) == 1


async def test_what_was_read_and_not_stored_is_not_confirmed(scenario, tcp_proxy, nats_server):
    """If it is killed with unpublished rows in memory, PostgreSQL must still have them."""
    proxy = tcp_proxy(nats_server.port)
    load = prepare(scenario, writers=1, kinds=("ledger",))
    bridge = scenario.bridge(
        "--status-interval", "100ms", nats_url=proxy.through(scenario.nats_url)
    )
    with load:
        await scenario.grown(20)
        proxy.deaf()
        read = bridge.status()["wal_messages_received"]
        await eventually(lambda: bridge.status()["wal_messages_received"] > read + 50)
        stored = bridge.status()["confirmed_lsn"]
        # Meanwhile several status updates are sent; keepalives must not confirm the changes.
        await asyncio.sleep(1)
        assert scenario.confirmed_lsn() <= parse_lsn(stored)
        bridge.kill()
        proxy.hear()
        scenario.bridge()
        await scenario.grown(20)
    await scenario.verdict(load)
