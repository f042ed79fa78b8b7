"""Named points at which a test can stop or kill a process of the bridge, a mirror or Spark.

`TAILRACE_HOLD` names a directory. A point acts only if the test has put a file there:
`{point}.hold` makes it wait until the file is gone, `{point}.kill` ends the process as SIGKILL
does. A point that acts first creates `{point}.reached`. Without the variable, a point costs one
comparison. With it, SIGUSR1 makes a bridge print where each of its tasks waits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

_DIRECTORY: Final = os.environ.get("TAILRACE_HOLD") or None
_POLL_SECONDS: Final = 0.02


def hold(point: str) -> None:
    """Block while the point is held, or end the process."""
    if _reach(point):
        while _is_held(point):
            time.sleep(_POLL_SECONDS)


async def hold_async(point: str) -> None:
    """Wait while the point is held, without blocking the event loop, or end the process."""
    if _reach(point):
        while _is_held(point):  # noqa: ASYNC110 - a file has no event to await
            await asyncio.sleep(_POLL_SECONDS)


def print_tasks_on_signal() -> None:
    """Under test, print the stack of every task of this event loop after SIGUSR1."""
    if _DIRECTORY is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _print_tasks)


def _print_tasks() -> None:
    tasks = asyncio.all_tasks()
    for task in tasks:
        task.print_stack(limit=6, file=sys.stderr)
    print(f"{len(tasks)} tasks printed", file=sys.stderr, flush=True)


def _reach(point: str) -> bool:
    """Create the file `reached` if the point acts; returns whether to wait at it."""
    if _DIRECTORY is None:
        return False
    fatal = Path(_DIRECTORY, f"{point}.kill").exists()
    if not fatal and not _is_held(point):
        return False
    Path(_DIRECTORY, f"{point}.reached").touch()
    if fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _is_held(point: str) -> bool:
    assert _DIRECTORY is not None
    return Path(_DIRECTORY, f"{point}.hold").exists()
