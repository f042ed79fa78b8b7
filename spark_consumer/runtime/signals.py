"""SIGINT and SIGTERM while work goes on in a thread; the main thread only waits for them.

Python would raise KeyboardInterrupt wherever the main thread is, also in the middle of a call to
Java, whose answer would then stay unread.
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
_DONE: Final = b"\0"


class Interrupted(Exception):
    """A signal ended the work before it was done; `exit_code` is 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


def run_interruptible(
    work: Callable[[], T], stop: Callable[[], bool], kill: Callable[[], None]
) -> T:
    """Run work in a thread; return what it returns, raise what it raises.

    The first signal calls `stop`, which lets the work end in good order and returns True, or
    returns False. After False, and at the second signal, `kill` ends what the work depends on and
    Interrupted is raised.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run(done: socket.socket) -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001
            failures.append(error)
        finally:
            done.send(_DONE)

    stopping = False
    with _signals_as_bytes() as (writing_end, reading_end):
        thread = threading.Thread(target=run, args=[writing_end], name="tailrace-work", daemon=True)
        thread.start()
        while (received := reading_end.recv(1)) != _DONE:
            number = received[0]
            if number not in _SIGNALS:
                continue
            if not stopping and stop():
                stopping = True
                continue
            _silence_errors()
            kill()
            thread.join(_LEAVE_SECONDS)
            raise Interrupted(number)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


@contextmanager
def _signals_as_bytes() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a pipe; the number of every signal is written into the first.

    The system may deliver a signal to any thread, often the second of two in a row. Python's
    handlers run in the main thread only, which would not wake up for it; the descriptor is written
    at once by the thread that has the signal.
    """
    writing_end, reading_end = socket.socketpair()
    with writing_end, reading_end:
        writing_end.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield writing_end, reading_end
            return
        before = {number: signal.signal(number, _to_the_descriptor) for number in _SIGNALS}
        descriptor = signal.set_wakeup_fd(writing_end.fileno(), warn_on_full_buffer=False)
        try:
            yield writing_end, reading_end
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def _to_the_descriptor(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: Python writes to the descriptor only for signals that have a handler."""


def _silence_errors() -> None:
    """Say nothing of errors in other threads: they come from the end that was asked for."""
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None
