"""Whatever was stored of a transaction, resuming gives exactly the rest of it, byte for byte."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from bridge.events.resume import Resume
from bridge.jetstream.record import StreamRecord
from bridge.wal.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Truncate,
    Update,
)
from consumer_sdk.wire.envelope import events_of
from tests.assembler_harness import Harness, structure

TABLES = {1: "t", 2: "u", 3: "Odd Table"}
relation_ids = st.sampled_from(list(TABLES))
keys = st.integers(0, 99).map(lambda n: str(n).encode())
sent = [b"", b"x", b"y" * 300, "é🐘".encode(), b"z" * 40_000, None]
sent_texts, texts = st.sampled_from(sent), st.sampled_from([*sent, UNCHANGED])

changes = st.one_of(
    st.builds(lambda r, k, t: Insert(r, (k, t)), relation_ids, keys, sent_texts),
    st.builds(lambda r, k, t: Update(r, None, None, (k, t)), relation_ids, keys, texts),
    st.builds(lambda r, o, k: Update(r, "K", (o, None), (k, b"n")), relation_ids, keys, keys),
    st.builds(lambda r, k: Delete(r, "K", (k, None)), relation_ids, keys),
    st.builds(
        lambda ids, c, i: Truncate(tuple(ids), c, i),
        st.lists(relation_ids, min_size=1, max_size=3, unique=True), st.booleans(), st.booleans(),
    ),
    st.builds(
        lambda transactional, prefix, content: LogicalMessage(transactional, 1, prefix, content),
        st.booleans(), st.sampled_from(["p", "a b", ""]), st.binary(max_size=20),
    ),
)  # fmt: skip
# Runs of equal kind, so that packing has something to do.
runs = st.lists(
    st.tuples(changes, st.integers(1, 5)), max_size=12
).map(lambda pairs: [change for change, times in pairs for _ in range(times)])  # fmt: skip
histories = st.lists(runs, min_size=1, max_size=4)


def assemble(history, *, pack, json, limit, resume=None, again=()):
    """Feed a history; relations are described anew before the changes numbered in `again`."""
    made = Harness(pack=pack, json=json, resume=resume, max_payload=limit)
    for relation_id, name in TABLES.items():
        made.describe(structure(relation_id, name))
    count = 0
    for number, transaction in enumerate(history, start=1):
        lsn = number * 100
        ts = 1_700_000_000_000_000 + lsn
        made.feed(Begin(lsn, ts, lsn + 1))
        for message in transaction:
            if count in again:
                for relation_id, name in TABLES.items():
                    made.describe(structure(relation_id, name))
            count += 1
            made.feed(message)
        made.feed(Commit(0, lsn, lsn + 8, ts))
    return made


@given(
    histories, st.booleans(), st.booleans(), st.sampled_from([1024 * 1024, 9_000]),
    st.sets(st.integers(0, 40), max_size=5), st.data(),
)  # fmt: skip
def test_resuming_anywhere_gives_exactly_the_rest(history, pack, json, limit, again, data):
    options = {"pack": pack, "json": json, "limit": limit}
    whole = assemble(history, **options)
    items, documents = whole.outgoing(), whole.documents()
    cut = data.draw(st.integers(0, len(items)))
    record = StreamRecord()
    for document in documents[:cut]:
        record.note(document)
    resume = Resume(
        record.commit_lsn, record.next_seq, record.next_ordinal, record.ts,
        must_reappear=bool(record.commit_lsn),
    )  # fmt: skip
    resumed = assemble(history, **options, resume=resume, again=again)
    assert resumed.outgoing() == items[cut:]


@given(histories, st.booleans(), st.booleans())
def test_every_change_has_its_place_and_every_transaction_one_end(history, pack, json):
    made = assemble(history, pack=pack, json=json, limit=1024 * 1024)
    events = [event for document in made.documents() for event in events_of(document)]
    for number, transaction in enumerate(history, start=1):
        mine = [e for e in events if e.commit_lsn == number * 100]
        counted = [e for e in mine if e.operation != "MESSAGE"]
        rows = [e for e in counted if e.operation != "COMMIT"]
        wanted = sum(
            len(m.relation_ids) if isinstance(m, Truncate) else not isinstance(m, LogicalMessage)
            for m in transaction
        )
        assert len(rows) == wanted
        assert [e.seq for e in counted] == list(range(len(counted)))
        assert [e.last for e in rows] == [False] * (len(rows) - 1) + [True] * bool(rows)
        messages = [e for e in mine if e.operation == "MESSAGE"]
        assert len(messages) == sum(
            isinstance(m, LogicalMessage) and m.transactional for m in transaction
        )
        tables = list(dict.fromkeys(e.table for e in rows))
        ended = [e.table for e in counted if e.operation == "COMMIT"]
        assert ended == [name for name in tables if name != rows[-1].table] if rows else not ended
        ends = [
            item.end_lsn
            for item in made.outgoing()
            if item.transaction is not None and item.transaction.commit_lsn == number * 100
        ]
        assert ends == [None] * (len(ends) - 1) + [number * 100 + 8] * bool(ends)
