"""Where batches may end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as some

from consumer_sdk.reading.decoder import Stored
from consumer_sdk.wire.envelope import Event
from spark_consumer.source.transaction_ends import BatchEnds

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def stored(sequence: int, mark: str) -> Stored:
    """A change `c`, the last change `l`, or a commit message `e` of some transaction."""
    operation = {"c": "UPDATE", "l": "UPDATE", "e": "COMMIT", "s": "SCHEMA"}[mark]
    event = Event("s", 1, "t", "public", operation, 9, 0, 0, 0, 1, 1, "", "", {}, last=mark == "l")
    return Stored(sequence, event)


class Log:
    """A log written as text: one character for each sequence from 1 on, `.` for other tables."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.read_messages = 0

    async def read(self, first: int, end: int) -> AsyncGenerator[list[Stored], None]:
        for sequence in range(first, end):
            self.read_messages += 1
            mark = self.text[sequence - 1]
            if mark != ".":
                yield [stored(sequence, mark)]


@pytest.mark.parametrize(
    ("text", "after", "goal", "expected"),
    [
        ("ccl", 0, 3, 3),
        ("cclcc", 0, 5, 3),
        ("ccl..", 0, 5, 5),
        (".....", 0, 5, 5),
        ("..s..", 0, 5, 5),
        ("cce.c", 0, 5, 3),
        ("cclccccl", 0, 5, 3),
        ("cccccccl", 0, 3, 8),
        ("cccccccc", 0, 3, 0),
        ("lcccc", 1, 5, 1),
        ("l", 1, 1, 1),
        ("cle..cl", 2, 5, 5),
    ],
)
async def test_a_batch_ends_where_no_transaction_is_under_way(
    text: str, after: int, goal: int, expected: int
) -> None:
    log = Log(text)
    assert await BatchEnds(log.read).find(after, goal, len(text)) == expected


async def test_a_long_transaction_is_read_once_while_its_end_is_awaited() -> None:
    log = Log("c" * 5000)
    ends = BatchEnds(log.read)
    assert await ends.find(0, 1000, 5000) == 0
    read = log.read_messages
    assert await ends.find(0, 1000, 5000) == 0
    assert log.read_messages == read
    log.text += "ccl" + "." * 10
    assert await ends.find(0, 1000, 5013) == 5003
    assert log.read_messages <= read + 20


async def test_packed_messages_are_counted_as_their_rows() -> None:
    log = Log("")

    async def read(first: int, end: int) -> AsyncGenerator[list[Stored], None]:
        yield [*(stored(1, "c") for _ in range(9)), stored(1, "l")]

    ends = BatchEnds(read)
    assert await ends.find(0, 1, 1) == 1
    assert ends.rows_per_message == 10
    assert log.read_messages == 0


Transactions = list[list[tuple[str, int]]]

# Each transaction is a list of changes: the table, and how many rows share its message. Tables a
# and b are read, o is not; N notes a schema before its table's next change.
TRANSACTIONS = some.lists(
    some.lists(some.tuples(some.sampled_from("abNo"), some.integers(1, 3)), min_size=1, max_size=6),
    max_size=12,
)


def messages_of(transactions: Transactions) -> list[tuple[str, list[Event]]]:
    """The messages of a log as the bridge writes it, each with the table it belongs to."""
    log: list[tuple[str, list[Event]]] = []

    def event(table: str, operation: str, lsn: int, *, last: bool = False) -> Event:
        return Event("s", 1, table, "public", operation, lsn, 0, 0, 0, 1, 1, "", "", {}, last=last)

    for number, changes in enumerate(transactions, start=1):
        touched = list(dict.fromkeys(table for table, _ in changes if table != "N"))
        final = max((i for i, (table, _) in enumerate(changes) if table != "N"), default=-1)
        for index, (table, rows) in enumerate(changes):
            if table == "N":
                # It carries the position at which the version was found: any earlier one.
                log.append(("a", [event("a", "SCHEMA", 1)]))
                continue
            marks = [index == final and row == rows - 1 for row in range(rows)]
            log.append((table, [event(table, "UPDATE", number, last=mark) for mark in marks]))
        if final >= 0:
            others = [table for table in touched if table != changes[final][0]]
            log += [(table, [event(table, "COMMIT", number)]) for table in others]
    return log


@given(TRANSACTIONS, some.data())
def test_batches_of_any_log_hold_each_transaction_once_and_whole(
    transactions: Transactions, draw: some.DataObject
) -> None:
    log = messages_of(transactions)
    tables = draw.draw(some.sampled_from(["a", "b", "ab"]))

    async def read(first: int, end: int) -> AsyncGenerator[list[Stored], None]:
        for sequence in range(first, end):
            table, events = log[sequence - 1]
            if table in tables:
                yield [Stored(sequence, event) for event in events]

    async def batches() -> list[list[int]]:
        ends, after, last = BatchEnds(read), 0, 0
        found = []
        while after < len(log):
            last = draw.draw(some.integers(min(len(log), last + 1), len(log)))
            goal = min(last, after + draw.draw(some.integers(1, 6)))
            end = await ends.find(after, goal, last)
            assert after <= end <= last
            batch = [e.commit_lsn async for es in read(after + 1, end + 1) for e in _changes(es)]
            found.append(batch)
            assert end > after or last < len(log)
            after = end
        return found

    taken = asyncio.run(batches())
    wanted = [number for number, changes in enumerate(transactions, 1) for table, rows in changes
              if table in tables for _ in range(rows)]  # fmt: skip
    assert [lsn for batch in taken for lsn in batch] == wanted
    lsns = [lsn for batch in taken for lsn in set(batch)]
    assert len(lsns) == len(set(lsns))


def _changes(found: list[Stored]) -> list[Event]:
    return [one.event for one in found if one.event.operation == "UPDATE"]
