"""Faults of the Spark job: its driver or an executor is killed, terminated or frozen."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.fault.faults.registry import fault
from tests.fault.judge import TIMEOUT_SECONDS
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    import random

    from tests.fault.world import World

POINTS = ("spark-before-commit", "spark-before-checkpoint", "spark-before-staging")


@fault("spark: driver kill -9", weight=10, needs="spark")
async def kill_driver(world: World, rng: random.Random) -> None:
    await world.lake.until_following(world.supervise)
    await world.wait(rng.random() * 3)
    world.lake.kill()
    world.lake.launch()


@fault("spark: driver killed at a named point", weight=6, needs="spark")
async def kill_driver_at_point(world: World, rng: random.Random) -> None:
    await world.lake.until_following(world.supervise)
    point = rng.choice(POINTS)
    with world.dying_at(point):
        await eventually(
            lambda: not world.lake.running, TIMEOUT_SECONDS, f"the driver died: {point}"
        )
    world.lake.launch()


@fault("spark: executor kill -9", weight=16, needs="spark")
async def kill_executor(world: World, rng: random.Random) -> None:
    await world.lake.until_following(world.supervise)
    await world.wait(rng.random() * 2)
    executors = await eventually(world.lake.executors, TIMEOUT_SECONDS, world.lake.log_tail)
    os.kill(rng.choice(executors), signal.SIGKILL)


@fault("spark: executor SIGTERM", weight=3, needs="spark")
async def terminate_executor(world: World, rng: random.Random) -> None:
    await world.lake.until_following(world.supervise)
    executors = await eventually(world.lake.executors, TIMEOUT_SECONDS, world.lake.log_tail)
    os.kill(rng.choice(executors), signal.SIGTERM)


@fault("spark: executor frozen for a moment", weight=3, needs="spark")
async def freeze_executor(world: World, rng: random.Random) -> None:
    await world.lake.until_following(world.supervise)
    executors = await eventually(world.lake.executors, TIMEOUT_SECONDS, world.lake.log_tail)
    victim = rng.choice(executors)
    os.kill(victim, signal.SIGSTOP)
    await world.wait(rng.uniform(1, 5))
    os.kill(victim, signal.SIGCONT)


@fault("spark: driver SIGTERM", weight=3, needs="spark")
async def terminate_driver(world: World, _: random.Random) -> None:
    await world.lake.until_following(world.supervise)
    world.lake.terminate()
    await eventually(lambda: not world.lake.running, TIMEOUT_SECONDS, world.lake.log_tail)
    world.lake.launch()


@fault("spark: driver frozen for a moment", weight=3, needs="spark")
async def freeze_driver(world: World, rng: random.Random) -> None:
    await world.lake.until_following(world.supervise)
    world.lake.signal(signal.SIGSTOP)
    await world.wait(rng.uniform(1, 5))
    world.lake.signal(signal.SIGCONT)
