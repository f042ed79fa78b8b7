"""Signals while work goes on in a thread."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from spark_consumer.runtime.signals import Interrupted, run_interruptible

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(60)

# Only a signal that nobody hears makes a test wait for as long.
UNHEARD_SECONDS = 20.0


@pytest.fixture(autouse=True)
def _what_an_interruption_changes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    yield
    logging.disable(logging.NOTSET)


def _signal_in_this_thread(number: int) -> None:
    time.sleep(0.1)  # by then the main thread waits
    signal.pthread_kill(threading.get_ident(), number)


def test_a_signal_that_another_thread_receives_is_heard() -> None:
    asked = threading.Event()

    def work() -> bool:
        _signal_in_this_thread(signal.SIGTERM)
        return asked.wait(UNHEARD_SECONDS)

    def ask() -> bool:
        asked.set()
        return True

    assert run_interruptible(work, ask, kill=lambda: None)


def test_the_second_of_two_signals_ends_the_work() -> None:
    asked, forced = threading.Event(), threading.Event()

    def work() -> bool:
        _signal_in_this_thread(signal.SIGINT)
        asked.wait(UNHEARD_SECONDS)
        _signal_in_this_thread(signal.SIGTERM)
        return forced.wait(UNHEARD_SECONDS)

    def ask() -> bool:
        asked.set()
        return True

    with pytest.raises(Interrupted) as interrupted:
        run_interruptible(work, ask, forced.set)
    assert interrupted.value.exit_code == 128 + signal.SIGTERM


def test_work_that_cannot_be_asked_ends_at_the_first_signal() -> None:
    forced = threading.Event()

    def work() -> bool:
        _signal_in_this_thread(signal.SIGINT)
        return forced.wait(UNHEARD_SECONDS)

    with pytest.raises(Interrupted):
        run_interruptible(work, stop=lambda: False, kill=forced.set)
    assert forced.is_set()


def test_handlers_are_as_before_when_the_work_is_done() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run_interruptible(lambda: 7, stop=lambda: True, kill=lambda: None) == 7
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_what_work_raises_is_raised() -> None:
    def work() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_interruptible(work, stop=lambda: True, kill=lambda: None)


def test_work_can_run_outside_the_main_thread() -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.append(run_interruptible(lambda: 7, lambda: True, lambda: None))
    )
    thread.start()
    thread.join(UNHEARD_SECONDS)
    assert results == [7]
