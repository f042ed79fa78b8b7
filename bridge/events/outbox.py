"""Finished messages that wait for space in the ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from bridge.events.messages import ITEM_OVERHEAD, OutgoingMessage, Oversized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.events.messages import Item


class BoundedQueue(Protocol):
    """The producer's side of the ring."""

    def put_many(self, items: Sequence[Item], sizes: Sequence[int], start: int) -> int:
        """Append items from `start` on while they fit; return the index of the next."""
        ...


class Outbox:
    """Holds finished items in order until they fit into the ring."""

    __slots__ = ("_items", "_moved", "_sizes", "bytes_held")

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._sizes: list[int] = []
        self._moved = 0
        """How many of the items are already in the ring."""
        self.bytes_held = 0
        """The sizes of the items, as the ring's byte bound counts them."""

    def __len__(self) -> int:
        return len(self._items) - self._moved

    def add(self, item: Item, size: int) -> None:
        """Append a finished item whose payload and objects have `size` bytes."""
        size += ITEM_OVERHEAD
        self._items.append(item)
        self._sizes.append(size)
        self.bytes_held += size

    def set_end(self, end_lsn: int) -> None:
        """Make the newest item the last one of its transaction."""
        item = self._items[-1]
        if isinstance(item, OutgoingMessage):
            self._items[-1] = item._replace(end_lsn=end_lsn)
        else:
            assert isinstance(item, Oversized)
            message = item.message._replace(end_lsn=end_lsn)
            self._items[-1] = Oversized(item.name, item.content, message)

    @property
    def next_size(self) -> int:
        """The size of the first item that is not in the ring."""
        return self._sizes[self._moved]

    def move_into(self, ring: BoundedQueue) -> bool:
        """Put items into the ring while they fit; True if all of them fitted."""
        if self._items:
            self._moved = ring.put_many(self._items, self._sizes, self._moved)
            if self._moved < len(self._items):
                return False
            self._items.clear()
            self._sizes.clear()
            self._moved = 0
            self.bytes_held = 0
        return True
