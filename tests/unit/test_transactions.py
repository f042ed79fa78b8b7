"""Grouping events into transactions, without any server."""

from __future__ import annotations

from typing import Any

import pytest

from consumer_sdk.errors import GapError
from consumer_sdk.reading.decoder import Stored
from consumer_sdk.reading.transactions import Transaction, TransactionBuilder
from consumer_sdk.wire.envelope import Event


def event(
    operation: str, lsn: int, seq: int = 0, *, source: str = "a", epoch: int = 1, **fields: Any
) -> Event:
    return Event(
        source=source, epoch=epoch, table="t", schema="public", operation=operation,
        commit_lsn=lsn, seq=seq, xid=7, ts=9, schema_version=1, relation_id=1, msg_id="",
        subject="",
        **fields,
    )  # fmt: skip


def group(*events: Event, cut: set[tuple[str, int]] | None = None) -> list[Transaction]:
    builder = TransactionBuilder(frozenset(cut or ()))
    return [
        transaction
        for number, one in enumerate(events, 1)
        for transaction in builder.push(Stored(number, one))
    ]


def shape(found: list[Transaction]) -> list[tuple[int, list[int]]]:
    return [(one.commit_lsn, [inner.seq for inner in one.events]) for one in found]


def test_the_last_change_completes_a_transaction() -> None:
    found = group(event("INSERT", 5), event("UPDATE", 5, 1, last=True, end_lsn=6))
    assert shape(found) == [(5, [0, 1])]
    assert (found[0].first_sequence, found[0].last_sequence, found[0].end_lsn) == (1, 2, 6)
    assert found[0].position == (5, 1)


def test_a_commit_message_completes_it_and_further_ends_are_ignored() -> None:
    found = group(
        event("INSERT", 5),
        event("COMMIT", 5, 3, end_lsn=6),
        event("COMMIT", 5, 4, end_lsn=6),
        event("INSERT", 8, last=True),
    )
    assert shape(found) == [(5, [0]), (8, [0])]
    assert found[0].position == (5, 3)


def test_sources_interleave() -> None:
    found = group(
        event("INSERT", 5),
        event("INSERT", 2, source="b"),
        event("INSERT", 5, 1, last=True),
        event("INSERT", 2, 1, source="b", last=True),
    )
    assert [(one.source, len(one.events)) for one in found] == [("a", 2), ("b", 2)]


def test_a_schema_notice_travels_with_the_rows_that_need_it() -> None:
    found = group(
        event("SCHEMA", 4),
        event("INSERT", 5),
        event("SCHEMA", 5),
        event("INSERT", 5, 1, last=True),
        event("SCHEMA", 9),
    )
    assert [[inner.operation for inner in one.events] for one in found] == [
        ["SCHEMA", "INSERT", "SCHEMA", "INSERT"]
    ]
    assert found[0].commit_lsn == 5


def test_logical_messages_alone_are_complete_when_their_source_moves_on() -> None:
    first = event("MESSAGE", 5, data="x")
    assert shape(group(first, event("INSERT", 8, last=True))) == [(5, [0]), (8, [0])]
    assert shape(group(first, event("PROGRESS", 4))) == []
    assert shape(group(first, event("PROGRESS", 6))) == [(5, [0])]
    assert shape(group(first, event("PROGRESS", 6, source="b"))) == []


def test_changes_without_an_end_are_never_a_transaction() -> None:
    half = event("INSERT", 5), event("INSERT", 5, 1)
    assert shape(group(*half, event("INSERT", 3, epoch=2, last=True))) == [(3, [0])]
    assert shape(group(*half, event("PROGRESS", 9, epoch=2))) == []
    for later in (event("INSERT", 8, last=True), event("PROGRESS", 6)):
        with pytest.raises(GapError, match="has no end"):
            group(*half, later)


def test_logical_messages_behind_the_last_change_come_on_their_own() -> None:
    found = group(
        event("INSERT", 5, 0, last=True, end_lsn=6),
        event("MESSAGE", 5, 1, data="one"),
        event("MESSAGE", 5, 1, data="two", end_lsn=6),
        event("COMMIT", 5, 1, end_lsn=6),
        event("INSERT", 8, last=True),
    )
    assert [[inner.operation for inner in one.events] for one in found] == [
        ["INSERT"], ["MESSAGE", "MESSAGE"], ["INSERT"],
    ]  # fmt: skip
    assert [one.commit_lsn for one in found] == [5, 5, 8]


def test_a_message_that_says_the_end_completes_its_transaction() -> None:
    found = group(event("INSERT", 5), event("MESSAGE", 5, 2, end_lsn=9), event("COMMIT", 5, 2))
    assert [len(one.events) for one in found] == [2]


def test_messages_and_changes_of_one_transaction_stay_together() -> None:
    found = group(event("MESSAGE", 5), event("INSERT", 5, 0, last=True), event("COMMIT", 5, 1))
    assert [[inner.operation for inner in one.events] for one in found] == [["MESSAGE", "INSERT"]]


def test_a_transaction_cut_by_the_start_is_left_out() -> None:
    found = group(
        event("INSERT", 5, 3), event("INSERT", 5, 4, last=True), event("INSERT", 6, last=True),
        cut={("a", 5)},
    )  # fmt: skip
    assert shape(found) == [(6, [0])]


def test_the_same_lsn_in_another_epoch_is_another_transaction() -> None:
    found = group(event("INSERT", 5, last=True), event("INSERT", 5, epoch=2, last=True))
    assert [one.epoch for one in found] == [1, 2]


@pytest.mark.parametrize("operation", ["INSERT", "TRUNCATE", "DELETE"])
def test_one_change_is_a_whole_transaction(operation: str) -> None:
    assert shape(group(event(operation, 5, last=True))) == [(5, [0])]
