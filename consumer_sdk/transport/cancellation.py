"""Cancellations that libraries drop, tasks that nobody awaits, and the errors of task groups."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

RESTART_SECONDS: Final = 5.0

Result = TypeVar("Result")


async def stay_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, even if a library dropped that error.

    Two libraries do. psycopg waits for the end of the query of a cancelled task, and if the
    connection breaks meanwhile, it raises that error instead. `asyncio.wait_for`, which nats-py
    uses, returns its result if that has just arrived (Python 3.11). A task that continues after
    this would run for ever, so every loop that uses one of them calls this function.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # Deliver a pending cancellation here, not later in the middle of a clean-up.
        await asyncio.sleep(0)
        raise asyncio.CancelledError


async def uninterrupted(work: asyncio.Future[Result]) -> Result:
    """Await `work` to its end; a cancellation is raised only after that."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


async def restarted(work: Callable[[], Awaitable[None]]) -> NoReturn:
    """Begin `work` again whenever it ends or raises, and log that: nobody awaits its task."""
    while True:
        await stay_cancelled()
        try:
            await work()
        except Exception:
            logger.exception("a background task failed and is started again")
        await asyncio.sleep(RESTART_SECONDS)


def errors_of(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group, in order and without nesting.

    Code that raises another error for a group catches BaseExceptionGroup and uses this function.
    An error raised in `except*` would be put into a new group by the first releases of Python 3.11.
    """
    flat: list[BaseException] = []
    for error in group.exceptions:
        flat += errors_of(error) if isinstance(error, BaseExceptionGroup) else [error]
    return flat
