"""Faults of the connections of bridge and mirror: cut, refused, half-open, slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fault.faults.registry import fault

if TYPE_CHECKING:
    import random

    from tests.fault.world import World


@fault("network: connections to postgres cut", weight=4)
async def cut_postgres(world: World, _: random.Random) -> None:
    world.postgres_proxy.cut()


@fault("network: connections to nats cut", weight=4, needs="single")
async def cut_nats(world: World, _: random.Random) -> None:
    world.nats_proxy.cut()


@fault("network: connections refused", weight=2)
async def refuse(world: World, rng: random.Random) -> None:
    proxy = rng.choice(world.proxies)
    proxy.stop()
    await world.wait(rng.uniform(0.5, 4))
    proxy.start()


@fault("network: half-open, silent in one direction or both")
async def go_deaf(world: World, rng: random.Random) -> None:
    proxy = rng.choice(world.proxies)
    proxy.deaf(rng.choice(("up", "down", "both")))
    await world.wait(rng.choice((1, 3, 12)))
    proxy.hear()


@fault("network: delayed", weight=2)
async def delay(world: World, rng: random.Random) -> None:
    proxy = rng.choice(world.proxies)
    proxy.delay(rng.choice((0.05, 0.2)))
    await world.wait(3)
    proxy.delay(0)


@fault("network: throttled", weight=2)
async def throttle(world: World, rng: random.Random) -> None:
    proxy = rng.choice(world.proxies)
    proxy.throttle(rng.choice((20_000, 100_000)))
    await world.wait(3)
    proxy.throttle(0)
