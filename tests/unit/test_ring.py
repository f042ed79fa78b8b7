"""The ring: bounds, order, and waking the side that waits."""

from __future__ import annotations

import asyncio

import pytest

from bridge.publish.ring import Ring


def try_put(ring, item, size):
    """Put one item; whether there was room."""
    return ring.put_many([item], [size], 0) == 1


@pytest.mark.parametrize(("slots", "size"), [(0, 1), (1, 1), (3, 1), (12, 1), (4, 0), (-2, 1)])
def test_a_ring_needs_a_power_of_two_and_room_for_bytes(slots, size):
    with pytest.raises(ValueError, match="must be"):
        Ring(slots, size)


def test_items_come_out_in_order_and_each_once():
    ring = Ring(8, 1000)
    assert ring.take(10, 1000) == []
    assert all(try_put(ring, n, 1) for n in range(5))
    assert ring.take(2, 1000) == [0, 1]
    assert all(try_put(ring, n, 1) for n in range(5, 9))
    assert ring.take(100, 1000) == [2, 3, 4, 5, 6, 7, 8]
    assert len(ring) == ring.bytes_held == 0


def test_slots_and_bytes_bound_what_is_inside():
    ring = Ring(4, 100)
    assert [try_put(ring, n, 10) for n in range(4)] == [True, True, True, False]
    ring.take(3, 1000)
    assert try_put(ring, "a", 60)
    assert not try_put(ring, "b", 41)
    assert try_put(ring, "c", 40)
    assert ring.bytes_held == 100
    assert not ring.fits(0) or try_put(ring, "d", 0)


def test_an_item_larger_than_the_bound_passes_alone():
    ring = Ring(4, 100)
    assert try_put(ring, "small", 1)
    assert not try_put(ring, "huge", 5000)
    ring.take(1, 10)
    assert try_put(ring, "huge", 5000)
    assert not try_put(ring, "small", 1)
    # And out again, whatever a batch may hold.
    assert ring.take(10, 10) == ["huge"]
    assert ring.bytes_held == 0


def test_a_batch_ends_before_the_item_that_would_exceed_it():
    ring = Ring(8, 1000)
    for size in (40, 40, 40, 5):
        try_put(ring, size, size)
    assert ring.take(10, 100) == [40, 40]
    assert ring.take(1, 100) == [40]
    assert ring.take(10, 1) == [5]


def test_a_taken_item_is_not_kept_alive():
    ring = Ring(2, 10)
    try_put(ring, "x", 1)
    ring.take(1, 10)
    assert ring._items == [None, None]


async def test_the_consumer_wakes_for_an_item_and_the_producer_for_room():
    ring = Ring(2, 10)
    consumer = asyncio.ensure_future(ring.wait_for_items())
    await asyncio.sleep(0)
    assert not consumer.done()
    try_put(ring, "a", 1)
    await asyncio.wait_for(consumer, 5)
    producer = asyncio.ensure_future(ring.wait_for_space(1))
    await asyncio.sleep(0)
    assert not producer.done()
    ring.take(1, 10)
    await asyncio.wait_for(producer, 5)
    await asyncio.wait_for(ring.wait_for_space(10), 5)


async def test_room_for_bytes_is_waited_for_until_it_is_enough():
    ring = Ring(8, 100)
    for _ in range(3):
        try_put(ring, "x", 30)
    producer = asyncio.ensure_future(ring.wait_for_space(60))
    await asyncio.sleep(0)
    ring.take(1, 30)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not producer.done()
    ring.take(1, 30)
    await asyncio.wait_for(producer, 5)


async def test_a_cancelled_wait_leaves_the_ring_usable():
    ring = Ring(2, 10)
    for _ in range(3):
        waiting = asyncio.ensure_future(ring.wait_for_items())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert try_put(ring, "a", 1)
    await asyncio.wait_for(ring.wait_for_items(), 5)
    waiting = asyncio.ensure_future(ring.wait_for_space(1))
    await asyncio.sleep(0)
    waiting.cancel()
    assert ring.take(1, 10) == ["a"]
    await asyncio.wait_for(ring.wait_for_space(1), 5)


class Interrupted(Ring):
    """A ring whose producer is interrupted when it looks for a waiting consumer."""

    def __init__(self, slots, max_bytes):
        self._reads = 0
        self.interrupt_at = 0
        self.interrupt = lambda: None
        super().__init__(slots, max_bytes)

    @property
    def _consumer(self):
        found = self.__dict__.get("waiter")
        self._reads += 1
        if self._reads == self.interrupt_at:
            self.interrupt()
        return found

    @_consumer.setter
    def _consumer(self, waiter):
        self.__dict__["waiter"] = waiter


@pytest.mark.parametrize("read", [1, 2])
async def test_a_consumer_that_waits_again_while_it_is_being_woken_is_not_forgotten(read):
    ring = Interrupted(8, 100)
    first = ring.wait_for_items()
    first.send(None)
    waits = []

    def go_around():
        # The consumer in its own thread finds the item by itself and waits for the next one.
        assert ring.take(10, 100)
        first.close()
        again = ring.wait_for_items()
        waits.append((again, again.send(None)))

    ring._reads, ring.interrupt_at, ring.interrupt = 0, read, go_around
    try_put(ring, "a", 1)
    ring.interrupt_at = 0
    try_put(ring, "b", 1)
    if not waits:
        first.close()
        return
    again, future = waits[0]
    assert future.done()
    again.close()
