"""The fence: only the bridge that wrote the newest message on `cdc.$fence.{source}` may publish.

Every batch names the sequence of its writer's fence, so the stream itself refuses a stale writer.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

import nats.errors

from bridge.errors import Retryable
from bridge.jetstream.batches import end_batch
from bridge.jetstream.streams import stored_message
from consumer_sdk.transport.api import ApiError, parse_headers
from consumer_sdk.wire.envelope import JSON, MSGPACK, decode_payload, encode
from consumer_sdk.wire.errors import WireError

if TYPE_CHECKING:
    from nats.aio.client import Client

PUBLISH_TIMEOUT_SECONDS = 5.0
TAKE_ATTEMPTS = 10
# Names and numbers as in nats-server's errors.json; the text of the second names no sequence.
WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SEQUENCE_CONSTANT = 10164


class Fenced(Exception):
    """Another bridge has taken over this source."""


class PublishRefused(Exception):
    """The stream refused the message."""

    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Written(NamedTuple):
    """A stored fence: its sequence, its writer, and the fence that the writer held before."""

    sequence: int
    instance: str
    before: int


class Fence:
    """The right of this bridge to publish for one source.

    With `batched`, a stale writer may have left a fast-ingest batch open, which must be ended: the
    fence does not stop an open batch.
    """

    def __init__(
        self,
        client: Client,
        *,
        stream: str,
        subject: str,
        source: str,
        instance: str,
        as_json: bool,
        batched: bool,
    ) -> None:
        self._client = client
        self._stream = stream
        self._subject = subject
        self._source = source
        self._instance = instance
        self._as_json = as_json
        self._batched = batched
        self._count = 0
        self.sequence = 0
        self.msg_id = b""
        """Message id of our newest fence."""
        self.headers = b""
        """Header lines that make a batch fail once another bridge holds the fence."""
        self.batch_id = b""
        """Id of the batches written under this fence."""

    async def take(self) -> int:
        """Take the fence over; only the bridge that holds the slot may call this."""
        for _ in range(TAKE_ATTEMPTS):
            newest = await self._newest()
            try:
                # The fence before ours is expected, so that a replicated stream refuses messages
                # that name it while ours is being replicated.
                await self._publish(newest.sequence)
            except PublishRefused as error:
                if error.code not in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_CONSTANT):
                    raise
                continue
            await self._end_batches(newest.sequence, newest.before)
            return self.sequence
        raise Retryable("the fence is contended")

    async def renew(self) -> int:
        """Write the fence again, so that our messages in flight fail; Fenced if it is lost."""
        held = self.sequence
        try:
            await self._publish(held)
        except PublishRefused as error:
            if error.code != WRONG_LAST_SEQUENCE:
                raise
            newest = await self._newest()
            if newest.sequence and newest.instance != self._instance:
                raise Fenced(f"source {self._source} was taken over by another bridge") from error
            # The newest fence is ours (its acknowledgement was lost), or it was purged or expired.
            await self._publish(newest.sequence)
        await self._end_batches(held)
        return self.sequence

    async def _end_batches(self, *fences: int) -> None:
        """End batches that an earlier holder may have left open.

        Such a batch may have stored messages after our fence, so the fence is written again.
        """
        if not self._batched:
            return
        ended = [
            await end_batch(self._client, self._subject, _batch_id(fence))
            for fence in fences
            if fence
        ]
        if any(ended):
            await self._publish(self.sequence)

    async def _newest(self) -> _Written:
        try:
            message = await stored_message(
                self._client, self._stream, {"last_by_subj": self._subject}
            )
        except ApiError as error:
            raise Retryable(f"the fence cannot be read: {error}") from error
        if message is None:
            return _Written(0, "", 0)
        try:
            document = decode_payload(parse_headers(message.headers), message.payload)
            return _Written(message.stream_seq, str(document["instance"]), int(document["before"]))
        except (WireError, KeyError, TypeError, ValueError, OverflowError):
            return _Written(message.stream_seq, "", 0)

    async def _publish(self, before: int) -> None:
        self._count += 1
        now = time.time_ns() // 1000
        document = {
            "v": 1,
            "source": self._source,
            "instance": self._instance,
            "before": self.sequence or before,
            "ts": now,
        }
        msg_id = f"fence-{self._source}-{self._instance}-{self._count}"
        try:
            reply = await self._client.request(
                self._subject,
                encode(document, as_json=self._as_json),
                timeout=PUBLISH_TIMEOUT_SECONDS,
                headers={
                    "Nats-Msg-Id": msg_id,
                    "Content-Type": JSON if self._as_json else MSGPACK,
                    "Nats-Expected-Last-Subject-Sequence": str(before),
                },
            )
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise Retryable(f"fence not written: {str(error) or type(error).__name__}") from error
        try:
            answer = json.loads(reply.data)
        except ValueError as error:
            raise Retryable("fence not written: unreadable acknowledgement") from error
        if "error" in answer:
            raise PublishRefused(
                answer["error"].get("err_code") or None, answer["error"]["description"]
            )
        self.sequence = answer["seq"]
        self.msg_id = msg_id.encode()
        self.batch_id = _batch_id(self.sequence)
        self.headers = (
            f"Nats-Expected-Last-Subject-Sequence: {self.sequence}\r\n"
            f"Nats-Expected-Last-Subject-Sequence-Subject: {self._subject}\r\n"
        ).encode()


def _batch_id(fence_seq: int) -> bytes:
    # Unique in the stream, and any bridge can derive it from the fence's sequence.
    return b"fence%x" % fence_seq
