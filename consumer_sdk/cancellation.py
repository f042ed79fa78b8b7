"""Cancellations that get lost on the way."""

from __future__ import annotations

import asyncio


async def stay_cancelled() -> None:
    """Raise CancelledError if this task was cancelled, whatever became of that.

    `asyncio.wait_for`, which nats-py is built on, returns what it waited for if that has arrived
    together with the cancellation (Python 3.11). Loops over requests ask here, so that they end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        # One that is still on its way must not come later, in the middle of the tidying up.
        await asyncio.sleep(0)
        raise asyncio.CancelledError
