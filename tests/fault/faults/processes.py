"""Faults of bridge, snapshot workers and mirror: they are killed, frozen or terminated."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psycopg

from tests.fault.faults.registry import fault
from tests.fault.judge import TIMEOUT_SECONDS
from tests.fault.world import print_tasks
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    import random

    from tests.fault.world import World

BRIDGE_POINTS = (
    "after-publish-before-ack",
    "after-ack-before-confirm",
    "between-kv-and-schema-message",
)
MIRROR_POINTS = ("mirror-between-data-and-position", "mirror-after-commit")


@fault("bridge: kill -9", weight=8)
async def kill_bridge(world: World, rng: random.Random) -> None:
    world.bridge.kill()
    await world.wait(rng.choice((0.0, 0.5, 1.5)))
    world.launch_bridge()


@fault("bridge: SIGTERM")
async def terminate_bridge(world: World, _: random.Random) -> None:
    await world.stop_bridge()
    world.launch_bridge()


@fault("bridge: frozen for a moment")
async def freeze_bridge(world: World, rng: random.Random) -> None:
    world.bridge.freeze()
    await world.wait(rng.uniform(0.5, 4))
    world.bridge.thaw()


@fault("bridge: frozen, taken over, thawed", weight=2)
async def take_over(world: World, _: random.Random) -> None:
    stale = world.bridge
    stale.freeze()
    fresh = world.launch_bridge()
    try:
        await eventually(fresh.ready, TIMEOUT_SECONDS, world.bridge_log)
        await world.until_growing(10)
        stale.thaw()
        await eventually(
            lambda: stale.status()["status"] == "standby",
            TIMEOUT_SECONDS,
            lambda: f"the stale one stands by\n{stale.status()}\n{print_tasks(stale)}",
        )
    finally:
        stale.kill()


@fault("bridge: killed at a named point", weight=6)
async def kill_at_point(world: World, rng: random.Random) -> None:
    point = rng.choice(BRIDGE_POINTS)
    with world.dying_at(point):
        if point == "between-kv-and-schema-message":
            world.scenario.database.execute(
                f"ALTER TABLE evolving ADD COLUMN c_{rng.randbytes(4).hex()} text"
            )
            world.scenario.database.execute("INSERT INTO evolving (a) VALUES ('wider')")
        await eventually(
            lambda: not world.bridge.running, TIMEOUT_SECONDS, f"the bridge died: {point}"
        )
    world.launch_bridge()


@fault("mirror: kill -9", weight=5, needs="mirror")
async def kill_mirror(world: World, rng: random.Random) -> None:
    world.kill_mirror()
    await world.wait(rng.random())
    world.launch_mirror()


@fault("mirror: SIGTERM", weight=2, needs="mirror")
async def terminate_mirror(world: World, _: random.Random) -> None:
    mirror = world.follower
    os.kill(mirror.pid, signal.SIGTERM)
    await eventually(lambda: not mirror.running, TIMEOUT_SECONDS, mirror.describe)
    world.launch_mirror()


@fault("mirror: frozen for a moment", weight=2, needs="mirror")
async def freeze_mirror(world: World, rng: random.Random) -> None:
    mirror = world.follower
    os.kill(mirror.pid, signal.SIGSTOP)
    await world.wait(rng.uniform(0.5, 4))
    os.kill(mirror.pid, signal.SIGCONT)


@fault("mirror: killed at a named point", weight=4, needs="mirror")
async def kill_mirror_at_point(world: World, rng: random.Random) -> None:
    point = rng.choice(MIRROR_POINTS)
    mirror = world.follower
    with world.dying_at(point):
        await eventually(lambda: not mirror.running, TIMEOUT_SECONDS, mirror.describe)
    world.launch_mirror()


@fault("mirror: killed in the middle of a bootstrap", weight=2, needs="mirror")
async def kill_bootstrap(world: World, rng: random.Random) -> None:
    point = rng.choice(("mirror-before-loaded", "mirror-before-swap"))
    world.forget_replica()
    with world.dying_at(point):
        world.launch_mirror()
        mirror = world.follower
        await eventually(lambda: not mirror.running, TIMEOUT_SECONDS, mirror.describe)
    world.launch_mirror()


async def _snapshot_under_way(world: World) -> list[int]:
    """Make the mirror request all tables again; return the workers, held at their first chunk."""
    world.forget_replica()
    await world.scenario.purge(world.scenario.subjects.init_stream)
    world.hold("snapshot.chunk.0")
    world.launch_mirror()
    return await eventually(world.snapshot_workers_at_work, TIMEOUT_SECONDS, world.bridge_log)


@fault("snapshot worker: kill -9", weight=2, needs="mirror")
async def kill_worker(world: World, rng: random.Random) -> None:
    try:
        os.kill(rng.choice(await _snapshot_under_way(world)), signal.SIGKILL)
    finally:
        world.release("snapshot.chunk.0")


@fault("snapshot worker: SIGTERM", weight=1, needs="mirror")
async def terminate_worker(world: World, rng: random.Random) -> None:
    try:
        os.kill(rng.choice(await _snapshot_under_way(world)), signal.SIGTERM)
    finally:
        world.release("snapshot.chunk.0")


@fault("snapshot worker: frozen for a moment", weight=1, needs="mirror")
async def freeze_worker(world: World, rng: random.Random) -> None:
    try:
        worker = rng.choice(await _snapshot_under_way(world))
        os.kill(worker, signal.SIGSTOP)
    finally:
        world.release("snapshot.chunk.0")
    await world.wait(rng.uniform(1, 4))
    os.kill(worker, signal.SIGCONT)


@fault("bridge: killed between the last chunk and the meta", weight=2, needs="mirror")
async def kill_before_meta(world: World, _: random.Random) -> None:
    world.forget_replica()
    await world.scenario.purge(world.scenario.subjects.init_stream)
    with world.dying_at("between-chunk-and-meta"):
        world.launch_mirror()
        await eventually(lambda: not world.bridge.running, TIMEOUT_SECONDS, world.bridge_log)
    world.launch_bridge()


@fault("bridge: killed with a large transaction under way", weight=2)
async def kill_in_large_transaction(world: World, rng: random.Random) -> None:
    with psycopg.connect(world.scenario.database.dsn) as connection:
        connection.execute(
            "INSERT INTO bulk (writer, payload)"
            " SELECT 0, repeat('large ', 60) FROM generate_series(1, 4000)"
        )
    await world.wait(rng.random() * 0.6)
    world.bridge.kill()
    world.launch_bridge()
