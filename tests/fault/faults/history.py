"""Faults that break the history of a source: the bridge must stop, and later announce a gap."""

from __future__ import annotations

import asyncio
import subprocess
from typing import TYPE_CHECKING

import psycopg

from tests.fault.faults.registry import fault
from tests.fault.judge import TIMEOUT_SECONDS
from tests.fault.nats_store import drop_last_messages
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.fault.world import World

LOST = "INSERT INTO bulk (writer, payload) VALUES (0, 'lost')"


async def _begin_new_epoch(world: World) -> None:
    """The bridge must refuse to continue, and start a new epoch with --on-gap=new-epoch."""
    refused = world.launch_bridge()
    await _refuses(world)
    assert not refused.running
    bridge = world.launch_bridge("--on-gap", "new-epoch")
    await eventually(
        lambda: bridge.ready() or not bridge.running, TIMEOUT_SECONDS, world.bridge_log
    )
    assert bridge.running, world.bridge_log()
    # The next fault of this kind needs a bridge without --on-gap=new-epoch.
    await world.stop_bridge()
    world.launch_bridge()
    await world.until_ready()


async def _refuses(world: World) -> None:
    await eventually(lambda: not world.bridge.running, TIMEOUT_SECONDS, world.bridge_log)
    assert world.bridge.exit_code == 4, f"{world.bridge.exit_code}: {world.bridge_log()}"


@fault("history: slot dropped", weight=1, gap=True)
async def drop_slot(world: World, _: random.Random) -> None:
    await world.stop_bridge()
    world.scenario.database.execute("SELECT pg_drop_replication_slot('shop')")
    world.scenario.database.execute(LOST)
    await _begin_new_epoch(world)


@fault("history: slot advanced", weight=1, gap=True)
async def advance_slot(world: World, _: random.Random) -> None:
    await world.stop_bridge()
    world.scenario.database.execute(LOST)
    world.scenario.database.execute(
        "SELECT pg_replication_slot_advance('shop', pg_current_wal_lsn())"
    )
    await _begin_new_epoch(world)


@fault("history: slot invalidated by max_slot_wal_keep_size", weight=1, gap=True)
async def invalidate_slot(world: World, _: random.Random) -> None:
    await world.stop_bridge()
    with psycopg.connect(world.postgres.dsn("shop"), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '16MB'")
        connection.execute("SELECT pg_reload_conf()")
        connection.execute(LOST)

        def lost() -> bool:
            connection.execute(
                "SELECT pg_logical_emit_message(false, 'fill', repeat('x', 8000000))"
            )
            connection.execute("SELECT pg_switch_wal()")
            connection.execute("CHECKPOINT")
            slot = world.scenario.database.slot("shop")
            return slot is not None and slot["wal_status"] == "lost"

        await eventually(lambda: asyncio.to_thread(lost), TIMEOUT_SECONDS, "the slot is lost")
        connection.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        connection.execute("SELECT pg_reload_conf()")
    await _begin_new_epoch(world)


@fault("history: stream deleted", weight=1, gap=True)
async def delete_stream(world: World, rng: random.Random) -> None:
    await _delete_stream(world, rng, recreated=False)


@fault("history: stream deleted and created again", weight=1, gap=True)
async def recreate_stream(world: World, rng: random.Random) -> None:
    await _delete_stream(world, rng, recreated=True)


async def _delete_stream(world: World, rng: random.Random, *, recreated: bool) -> None:
    stream = world.scenario.subjects.cdc_stream
    running = rng.random() < 0.5
    if not running:
        await world.stop_bridge()
    config = (await world.scenario.api(f"STREAM.INFO.{stream}"))["config"]
    await world.scenario.delete(stream)
    world.judge.forget_stream()
    if recreated:
        await world.scenario.api(f"STREAM.CREATE.{stream}", config)
    world.scenario.database.execute(LOST)
    if running:
        await _refuses(world)
    await _begin_new_epoch(world)


@fault("history: unsynced messages of CDC dropped", weight=1, gap=True, needs="single")
async def drop_tail(world: World, rng: random.Random) -> None:
    running = rng.random() < 0.5
    for _ in range(20):
        world.scenario.database.execute(LOST)
    await world.scenario.drained(TIMEOUT_SECONDS)
    if not running:
        await world.stop_bridge()
    world.nats.kill()
    # More than the progress records after the last row, of which KV has a copy.
    drop_last_messages(world.nats, world.scenario.subjects.cdc_stream, rng.choice((8, 12, 20)))
    await asyncio.to_thread(world.nats.start)
    world.judge.reread()
    if running:
        world.scenario.database.execute(LOST)
        await _refuses(world)
    await _begin_new_epoch(world)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["rm", "-rf", str(target)], check=True)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


@fault("history: postgres restored from an older backup", weight=1, gap=True)
async def restore_backup(world: World, _: random.Random) -> None:
    data = world.postgres.directory / "data"
    backup = world.postgres.directory / "backup"
    await world.stop_bridge()
    await asyncio.to_thread(world.postgres.stop, 60)
    await asyncio.to_thread(_copy, data, backup)
    await asyncio.to_thread(world.postgres.start)
    world.launch_bridge()
    world.load.resume()
    await world.until_ready()
    await world.until_growing(50)
    await world.judge.barrier(replicas=False)
    await world.stop_bridge()
    await asyncio.to_thread(world.postgres.stop, 60, mode="immediate")
    await asyncio.to_thread(_copy, backup, data)
    await asyncio.to_thread(world.postgres.start)
    world.scenario.database.execute(LOST)
    await _begin_new_epoch(world)
