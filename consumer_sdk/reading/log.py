"""The change log by sequence: its bounds, reads of a range, and waiting for new messages."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

from consumer_sdk.errors import UsageError
from consumer_sdk.reading.deployment import Deployment
from consumer_sdk.reading.proof import (
    Selection,
    StreamBreak,
    Trimming,
    find_break,
    require_continuation,
    require_same_stream,
)
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.transport.api import Frame, StreamBounds
from consumer_sdk.transport.connection import open_connection

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.transport.settings import NatsSettings

__all__ = ["Frame", "LogBounds", "LogReader", "read_log_blocking", "read_log_blocking_raw"]

LogBounds = StreamBounds
Item = TypeVar("Item")
DEFAULT_BATCH = 1000


class LogReader:
    """Random access to the change log by stream sequence.

    Reads are independent: any number of readers may read any ranges in parallel.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._nc = deployment.nc
        self._stream = deployment.subjects.cdc_stream
        self._everything = deployment.subjects.cdc_all
        self._decoder = deployment.decoder()

    async def bounds(self) -> LogBounds:
        """The first and last sequence stored now, and the creation time of the stream."""
        return await self._deployment.cdc_bounds()

    async def read(
        self,
        first: int,
        end: int,
        subjects: Sequence[str] | None = None,
        *,
        created: int | None = None,
        max_batch: int = DEFAULT_BATCH,
        timeout: float | None = None,
    ) -> AsyncGenerator[list[Stored], None]:
        """The events stored at sequences [first, end), in batches that are never empty.

        `subjects` selects some subjects; `created` is the creation time of the expected stream.
        GapError if part of the range is no longer stored, UsageError if part is not stored yet.
        """
        frames = self.read_raw(
            first, end, subjects, created=created, max_batch=max_batch, timeout=timeout
        )
        async with aclosing(frames):
            async for batch in frames:
                while batch:
                    stored, used = await self._decoder.decode_some(batch, sys.maxsize)
                    if stored:
                        yield stored
                    batch = batch[used:]

    async def read_raw(
        self,
        first: int,
        end: int,
        subjects: Sequence[str] | None = None,
        *,
        created: int | None = None,
        max_batch: int = DEFAULT_BATCH,
        timeout: float | None = None,
    ) -> AsyncGenerator[list[Frame], None]:
        """Like `read`, but not decoded: sequence, subject, header block and payload as stored."""
        if first < 1 or end < first:
            raise UsageError(f"not a range of sequences: [{first}, {end})")
        bounds = await self.bounds()
        require_same_stream(bounds, first, created)
        if first == end:
            return
        is_trimmed = find_break(bounds, first) is StreamBreak.TRIMMED
        if end > bounds.last + 1 and not is_trimmed:
            raise UsageError(
                f"the log ends at sequence {bounds.last}; [{first}, {end}) goes beyond"
            )
        require_continuation(bounds, first)
        filters = subjects or [self._everything]
        consumer = PullConsumer(
            self._nc,
            Selection(self._stream, filters, first, bounds.created),
            window=max(64, min(4096, end - first)),
            timeout=timeout,
        )
        # The first call opens the consumer, which then knows whether anything is pending.
        wait = 0.0
        try:
            while consumer.next_sequence < end:
                frames = await consumer.take(max_batch, wait)
                wait = 1.0
                inside = frames
                if frames and frames[-1].stream_seq >= end:
                    inside = [frame for frame in frames if frame.stream_seq < end]
                if inside:
                    yield inside
                # The range may end with messages of other subjects, which are not delivered.
                if consumer.caught_up and await consumer.is_through(end):
                    return
        finally:
            await consumer.close()

    async def is_read_through(
        self, subjects: Sequence[str], next_sequence: int, through: int, created: int
    ) -> bool:
        """Whether nothing of these subjects is stored from `next_sequence` up to `through`."""
        if next_sequence > through:
            return True
        first = max(next_sequence, (await self.bounds()).first)
        if first > through:
            return False
        async with aclosing(self.read(first, through + 1, subjects, created=created)) as found:
            async for _ in found:
                return False
        return True

    async def poll(self, after: int, timeout: float | None = None) -> LogBounds:
        """Wait until something is stored after sequence `after`, at most `timeout` seconds."""
        bounds = await self.bounds()
        if bounds.last > after or (timeout is not None and timeout <= 0):
            return bounds
        selection = Selection(
            self._stream,
            [self._everything],
            after + 1,
            bounds.created,
            Trimming.ALLOWED_BEFORE_FIRST,
        )
        consumer = PullConsumer(self._nc, selection, headers_only=True, window=2)
        try:
            await consumer.take(1, wait=timeout)
        finally:
            await consumer.close()
        return await self.bounds()


def read_log_blocking(
    settings: NatsSettings,
    first: int,
    end: int,
    subjects: Sequence[str] | None = None,
    *,
    created: int | None = None,
    max_batch: int = DEFAULT_BATCH,
    timeout: float | None = 60.0,
) -> Iterator[list[Stored]]:
    """`LogReader.read` for code without an event loop; opens and closes its own connection."""
    return _blocking(
        settings,
        lambda log: log.read(
            first, end, subjects, created=created, max_batch=max_batch, timeout=timeout
        ),
        timeout,
    )


def read_log_blocking_raw(
    settings: NatsSettings,
    first: int,
    end: int,
    subjects: Sequence[str] | None = None,
    *,
    created: int | None = None,
    max_batch: int = DEFAULT_BATCH,
    timeout: float | None = 60.0,
) -> Iterator[list[Frame]]:
    """`LogReader.read_raw` for code without an event loop; opens and closes its own connection."""
    return _blocking(
        settings,
        lambda log: log.read_raw(
            first, end, subjects, created=created, max_batch=max_batch, timeout=timeout
        ),
        timeout,
    )


def _blocking(
    settings: NatsSettings,
    read: Callable[[LogReader], AsyncGenerator[Item, None]],
    timeout: float | None,
) -> Iterator[Item]:
    async def step(items: AsyncGenerator[Item, None]) -> list[Item]:
        try:
            return [await anext(items)]
        except StopAsyncIteration:
            return []

    with asyncio.Runner() as runner:
        connection = runner.run(open_connection(settings, timeout))
        try:
            items = read(LogReader(Deployment(connection, settings)))
            try:
                while batch := runner.run(step(items)):
                    yield batch[0]
            finally:
                runner.run(_close(items))
        finally:
            runner.run(connection.close())


async def _close(items: AsyncGenerator[Item, None]) -> None:
    await items.aclose()
