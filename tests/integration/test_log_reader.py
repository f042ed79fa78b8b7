"""The log by sequence: slices, errors, waiting for more, and reading without an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.errors import (
    GapError,
    UsageError,
)
from consumer_sdk.reading.log import read_log_blocking, read_log_blocking_raw
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from consumer_sdk.client import Client
    from tests.fixtures.publisher import Publisher


async def test_slices_of_the_log_put_together_are_the_log(
    publisher: Publisher, client: Client
) -> None:
    for number in range(40):
        await publisher.insert(number, table="users" if number % 3 else "orders")
    log = client.log()
    bounds = await log.bounds()
    assert (bounds.first, bounds.last) == (1, 40)
    for subjects in (None, [client.subjects.table_filter("orders")]):
        whole = await read_slice(client, 1, 41, subjects)
        for cut in (1, 2, 13, 39, 40):
            parts = await asyncio.gather(
                read_slice(client, 1, cut, subjects), read_slice(client, cut, 41, subjects)
            )
            assert parts[0] + parts[1] == whole
    assert len(whole) == 14


async def read_slice(
    client: Client, first: int, end: int, subjects: list[str] | None
) -> list[tuple[int, Any]]:
    async with asyncio.timeout(20):
        return [
            (one.stream_seq, one.event.data["id"])
            async for batch in client.log().read(first, end, subjects)
            for one in batch
        ]


async def test_a_purged_range_is_an_error(publisher: Publisher, client: Client) -> None:
    await publisher.insert(*range(10))
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=5)
    with pytest.raises(GapError):
        await read_slice(client, 4, 8, None)
    assert len(await read_slice(client, 5, 8, None)) == 3
    with pytest.raises(UsageError, match="goes beyond"):
        await read_slice(client, 5, 12, None)
    with pytest.raises(UsageError):
        await read_slice(client, 6, 5, None)
    assert await read_slice(client, 2, 2, None) == []


async def test_another_stream_than_expected_is_an_error(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    with pytest.raises(GapError, match="recreated"):
        async for _ in client.log().read(1, 2, created=12345):
            pass


async def test_polling_returns_when_something_is_stored(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    log = client.log()
    assert (await log.poll(0)).last == 1
    assert (await log.poll(1, timeout=0.05)).last == 1
    waiting = asyncio.ensure_future(log.poll(1, timeout=30))
    await eventually(publisher.is_read)
    await publisher.insert(2)
    assert (await asyncio.wait_for(waiting, 5)).last == 2


async def test_the_log_can_be_read_without_an_event_loop(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(*range(25))

    def read() -> tuple[list[Any], int]:
        decoded = [
            one.event.data["id"]
            for batch in read_log_blocking(client.settings, 3, 20, max_batch=4)
            for one in batch
        ]
        raw = sum(len(batch) for batch in read_log_blocking_raw(client.settings, 1, 26))
        unfinished = read_log_blocking(client.settings, 1, 26, max_batch=2)
        next(iter(unfinished))
        unfinished.close()  # type: ignore[attr-defined]
        return decoded, raw

    assert await asyncio.to_thread(read) == (list(range(2, 19)), 25)
    await eventually(publisher.is_left_alone)
