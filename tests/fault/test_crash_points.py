"""Crashes at the most critical points."""

from __future__ import annotations

import asyncio

import pytest

from consumer_sdk import SnapshotFailed, connect
from tests.fault.conftest import prepare
from tests.fixtures.waiting import eventually

POINTS = ("after-publish-before-ack", "after-ack-before-confirm", "between-kv-and-schema-message")


@pytest.mark.parametrize("flags", [(), ("--pack",)], ids=["single", "pack"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_crash_exactly_here_loses_and_repeats_nothing(scenario, holds, point, flags):
    load = prepare(scenario, writers=1)
    bridge = scenario.bridge(*flags)
    load.start()
    await scenario.grown(30)
    holds.kill(point)
    if point.startswith("between"):
        # The next row has a new structure, whose schema is stored and announced first.
        scenario.database.execute("ALTER TABLE ledger_0 ADD COLUMN later int")
    await eventually(lambda: not bridge.running, 30, "killed at the point")
    assert holds.is_reached(point)
    holds.spare(point)
    assert bridge.exit_code == 128 + 9
    scenario.bridge(*flags)
    await scenario.grown(30)
    load.stop()
    history = await scenario.verdict(load)
    assert len(history.sources[scenario.slot].epochs) == 1


async def test_a_schema_change_is_announced_though_the_bridge_died_after_storing_it(
    scenario, holds
):
    database = scenario.database
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge = scenario.bridge()
    database.execute("INSERT INTO t VALUES (1)")
    await scenario.drained()
    holds.kill("between-kv-and-schema-message")
    database.execute("ALTER TABLE t ADD COLUMN name text")
    database.execute("INSERT INTO t VALUES (2, 'two')")
    await eventually(lambda: not bridge.running, 30, "killed at the point")
    holds.spare("between-kv-and-schema-message")
    scenario.bridge()
    # The oracle checks that every row follows the message of its schema version.
    history = await scenario.verdict(tables=["t"])
    assert history.sources[scenario.slot].schemas["t"] == 2


async def test_a_crash_between_the_last_chunk_and_the_meta_leaves_a_failed_snapshot(
    scenario, holds, nats_server
):
    """Without the bridge no meta is stored: readers get the failure, ask again, get all rows."""
    point = "between-chunk-and-meta"
    database = scenario.database
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge = scenario.bridge()
    database.execute("INSERT INTO t SELECT generate_series(1, 500)")
    await scenario.drained()
    holds.kill(point)
    async with connect(nats_server.reader_url, prefix=scenario.prefix) as client:
        asking = asyncio.ensure_future(client.snapshot("t"))
        await eventually(lambda: not bridge.running, 60, "killed at the point")
        assert holds.is_reached(point)
        holds.spare(point)
        scenario.bridge()
        with pytest.raises(SnapshotFailed, match="the bridge stopped"):
            await asking
        snapshot = await client.snapshot("t")
        assert not snapshot.reused
        rows = [row async for row in snapshot.rows()]
    assert sorted(row["id"] for row in rows) == list(range(1, 501))
