"""The ring against a deque as its model, and between two threads with a loop each."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bridge.publish.ring import Ring

sizes = st.integers(0, 60)


def try_put(ring, item, size):
    """Put one item; whether there was room."""
    return ring.put_many([item], [size], 0) == 1


class RingMachine(RuleBasedStateMachine):
    """Every sequence of calls gives what a bounded deque of (item, size) gives."""

    @initialize(exponent=st.integers(1, 5), max_bytes=st.integers(1, 100))
    def make(self, exponent, max_bytes):
        self.slots = 2**exponent - 1
        self.max_bytes = max_bytes
        self.ring = Ring(2**exponent, max_bytes)
        self.model = deque()
        self.count = 0

    def fits(self, size):
        held = sum(one[1] for one in self.model)
        return len(self.model) < self.slots and (not self.model or held + size <= self.max_bytes)

    @rule(size=sizes)
    def put(self, size):
        assert self.ring.fits(size) == self.fits(size)
        accepted = try_put(self.ring, self.count, size)
        assert accepted == self.fits(size)
        if accepted:
            self.model.append((self.count, size))
            self.count += 1

    @rule(many=st.lists(sizes, max_size=12), start=st.integers(0, 3))
    def put_many(self, many, start):
        start = min(start, len(many))
        numbers = list(range(self.count, self.count + len(many)))
        place = self.ring.put_many(numbers, many, start)
        for number, size in list(zip(numbers, many, strict=True))[start:place]:
            assert self.fits(size)
            self.model.append((number, size))
        assert place == len(many) or not self.fits(many[place])
        self.count += len(many)

    @rule(max_items=st.integers(1, 40), max_bytes=st.integers(0, 120))
    def take(self, max_items, max_bytes):
        wanted, total = [], 0
        while self.model and len(wanted) < max_items:
            if wanted and total + self.model[0][1] > max_bytes:
                break
            item, size = self.model.popleft()
            wanted.append(item)
            total += size
        assert self.ring.take(max_items, max_bytes) == wanted

    @invariant()
    def agree(self):
        if not hasattr(self, "ring"):
            return
        assert len(self.ring) == len(self.model)
        assert self.ring.bytes_held == sum(size for _, size in self.model)
        assert len(self.ring) <= self.slots
        assert (
            self.ring.bytes_held <= max(self.max_bytes, self.model[0][1] if self.model else 0)
            or len(self.model) == 1
        )


TestRing = RingMachine.TestCase
TestRing.settings = settings(stateful_step_count=25)


@given(st.lists(sizes, max_size=300), st.integers(1, 4), st.integers(1, 120), st.randoms())
def test_two_tasks_of_one_loop_pass_everything_on_in_order(all_sizes, exponent, max_bytes, rnd):
    asyncio.run(pass_on(Ring(2**exponent, max_bytes), all_sizes, rnd))


async def pass_on(ring, all_sizes, rnd):
    got = []

    async def consume():
        while len(got) < len(all_sizes):
            await ring.wait_for_items()
            got.extend(ring.take(rnd.randint(1, 5), rnd.randint(1, 100)))

    async def produce():
        for number, size in enumerate(all_sizes):
            while not try_put(ring, number, size):
                await ring.wait_for_space(size)
            if rnd.random() < 0.2:
                await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(consume(), produce()), 30)
    assert got == list(range(len(all_sizes)))


@pytest.mark.parametrize(("slots", "max_bytes"), [(2, 10), (4, 64), (64, 300), (1024, 10_000)])
def test_two_threads_with_a_loop_each_pass_everything_on_in_order(slots, max_bytes):
    """A lost wake-up would leave both sides waiting for ever."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    ring = Ring(slots, max_bytes)
    count = 12_000
    got: list[int] = []
    highest = 0

    async def produce():
        rnd = random.Random(seed)
        number = 0
        while number < count:
            numbers = list(range(number, min(count, number + rnd.randint(1, 6))))
            lengths = [rnd.choice((0, 1, 3, 9, 9, 40)) for _ in numbers]
            place = 0
            while (place := ring.put_many(numbers, lengths, place)) < len(numbers):
                await ring.wait_for_space(lengths[place])
            number += len(numbers)
            if try_put(ring, number, 1) if number < count else False:
                number += 1
            if rnd.random() < 0.01:
                await asyncio.sleep(0)

    async def consume():
        nonlocal highest
        rnd = random.Random(seed + 1)
        while len(got) < count:
            await ring.wait_for_items()
            highest = max(highest, ring.bytes_held)
            got.extend(ring.take(rnd.randint(1, slots), rnd.randint(1, 100)))

    # Threads change places after almost every instruction.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=asyncio.run, args=[side()]) for side in (produce, consume)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    try:
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"stuck after {len(got)} items"
    finally:
        sys.setswitchinterval(interval)
    assert got == list(range(count))
    assert highest <= max(max_bytes, 40)
