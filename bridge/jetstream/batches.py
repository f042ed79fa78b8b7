"""Publishes batches to the CDC stream in one of two ways.

Both ways guarantee that the stored messages of a batch are a prefix of it. The next batch is
written only after the result of this one is known, so that no message overtakes a refused one.

Fast ingest (nats-server 2.14, stream with allow_batched) sends a batch in gap mode `fail`: the
server ends the batch at the first message that it refuses. Only the first message of a batch is
fenced. The batch id is therefore derived from the fence, so that the bridge that takes the fence
next can end a batch that was left open.

Plain publishing lets each message expect the message before it as the last one of the stream, so
that after a refused message the rest is refused too. A message of another source in between only
shortens the batch. Messages of a stale writer are refused as well, with one exception: the stream
accepts one right after the same message that we have sent, and then it equals our next message.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import nats.errors

from bridge.errors import Retryable
from bridge.jetstream.frames import PublishFrame, encode_numbered
from consumer_sdk.transport.holds import hold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from bridge.events.messages import OutgoingMessage
    from bridge.jetstream.fence import Fence
    from bridge.jetstream.frames import FrameWriter

    NextBatch: TypeAlias = Callable[[], Sequence[OutgoingMessage] | None]
    Mode: TypeAlias = Literal["fast-ingest", "plain"]

FIRST_ERROR_CODE = 10000
"""JetStream's own error codes begin here; lower codes are states of connections and leaders."""
WRONG_LAST_MSG_ID = 10070
NO_SUCH_BATCH = (10208, 10205)
"""The batch is unknown; the stream does not allow batches any more."""
END_TIMEOUT_SECONDS = 5.0
UNREADABLE = "unreadable acknowledgement"
_BEYOND_ANY_BATCH = 1 << 30
NO_ROOM = (10002, 10023, 10028, 10047, 10077, 10121, 10122)
"""Limits of the account, of the server's memory and storage, and of the stream."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the rest of a batch is refused, or not known to be stored."""

    text: str
    code: int | None = None
    """JetStream's error code or the status of the reply; None if the server gave neither."""

    @property
    def interleaved(self) -> bool:
        """Whether another source wrote in between; the stored messages are known."""
        return self.code == WRONG_LAST_MSG_ID

    @property
    def full(self) -> bool:
        """Whether the stream or the account has reached a limit."""
        return self.code in NO_ROOM


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The first `stored` messages of a batch are in the stream.

    `last_seq` is the sequence of the last of them.
    """

    stored: int
    last_seq: int | None
    refusal: Refusal | None = None

    @classmethod
    def unknown(cls, refusal: Refusal) -> BatchResult:
        """The result of a batch of which it is not known how many messages are stored."""
        return cls(0, None, refusal)


class BatchWriter(Protocol):
    """One way of publishing batches."""

    mode: Mode

    async def send(
        self, items: Sequence[OutgoingMessage], fence: Fence, next_batch: NextBatch | None = None
    ) -> BatchResult:
        """Publish a batch under the fence; the result says how many messages are stored.

        `next_batch` is called while this batch is in flight and may return another one. That one
        may be written as soon as this one is stored, and the caller must send it next.
        """
        ...

    def interrupt(self) -> None:
        """Stop waiting for acknowledgements, because the connection is lost."""
        ...

    async def close(self) -> None: ...


async def end_batch(client: Client, subject: str, batch_id: bytes) -> bool:
    """End a fast-ingest batch that may have been left open; True if it was open.

    The server refuses all later messages of the batch.
    """
    inbox = client.new_inbox()
    subscription = await client.subscribe(f"{inbox}.>")
    try:
        # Operation 3 ends a batch without storing; a number out of order ends any batch.
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
        return Refusal("no JetStream leader accepts the message", int(headers["Status"]))
    try:
        answer = json.loads(data)
    except ValueError:
        return Refusal(UNREADABLE)
    if not isinstance(answer, dict):
        return Refusal(UNREADABLE)
    problem = answer.get("error")
    return _refusal_of(problem, "") if problem else None


def _refusal_of(problem: Mapping[str, Any] | None, text: str) -> Refusal:
    """The refusal that an error of JetStream states; `text` if the error has no description."""
    problem = problem or {}
    return Refusal(str(problem.get("description", text)), problem.get("err_code") or None)


class _Replies:
    """A wildcard inbox that receives the replies of all batches, one batch after another."""

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

    def discard(self) -> None:
        """Drop late replies to earlier batches."""
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
    """Fast-ingest batches: one acknowledgement for each batch, one batch in flight at a time.

    The next batch is encoded while this one is in flight, and written immediately after the
    acknowledgement, so that the server does not wait for the bridge.
    """

    mode: Mode = "fast-ingest"

    def __init__(self, client: Client, writer: FrameWriter, timeout: float) -> None:
        self._writer = writer
        self._timeout = timeout
        self._replies = _Replies(client)
        self._number = 0
        self._next: _Encoded | None = None

    async def open(self) -> None:
        await self._replies.open()

    async def send(
        self, items: Sequence[OutgoingMessage], fence: Fence, next_batch: NextBatch | None = None
    ) -> BatchResult:
        batch, self._next = self._next, None
        if batch is None or batch.items is not items or batch.fence_seq != fence.sequence:
            self._replies.discard()
            batch = self._encode(items, fence)
        outcome = await self._send(batch, fence, next_batch)
        if outcome.refusal is not None:
            self._next = None
        return outcome

    async def _send(
        self, batch: _Encoded, fence: Fence, next_batch: NextBatch | None
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
                if next_batch is not None and self._writer.direct and (items := next_batch()):
                    self._next = self._encode(items, fence)
                while True:
                    message = await self._replies.next()
                    if not message.subject.startswith(prefix):
                        continue
                    status = message.headers.get("Status") if message.headers else None
                    if status:
                        return BatchResult.unknown(Refusal("no JetStream leader", int(status)))
                    answer = json.loads(message.data)
                    if not isinstance(answer, dict):
                        raise ValueError(answer)
                    kind = answer.get("type")
                    if kind == "ack":
                        continue
                    if kind in ("err", "gap"):
                        refusal = refusal or _refusal_of(answer.get("error"), kind)
                        continue
                    if "batch" in answer:
                        stored = answer.get("count", 0)
                        if stored == count and refusal is None:
                            self._write_next()
                            return BatchResult(count, answer["seq"])
                        return BatchResult.unknown(refusal or Refusal("the batch ended early"))
                    return BatchResult.unknown(refusal or _refusal_of(answer.get("error"), ""))
        except TimeoutError:
            return BatchResult.unknown(refusal or Refusal("no acknowledgement in time"))
        except Retryable as error:
            return BatchResult.unknown(Refusal(str(error)))
        except ValueError:
            return BatchResult.unknown(Refusal(UNREADABLE))

    def _encode(self, items: Sequence[OutgoingMessage], fence: Fence) -> _Encoded:
        """Encode a batch for the wire: operation 0 begins it, 1 adds, 2 adds and ends."""
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
    def _frames(items: Sequence[OutgoingMessage], head: bytes, guard: bytes) -> list[PublishFrame]:
        """The frames of a batch, for writing through the public API of nats-py."""
        frames: list[PublishFrame] = []
        count = len(items)
        for place, item in enumerate(items, start=1):
            operation = 2 if place == count else 0 if place == 1 else 1
            lines = b"Nats-Msg-Id: %b\r\n%b" % (item.msg_id, item.headers)
            if place == 1:
                lines += guard
            reply = b"%b%d.%d.$FI" % (head, place, operation)
            frames.append(PublishFrame(item.subject, reply, lines, item.payload))
        return frames

    def _write_next(self) -> None:
        """Write the next batch now, so that the server does not wait for the bridge."""
        if self._next is not None:
            self._next.is_written = self._writer.write_at_once(self._next.data)

    def interrupt(self) -> None:
        self._replies.interrupt()

    async def close(self) -> None:
        await self._replies.close()


class PlainWriter:
    """Plain publishing: one acknowledgement for each message; each names the id before it."""

    mode: Mode = "plain"

    def __init__(self, client: Client, writer: FrameWriter, timeout: float) -> None:
        self._writer = writer
        self._timeout = timeout
        self._replies = _Replies(client)
        self._number = 0
        self._fence_seq = 0
        self._before = b""
        """Expected id of the stream's last message; empty if another source wrote after it."""

    async def open(self) -> None:
        await self._replies.open()

    async def send(
        self,
        items: Sequence[OutgoingMessage],
        fence: Fence,
        next_batch: NextBatch | None = None,  # noqa: ARG002
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
        self._replies.discard()
        head = b"%b.%x." % (self._replies.inbox, self._number)
        prefix = head.decode()
        frames: list[PublishFrame] = []
        if self._before:
            guard += b"Nats-Expected-Last-Msg-Id: %b\r\n" % self._before
        for place, item in enumerate(items):
            lines = b"Nats-Msg-Id: %b\r\n%b%b" % (item.msg_id, item.headers, guard)
            reply = b"%b%d" % (head, place)
            frames.append(PublishFrame(item.subject, reply, lines, item.payload))
            guard = b"Nats-Expected-Last-Msg-Id: %b\r\n" % item.msg_id
        refusals: dict[int, Refusal] = {}
        answered = 0
        last_seq: int | None = None
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
                        last_seq = max(last_seq or 0, json.loads(message.data).get("seq", 0))
        except TimeoutError:
            return BatchResult.unknown(Refusal("no acknowledgement in time"))
        except Retryable as error:
            return BatchResult.unknown(Refusal(str(error)))
        if not refusals:
            return BatchResult(len(items), last_seq)
        first = min(refusals)
        if refusals[first].interleaved and len(refusals) == len(items) - first:
            return BatchResult(first, last_seq, refusals[first])
        if refusals[first].interleaved:
            return BatchResult.unknown(Refusal("acknowledgements do not form a prefix"))
        return BatchResult.unknown(refusals[first])

    def interrupt(self) -> None:
        self._replies.interrupt()

    async def close(self) -> None:
        await self._replies.close()
