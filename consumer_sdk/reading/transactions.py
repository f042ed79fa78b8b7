"""Collects the events of a feed into whole transactions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from consumer_sdk.errors import GapError
from consumer_sdk.wire.position import Position, format_lsn

if TYPE_CHECKING:
    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.wire.envelope import Event

COUNTED = frozenset({"INSERT", "UPDATE", "DELETE", "TRUNCATE", "COMMIT"})
"""Operations that have an ordinal of their own in the transaction."""


@dataclass(slots=True)
class Transaction:
    """One transaction of a source, as far as it touches the tables being read.

    `events` holds changes, schema notices and logical messages in order, without COMMIT events.
    `last_seq` is the `seq` of the last event read, COMMIT included. `end_lsn` is 0 if the events
    do not carry it.
    """

    source: str
    epoch: int
    commit_lsn: int
    end_lsn: int
    xid: int
    ts: int
    events: list[Event]
    first_sequence: int
    last_sequence: int
    last_seq: int = 0

    @property
    def position(self) -> Position:
        """The position of its last event; reading after it continues with the next transaction."""
        return Position(self.commit_lsn, self.last_seq)


class TransactionBuilder:
    """Collects events until their transaction ends.

    The first end with a commit LSN completes the transaction; further ends with that LSN are
    ignored. Sources may interleave in the stream; transactions are returned in the order of their
    ends. A schema notice belongs to the transaction that follows it.

    Logical messages written after a transaction's last change are stored after its end. They form
    a second transaction with the same commit LSN. Messages without an end are complete when the
    next transaction of their source begins. Changes without an end are dropped if a new epoch
    begins after them; otherwise GapError is raised. Events of the transactions in `cut`, given as
    (source, commit LSN), are dropped, because the start of these transactions was not read.
    """

    def __init__(self, cut: frozenset[tuple[str, int]] = frozenset()) -> None:
        self._cut = cut
        self._open: dict[str, Transaction] = {}
        self._ended: dict[str, tuple[int, int]] = {}
        self._notices: dict[str, list[Event]] = {}

    def push(self, stored: Stored) -> list[Transaction]:
        """Add the next event; returns the transactions it completes."""
        event = stored.event
        source = event.source
        current = self._open.get(source)
        if event.operation == "PROGRESS":
            if current is not None and event.commit_lsn > current.commit_lsn:
                return self._without_end(stored)
            return []
        if event.operation == "SCHEMA":
            waiting = self._notices.setdefault(source, []) if current is None else current.events
            waiting.append(event)
            return []
        mark = (event.epoch, event.commit_lsn)
        is_message = event.operation == "MESSAGE"
        has_ended = self._ended.get(source) == mark and not is_message
        if has_ended or (source, event.commit_lsn) in self._cut:
            return []
        complete = []
        if current is not None and (current.epoch, current.commit_lsn) != mark:
            complete += self._without_end(stored)
            current = None
        if current is None:
            if event.operation == "COMMIT":
                # Its changes were stored before the start of this reader.
                self._ended[source] = mark
                return complete
            current = self._begin(stored)
        current.last_sequence = stored.stream_seq
        current.last_seq = event.seq
        if event.operation != "COMMIT":
            current.events.append(event)
        if event.last or event.operation == "COMMIT" or (is_message and event.end_lsn):
            current.end_lsn = event.end_lsn
            self._ended[source] = mark
            complete.append(self._open.pop(source))
        return complete

    def _without_end(self, following: Stored) -> list[Transaction]:
        """Close the open transaction, which is complete only if it holds just logical messages."""
        transaction = self._open.pop(following.event.source)
        if not any(event.operation in COUNTED for event in transaction.events):
            return [transaction]
        if transaction.epoch == following.event.epoch:
            raise GapError(
                f"transaction {format_lsn(transaction.commit_lsn)} of source "
                f"{transaction.source} has no end",
                transaction.last_sequence + 1,
                following.stream_seq,
            )
        return []

    def _begin(self, stored: Stored) -> Transaction:
        event = stored.event
        transaction = Transaction(
            source=event.source,
            epoch=event.epoch,
            commit_lsn=event.commit_lsn,
            end_lsn=0,
            xid=event.xid,
            ts=event.ts,
            events=self._notices.pop(event.source, []),
            first_sequence=stored.stream_seq,
            last_sequence=stored.stream_seq,
        )
        self._open[event.source] = transaction
        return transaction
