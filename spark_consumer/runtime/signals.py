"""SIGINT and SIGTERM while work goes on in a thread; the main thread only waits for them.

Python would raise KeyboardInterrupt wherever the main thread stands, in the middle of a call to
Java too, which then has an answer that nobody reads.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

T = TypeVar("T")

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_LEAVE_SECONDS: Final = 2.0
_DONE: Final = 0


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
    results: list[T] = []
    failures: list[BaseException] = []

    def run(told: socket.socket) -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
        finally:
            told.send(bytes([_DONE]))

    asked = False
    with _hearing() as (told, heard):
        thread = threading.Thread(target=run, args=[told], name="tailrace-work", daemon=True)
        thread.start()
        while (number := heard.recv(1)[0]) != _DONE:
            if number not in _SIGNALS:
                continue
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
def _hearing() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a pipe: into the first goes the number of every signal.

    The system may hand a signal to any thread, the second of two in a row mostly. Only what is
    written at once, by whichever thread has it, is sure to wake one that waits.
    """
    told, heard = socket.socketpair()
    with told, heard:
        told.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield told, heard
            return
        before = {number: signal.signal(number, _to_the_pipe) for number in _SIGNALS}
        descriptor = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        try:
            yield told, heard
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def _to_the_pipe(_number: int, _frame: FrameType | None) -> None:
    """Python passes signals on only where it has a handler."""


def _fall_silent() -> None:
    """What breaks from now on breaks because it was told to."""
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None
