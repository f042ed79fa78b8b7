"""HOT PATH: messages for taps, read directly from the bytes received from the socket.

nats-py's parser matches regular expressions, shifts a buffer and awaits a coroutine for every
message. Here one loop splits the received bytes into complete messages for taps; nats-py's parser
handles everything else. `make bench reading` measures the gain.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Protocol

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

if TYPE_CHECKING:
    from nats.aio.client import Client


class Tap(Protocol):
    """Receives one frame: subject, reply subject, payload, header block (None or empty if none)."""

    def __call__(
        self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None, /
    ) -> None: ...


_CRLF: Final = b"\r\n"
_LONGEST_LINE: Final = 4096
_LARGE_BYTES: Final = 128 * 1024
"""nats-py's parser collects an incomplete message that is larger than this."""
_READ_SECONDS: Final = 30e-6
"""What receiving bytes from the socket costs besides parsing them."""
_TURN_BYTES: Final = 8 * 1024
_LONGEST_TURN_SECONDS: Final = 0.15e-3
_PAUSE_FACTOR: Final = 12
_LONGEST_PAUSE_SECONDS: Final = 0.05


class FrameParser(Parser):
    """nats-py's parser with a short cut for messages to taps."""

    def __init__(self, nc: Client, taps: dict[int, Tap]) -> None:
        super().__init__(nc)
        self._taps = taps

    async def parse(self, data: bytes = b"") -> None:
        """Handle received bytes, as `Parser.parse` does."""
        taps = self._taps
        if not taps or self.state != AWAITING_CONTROL_LINE:
            await super().parse(data)
            return
        received = bytes(self.buf) + data if self.buf else data
        self.buf.clear()
        at = 0
        size = len(received)
        while at < size:
            line_end = received.find(_CRLF, at, at + _LONGEST_LINE)
            if line_end < 0:
                break
            # HMSG <subject> <sid> <reply> <header bytes> <all bytes>
            words = received[at:line_end].split(b" ")
            if (len(words) != 6 or words[0] != b"HMSG") and not _complete(words):
                break
            try:
                tap = taps[int(words[2])]
                head = line_end + 2
                body = head + int(words[4])
                end = head + int(words[5])
            except (KeyError, ValueError):
                break
            if end + 2 > size:
                if end - head <= _LARGE_BYTES:
                    self.buf += received[at:]
                    return
                break
            tap(words[1], words[3], received[body:end], received[head:body] or None)
            at = end + 2
        if at < size:
            await super().parse(received[at:])


def _complete(words: list[bytes]) -> bool:
    """Give a message without reply or headers the six words of one that has both."""
    if words[0] == b"HMSG" and len(words) == 5:
        words.insert(3, b"")
        return True
    if words[0] == b"MSG" and len(words) in (4, 5):
        if len(words) == 4:
            words.insert(3, b"")
        words.insert(4, b"0")
        return True
    return False


class PacedParser(FrameParser):
    """A parser that leaves most of the event loop's time to others.

    What it does not read in time waits in the server, which disconnects a client that has too much
    waiting. So a flood of messages costs this process neither time nor memory.
    """

    def __init__(self, nc: Client, taps: dict[int, Tap]) -> None:
        super().__init__(nc, taps)
        self._busy_seconds = 0.0

    async def parse(self, data: bytes = b"") -> None:
        """Handle received bytes in small parts; pause in proportion to the time that they take."""
        self._busy_seconds += _READ_SECONDS
        for start in range(0, len(data) or 1, _TURN_BYTES):
            began = time.perf_counter()
            await super().parse(data[start : start + _TURN_BYTES])
            self._busy_seconds += time.perf_counter() - began
            if self._busy_seconds > _LONGEST_TURN_SECONDS:
                pause = min(self._busy_seconds * _PAUSE_FACTOR, _LONGEST_PAUSE_SECONDS)
                self._busy_seconds = 0.0
                await asyncio.sleep(pause)
