"""SIGINT and SIGTERM: the work runs in a thread, and the main thread only waits for signals.

Python raises KeyboardInterrupt wherever the main thread is. In the middle of a call to Java, the
answer would then stay unread.
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
_JOIN_SECONDS: Final = 2.0
_DONE: Final = b"\0"


class Interrupted(Exception):
    """A signal ended the work before it was done; `exit_code` is 128 + the signal number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.exit_code = 128 + number


def run_interruptible(
    work: Callable[[], T], stop: Callable[[], bool], kill: Callable[[], None]
) -> T:
    """Run `work` in a thread; return what it returns, raise what it raises.

    The first signal calls `stop`, which returns True if the work will now end gracefully. If it
    returns False, and at the second signal, `kill` ends what the work depends on and Interrupted
    is raised.
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
            thread.join(_JOIN_SECONDS)
            raise Interrupted(number)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


@contextmanager
def _signals_as_bytes() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a socket pair; the number of every signal is written to the first.

    The system may deliver a signal to any thread. Python's handlers run in the main thread only,
    and a signal in another thread does not wake it up. The thread that gets the signal writes to
    the descriptor at once.
    """
    writing_end, reading_end = socket.socketpair()
    with writing_end, reading_end:
        writing_end.setblocking(False)
        if threading.current_thread() is not threading.main_thread():
            yield writing_end, reading_end
            return
        before = {number: signal.signal(number, _do_nothing) for number in _SIGNALS}
        descriptor = signal.set_wakeup_fd(writing_end.fileno(), warn_on_full_buffer=False)
        try:
            yield writing_end, reading_end
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: Python writes to the descriptor only for signals that have a handler."""


def _silence_errors() -> None:
    """Hide the errors of other threads: the requested end causes them."""
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda _: None
