"""Reads the whole CDC stream and checks it against the rules and the source.

The rules, for every source and epoch: positions increase with the stream sequence, the ordinals of
a transaction have no gaps, every transaction has an end, no message id occurs twice, a row follows
the schema message of its version, and a progress record is never ahead of the changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from consumer_sdk.wire import Event, Subjects, decode_payload, read_events
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.position import format_lsn
from tests.fault.stream_reader import load_dictionaries, read_stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nats.aio.client import Client

    from tests.fixtures.stored import StoredMessage


@dataclass
class Transaction:
    """The messages of one transaction in the stream."""

    commit_lsn: int
    end_lsn: int = 0
    tables: list[str] = field(default_factory=list)
    changes: int = 0
    next_seq: int = 0
    next_ordinal: int = 0
    notices: int = 0
    has_last: bool = False
    last_sequence: int = 0

    @property
    def complete(self) -> bool:
        """Whether the stream has its end for every table that it changed."""
        if not self.tables:
            return self.end_lsn > 0
        return self.has_last and self.notices == len(self.tables) - 1


@dataclass
class SourceHistory:
    """The history of one source."""

    epochs: list[int] = field(default_factory=list)
    transactions: list[Transaction] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    messages: list[Event] = field(default_factory=list)
    progress: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    fences: int = 0
    schemas: dict[str, int] = field(default_factory=dict)
    recorded_lsn: int = 0

    @property
    def gaps(self) -> list[dict[str, Any]]:
        """The gaps that progress records announce."""
        return [document["gap"] for _, document in self.progress if document.get("gap")]


class StreamHistory:
    """Reads messages in stream order; `violations` lists the broken rules."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self.dictionaries: dict[str, bytes] = {}
        """The dictionaries of compressed messages; the caller loads them before reading."""
        self.violations: list[str] = []
        self.sources: dict[str, SourceHistory] = {}
        self.foreign: list[StoredMessage] = []
        """Messages that do not follow the wire format."""
        self._ids: dict[str, int] = {}

    def source(self, name: str) -> SourceHistory:
        return self.sources.setdefault(name, SourceHistory())

    def take(self, messages: Iterable[StoredMessage]) -> None:
        """Read on."""
        for message in messages:
            self._take(message)

    def _wrong(self, message: StoredMessage, what: str) -> None:
        self.violations.append(f"#{message.sequence} {message.subject}: {what}")

    def _take(self, message: StoredMessage) -> None:
        msg_id = message.headers.get("Nats-Msg-Id", "")
        cdc = self._subjects.cdc
        try:
            document = decode_payload(message.headers, message.data, self.dictionaries)
            if not msg_id:
                raise WireError("not of the bridge")
            if message.subject.startswith(f"{cdc}.$fence."):
                self.source(document["source"]).fences += 1
            elif message.subject.startswith(f"{cdc}.$progress."):
                self._take_progress(message, document)
            elif message.subject.endswith(".schema"):
                self._take_schema(message, document)
            else:
                events = read_events(message.headers, message.data, self.dictionaries)
                if events[0].msg_id != msg_id or events[0].subject != message.subject:
                    raise WireError("not of the bridge")
                for event in events:
                    self._take_event(message, event)
        except (WireError, KeyError):
            self.foreign.append(message)
            return
        if msg_id in self._ids:
            self._wrong(message, f"message id {msg_id} is also at #{self._ids[msg_id]}")
        self._ids[msg_id] = message.sequence

    def _enter_epoch(self, message: StoredMessage, history: SourceHistory, epoch: int) -> None:
        if not history.epochs or epoch > history.epochs[-1]:
            history.epochs.append(epoch)
            history.recorded_lsn = 0
            history.transactions.append(Transaction(0, 1))
            history.schemas.clear()
        elif epoch < history.epochs[-1]:
            self._wrong(message, f"epoch {epoch} after {history.epochs[-1]}")

    def _take_progress(self, message: StoredMessage, document: dict[str, Any]) -> None:
        history = self.source(document["source"])
        self._enter_epoch(message, history, document["epoch"])
        history.progress.append((message.sequence, document))
        if document["lsn"] < history.recorded_lsn:
            self._wrong(message, "progress goes back")
        history.recorded_lsn = max(history.recorded_lsn, document["lsn"])
        current = history.transactions[-1]
        if not current.complete and document["lsn"] > current.commit_lsn:
            self._wrong(message, "progress is ahead of a transaction without end")
        for transaction in reversed(history.transactions):
            if not transaction.commit_lsn:
                break
            if (
                transaction.end_lsn <= document["lsn"]
                and transaction.last_sequence > document["stream_seq"]
            ):
                self._wrong(message, "progress names a sequence before its changes")
            elif transaction.last_sequence <= document["stream_seq"]:
                break

    def _take_schema(self, message: StoredMessage, document: dict[str, Any]) -> None:
        history = self.source(document["source"])
        self._enter_epoch(message, history, document["epoch"])
        change = self._subjects.split_change(message.subject)
        assert change is not None
        history.schemas[change[0]] = document["schema_version"]

    def _take_event(self, message: StoredMessage, event: Event) -> None:
        history = self.source(event.source)
        self._enter_epoch(message, history, event.epoch)
        transaction = history.transactions[-1]
        if event.commit_lsn != transaction.commit_lsn:
            if event.commit_lsn < transaction.commit_lsn:
                self._wrong(message, "commit order is broken")
            if not transaction.complete:
                self._wrong(message, f"the transaction before has no end: {transaction}")
            if event.commit_lsn < history.recorded_lsn:
                self._wrong(message, "a progress record was ahead of this change")
            transaction = Transaction(event.commit_lsn)
            history.transactions.append(transaction)
        transaction.last_sequence = message.sequence
        if event.end_lsn:
            if transaction.end_lsn not in (0, event.end_lsn):
                self._wrong(message, "two ends of one transaction differ")
            transaction.end_lsn = event.end_lsn
        if event.operation == "MESSAGE":
            assert event.document is not None
            if event.document["ordinal"] != transaction.next_ordinal:
                self._wrong(message, f"message {event.document['ordinal']} is out of order")
            transaction.next_ordinal = event.document["ordinal"] + 1
            history.messages.append(event)
            return
        if event.seq != transaction.next_seq:
            self._wrong(message, f"ordinal {event.seq} comes where {transaction.next_seq} should")
        transaction.next_seq = event.seq + 1
        change = self._subjects.split_change(message.subject)
        assert change is not None
        token = change[0]
        if event.operation == "COMMIT":
            transaction.notices += 1
            if token not in transaction.tables or not transaction.has_last:
                self._wrong(message, "a commit message out of place")
            return
        if transaction.has_last:
            self._wrong(message, "a change after the last of its transaction")
        if token not in transaction.tables:
            transaction.tables.append(token)
        transaction.changes += 1
        transaction.has_last = event.last
        if history.schemas.get(token) != event.schema_version:
            announced = history.schemas.get(token)
            self._wrong(message, f"version {event.schema_version} follows schema {announced}")
        history.events.append(event)

    def finish(self) -> None:
        """Require that no transaction is open, and raise all violations."""
        for name, history in self.sources.items():
            if history.transactions and not history.transactions[-1].complete:
                self.violations.append(f"{name}: no end of {history.transactions[-1]}")
        assert not self.violations, "\n".join(
            [f"{len(self.violations)} violations", *self.violations[:20]]
        )


async def read_history(client: Client, prefix: str, *, finished: bool = True) -> StreamHistory:
    """Check every rule on a whole stream; unless `finished`, the last transaction may be open."""
    subjects = Subjects(prefix)
    history = StreamHistory(subjects)
    messages = await read_stream(client, subjects.cdc_stream)
    history.dictionaries = await load_dictionaries(client, subjects, messages)
    history.take(messages)
    if finished:
        history.finish()
    return history


def fold(events: Sequence[Event], table: str, key: str) -> dict[Any, dict[str, Any]]:
    """The rows that result from the events, by key."""
    rows: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event.table != table:
            continue
        if event.operation == "TRUNCATE":
            rows.clear()
        elif event.operation == "DELETE":
            del rows[event.data[key]]
        elif event.operation == "INSERT":
            assert event.data[key] not in rows, f"{table} {event.data[key]} inserted twice"
            rows[event.data[key]] = dict(event.data)
        else:
            before = rows.pop((event.old or event.data)[key])
            missing = {name: before[name] for name in event.unchanged}
            rows[event.data[key]] = {**event.data, **missing}
    return rows


def compare_with_source(dsn: str, events: Sequence[Event], tables: Iterable[str]) -> None:
    """Check that all rows of the source and no others are there, ledger rows inserted once."""
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as connection:
        for table in tables:
            rows = connection.execute(
                sql.SQL("SELECT * FROM {}").format(sql.Identifier(table))
            ).fetchall()
            key = primary_key(connection, table)
            source = {row[key]: row for row in rows}
            replica = fold(events, table, key)
            columns = list(rows[0]) if rows else []
            seen = {
                number: {name: row.get(name) for name in columns} for number, row in replica.items()
            }
            missing = sorted(set(source) - set(seen))
            extra = sorted(set(seen) - set(source))
            assert not missing, f"{table}: missing {missing[:10]} of {len(source)}"
            assert not extra, f"{table}: too many {extra[:10]}"
            wrong = [number for number, row in source.items() if seen[number] != row]
            assert not wrong, f"{table}: {seen[wrong[0]]} instead of {source[wrong[0]]}"
            if table.startswith("ledger_"):
                numbers = [event.data["n"] for event in events if event.table == table]
                assert numbers == sorted(source), f"{table}: not in the order of writing"


def primary_key(connection: psycopg.Connection[Any], table: str) -> str:
    """Name of the table's one key column."""
    row = connection.execute(
        "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid"
        " AND a.attnum = i.indkey[0] WHERE i.indrelid = %s::regclass AND i.indisprimary",
        [table],
    ).fetchone()
    assert row is not None, f"{table} has no primary key"
    name: str = row["attname"]
    return name


def check_confirmed(history: SourceHistory, samples: Iterable[tuple[int, int]]) -> None:
    """Check that every confirmed change was in the stream when it was confirmed.

    A sample is a confirmed position and the stream's last sequence read after it.
    """
    for confirmed_lsn, last_sequence in samples:
        for transaction in history.transactions:
            assert (
                not transaction.commit_lsn
                or transaction.end_lsn > confirmed_lsn
                or transaction.last_sequence <= last_sequence
            ), (
                f"{format_lsn(confirmed_lsn)} was confirmed while the stream ended at "
                f"{last_sequence}, before #{transaction.last_sequence}"
            )
