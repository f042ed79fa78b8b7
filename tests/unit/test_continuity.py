"""The decision at every start: first epoch, continue, or a gap with its reason."""

from __future__ import annotations

import pytest

from bridge.events.resume import Resume
from bridge.jetstream.record import StreamRecord
from bridge.postgres.connection import Server
from bridge.publish.continuity import decide

SERVER = Server("777", 1, "shop", flushed_lsn=0x9000)
CREATED = 1_700_000_000_000_000


def progress(**changes):
    return {
        "v": 1, "source": "main", "epoch": 5, "system_id": "777", "timeline": 1,
        "database": "shop", "publication": "pub", "lsn": 0x1000, "stream_seq": 40,
        "stream_created": CREATED, "source_lsn": 0x1000, "gap": None, "ts": 1, **changes,
    }  # fmt: skip


def record(kept=None, **position):
    made = StreamRecord(epoch=5, **position)
    if kept is not None:
        made.note_progress(kept)
    return made


def decided(made, server=SERVER, *, slot=0x1000, pub="pub", last_seq=50, tail_id=None):
    return decide(
        made, server, publication=pub, slot_lsn=slot, stream_created_us=CREATED,
        stream_last_seq=last_seq, tail_id=tail_id,
    )  # fmt: skip


def test_nothing_recorded_begins_the_first_epoch_where_the_slot_stands():
    decision = decided(StreamRecord(), slot=0x500)
    assert decision.first
    assert decision.gap is None
    assert decision.resume == Resume()


def test_a_slot_at_or_before_the_record_continues():
    at = decided(record(progress()))
    assert (at.gap, at.first) == (None, False)
    before = decided(record(progress(), commit_lsn=0x0F00, next_seq=3, next_ordinal=2, ts=9))
    assert before.gap is None
    assert (before.resume.commit_lsn, before.resume.next_seq) == (0x0F00, 3)
    assert (before.resume.next_ordinal, before.resume.ts) == (2, 9)


def test_events_alone_are_record_enough():
    decision = decided(
        StreamRecord(epoch=5, commit_lsn=0x2000, next_seq=1, end_lsn=0x2008), slot=0x2008
    )
    assert (decision.gap, decision.first) == (None, False)


@pytest.mark.parametrize(
    ("slot", "must_reappear"), [(0x1F00, True), (0x2000, True), (0x2001, False), (0x2008, False)]
)
def test_a_transaction_behind_the_slot_must_come_again(slot, must_reappear):
    made = record(progress(), commit_lsn=0x2000, next_seq=1, end_lsn=0x2008)
    decision = decided(made, slot=slot)
    assert decision.gap is None
    assert decision.resume.must_reappear is must_reappear


def test_nothing_stored_means_nothing_must_come_again():
    assert decided(record(progress())).resume.must_reappear is False


@pytest.mark.parametrize(
    ("slot", "is_gap"), [(0x0FFF, False), (0x1000, False), (0x1001, True), (0x8000, True)]
)
def test_a_slot_ahead_of_the_record_is_a_gap(slot, is_gap):
    decision = decided(record(progress()), slot=slot)
    assert (decision.gap is not None) == is_gap
    if is_gap:
        assert "the slot stands at" in decision.gap
        assert "0/1000" in decision.gap
        assert decision.resume == Resume()


@pytest.mark.parametrize(
    ("changes", "server", "reason"),
    [
        ({"system_id": "778"}, SERVER, "another PostgreSQL system: 777, was 778"),
        ({"database": "other"}, SERVER, "another database: 'shop', was 'other'"),
        ({"stream_created": CREATED + 1}, SERVER, "deleted and created again"),
        ({"stream_seq": 51}, SERVER, "the CDC stream ends at 50, it had reached 51"),
        ({"lsn": 0x9001}, SERVER, "restored from a backup?"),
        ({"timeline": 2}, SERVER, "timeline 1 does not descend from timeline 2"),
        (
            {"timeline": 1},
            Server("777", 2, "shop", 0x9000, forks={1: 0x0FFF}),
            "timeline 1 was left at 0/FFF, the stream records up to 0/1000",
        ),
        (
            {"timeline": 2},
            Server("777", 3, "shop", 0x9000, forks={1: 0x0FFF}),
            "timeline 3 does not descend from timeline 2",
        ),
    ],
)
def test_what_breaks_history_is_named(changes, server, reason):
    decision = decided(record(progress(**changes)), server)
    assert decision.gap is not None
    assert reason in decision.gap
    assert not decision.first


def test_a_timeline_that_forked_behind_the_record_continues():
    for forks in ({1: 0x1000}, {1: 0x1000, 2: 0x3000}):
        server = Server("777", len(forks) + 1, "shop", 0x9000, forks=forks)
        assert decided(record(progress()), server).gap is None


def test_another_publication_is_a_gap_only_while_something_is_unconfirmed():
    made = record(progress(), commit_lsn=0x2000, next_seq=1, end_lsn=0x2008)
    assert (
        "the publication changed from 'pub' to 'new'" in decided(made, slot=0x1000, pub="new").gap
    )
    assert decided(made, slot=0x2008, pub="new").gap is None


def test_a_stream_whose_message_was_replaced_is_a_gap():
    made = record(progress(stream_msg_id="a"))
    assert decided(made, tail_id="a").gap is None
    assert decided(made, tail_id=None).gap is None
    assert "is not the one stored there" in decided(made, tail_id="b").gap


def test_records_of_older_bridges_with_fewer_fields_are_enough():
    sparse = {"epoch": 5, "lsn": 0x1000, "stream_seq": 1}
    assert decided(record(sparse)).gap is None


def test_a_progress_record_that_knows_its_position_closes_the_log_behind_it():
    position = {"lsn": 0x0F00, "seq": 2, "ordinal": 0, "ts": 3}
    decision = decided(record(progress(position=position)), slot=0x0E00)
    assert decision.gap is None
    assert (decision.resume.commit_lsn, decision.resume.next_seq) == (0x0F00, 2)
    assert decision.resume.nothing_before == 0x1000
    assert decided(record(progress())).resume.nothing_before == 0
