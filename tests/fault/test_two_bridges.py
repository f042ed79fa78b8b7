"""Two bridges: one slot with a standby, or one stream with two sources."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.fault.conftest import prepare
from tests.fault.nats_binaries import OLDEST
from tests.fault.scenario import ROUNDS, create_stream
from tests.fault.stream_oracle import compare_with_source
from tests.fixtures.waiting import eventually

TAKEOVER_SECONDS = 10
# Extra time for the start of a session on a busy machine.
GRACE_SECONDS = 5


async def _standby(scenario):
    bridge = scenario.bridge(wait=False)
    await eventually(
        lambda: _ready_document(bridge).get("state") == "standby", 40, "the second stands by"
    )
    assert bridge.http("/ready").status == 503
    assert bridge.http("/health").status == 200
    return bridge


def _ready_document(bridge):
    try:
        return bridge.http("/ready").json()
    except OSError:
        return {}


async def _taken_over(bridge, began):
    await eventually(bridge.ready, TAKEOVER_SECONDS + GRACE_SECONDS, "taken over")
    seconds = time.monotonic() - began
    print(f"taken over after {seconds:.1f} s")
    assert seconds < TAKEOVER_SECONDS + GRACE_SECONDS


async def test_a_standby_takes_over_from_a_killed_bridge(scenario, workload):
    active = scenario.bridge()
    workload.start()
    for _ in range(ROUNDS):
        standby = await _standby(scenario)
        await scenario.grown(20)
        began = time.monotonic()
        active.kill()
        await _taken_over(standby, began)
        active = standby
    await scenario.grown(20)
    workload.stop()
    await scenario.verdict(workload)


@pytest.mark.parametrize("batched", [True, False], ids=["batches", "plain"])
async def test_a_frozen_bridge_is_fenced_when_it_thaws(scenario, workload, batched):
    if not batched:
        await create_stream(scenario)
    active = scenario.bridge()
    standby = await _standby(scenario)
    workload.start()
    await scenario.grown(50)
    began = time.monotonic()
    active.freeze()
    await _taken_over(standby, began)
    await scenario.grown(20)
    active.thaw()
    await eventually(lambda: active.status()["status"] == "standby", 30, "the thawed stands by")
    await scenario.grown(20)
    workload.stop()
    await scenario.verdict(workload)
    assert standby.ready()
    assert not active.ready()


@pytest.mark.parametrize("kind", ["batches", "plain", OLDEST])
async def test_a_bridge_stopped_between_publish_and_ack_adds_nothing_after_a_takeover(
    scenario_on, holds, kind
):
    """The stale one resumes with an acknowledged batch and a full ring, after the window."""
    scenario, _ = await scenario_on(OLDEST if kind == OLDEST else None)
    if kind == "plain":
        await create_stream(scenario)
    load = prepare(scenario, writers=1)
    stale = scenario.bridge("--batch-events", "20")
    holds.set("after-publish-before-ack")
    load.start()
    await holds.wait_reached("after-publish-before-ack")
    # A file holds the point; the next bridge must not see it.
    fresh = scenario.bridge(wait=False, environment={"TAILRACE_HOLD": ""})
    await scenario.grown(100, timeout=60)
    holds.release("after-publish-before-ack")
    await eventually(
        lambda: _ready_document(stale).get("state") == "standby", 40, "the stale stands by"
    )
    await scenario.grown(20, timeout=60)
    load.stop()
    await scenario.verdict(load)
    await eventually(fresh.ready, 30, "the fresh one is active")


@pytest.mark.parametrize("version", [None, OLDEST], ids=["batches", OLDEST])
async def test_two_publications_share_one_stream(scenario_on, version):
    scenario, _ = await scenario_on(version)
    load = prepare(scenario, writers=2)
    database = scenario.database
    database.execute("DROP PUBLICATION pub")
    first = ["ledger_0", "accounts", "keyed"]
    second = ["ledger_1", "bulk", "evolving"]
    slots = [f"{scenario.slot}_a", f"{scenario.slot}_b"]
    for name, tables in (("pub_a", first), ("pub_b", second)):
        database.publish(*tables, name=name)
    bridges = [
        scenario.bridge(slot=slot, pub=name)
        for slot, name in zip(slots, ("pub_a", "pub_b"), strict=True)
    ]
    load.start()
    for round_ in range(ROUNDS):
        await scenario.grown(100)
        place = round_ % 2
        bridges[place].kill()
        await asyncio.sleep(1.2)
        bridges[place] = scenario.bridge(slot=slots[place], pub=f"pub_{'ab'[place]}")
    await scenario.grown(100)
    load.stop()
    for slot in slots:
        scenario.slot = slot
        await scenario.drained()
    history = await scenario.history()
    for slot, tables in zip(slots, (first, second), strict=True):
        compare_with_source(database.dsn, history.sources[slot].events, tables)
        assert len(history.sources[slot].epochs) == 1
