"""Cancellations that get lost on the way."""

from __future__ import annotations

import asyncio
from typing import TypeVar

Result = TypeVar("Result")


async def stay_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, whatever became of that.

    Two ways to lose a cancellation are known. psycopg waits for the end of the query that a
    cancelled task has under way, and when the connection breaks then, its error comes instead.
    `asyncio.wait_for`, which nats-py is built on, returns what it waited for if that has just
    arrived (Python 3.11). A task that goes on after either is never ended by anybody, so every
    loop that uses one of them asks here.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # One that is still on its way must not come later, in the middle of the tidying up.
        await asyncio.sleep(0)
        raise asyncio.CancelledError


async def uninterrupted(work: asyncio.Future[Result]) -> Result:
    """Await something to its end, and only then be cancelled."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
