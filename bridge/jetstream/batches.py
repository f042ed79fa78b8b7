"""Batches into the CDC stream: written at once, acknowledged as a whole, without holes.

Both ways promise the same: what is stored of a batch is a prefix of it. The next batch is written
only after the outcome of this one is known, so that no later message overtakes a refused one.

Fast ingest (server 2.14, stream with allow_batched): one batch in gap mode `fail`; the server ends
it at the first message it refuses. The batch is named after the fence, so that whoever takes the
fence next can end a batch that was left open: its messages after the first are not fenced.

Plain: each message expects the one before it to be the last of the stream, so a refusal refuses
the rest; a message of another source in between only shortens the batch. What a stale writer still
sends is refused too, except right behind the same message sent by us: then it is our next message.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import nats.errors

from bridge.errors import Retryable
from bridge.jetstream.frames import encode_numbered
from consumer_sdk.transport.holds import hold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from bridge.events.messages import OutgoingMessage
    from bridge.jetstream.fence import Fence
    from bridge.jetstream.frames import Frame, FrameWriter

    Following: TypeAlias = Callable[[], Sequence[OutgoingMessage] | None]

FIRST_ERROR_CODE = 10000
"""JetStream's own errors begin here; below are states of the connection and of leaders."""
WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_MSG_ID = 10070
NO_SUCH_BATCH = (10208, 10205)
"""The batch is unknown; the stream takes no batches any more."""
END_TIMEOUT_SECONDS = 5.0
_BEYOND_ANY_BATCH = 1 << 30
NO_ROOM = (10002, 10023, 10028, 10047, 10077, 10121, 10122)
"""Limits of the account, of the server's memory and storage, and of the stream."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the rest of a batch is not known to be stored."""

    code: int
    text: str

    @property
    def fenced(self) -> bool:
        """Another bridge has taken over."""
        return self.code == WRONG_LAST_SEQUENCE

    @property
    def interleaved(self) -> bool:
        """Another source of the stream wrote in between; what is stored is known."""
        return self.code == WRONG_LAST_MSG_ID

    @property
    def full(self) -> bool:
        """The stream or the account has no room."""
        return self.code in NO_ROOM


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The first `stored` messages of a batch are in the stream; `last_seq` is 0 if unknown."""

    stored: int
    last_seq: int
    refusal: Refusal | None = None


class BatchWriter(Protocol):
    """One way of publishing."""

    mode: str

    async def send(
        self, items: Sequence[OutgoingMessage], fence: Fence, following: Following | None = None
    ) -> BatchResult:
        """Publish a batch under the fence; the result says what is stored.

        `following` gives the next batch, if there is one, while this one is under way. It may be
        written as soon as this one is stored; the caller must send it next.
        """
        ...

    def interrupt(self) -> None:
        """Wait no longer for acknowledgements: the connection is lost."""
        ...

    async def close(self) -> None: ...


async def end_batch(client: Client, subject: str, batch_id: bytes) -> bool:
    """End a fast-ingest batch that may have been left open; True if there was one.

    Whatever its writer still sends is refused from then on.
    """
    inbox = client.new_inbox()
    subscription = await client.subscribe(f"{inbox}.>")
    try:
        # Operation 3 ends without storing; a number out of order ends a batch of any length.
        reply = f"{inbox}.{batch_id.decode()}.2.fail.{_BEYOND_ANY_BATCH}.3.$FI"
        await client.publish(subject, b"", reply=reply)
        while True:
            message = await subscription.next_msg(timeout=END_TIMEOUT_SECONDS)
            answer = json.loads(message.data or b"{}")
            if "batch" in answer:
                return True
            if answer.get("type") is None:
                break
    except (TimeoutError, nats.errors.Error, OSError, ValueError) as error:
        raise Retryable(f"an open batch cannot be ended: {error}") from error
    finally:
        await subscription.unsubscribe()
    if answer.get("error", {}).get("err_code") not in NO_SUCH_BATCH:
        raise Retryable(f"an open batch cannot be ended: {answer}")
    return False


def _refusal(data: bytes, headers: dict[str, str] | None) -> Refusal | None:
    if headers and headers.get("Status"):
        return Refusal(int(headers["Status"]), "no JetStream leader takes the message")
    try:
        answer = json.loads(data)
    except ValueError:
        return Refusal(0, "unreadable acknowledgement")
    if not isinstance(answer, dict):
        return Refusal(0, "unreadable acknowledgement")
    problem = answer.get("error")
    if problem:
        return Refusal(problem.get("err_code", 0), str(problem.get("description", "")))
    return None


class _Replies:
    """A wildcard inbox whose replies go to whoever runs a batch now."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.inbox = client.new_inbox().encode()
        self._subscription: Any = None
        self._sink: asyncio.Queue[Msg | None] = asyncio.Queue()

    async def open(self) -> None:
        async def take(message: Msg) -> None:
            self._sink.put_nowait(message)

        self._subscription = await self._client.subscribe(
            f"{self.inbox.decode()}.>", cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1
        )
        await self._client.flush()

    def forget(self) -> None:
        """Drop what came too late for an earlier batch."""
        while not self._sink.empty():
            self._sink.get_nowait()

    def interrupt(self) -> None:
        self._sink.put_nowait(None)

    async def next(self) -> Msg:
        message = await self._sink.get()
        if message is None:
            raise Retryable("the connection to NATS was lost")
        return message

    async def close(self) -> None:
        if self._subscription is not None and not self._client.is_closed:
            try:
                await self._subscription.unsubscribe()
            except (OSError, RuntimeError):
                pass


@dataclass(slots=True)
class _Encoded:
    """A batch ready to be written, or written already."""

    items: Sequence[OutgoingMessage]
    fence_seq: int
    head: bytes
    data: bytes
    is_written: bool = False


class FastIngestWriter:
    """Fast-ingest batches: one acknowledgement for all, one batch under way at a time.

    The next one is encoded meanwhile and written as soon as the acknowledgement is there, before
    anything else is done, so that the server does not wait for us.
    """

    mode = "fast-ingest"

    def __init__(self, client: Client, writer: FrameWriter, timeout: float) -> None:
        self._writer = writer
        self._timeout = timeout
        self._replies = _Replies(client)
        self._number = 0
        self._next: _Encoded | None = None

    async def open(self) -> None:
        await self._replies.open()

    async def send(
        self, items: Sequence[OutgoingMessage], fence: Fence, following: Following | None = None
    ) -> BatchResult:
        batch, self._next = self._next, None
        if batch is None or batch.items is not items or batch.fence_seq != fence.sequence:
            self._replies.forget()
            batch = self._encode(items, fence)
        outcome = await self._send(batch, fence, following)
        if outcome.refusal is not None:
            self._next = None
        return outcome

    async def _send(
        self, batch: _Encoded, fence: Fence, following: Following | None
    ) -> BatchResult:
        count, prefix = len(batch.items), batch.head.decode()
        refusal: Refusal | None = None
        try:
            async with asyncio.timeout(self._timeout):
                if batch.is_written:
                    await self._writer.drain()
                elif self._writer.direct:
                    await self._writer.write_encoded(batch.data)
                else:
                    await self._writer.write(self._frames(batch.items, batch.head, fence.headers))
                hold("after-publish-before-ack")
                if following is not None and self._writer.direct and (items := following()):
                    self._next = self._encode(items, fence)
                while True:
                    message = await self._replies.next()
                    if not message.subject.startswith(prefix):
                        continue
                    status = message.headers.get("Status") if message.headers else None
                    if status:
                        return BatchResult(0, 0, Refusal(int(status), "no JetStream leader"))
                    answer = json.loads(message.data)
                    if not isinstance(answer, dict):
                        raise ValueError(answer)
                    kind = answer.get("type")
                    if kind == "ack":
                        continue
                    if kind in ("err", "gap"):
                        problem = answer.get("error") or {}
                        refusal = refusal or Refusal(
                            problem.get("err_code", 0), str(problem.get("description", kind))
                        )
                        continue
                    if "batch" in answer:
                        stored = answer.get("count", 0)
                        if stored == count and refusal is None:
                            self._write_next()
                            return BatchResult(count, answer["seq"])
                        return BatchResult(0, 0, refusal or Refusal(0, "the batch ended early"))
                    problem = answer.get("error") or {}
                    return BatchResult(
                        0,
                        0,
                        refusal
                        or Refusal(problem.get("err_code", 0), problem.get("description", "")),
                    )
        except TimeoutError:
            return BatchResult(0, 0, refusal or Refusal(0, "no acknowledgement in time"))
        except Retryable as error:
            return BatchResult(0, 0, Refusal(0, str(error)))
        except ValueError:
            return BatchResult(0, 0, Refusal(0, "unreadable acknowledgement"))

    def _encode(self, items: Sequence[OutgoingMessage], fence: Fence) -> _Encoded:
        """A batch as it is written: operation 0 begins it, 1 adds, 2 adds and ends."""
        self._number += 1
        count = len(items)
        head = b"%b.%x.%b.%d.fail." % (
            self._replies.inbox, self._number, fence.batch_id, max(count, 2),
        )  # fmt: skip
        if not self._writer.direct:
            return _Encoded(items, fence.sequence, head, b"")
        begin = items[0]._replace(headers=items[0].headers + fence.headers)
        data = (
            (encode_numbered([begin], head, b".0.$FI", 1) if count > 1 else b"")
            + encode_numbered(items[1:-1], head, b".1.$FI", 2)
            + encode_numbered([items[-1] if count > 1 else begin], head, b".2.$FI", count)
        )
        return _Encoded(items, fence.sequence, head, data)

    @staticmethod
    def _frames(items: Sequence[OutgoingMessage], head: bytes, guard: bytes) -> list[Frame]:
        """The same for the public API."""
        frames: list[Frame] = []
        count = len(items)
        for place, item in enumerate(items, start=1):
            operation = 2 if place == count else 0 if place == 1 else 1
            lines = b"Nats-Msg-Id: %b\r\n%b" % (item.msg_id, item.headers)
            if place == 1:
                lines += guard
            reply = b"%b%d.%d.$FI" % (head, place, operation)
            frames.append((item.subject, reply, lines, item.payload))
        return frames

    def _write_next(self) -> None:
        """Write the next batch before anything else is done, so that the server need not wait."""
        if self._next is not None:
            self._next.is_written = self._writer.write_at_once(self._next.data)

    def interrupt(self) -> None:
        self._replies.interrupt()

    async def close(self) -> None:
        await self._replies.close()


class PlainWriter:
    """Plain publishing with one acknowledgement each, chained by message id."""

    mode = "plain"

    def __init__(self, client: Client, writer: FrameWriter, timeout: float) -> None:
        self._writer = writer
        self._timeout = timeout
        self._replies = _Replies(client)
        self._number = 0
        self._fence_seq = 0
        self._before = b""
        """Id that the stream's last message should have; empty if another source wrote after it."""

    async def open(self) -> None:
        await self._replies.open()

    async def send(
        self,
        items: Sequence[OutgoingMessage],
        fence: Fence,
        following: Following | None = None,  # noqa: ARG002
    ) -> BatchResult:
        if self._fence_seq != fence.sequence:
            self._fence_seq = fence.sequence
            self._before = fence.msg_id
        outcome = await self._send(items, fence.headers)
        if outcome.refusal is None:
            self._before = items[-1].msg_id
        elif outcome.refusal.interleaved:
            self._before = b""
        return outcome

    async def _send(self, items: Sequence[OutgoingMessage], guard: bytes) -> BatchResult:
        self._number += 1
        self._replies.forget()
        head = b"%b.%x." % (self._replies.inbox, self._number)
        prefix = head.decode()
        frames: list[Frame] = []
        if self._before:
            guard += b"Nats-Expected-Last-Msg-Id: %b\r\n" % self._before
        for place, item in enumerate(items):
            lines = b"Nats-Msg-Id: %b\r\n%b%b" % (item.msg_id, item.headers, guard)
            frames.append((item.subject, b"%b%d" % (head, place), lines, item.payload))
            guard = b"Nats-Expected-Last-Msg-Id: %b\r\n" % item.msg_id
        refusals: dict[int, Refusal] = {}
        answered = 0
        last_seq = 0
        try:
            async with asyncio.timeout(self._timeout):
                await self._writer.write(frames)
                hold("after-publish-before-ack")
                while answered < len(items):
                    message = await self._replies.next()
                    if not message.subject.startswith(prefix):
                        continue
                    answered += 1
                    refusal = _refusal(message.data, message.headers)
                    if refusal is not None:
                        refusals[int(message.subject[len(prefix) :])] = refusal
                    else:
                        last_seq = max(last_seq, json.loads(message.data).get("seq", 0))
        except TimeoutError:
            return BatchResult(0, 0, Refusal(0, "no acknowledgement in time"))
        except Retryable as error:
            return BatchResult(0, 0, Refusal(0, str(error)))
        if not refusals:
            return BatchResult(len(items), last_seq)
        first = min(refusals)
        if refusals[first].interleaved and len(refusals) == len(items) - first:
            return BatchResult(first, last_seq, refusals[first])
        if refusals[first].interleaved:
            return BatchResult(0, 0, Refusal(0, "acknowledgements do not form a prefix"))
        return BatchResult(0, 0, refusals[first])

    def interrupt(self) -> None:
        self._replies.interrupt()

    async def close(self) -> None:
        await self._replies.close()
