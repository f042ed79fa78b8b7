"""Live changes: a feed of events in stream order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Self

from consumer_sdk.reading.decoder import EventDecoder, Stored
from consumer_sdk.reading.transactions import COUNTED
from consumer_sdk.wire.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from consumer_sdk.reading.pull import PullConsumer
    from consumer_sdk.transport.api import Frame
    from consumer_sdk.wire.envelope import Event

__all__ = ["ChangeFeed", "Stored"]

_BEFORE_ALL: Final = (-1, -1)
"""LSN and ordinal before those of every event."""


class ChangeFeed:
    """Events in stream order, in batches that are never empty; ends only by `close` or an error.

    After a lost connection or a dropped delivery the feed continues without missing or repeating an
    event, or raises GapError. It drops an event whose position is not after the last one seen of
    its source and epoch; `after` gives the positions to start from. Cancelling a pending `next`
    loses nothing.
    """

    def __init__(
        self,
        consumer: PullConsumer,
        decoder: EventDecoder,
        *,
        max_batch: int = 1000,
        after: Mapping[tuple[str, int], Position] | None = None,
    ) -> None:
        self._consumer = consumer
        self._decoder = decoder
        self._max_batch = max_batch
        self._frames: deque[Frame] = deque()
        self._last: dict[tuple[str, int], Position] = dict(after or {})
        self._last_message: dict[tuple[str, int], tuple[int, int]] = {}

    @property
    def next_sequence(self) -> int:
        """Where a later feed of the same tables starts without missing or repeating anything.

        While this feed is idle, it moves past messages of other tables.
        """
        return self._frames[0].stream_seq if self._frames else self._consumer.next_sequence

    @property
    def created(self) -> int | None:
        """Creation time of the stream in microseconds, None before the first batch."""
        return self._consumer.created

    @property
    def caught_up(self) -> bool:
        """Whether everything stored at the last check has been returned."""
        return not self._frames and self._consumer.caught_up

    @property
    def reopened(self) -> int:
        """How often the consumer on the server was replaced."""
        return self._consumer.reopened

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Stored]:
        while True:
            batch = await self.next(None)
            if batch:
                return batch

    async def next(self, wait: float | None) -> list[Stored]:
        """The next batch; [] if nothing came within `wait` seconds, or if all of it was dropped."""
        frames = self._frames
        if not frames:
            frames.extend(await self._consumer.take(self._max_batch, wait))
        # Decoding may fetch something and be cancelled, so the frames stay here until it is done.
        stored, used = await self._decoder.decode_some(frames, self._max_batch)
        for _ in range(used):
            frames.popleft()
        return self._drop_seen(stored)

    async def close(self) -> None:
        """Delete the consumer on the server; idempotent."""
        await self._consumer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _drop_seen(self, stored: list[Stored]) -> list[Stored]:
        """The events whose position is after the last one seen of their source and epoch."""
        unseen: list[Stored] = []
        append = unseen.append
        key: tuple[str, int] = ("", -1)
        lsn, seq = _BEFORE_ALL
        for item in stored:
            event = item.event
            if event.operation in COUNTED:
                if event.epoch != key[1] or event.source != key[0]:
                    if lsn >= 0:
                        self._last[key] = Position(lsn, seq)
                    key = (event.source, event.epoch)
                    lsn, seq = self._last.get(key, _BEFORE_ALL)
                if event.commit_lsn < lsn or (event.commit_lsn == lsn and event.seq <= seq):
                    continue
                lsn, seq = event.commit_lsn, event.seq
            else:
                own = (event.source, event.epoch)
                last = (lsn, seq) if own == key else self._last.get(own, _BEFORE_ALL)
                if event.operation == "MESSAGE" and not self._is_new_message(event, last):
                    continue
                if event.commit_lsn == last[0]:
                    event.behind = last[1]
            append(item)
        if lsn >= 0:
            self._last[key] = Position(lsn, seq)
        return unseen

    def _is_new_message(self, event: Event, last: tuple[int, int]) -> bool:
        """Whether a logical message comes after the last change and the last message seen."""
        own = (event.source, event.epoch)
        ordinal = (event.document or {}).get("ordinal", 0)
        lsn_and_ordinal = (event.commit_lsn, ordinal if isinstance(ordinal, int) else 0)
        last_message = self._last_message.get(own, _BEFORE_ALL)
        if (event.commit_lsn, event.seq - 1) < last or lsn_and_ordinal <= last_message:
            return False
        self._last_message[own] = lsn_and_ordinal
        return True
