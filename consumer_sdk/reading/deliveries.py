"""HOT PATH: the inbox of a pull consumer, between the connection and whoever takes messages.

Counts what was asked for, what has come and what has been taken, so that memory is bounded and a
lost delivery is noticed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import Final

HEARTBEAT_SECONDS = 2.0
STALL_SECONDS = 3 * HEARTBEAT_SECONDS
EXPIRES_SECONDS = 30.0
LATE_SECONDS: Final = 2.0
NEVER: Final = sys.maxsize
WINDOW_BYTES: Final = 16 * 1024 * 1024
_NANOSECONDS: Final = 1_000_000_000
_ENDED_NORMALLY: Final = ("message size exceeds maxbytes", "batch completed")


class Deliveries:
    """Messages that have been delivered and not been taken yet.

    `trouble` says why the consumer must be replaced, None while all is well. `starved` is set when
    the server had nothing left to fulfil, so that what was stored meanwhile was not delivered at
    once. `taken` counts the consumer's messages that have left the buffer. Behind message number
    `unasked_from` others may have been stored and trimmed while nobody asked for any.
    """

    def __init__(self) -> None:
        self.buffer: deque[tuple[bytes, bytes, bytes, bytes | None]] = deque()
        self.trouble: str | None = "not opened"
        self.starved = False
        self.taken = 0
        self.unasked_from = NEVER
        self._unasked_until = 0
        self._bytes = 0
        self._demand = 0
        self._fruitless = False
        self._request_bytes = WINDOW_BYTES // 2
        self._asked_at = 0.0
        self._heard_at = 0.0
        self._silent = 0.0
        """For how long nothing was heard, counting only the time spent waiting for it."""
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, largest_message: int) -> None:
        """Start counting for a new consumer of messages up to a size."""
        self.drop()
        self.starved = False
        self.taken = 0
        self.unasked_from = NEVER
        self._demand = 0
        self._fruitless = False
        self._request_bytes = max(WINDOW_BYTES // 2, 2 * largest_message)
        self._heard_at = asyncio.get_running_loop().time()
        self._silent = 0.0

    def on_frame(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Take in what the server sends to the inbox: messages and statuses."""
        if reply.startswith(b"$JS.ACK."):
            self.buffer.append((subject, reply, payload, headers))
            self._bytes += len(payload)
            self._demand -= 1
            self._fruitless = False
            if self._demand <= 0:
                self.starved = True
                self._note_unasked()
        elif not self._on_status(headers or b""):
            return
        self.wake()

    def _on_status(self, headers: bytes) -> bool:
        """Whether the status is worth waking up for."""
        self._heard_at = asyncio.get_running_loop().time()
        self._silent = 0.0
        first, _, rest = headers.partition(b"\r\n")
        status, _, description = first.removeprefix(b"NATS/1.0").strip().partition(b" ")
        fields = _fields(rest)
        if status == b"100":
            # A heartbeat says how many messages were delivered: fewer here means some were lost.
            sent = fields.get(b"nats-last-consumer", b"")
            if sent.isdigit() and int(sent) > self.taken + len(self.buffer):
                self.trouble = "messages were lost on the way"
                return True
            return False
        pending = fields.get(b"nats-pending-messages", b"")
        ended = description.decode("utf-8", "replace").lower()
        if status == b"408" or (status == b"409" and ended.startswith(_ENDED_NORMALLY)):
            if status == b"409" and self._fruitless:
                # Stored while the server allowed larger messages: ask for more bytes at a time.
                self._request_bytes *= 2
            self._demand = max(0, self._demand - int(pending)) if pending.isdigit() else 0
            self.starved = self.starved or self._demand == 0
            # One that expires is followed by the next at once, unless this process was frozen.
            late = time.time() > self._asked_at + EXPIRES_SECONDS + LATE_SECONDS
            if self._demand == 0 and (status == b"409" or late):
                self._note_unasked()
        elif status:
            self.trouble = f"{status.decode('ascii', 'replace')} {ended}"
        return True

    def _note_unasked(self) -> None:
        self._unasked_until = self.taken + len(self.buffer)
        self.unasked_from = min(self.unasked_from, self._unasked_until)

    def fail(self, trouble: str) -> None:
        """Note why the consumer must be replaced, and wake whoever waits."""
        self.trouble = trouble
        self.wake()

    def drop(self) -> None:
        """Forget what was not taken; it will be delivered again."""
        self.buffer.clear()
        self._bytes = 0

    def remove(self, count: int, size: int) -> None:
        """Let go of the oldest messages, `size` bytes together."""
        popleft = self.buffer.popleft
        for _ in range(count):
            popleft()
        self._bytes -= size
        self._silent = 0.0
        self.taken += count
        if self.taken > self._unasked_until:
            self.unasked_from = NEVER
        if self._demand > 0:
            self.starved = False

    def request(self, window: int, taking: int) -> bytes | None:
        """The pull request that is due, None if enough is asked for or held already.

        `taking` messages are about to be removed.
        """
        demand = max(self._demand, 0)
        held = len(self.buffer) - taking + demand
        if self.trouble is not None or held > window // 2:
            return None
        if self._bytes > WINDOW_BYTES and len(self.buffer) > taking:
            return None
        self._fruitless = demand == 0
        self._demand = demand + window - held
        self._asked_at = time.time()
        return json.dumps(
            {
                "batch": window - held,
                "max_bytes": self._request_bytes,
                "expires": int(EXPIRES_SECONDS * _NANOSECONDS),
                "idle_heartbeat": int(HEARTBEAT_SECONDS * _NANOSECONDS),
            }
        ).encode()

    async def wait(self, deadline: float | None) -> None:
        """Wait for a message, for trouble, or until `deadline`; silence is trouble too.

        Silence adds up over short waits, or whoever asks often would never notice it.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if self.trouble is not None or self.buffer:
            return
        until = begun + STALL_SECONDS - self._silent
        await self.pause(until if deadline is None else min(until, deadline))
        if self.buffer:
            return
        self._silent += loop.time() - max(self._heard_at, begun)
        if self._silent >= STALL_SECONDS and self.trouble is None:
            self.trouble = "no heartbeat"

    async def pause(self, until: float) -> None:
        """Wait until a time or until something happens."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout_at(until):
                await self._waiter
        except TimeoutError:
            pass
        finally:
            self._waiter = None

    def wake(self) -> None:
        """End a wait."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _fields(block: bytes) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in block.split(b"\r\n") if b":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
