"""Neither a swallowed cancellation, the error in a group nor the end of a task is lost."""

from __future__ import annotations

import ast
import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from bridge.config import load
from bridge.errors import Retryable
from bridge.service import Service, StopRequested
from bridge.snapshot.coordinator.requests import RequestListener
from bridge.snapshot.coordinator.service import SnapshotService
from consumer_sdk.transport import cancellation
from consumer_sdk.transport.cancellation import errors_of, stay_cancelled

ROOT = Path(__file__).resolve().parents[2]


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


async def test_work_that_a_stop_did_not_reach_is_handed_over_to_be_closed():
    service = Service(load({"slot": "s", "pub": "p"}, environ={}))
    began = asyncio.Event()

    async def work() -> str:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return "opened"

    task = asyncio.create_task(service._unless_stopped(work()))
    await began.wait()
    service.request_shutdown()
    assert await task == "opened"


@pytest.mark.parametrize("error", [asyncio.CancelledError(), OSError("lost")])
async def test_work_that_a_stop_has_ended_is_not_an_error(error: BaseException):
    service = Service(load({"slot": "s", "pub": "p"}, environ={}))
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(10)
        finally:
            raise error

    task = asyncio.create_task(service._unless_stopped(work()))
    await began.wait()
    service.request_shutdown()
    with pytest.raises(StopRequested):
        await task


def test_the_errors_of_nested_groups_come_in_order():
    nested = ExceptionGroup("", [ExceptionGroup("", [KeyError(1), OSError()]), ValueError()])
    assert [type(error) for error in errors_of(nested)] == [KeyError, OSError, ValueError]


@pytest.mark.parametrize("package", ["bridge", "consumer_sdk", "spark_consumer"])
def test_no_error_is_raised_in_except_star(package):
    """Python 3.11.2 puts such an error into a group, so that no caller recognises it."""
    for path in sorted((ROOT / package).rglob("*.py")):
        tries = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.TryStar))
        handlers = (handler for one in tries for handler in one.handlers)
        raising = [n for one in handlers for n in ast.walk(one) if isinstance(n, ast.Raise)]
        assert not raising, f"{path}, line {raising[0].lineno}"


async def test_a_background_task_that_fails_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cancellation, "RESTART_SECONDS", 0.0)
    begun = asyncio.Queue[int]()

    async def work() -> None:
        begun.put_nowait(1)
        raise LookupError("not expected")

    task = asyncio.create_task(cancellation.restarted(work))
    for _ in range(3):
        await begun.get()
    assert "LookupError: not expected" in caplog.text
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_snapshot_task_that_dies_ends_the_session(victim: int) -> None:
    async def fail() -> None:
        raise LookupError("not expected")

    async def go_on() -> None:
        await asyncio.Event().wait()

    works = [go_on, go_on]
    works[victim] = fail
    tasks = [asyncio.create_task(work(), name=f"task {n}") for n, work in enumerate(works)]
    service = object.__new__(SnapshotService)
    service._background = [tasks[0]]
    service._requests = object.__new__(RequestListener)
    service._requests._tasks = [tasks[0], tasks[1]]
    with pytest.raises(Retryable, match=f"task {victim} ended: LookupError"):
        await service.watch()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
