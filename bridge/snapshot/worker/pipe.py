"""A worker's end of the pipes to the coordinator."""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from bridge.snapshot.messages import Alive, Command, decode_command, encode, unexpected

if TYPE_CHECKING:
    from bridge.snapshot.messages import Report

    Expected = TypeVar("Expected", bound=Command)

BRIDGE_IS_GONE: Final = 3
READ_BYTES: Final = 65536
ALIVE_SECONDS: Final = 5.0


class CoordinatorPipe:
    """Sends reports from any thread and receives commands; ends the process with the bridge."""

    def __init__(self) -> None:
        # No other output, such as a library's, may mix with the messages.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="commands").start()
        threading.Thread(target=self._send_alive, daemon=True, name="alive").start()

    def send(self, report: Report) -> None:
        """Send a report."""
        line = encode(report)
        with self._lock:
            try:
                self._out.write(line)
            except OSError:
                _exit()

    def receive(self) -> Command:
        """Wait for the next command."""
        return decode_command(self._lines.get())

    def expect(self, kind: type[Expected]) -> Expected:
        """Wait for the next command, which must be of this kind."""
        command = self.receive()
        if not isinstance(command, kind):
            raise unexpected(command)
        return command

    def _send_alive(self) -> None:
        while True:
            self.send(Alive())
            time.sleep(ALIVE_SECONDS)

    def _read(self) -> None:
        # Unbuffered: a thread that blocks in the buffer of sys.stdin would prevent a clean exit.
        pending = b""
        with suppress(OSError):
            while data := os.read(0, READ_BYTES):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._lines.put(line)
        _exit()


def _exit() -> NoReturn:
    os._exit(BRIDGE_IS_GONE)
