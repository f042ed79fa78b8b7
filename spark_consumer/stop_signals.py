"""SIGINT and SIGTERM while work goes on in a thread; the main thread only waits for them.

Python would raise KeyboardInterrupt wherever the main thread stands, in the middle of a call to
Java too, which then has an answer that nobody reads.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_LEAVE_SECONDS: Final = 2.0


class Interrupted(Exception):
    """A signal ended the work before it was done; `exit_code` is 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


def run_attended(work: Callable[[], T], ask: Callable[[], bool], force: Callable[[], None]) -> T:
    """Run work in a thread; what it returns or raises.

    At the first signal `ask` may arrange for an end in good order and say so; otherwise, and at the
    second signal, `force` takes from the work what it stands on and Interrupted is raised.
    """
    # The one queue whose put may interrupt its own get.
    heard: SimpleQueue[int | None] = SimpleQueue()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
        finally:
            heard.put(None)

    thread = threading.Thread(target=run, name="tailrace-work", daemon=True)
    asked = False
    with _hearing(heard):
        thread.start()
        while (number := heard.get()) is not None:
            if not asked and ask():
                asked = True
                continue
            _fall_silent()
            force()
            thread.join(_LEAVE_SECONDS)
            raise Interrupted(number)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


@contextmanager
def _hearing(heard: SimpleQueue[int | None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.put(number)

    before = {number: signal.signal(number, hear) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fall_silent() -> None:
    """What breaks from now on breaks because it was told to."""
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None
