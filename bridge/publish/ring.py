"""The ring between decoding and publishing: one producer, one consumer, no locks.

Only the producer writes `_tail` and `_bytes_in`; only the consumer writes `_head` and
`_bytes_out`. Each side reads the other's fields. One slot stays empty, so that a full ring differs
from an empty one.

No wake-up is lost: a side that must wait first sets its waiter and then checks the indexes again,
while the other side first moves its index and then checks for a waiter. Only the waiting side sets
and clears its waiter.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
V = TypeVar("V")


class _Waiter:
    """A future, and the event loop on which it must be set."""

    __slots__ = ("_future", "_loop", "is_woken")

    def __init__(self) -> None:
        self.is_woken = False
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def wake(self) -> None:
        """Wake the waiting side; callable from any thread."""
        self.is_woken = True
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._set()
        else:
            self._loop.call_soon_threadsafe(self._set)

    async def wait(self) -> None:
        await self._future


def _write(ring: list[V], index: int, values: Sequence[V]) -> None:
    """Write values into a ring from an index on; continue at the start after its end."""
    first = len(ring) - index
    if len(values) <= first:
        ring[index : index + len(values)] = values
    else:
        ring[index:] = values[:first]
        ring[: len(values) - first] = values[first:]


def _read(ring: list[V], index: int, count: int) -> list[V]:
    """Read values of a ring from an index on; continue at the start after its end."""
    values = ring[index : index + count]
    if len(values) < count:
        values += ring[: count - len(values)]
    return values


class Ring(Generic[T]):
    """A fixed ring bounded by slots and by bytes.

    An empty ring accepts an item larger than the byte bound, so that a row of any size can pass.
    """

    __slots__ = (
        "_bytes_in", "_bytes_out", "_consumer", "_head", "_items", "_mask", "_producer", "_sizes",
        "_tail", "max_bytes",
    )  # fmt: skip

    def __init__(self, slots: int, max_bytes: int) -> None:
        if slots < 2 or slots & (slots - 1):
            raise ValueError("the number of slots must be a power of two")
        if max_bytes < 1:
            raise ValueError("the byte bound must be positive")
        self._items: list[T | None] = [None] * slots
        self._sizes = [0] * slots
        self._mask = slots - 1
        self.max_bytes = max_bytes
        self._head = 0
        self._tail = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._consumer: _Waiter | None = None
        self._producer: _Waiter | None = None

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def bytes_held(self) -> int:
        """Bytes of the items in the ring."""
        return self._bytes_in - self._bytes_out

    def fits(self, size: int) -> bool:
        """Whether an item of this size can be put into the ring now."""
        depth = self._tail - self._head
        if depth >= self._mask:
            return False
        return depth == 0 or self._bytes_in - self._bytes_out + size <= self.max_bytes

    def put_many(self, items: Sequence[T], sizes: Sequence[int], start: int) -> int:
        """Producer: append items from `start` on while they fit; return the index of the next."""
        tail, mask, limit = self._tail, self._mask, self.max_bytes
        total = self._bytes_in
        count = len(items)
        place = start
        if start:
            items, sizes = items[start:], sizes[start:]
        size = sum(sizes)
        if tail - self._head + len(items) <= mask and total - self._bytes_out + size <= limit:
            _write(self._items, tail & mask, items)
            _write(self._sizes, tail & mask, sizes)
            total += size
            tail += len(items)
            place = count
        else:
            for item, size in zip(items, sizes, strict=True):
                depth = tail - self._head
                if depth >= mask or (depth and total - self._bytes_out + size > limit):
                    break
                self._items[tail & mask] = item
                self._sizes[tail & mask] = size
                total += size
                tail += 1
                place += 1
        self._bytes_in = total
        self._tail = tail
        waiter = self._consumer
        if place > start and waiter is not None and not waiter.is_woken:
            waiter.wake()
        return place

    def take(self, max_items: int, max_bytes: int) -> list[T]:
        """Consumer: remove items from the front, at least one if there is any."""
        head = self._head
        available = self._tail - head
        if not available:
            return []
        index = head & self._mask
        sizes = _read(self._sizes, index, min(available, max_items))
        total = sum(sizes)
        while total > max_bytes and len(sizes) > 1:
            total -= sizes.pop()
        count = len(sizes)
        taken = _read(self._items, index, count)
        _write(self._items, index, [None] * count)
        self._bytes_out += total
        self._head = head + count
        waiter = self._producer
        if waiter is not None and not waiter.is_woken:
            waiter.wake()
        return taken  # type: ignore[return-value]

    async def wait_for_items(self) -> None:
        """Consumer: return when there is at least one item."""
        while self._tail == self._head:
            waiter = self._consumer = _Waiter()
            if self._tail != self._head:
                self._consumer = None
                return
            try:
                await waiter.wait()
            finally:
                self._consumer = None

    async def wait_for_space(self, size: int) -> None:
        """Producer: return when an item of this size fits."""
        while not self.fits(size):
            waiter = self._producer = _Waiter()
            if self.fits(size):
                self._producer = None
                return
            try:
                await waiter.wait()
            finally:
                self._producer = None
