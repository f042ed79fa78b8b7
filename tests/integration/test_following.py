"""Following whole transactions from any starting point."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.errors import (
    GapError,
    UsageError,
)
from consumer_sdk.reading.starting_point import SourcePosition
from consumer_sdk.wire.envelope import encode
from tests.fixtures.publisher import EPOCH, Publisher
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from consumer_sdk.client import Client
    from consumer_sdk.reading.transactions import Transaction


async def next_transactions(source: Any, count: int) -> list[Transaction]:
    async with asyncio.timeout(20):
        return [await anext(source) for _ in range(count)]


async def test_a_transaction_ends_at_the_first_end_of_the_tables_read(
    publisher: Publisher, client: Client
) -> None:
    lsn = await publisher.transaction(
        ("users", "INSERT", {"id": 1}),
        ("orders", "INSERT", {"id": 2}),
        ("users", "UPDATE", {"id": 1}),
        ("items", "INSERT", {"id": 3}),
    )
    await publisher.insert(4)
    for tables, expected in (
        (["users"], [[1, 1], [4]]),
        (["orders", "users"], [[1, 2, 1], [4]]),
        (None, [[1, 2, 1, 3], [4]]),
        (["items", "users"], [[1, 1, 3], [4]]),
    ):
        changes = client.changes(tables, after="start")
        found = await next_transactions(changes, 2)
        assert [[event.data["id"] for event in one.events] for one in found] == expected
        assert found[0].commit_lsn == lsn
        assert found[0].end_lsn == lsn + 0x30
        await changes.aclose()


async def test_following_from_now_leaves_out_what_is_stored(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    changes = client.changes(["users"])
    waiting = asyncio.ensure_future(anext(changes))
    await eventually(publisher.is_read)
    await publisher.insert(2)
    assert [event.data["id"] for event in (await waiting).events] == [2]
    await changes.aclose()


async def test_a_transaction_under_way_at_the_start_is_left_out(
    publisher: Publisher, client: Client
) -> None:
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 1}))
    changes = client.changes(["users"])
    waiting = asyncio.ensure_future(anext(changes))
    await eventually(publisher.is_read)
    await publisher.send(
        publisher.event("users", "INSERT", lsn=0x900, seq=1, data={"id": 2}, last=True)
    )
    await publisher.insert(3)
    assert [event.data["id"] for event in (await waiting).events] == [3]
    await changes.aclose()


async def test_transactions_under_way_in_two_sources_are_left_out(
    publisher: Publisher, client: Client
) -> None:
    other = Publisher(publisher.client, publisher.subjects.prefix, source="crm")
    await other.send(other.event("accounts", "INSERT", lsn=0x700, seq=0, data={"id": 1}))
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 2}))
    await publisher.send_raw(publisher.subjects.change("users", "insert"), b"damaged", None)
    changes = client.changes(None, after=3)
    for one, table, lsn in ((other, "accounts", 0x700), (publisher, "users", 0x900)):
        await one.send(one.event(table, "INSERT", lsn=lsn, seq=1, data={"id": 3}, last=True))
    await other.insert(4, table="accounts")
    [found] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in found.events] == [4]
    await changes.aclose()


async def test_a_transaction_whose_beginning_was_trimmed_is_left_out(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1, 2, 3)
    await publisher.insert(4)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=3)
    changes = client.changes(None, after="start")
    [first] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in first.events] == [4]
    await changes.aclose()


async def test_following_after_a_sequence(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1)
    await publisher.insert(2)
    await publisher.insert(3)
    changes = client.changes(None, after=2)
    [found] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in found.events] == [3]
    await changes.aclose()


async def test_following_from_a_time(publisher: Publisher, client: Client) -> None:
    await publisher.insert(1)
    info = await publisher.js.get_msg(publisher.subjects.cdc_stream, 1)
    await publisher.insert(2)
    stored = await publisher.js.get_msg(publisher.subjects.cdc_stream, 2)
    assert info.time is not None
    assert stored.time is not None
    changes = client.changes(None, after=stored.time)
    [found] = await next_transactions(changes, 1)
    assert [event.data["id"] for event in found.events] == [2]
    await changes.aclose()
    with pytest.raises(UsageError, match="time zone"):
        await anext(client.changes(None, after=datetime(2030, 1, 1)))  # noqa: DTZ001
    changes = client.changes(None, after=datetime(2090, 1, 1, tzinfo=UTC))
    waiting = asyncio.ensure_future(anext(changes))
    await eventually(publisher.is_read)
    await publisher.insert(3)
    assert [event.data["id"] for event in (await waiting).events] == [3]
    await changes.aclose()


@pytest.mark.parametrize("wanted", range(0, 60, 7))
async def test_following_after_a_position_of_each_source(
    publisher: Publisher, client: Client, wanted: int
) -> None:
    other = Publisher(publisher.client, publisher.subjects.prefix, source="crm")
    positions = []
    for number in range(60):
        lsn = await publisher.insert(number)
        positions.append(SourcePosition(EPOCH, lsn, 0))
        if number % 9 == 0:
            await other.insert(1000 + number, table="accounts")
            await publisher.progress()
    last = SourcePosition(EPOCH, other.lsn, 0)
    changes = client.changes(None, after={"shop": positions[wanted], "crm": last})
    if wanted < 59:
        found = await next_transactions(changes, 59 - wanted)
        assert [one.events[0].data["id"] for one in found] == list(range(wanted + 1, 60))
    await changes.aclose()


async def test_a_position_that_was_trimmed_is_a_gap(publisher: Publisher, client: Client) -> None:
    lsn = await publisher.insert(1)
    await publisher.insert(2)
    await publisher.insert(3)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=3)
    with pytest.raises(GapError, match="position of source shop"):
        await anext(client.changes(None, after={"shop": SourcePosition(EPOCH, lsn, 0)}))


async def test_a_new_epoch_after_the_position_is_a_gap(
    publisher: Publisher, client: Client
) -> None:
    lsn = await publisher.insert(1)
    publisher.epoch += 1
    await publisher.insert(2)
    with pytest.raises(GapError, match="new epoch"):
        await anext(client.changes(None, after={"shop": SourcePosition(EPOCH, lsn, 0)}))


async def test_logical_messages_join_their_transaction(
    publisher: Publisher, client: Client
) -> None:
    await publisher.message("outbox", "alone")
    await publisher.progress()
    changes = client.changes(["users"], after="start", messages=True)
    [found] = await next_transactions(changes, 1)
    assert [event.data for event in found.events] == ["alone"]
    await changes.aclose()


async def test_logical_messages_of_one_prefix(publisher: Publisher, client: Client) -> None:
    await publisher.message("outbox", "one")
    await publisher.message("other.prefix", "two")
    await publisher.message("outbox", "three")
    messages = client.messages("outbox", after="start")
    async with asyncio.timeout(10):
        assert [(await anext(messages)).event.data for _ in range(2)] == ["one", "three"]
    await messages.aclose()


async def test_single_events_stream_before_their_transaction_ends(
    publisher: Publisher, client: Client
) -> None:
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 1}))
    events = client.changes(["users"], after="start", as_events=True)
    async with asyncio.timeout(10):
        assert (await anext(events)).event.data == {"id": 1}
    await events.aclose()


async def test_a_foreign_starting_point_is_refused(publisher: Publisher, client: Client) -> None:
    for after in ("yesterday", True, None, -1, {}):
        with pytest.raises(UsageError):
            await anext(client.changes(None, after=after))  # type: ignore[call-overload]


@pytest.mark.parametrize("tables", [["users"], None], ids=["some", "all"])
async def test_starting_now_leaves_out_a_transaction_that_another_source_has_overtaken(
    publisher: Publisher, client: Client, prefix: str, tables: list[str] | None
) -> None:
    other = Publisher(publisher.client, prefix, source="other")
    await publisher.put_schema()
    publisher.lsn += 0x100
    first_half = publisher.event("users", "INSERT", lsn=publisher.lsn, data={"id": 1})
    await publisher.send(first_half)
    for number in range(100):
        await other.insert(number, table="others")
    async with aclosing(client.changes(tables, after="now")) as changes:
        first = asyncio.ensure_future(anext(changes))
        await eventually(publisher.is_read)
        end = {"seq": 1, "msg_id": "second half", "last": True, "end_lsn": publisher.lsn + 0x30}
        await publisher.send({**first_half, **end})
        await publisher.insert(7)
        assert [one.data["id"] for one in (await asyncio.wait_for(first, 10)).events] == [7]


def rows(found: list[Transaction]) -> list[list[Any]]:
    """What the rows and messages of some transactions hold."""
    return [
        [event.data if event.operation == "MESSAGE" else event.data["id"] for event in one.events]
        for one in found
    ]


async def test_packed_rows_that_begin_what_is_retained_are_a_whole_transaction(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(1)
    packed = [{"data": {"id": 2}}, {"data": {"id": 3}}]
    await publisher.send(publisher.event("users", "INSERT", lsn=0x1180, rows=packed, last=True))
    await publisher.insert(4)
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=2)
    changes = client.changes(None, after="start")
    assert rows(await next_transactions(changes, 2)) == [[2, 3], [4]]
    await changes.aclose()


async def test_transactions_of_two_sources_whose_beginning_was_trimmed_are_left_out(
    publisher: Publisher, client: Client
) -> None:
    other = Publisher(publisher.client, publisher.subjects.prefix, source="crm")
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 1}))
    await other.send(other.event("accounts", "INSERT", lsn=0x700, seq=0, data={"id": 1}))
    await publisher.progress(0x800)
    for one, table, lsn in ((other, "accounts", 0x700), (publisher, "users", 0x900)):
        await one.send(one.event(table, "INSERT", lsn=lsn, seq=1, data={"id": 2}, last=True))
    await other.insert(3, table="accounts")
    await publisher.js.purge_stream(publisher.subjects.cdc_stream, seq=3)
    changes = client.changes(None, after="start")
    assert rows(await next_transactions(changes, 1)) == [[3]]
    await changes.aclose()


async def test_what_a_new_epoch_leaves_unfinished_is_not_shown(
    publisher: Publisher, client: Client
) -> None:
    await publisher.send(publisher.event("users", "INSERT", lsn=0x900, seq=0, data={"id": 1}))
    publisher.epoch += 1
    await publisher.progress(gap={"reason": "slot lost"})
    await publisher.insert(2)
    for messages in (False, True):
        changes = client.changes(["users"], after="start", messages=messages)
        assert rows(await next_transactions(changes, 1)) == [[2]]
        await changes.aclose()


async def test_further_ends_after_the_position_are_no_transaction(
    publisher: Publisher, client: Client
) -> None:
    await publisher.transaction(("users", "INSERT", {"id": 1}), ("orders", "INSERT", {"id": 2}))
    await publisher.insert(3)
    changes = client.changes(None, after="start")
    [first] = await next_transactions(changes, 1)
    await changes.aclose()
    for after in ({"shop": SourcePosition(first.epoch, *first.position)}, first.last_sequence):
        changes = client.changes(None, after=after)
        assert rows(await next_transactions(changes, 1)) == [[3]]
        await changes.aclose()


async def test_messages_behind_the_last_change_do_not_move_the_position_back(
    publisher: Publisher, client: Client
) -> None:
    lsn = await publisher.insert(1, 2, 3)
    publisher.lsn -= 0x100
    await publisher.message("outbox", "behind", seq=3, end_lsn=lsn + 0x30)
    await publisher.insert(4)
    changes = client.changes(None, after="start", messages=True)
    found = await next_transactions(changes, 2)
    await changes.aclose()
    for one, rest in zip(found, ([["behind"], [4]], [[4]]), strict=True):
        at = SourcePosition(one.epoch, *one.position)
        changes = client.changes(None, after={"shop": at}, messages=True)
        assert rows(await next_transactions(changes, len(rest))) == rest
        await changes.aclose()


async def test_the_position_of_any_single_event_leaves_out_no_change(
    publisher: Publisher, client: Client
) -> None:
    await publisher.insert(0)
    lsn = await publisher.message("outbox", "ahead", seq=0)
    notice = {**publisher.schema_document(), "operation": "SCHEMA"}
    subject = publisher.subjects.change("users", "schema")
    await publisher.send(notice, subject=subject)
    await publisher.send(publisher.event("users", "INSERT", lsn=lsn, seq=0, data={"id": 1}))
    await publisher.send(notice, subject=subject)
    await publisher.send(
        publisher.event("users", "INSERT", lsn=lsn, seq=1, data={"id": 2}, last=True)
    )
    await publisher.insert(3)

    async def next_ids(after: Any, end: int) -> tuple[list[Any], list[Any]]:
        events = client.changes(None, after=after, as_events=True, messages=True)
        seen: list[Any] = []
        async with asyncio.timeout(20):
            while not seen or seen[-1].operation != "INSERT" or seen[-1].data["id"] != end:
                seen.append((await anext(events)).event)
        await events.aclose()
        return seen, [event.data["id"] for event in seen if event.operation == "INSERT"]

    events, _ = await next_ids(1, 2)
    assert len(events) == 5
    for event, rest in zip(events, ([1, 2, 3], [1, 2, 3], [2, 3], [2, 3], [3]), strict=True):
        at = SourcePosition(event.epoch, *event.position)
        assert (await next_ids({"shop": at}, 3))[1] == rest


async def test_a_position_is_found_behind_a_long_run_of_progress(
    publisher: Publisher, client: Client
) -> None:
    lsn = await publisher.insert(1)
    record = encode({"v": 1, "source": "shop", "epoch": EPOCH, "lsn": lsn + 0x30, "stream_seq": 1})
    for _ in range(10_000):
        await publisher.client.publish(publisher.subjects.progress("shop"), record)
    await publisher.client.flush()
    await publisher.insert(2)
    requests = client.nc.stats["out_msgs"]
    changes = client.changes(None, after={"shop": SourcePosition(EPOCH, lsn, 0)})
    assert rows(await next_transactions(changes, 1)) == [[2]]
    assert client.nc.stats["out_msgs"] - requests < 1000
    await changes.aclose()
