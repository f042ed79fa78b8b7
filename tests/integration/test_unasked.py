"""What comes and goes while a slow reader asks for nothing is a gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from consumer_sdk.errors import GapError
from consumer_sdk.reading.proof import Selection
from consumer_sdk.reading.pull import PullConsumer
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from consumer_sdk.client import Client
    from tests.fixtures.publisher import Publisher

WINDOW = 4


@pytest.fixture
async def reader(publisher: Publisher, client: Client) -> AsyncIterator[PullConsumer]:
    """Has asked for four messages and got them, each as the newest of the stream."""
    stream = publisher.subjects.cdc_stream
    everything = Selection(stream, [publisher.subjects.cdc_all])
    consumer = PullConsumer(client.nc, everything, window=WINDOW)
    assert await consumer.take(1, wait=0.1) == []
    for number in range(1, WINDOW + 1):
        await publisher.insert(number)
        await eventually(lambda number=number: len(consumer._demand.buffer) == number)
    yield consumer
    await consumer.close()


async def take_all(reader: PullConsumer, limit: int) -> None:
    for _ in range(WINDOW + 1):
        await reader.take(limit, wait=5)


@pytest.mark.parametrize("limit", [1, WINDOW], ids=["one by one", "all at once"])
async def test_messages_purged_while_a_reader_asked_for_nothing_are_a_gap(
    publisher: Publisher, reader: PullConsumer, limit: int
) -> None:
    await publisher.insert(5)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    await publisher.insert(6)
    with pytest.raises(GapError, match="trimmed or purged"):
        await take_all(reader, limit)


async def test_messages_purged_with_nothing_after_them_are_a_gap_too(
    publisher: Publisher, reader: PullConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("consumer_sdk.reading.demand.EXPIRES_SECONDS", 1.0)
    await publisher.insert(5)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    with pytest.raises(GapError, match="trimmed or purged"):
        await take_all(reader, WINDOW)


async def test_messages_that_a_reader_had_asked_for_are_none(
    publisher: Publisher, reader: PullConsumer
) -> None:
    assert len(await reader.take(WINDOW, wait=5)) == WINDOW
    assert await reader.take(WINDOW, wait=0.2) == []
    await publisher.insert(5)
    await eventually(lambda: len(reader._demand.buffer) == 1)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream)
    await publisher.insert(6)
    await eventually(lambda: len(reader._demand.buffer) == 2)
    assert len(await reader.take(WINDOW, wait=5)) == 2
