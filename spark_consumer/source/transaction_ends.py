"""Where a batch may end: at a sequence where no transaction of the source is open."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from consumer_sdk.reading.decoder import Stored

    ReadRange = Callable[[int, int], AsyncGenerator[list[Stored], None]]

_FIRST_SPAN: Final = 256
_GROWTH: Final = 8
_CHANGES: Final = frozenset({"INSERT", "UPDATE", "DELETE", "TRUNCATE"})


class BatchEnds:
    """Finds the ends of batches of one source; `read(first, end)` returns its events.

    It remembers how far a long transaction has been read, so that each search for its end reads
    only new messages.
    """

    def __init__(self, read: ReadRange) -> None:
        self._read = read
        self._open_after: int | None = None
        self._open_until = 0
        self.rows_per_message = 1.0

    async def find(self, after: int, goal: int, last: int) -> int:
        """The end of a batch that begins after `after`, the end of the previous batch.

        This is the last sequence up to `goal` where no transaction is open. If one transaction
        extends from `after` beyond the goal, it is the end of that transaction, or `after` if that
        end is not yet stored at a sequence up to `last`.
        """
        if goal <= after:
            return after
        if self._open_after == after and goal <= self._open_until:
            return await self._forward(after, self._open_until, last)
        known = self._open_until if self._open_after == after else after
        found = await self._backward(known, goal, under_way=known > after)
        if found is not None:
            return found
        return await self._forward(after, goal, last)

    async def _backward(self, after: int, goal: int, *, under_way: bool) -> int | None:
        end = goal + 1
        span = _FIRST_SPAN
        while end > after + 1:
            first = max(after + 1, end - span)
            ended_at, more = await self._last_end(first, end)
            if ended_at is not None:
                return ended_at if more or under_way else goal
            under_way = under_way or more
            end = first
            span *= _GROWTH
        return None if under_way else goal

    async def _last_end(self, first: int, end: int) -> tuple[int | None, bool]:
        """Where the last transaction in a range ends, and whether changes follow in the range."""
        ended_at: int | None = None
        more = False
        rows = messages = previous = 0
        async with aclosing(self._read(first, end)) as batches:
            async for batch in batches:
                for stored in batch:
                    rows += 1
                    messages += stored.stream_seq != previous
                    previous = stored.stream_seq
                    if _is_end(stored):
                        ended_at, more = stored.stream_seq, False
                    elif stored.event.operation in _CHANGES:
                        more = True
        if messages:
            self.rows_per_message = rows / messages
        return ended_at, more

    async def _forward(self, after: int, scanned: int, last: int) -> int:
        if scanned < last:
            async with aclosing(self._read(scanned + 1, last + 1)) as batches:
                async for batch in batches:
                    for stored in batch:
                        if _is_end(stored):
                            self._open_after = None
                            return stored.stream_seq
        self._open_after = after
        self._open_until = max(scanned, last)
        return after


def _is_end(stored: Stored) -> bool:
    return stored.event.last or stored.event.operation == "COMMIT"
