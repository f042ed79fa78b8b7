"""Faults of streams and buckets that leave the history unbroken."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import NotFoundError

from tests.fault.faults.registry import fault
from tests.fault.judge import TIMEOUT_SECONDS
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    import random

    from tests.fault.world import World


@fault("jetstream: CDC full, then freed", weight=2)
async def fill_stream(world: World, rng: random.Random) -> None:
    stream = world.scenario.subjects.cdc_stream
    state = (await world.scenario.api(f"STREAM.INFO.{stream}"))["state"]
    await world.set_stream(max_bytes=state["bytes"] + 2000, discard="new")
    await world.wait(rng.choice((2, 5)))
    await world.set_stream(max_bytes=-1, discard="old")


@fault("jetstream: KV bucket of the bridge deleted", weight=2)
async def delete_record(world: World, rng: random.Random) -> None:
    await _delete_bucket(world, world.scenario.subjects.bridge_bucket, rng)


@fault("jetstream: KV bucket of the schemas deleted", weight=2)
async def delete_schemas(world: World, rng: random.Random) -> None:
    await _delete_bucket(world, world.scenario.subjects.schemas_bucket, rng)


async def _delete_bucket(world: World, bucket: str, rng: random.Random) -> None:
    js = world.client.jetstream()
    await world.scenario.delete(f"KV_{bucket}")
    if rng.random() < 0.5:
        world.bridge.kill()
        world.launch_bridge()

    async def restored() -> bool:
        await asyncio.to_thread(world.supervise)
        with suppress(NotFoundError, nats.errors.Error):
            await js.key_value(bucket)
            return True
        return False

    await eventually(restored, TIMEOUT_SECONDS, world.bridge_log)


@fault("jetstream: INIT purged during a bootstrap", weight=2, needs="mirror")
async def purge_init(world: World, rng: random.Random) -> None:
    world.forget_replica()
    world.launch_mirror()
    for _ in range(rng.randint(1, 3)):
        await world.wait(rng.random())
        await world.scenario.purge(world.scenario.subjects.init_stream)


async def _behind(world: World) -> None:
    """Stop the mirror while changes are stored, so that it misses them."""
    world.kill_mirror()
    world.load.resume()
    await world.until_growing(50)
    await world.judge.barrier(replicas=False)


@fault("jetstream: CDC purged behind a stopped mirror", weight=2, at_rest=True, needs="mirror")
async def purge_cdc(world: World, _: random.Random) -> None:
    await _behind(world)
    await world.scenario.purge(world.scenario.subjects.cdc_stream)
    await world.mirror_announces_gap()


@fault("jetstream: CDC trimmed behind a stopped mirror", weight=2, at_rest=True, needs="mirror")
async def trim_cdc(world: World, rng: random.Random) -> None:
    await _behind(world)
    keep = rng.choice((1, 3, 5))
    await world.scenario.purge(world.scenario.subjects.cdc_stream, keep=keep)
    await world.mirror_announces_gap()
