"""Finished messages on their way into the ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from bridge.events.messages import ITEM_OVERHEAD, OutgoingMessage, Oversized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.events.messages import Item


class BoundedQueue(Protocol):
    """The producer's side of the ring."""

    def put_many(self, items: Sequence[Item], sizes: Sequence[int], start: int) -> int:
        """Append items from `start` on while there is room; give the place of the next."""
        ...


class Outbox:
    """Holds finished items in order until the ring has room for them."""

    __slots__ = ("_items", "_moved", "_sizes", "bytes_held")

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._sizes: list[int] = []
        self._moved = 0
        """How many of the items are in the ring already."""
        self.bytes_held = 0
        """What the items count against the ring's byte bound."""

    def __len__(self) -> int:
        return len(self._items) - self._moved

    def add(self, item: Item, size: int) -> None:
        """Append a finished item whose payload and objects have `size` bytes."""
        size += ITEM_OVERHEAD
        self._items.append(item)
        self._sizes.append(size)
        self.bytes_held += size

    def set_end(self, end_lsn: int) -> None:
        """Make the newest item the final one of its transaction."""
        item = self._items[-1]
        if isinstance(item, OutgoingMessage):
            self._items[-1] = item._replace(end_lsn=end_lsn)
        else:
            assert isinstance(item, Oversized)
            message = item.message._replace(end_lsn=end_lsn)
            self._items[-1] = Oversized(item.name, item.content, message)

    @property
    def next_size(self) -> int:
        """How much room the first item needs in the ring."""
        return self._sizes[self._moved]

    def move_into(self, ring: BoundedQueue) -> bool:
        """Put items into the ring as far as there is room; True if all of them went in."""
        if self._items:
            self._moved = ring.put_many(self._items, self._sizes, self._moved)
            if self._moved < len(self._items):
                return False
            self._items.clear()
            self._sizes.clear()
            self._moved = 0
            self.bytes_held = 0
        return True
