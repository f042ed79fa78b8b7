"""The CDC stream, with the right to write to it for one source."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Self

import nats.errors
from nats.js.errors import APIError

from bridge.errors import Retryable
from bridge.jetstream.batches import FastIngestWriter, PlainWriter
from bridge.jetstream.fence import Fence, PublishRefused
from bridge.jetstream.frames import FrameWriter
from bridge.jetstream.readback import RecordReader
from bridge.jetstream.streams import stream_state
from consumer_sdk.transport.api import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nats.aio.client import Client

    from bridge.config import Settings
    from bridge.events.messages import OutgoingMessage
    from bridge.jetstream.batches import BatchResult, BatchWriter, Mode, NextBatch
    from bridge.jetstream.broker import Broker
    from bridge.jetstream.record import StreamRecord
    from bridge.jetstream.streams import StreamState
    from consumer_sdk.wire.envelope import Document


class StreamChanged(Retryable):
    """The stream was replaced or has lost messages: continuity must be decided again."""


class FencedStream:
    """Writes to the CDC stream and reads it back; writes fail after another bridge took over."""

    def __init__(
        self,
        client: Client,
        state: StreamState,
        fence: Fence,
        records: RecordReader,
        writer: BatchWriter,
    ) -> None:
        self._client = client
        self._fence = fence
        self._records = records
        self._writer = writer
        self.state = state
        """State of the stream before the fence was written."""

    @classmethod
    async def take(
        cls, broker: Broker, settings: Settings, is_foreign: Callable[[str], bool]
    ) -> Self:
        """Take the fence, so that no earlier bridge of the source can write any more.

        `is_foreign` tells whether a table belongs to another source; its messages are skipped.
        """
        client, subjects, source = broker.client, settings.subjects, settings.slot
        state = await stream_state(client, subjects.cdc_stream)
        if state is None:
            raise Retryable(f"stream {subjects.cdc_stream} has gone; it is created again")
        batched = bool(state.config.get("allow_batched"))
        fence = Fence(
            client,
            stream=state.name,
            subject=subjects.fence(source),
            source=source,
            instance=secrets.token_hex(8),
            as_json=settings.json,
            batched=batched,
        )
        try:
            await fence.take()
        except PublishRefused as error:
            raise Retryable(f"the CDC stream takes no messages: {error}") from error
        records = RecordReader(client, subjects, source, is_foreign, broker.dictionaries)
        frames = await FrameWriter.create(client, subjects.cdc_stream)
        writer = (FastIngestWriter if batched else PlainWriter)(
            client, frames, settings.flush_timeout
        )
        await writer.open()
        return cls(client, state, fence, records, writer)

    async def close(self) -> None:
        """Stop receiving acknowledgements."""
        await self._writer.close()

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def mode(self) -> Mode:
        """How batches are published."""
        return self._writer.mode

    @property
    def fence_seq(self) -> int:
        """Sequence of our newest fence."""
        return self._fence.sequence

    @property
    def fence_id(self) -> str:
        """Message id of our newest fence."""
        return self._fence.msg_id.decode()

    @property
    def last_seq(self) -> int:
        """Sequence of the newest message when the fence was taken."""
        return max(self.state.last_seq, self._fence.sequence)

    async def send(
        self, items: Sequence[OutgoingMessage], next_batch: NextBatch | None = None
    ) -> BatchResult:
        """Publish a batch; the result says how many of its messages are stored."""
        return await self._writer.send(items, self._fence, next_batch)

    def interrupt(self) -> None:
        """Stop waiting for the acknowledgements of the batch in flight."""
        self._writer.interrupt()

    async def tail_id(self, record: StreamRecord) -> str | None:
        """Id of the message at the sequence where the stream ended by the progress record."""
        return await self._records.tail_id(record)

    async def holds(self, item: OutgoingMessage) -> bool:
        """Whether the newest message on the item's subject is the item or one after it."""
        return await self._records.holds(item)

    async def read(self, kept: Document | None) -> StreamRecord:
        """Read the source's record; `kept` is the progress record of the KV bucket."""
        try:
            return await self._records.read(self._fence.sequence, kept)
        except (TimeoutError, nats.errors.Error, APIError) as error:
            raise Retryable(f"the record cannot be read: {error}") from error

    async def read_back(self, known: Document) -> StreamRecord:
        """Renew the fence, so that messages in flight are refused, and read the record.

        `known` is a progress record of what was acknowledged. StreamChanged if the stream no
        longer holds the message that it names as the newest.
        """
        await self._fence.renew()
        found = await self._records.message_id_at(known["stream_seq"])
        if found != known["stream_msg_id"]:
            raise StreamChanged(
                f"the CDC stream does not show message {known['stream_seq']} that it acknowledged"
            )
        return await self._records.read(self._fence.sequence, known)

    async def require_unchanged(self) -> None:
        """Raise StreamChanged if the stream was deleted or created again."""
        try:
            state = await stream_state(self._client, self.state.name)
        except (ApiError, Retryable):
            return
        if state is None or state.created_us != self.state.created_us:
            raise StreamChanged("the CDC stream has gone")
