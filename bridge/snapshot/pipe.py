"""A worker's end of its conversation with the bridge: lines of JSON over stdin and stdout."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

ORPHANED: Final = 3
READ_BYTES: Final = 65536
ALIVE_SECONDS: Final = 5.0


class Pipe:
    """Lines of JSON to the bridge and back; reports may come from any thread."""

    def __init__(self) -> None:
        # Nothing else may write into the conversation, whatever a library prints.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="bridge").start()
        threading.Thread(target=self._live, daemon=True, name="sign of life").start()

    def tell(self, what: str, **fields: Any) -> None:
        """Report something that needs no answer."""
        line = json.dumps({"say": what, **fields}).encode() + b"\n"
        with self._lock:
            try:
                self._out.write(line)
            except OSError:
                _orphaned()

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self.tell(what, **fields)
        return self._answers.get()

    def next_line(self) -> dict[str, Any]:
        """Wait for something the bridge says of itself."""
        return self._answers.get()

    def _live(self) -> None:
        """Let the bridge tell a worker that is slow from one that hangs."""
        while True:
            self.tell("alive")
            time.sleep(ALIVE_SECONDS)

    def _listen(self) -> None:
        # Unbuffered: a thread that waits in a buffer of sys.stdin would disturb an orderly exit.
        pending = b""
        with suppress(OSError, ValueError):
            while data := os.read(0, READ_BYTES):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._answers.put(json.loads(line))
        _orphaned()


def _orphaned() -> NoReturn:
    os._exit(ORPHANED)
