"""Servers that crash and come back, and connections that are cut or go silent."""

from __future__ import annotations

import asyncio

import pytest

from tests.fault.scenario import ROUNDS
from tests.fixtures.waiting import eventually


async def _settle(scenario, bridge, load):
    """The bridge resumes by itself, and the stream has every change once."""
    await scenario.grown(20, timeout=60)
    load.stop()
    history = await scenario.verdict(load)
    assert bridge.running
    # Everything is stored; a connection lost at the last moment is reopened automatically.
    await eventually(bridge.ready, 30, "ready")
    source = history.sources[scenario.slot]
    assert len(source.epochs) == 1
    return history


async def test_nats_killed_and_restarted_under_load(scenario, workload, nats_server):
    bridge = scenario.bridge()
    workload.start()
    for _ in range(ROUNDS):
        await scenario.grown(50)
        nats_server.kill()
        await asyncio.sleep(scenario.rng.random())
        nats_server.start()
    await _settle(scenario, bridge, workload)
    assert bridge.status()["nats_reconnect_count"] >= ROUNDS


async def test_a_nats_that_is_away_is_called_that(scenario_on):
    scenario, server = await scenario_on()
    scenario.database.execute("CREATE TABLE fresh (id int PRIMARY KEY)")
    scenario.database.publish("fresh")
    bridge = scenario.bridge()
    server.kill()
    await eventually(lambda: not bridge.status()["nats_connected"], 40, "noticed")
    # Its schema must be stored before the row.
    scenario.database.execute("INSERT INTO fresh VALUES (1)")

    def warning():
        return "; ".join(w["text"] for w in bridge.status()["warnings"] if w["key"] == "publish")

    await eventually(lambda: "NATS is away" in warning(), 40, warning)
    server.start()
    await scenario.verdict(tables=["fresh"])
    # The text of nats-py is misleading: it mentions a buffer.
    assert "outbound buffer" not in bridge.log_text()


async def test_postgres_killed_and_restarted_under_load(scenario, workload, pg):
    bridge = scenario.bridge()
    workload.start()
    for _ in range(ROUNDS):
        await scenario.grown(50)
        pg.kill()
        await asyncio.sleep(scenario.rng.random())
        pg.start()
    await _settle(scenario, bridge, workload)
    assert bridge.status()["reconnect_count"] >= ROUNDS


@pytest.mark.parametrize("side", ["postgres", "nats"])
async def test_connections_cut_under_load(scenario, workload, tcp_proxy, pg, nats_server, side):
    proxy = tcp_proxy(pg.port if side == "postgres" else nats_server.port)
    bridge = scenario.bridge(**_through(proxy, side, scenario))
    workload.start()
    for _ in range(ROUNDS):
        await scenario.grown(30, timeout=60)
        proxy.cut()
    await _settle(scenario, bridge, workload)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("side", ["postgres", "nats"])
async def test_a_connection_that_goes_silent_is_given_up_and_made_again(
    scenario, workload, tcp_proxy, pg, nats_server, side, direction
):
    proxy = tcp_proxy(pg.port if side == "postgres" else nats_server.port)
    bridge = scenario.bridge(**_through(proxy, side, scenario))
    workload.start()
    await scenario.grown(50)
    proxy.deaf(direction)
    workload.stop()
    # No connection is closed: one end must detect that the other is silent.
    word = "is_connected" if side == "postgres" else "nats_connected"
    await eventually(lambda: not bridge.status()[word], 60, "noticed")
    workload.resume()
    proxy.hear()
    await _settle(scenario, bridge, workload)


async def test_a_short_stall_is_waited_out(scenario, workload, tcp_proxy, nats_server):
    proxy = tcp_proxy(nats_server.port)
    bridge = scenario.bridge(nats_url=proxy.through(scenario.nats_url))
    workload.start()
    for _ in range(ROUNDS):
        await scenario.grown(30)
        proxy.deaf(scenario.rng.choice(("up", "down", "both")))
        await asyncio.sleep(1.5)
        proxy.hear()
    await _settle(scenario, bridge, workload)


def _through(proxy, side, scenario):
    if side == "postgres":
        return {"database_url": proxy.through(scenario.database.dsn)}
    return {"nats_url": proxy.through(scenario.nats_url)}
