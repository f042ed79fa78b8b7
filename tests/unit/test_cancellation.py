"""A cancellation that somebody swallowed is not forgotten."""

from __future__ import annotations

import asyncio

import pytest

from consumer_sdk.transport.cancellation import stay_cancelled


async def test_what_arrives_together_with_a_cancellation_does_not_undo_it():
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    after: list[str] = []

    async def work() -> None:
        await asyncio.wait_for(answer, 10)
        await stay_cancelled()
        after.append("went on")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not after


async def test_a_task_that_nobody_cancelled_goes_on():
    await stay_cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.sleep(10)
    await stay_cancelled()


async def test_a_cancellation_on_its_way_does_not_hit_the_tidying_up():
    tidied: list[str] = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        # As a signal handler does: the task is running, and hears of it at its next wait.
        task.cancel()
        try:
            await stay_cancelled()
        finally:
            await asyncio.sleep(0)
            tidied.append("done")

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert tidied == ["done"]
