"""HOT PATH: the open pull requests of a consumer, and the messages that they brought.

Messages requested, received and taken are counted, so that memory is bounded and a lost delivery is
detected.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from consumer_sdk.transport.api import Frame

HEARTBEAT_SECONDS = 2.0
STALL_SECONDS = 3 * HEARTBEAT_SECONDS
EXPIRES_SECONDS = 30.0
LATE_SECONDS: Final = 2.0
WINDOW_BYTES: Final = 16 * 1024 * 1024
_NANOSECONDS: Final = 1_000_000_000


class Delivered(NamedTuple):
    """The oldest messages not taken yet, and what their delivery proves.

    From index `unproven_from` on, messages before a frame may have been trimmed undelivered,
    because they had to wait for a request. With `is_newest`, the last frame was the last one
    stored.
    """

    frames: list[Frame]
    size: int
    unproven_from: int
    is_newest: bool


class Demand:
    """The open pull requests, and the messages that were received and not taken yet.

    `failure` is the reason why the consumer must be replaced, None while it works. `exhausted` is
    set when the server has fulfilled every request: what is stored then is not delivered at once.
    `taken` counts the consumer's messages that have left the buffer. After message number
    `unrequested_from`, others may have been stored and trimmed while no request was open; None if
    a request was always open.
    """

    def __init__(self, window: int) -> None:
        self.buffer: deque[tuple[bytes, bytes, bytes, bytes | None]] = deque()
        self.failure: str | None = "not opened"
        self.exhausted = False
        self.taken = 0
        self.unrequested_from: int | None = None
        self._unrequested_until = 0
        self._window = window
        self._buffered_bytes = 0
        self._requested = 0
        """How many messages the open requests may still bring."""
        self._nothing_received = False
        """Whether the only open request has brought nothing yet."""
        self._request_bytes = WINDOW_BYTES // 2
        self._requested_at = 0.0
        self._last_status_at = 0.0
        self._silent_seconds = 0.0
        """The time without a message or status, as far as it was spent in `wait`."""
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, largest_message: int) -> None:
        """Start counting for a new consumer; no message is larger than `largest_message`."""
        self.drop()
        self.exhausted = False
        self.taken = 0
        self.unrequested_from = None
        self._requested = 0
        self._nothing_received = False
        self._request_bytes = max(WINDOW_BYTES // 2, 2 * largest_message)
        self._last_status_at = asyncio.get_running_loop().time()
        self._silent_seconds = 0.0

    @property
    def lacked_request(self) -> bool:
        """Whether no request was open for a time after the last message taken."""
        return self.unrequested_from is not None and self.taken >= self.unrequested_from

    def on_frame(self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None) -> None:
        """Receive what the server sends to the inbox: messages and statuses."""
        if reply.startswith(b"$JS.ACK."):
            self.buffer.append((subject, reply, payload, headers))
            self._buffered_bytes += len(payload)
            self._requested -= 1
            self._nothing_received = False
            if self._requested <= 0:
                self.exhausted = True
                self._note_no_request()
        elif not self._on_status(headers or b""):
            return
        self.wake()

    def _on_status(self, headers: bytes) -> bool:
        """Handle a status; returns whether the waiting reader must be woken."""
        self._last_status_at = asyncio.get_running_loop().time()
        self._silent_seconds = 0.0
        first, _, rest = headers.partition(b"\r\n")
        reason = first.removeprefix(b"NATS/1.0").strip()
        status = reason.partition(b" ")[0]
        fields = _fields(rest)
        if status == b"100":
            # A heartbeat counts the delivered messages. If fewer came, some were lost.
            sent = fields.get(b"nats-last-consumer", b"")
            if sent.isdigit() and int(sent) > self.taken + len(self.buffer):
                self.failure = "messages were lost on the way"
                return True
            return False
        # What is left of a request that has ended: its time or its bytes are used up. A 409 without
        # this field says that the consumer cannot deliver any more.
        pending = fields.get(b"nats-pending-messages", b"")
        if status == b"408" or (status == b"409" and pending):
            if status == b"409" and self._nothing_received:
                # The next message dates from a larger size limit: request more bytes at a time.
                self._request_bytes *= 2
            self._requested = max(0, self._requested - int(pending)) if pending.isdigit() else 0
            self.exhausted = self.exhausted or self._requested == 0
            # A request that expires is renewed at once, unless this process was frozen.
            late = time.time() > self._requested_at + EXPIRES_SECONDS + LATE_SECONDS
            if self._requested == 0 and (status == b"409" or late):
                self._note_no_request()
        elif status:
            self.failure = reason.decode("utf-8", "replace").lower()
        return True

    def _note_no_request(self) -> None:
        self._unrequested_until = self.taken + len(self.buffer)
        if self.unrequested_from is None or self._unrequested_until < self.unrequested_from:
            self.unrequested_from = self._unrequested_until

    def fail(self, reason: str) -> None:
        """Set the reason why the consumer must be replaced, and end a wait."""
        self.failure = reason
        self.wake()

    def drop(self) -> None:
        """Empty the buffer; the next consumer delivers these messages again."""
        self.buffer.clear()
        self._buffered_bytes = 0

    def peek(self, limit: int, through: int) -> Delivered:
        """The messages to be taken next, all of them stored after sequence `through`.

        A lost or foreign delivery sets `failure`; the messages before it are returned.
        """
        frames: list[Frame] = []
        append = frames.append
        number = self.taken
        waiting_from: int | None = None
        pending = b"0"
        size = 0
        try:
            for subject, reply, payload, headers in islice(self.buffer, limit):
                tokens = reply.split(b".")
                # $JS.ACK.<stream>.<consumer>.<tries>.<stream seq>.<consumer seq>.<time>.<pending>,
                # with <domain>.<account> before the stream on newer or leaf-node servers.
                at = 5 if len(tokens) == 9 else 7
                sequence = int(tokens[at])
                number += 1
                if int(tokens[at + 1]) != number or sequence <= through:
                    self.failure = "delivery numbers are not consecutive"
                    break
                pending = tokens[at + 3]
                through = sequence
                size += len(payload)
                append(Frame(sequence, subject, headers, payload))
                if waiting_from is None and pending != b"0":
                    waiting_from = len(frames)
        except (ValueError, IndexError):
            self.failure = "a message in the inbox is not from JetStream"
        unproven_from = len(frames) if waiting_from is None else waiting_from
        if self.exhausted:
            unproven_from = 0
        elif self.unrequested_from is not None:
            unproven_from = min(unproven_from, max(0, self.unrequested_from - self.taken))
        return Delivered(frames, size, unproven_from, pending == b"0")

    def remove(self, count: int, size: int) -> None:
        """Remove the oldest messages, whose payloads have `size` bytes together."""
        popleft = self.buffer.popleft
        for _ in range(count):
            popleft()
        self._buffered_bytes -= size
        self._silent_seconds = 0.0
        self.taken += count
        if self.taken > self._unrequested_until:
            self.unrequested_from = None
        if self._requested > 0:
            self.exhausted = False

    def request(self, taking: int) -> bytes | None:
        """The pull request to send now; None if enough messages are requested or held already.

        `taking` messages are about to be removed.
        """
        requested = max(self._requested, 0)
        held = len(self.buffer) - taking + requested
        if self.failure is not None or held > self._window // 2:
            return None
        if self._buffered_bytes > WINDOW_BYTES and len(self.buffer) > taking:
            return None
        batch = self._window - held
        self._nothing_received = requested == 0
        self._requested = requested + batch
        self._requested_at = time.time()
        return json.dumps(
            {
                "batch": batch,
                "max_bytes": self._request_bytes,
                "expires": int(EXPIRES_SECONDS * _NANOSECONDS),
                "idle_heartbeat": int(HEARTBEAT_SECONDS * _NANOSECONDS),
            }
        ).encode()

    async def wait(self, deadline: float | None) -> None:
        """Wait for a message, for a failure, or until `deadline`; missing heartbeats are a failure.

        Silence adds up over several waits: each may be shorter than the limit.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if self.failure is not None or self.buffer:
            return
        until = begun + STALL_SECONDS - self._silent_seconds
        await self.pause(until if deadline is None else min(until, deadline))
        if self.buffer:
            return
        self._silent_seconds += loop.time() - max(self._last_status_at, begun)
        if self._silent_seconds >= STALL_SECONDS and self.failure is None:
            self.failure = "no heartbeat"

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
