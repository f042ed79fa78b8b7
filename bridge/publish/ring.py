"""The ring between decoding and publishing: one producer, one consumer, no locks.

`_tail` and `_bytes_in` are written by the producer only, `_head` and `_bytes_out` by the consumer
only; each side reads the other's. One slot stays empty, so that full and empty differ. A side
that waits first shows its waiter and then looks again, and the other side moves its index first
and then looks for a waiter: one of the two always notices. A waiter is put there and taken away
only by the side that waits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
V = TypeVar("V")


class _Waiter:
    """A future together with the loop it must be woken on."""

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
    """Put values into a ring from an index on, past its end too."""
    first = len(ring) - index
    if len(values) <= first:
        ring[index : index + len(values)] = values
    else:
        ring[index:] = values[:first]
        ring[: len(values) - first] = values[first:]


def _read(ring: list[V], index: int, count: int) -> list[V]:
    """Values of a ring from an index on, past its end too."""
    values = ring[index : index + count]
    if len(values) < count:
        values += ring[: count - len(values)]
    return values


class Ring(Generic[T]):
    """A fixed ring bounded by slots and by bytes.

    An item larger than the byte bound is accepted when the ring is empty, so that no row is too
    large to pass.
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
    def capacity(self) -> int:
        """How many items fit."""
        return self._mask

    @property
    def bytes_held(self) -> int:
        """Bytes of the items inside."""
        return self._bytes_in - self._bytes_out

    def has_room(self, size: int) -> bool:
        """Whether an item of this size would be accepted now."""
        depth = self._tail - self._head
        if depth >= self._mask:
            return False
        return depth == 0 or self._bytes_in - self._bytes_out + size <= self.max_bytes

    def try_put(self, item: T, size: int) -> bool:
        """Producer: append an item, or answer False when there is no room."""
        tail = self._tail
        depth = tail - self._head
        if depth >= self._mask or (
            depth and self._bytes_in - self._bytes_out + size > self.max_bytes
        ):
            return False
        index = tail & self._mask
        self._items[index] = item
        self._sizes[index] = size
        self._bytes_in += size
        self._tail = tail + 1
        waiter = self._consumer
        if waiter is not None and not waiter.is_woken:
            waiter.wake()
        return True

    def put_many(self, items: Sequence[T], sizes: Sequence[int], start: int) -> int:
        """Producer: append items from `start` on while there is room; the place of the next."""
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

    async def wait_for_room(self, size: int) -> None:
        """Producer: return when an item of this size would be accepted."""
        while not self.has_room(size):
            waiter = self._producer = _Waiter()
            if self.has_room(size):
                self._producer = None
                return
            try:
                await waiter.wait()
            finally:
                self._producer = None
