"""What stored messages say of a source: the newest epoch, its position, its end."""

from __future__ import annotations

import pytest

from bridge.events.messages import OutgoingMessage, TransactionHeader
from bridge.jetstream.record import StreamRecord, has_position, is_recorded
from consumer_sdk.wire import WireError


def event(lsn, seq, *, epoch=5, **fields):
    return {
        "v": 1, "source": "main", "epoch": epoch, "operation": "INSERT", "lsn": lsn, "seq": seq,
        "ts": lsn + 1, **fields,
    }  # fmt: skip


def message(lsn, ordinal, **fields):
    return event(lsn, 0, operation="MESSAGE", ordinal=ordinal, **fields)


def noted(*documents):
    record = StreamRecord()
    for document in documents:
        record.note(document)
    return record


def position(record):
    return record.epoch, record.commit_lsn, record.next_seq, record.next_ordinal, record.ts


def test_the_newest_position_counts_in_whatever_order_subjects_are_read():
    documents = [event(100, 0), event(100, 4), event(90, 8), event(100, 2), message(100, 1)]
    wanted = (5, 100, 5, 2, 101)
    assert position(noted(*documents)) == wanted
    assert position(noted(*reversed(documents))) == wanted


def test_a_packed_message_counts_up_to_its_last_row():
    assert noted(event(100, 7, rows=[{}, {}, {}])).next_seq == 10


def test_a_newer_transaction_starts_its_own_count():
    record = noted(event(100, 9, end_lsn=108), message(100, 3), event(200, 0))
    assert position(record) == (5, 200, 1, 0, 201)
    assert record.end_lsn == 0


def test_a_newer_epoch_begins_anew_and_an_older_one_is_ignored():
    record = noted(
        event(900, 5, epoch=4, end_lsn=908), event(100, 0, epoch=5), event(950, 1, epoch=4)
    )
    assert position(record) == (5, 100, 1, 0, 101)
    assert record.end_lsn == 0


def test_the_end_is_known_from_the_message_that_carries_it():
    record = noted(event(100, 1, last=True, end_lsn=108), event(100, 0))
    assert (record.end_lsn, record.recorded_lsn) == (108, 108)
    assert noted(event(100, 0)).recorded_lsn == 100
    assert noted(event(100, 0), event(90, 0, end_lsn=98)).end_lsn == 0


@pytest.mark.parametrize(
    "damaged",
    [
        {"epoch": None}, {"epoch": "5"}, {"lsn": None}, {"seq": -1}, {"seq": "x"}, {"ts": None},
        {"operation": "MESSAGE", "ordinal": None}, {"operation": "MESSAGE"},
    ],
)  # fmt: skip
def test_what_is_not_a_message_of_this_format_is_refused(damaged):
    document = {**event(100, 0), **damaged}
    record = StreamRecord()
    with pytest.raises((WireError, KeyError, TypeError, ValueError)):
        record.note(document)
    assert position(record) == (0, 0, 0, 0, 0)


def test_progress_of_the_same_epoch_extends_what_is_proven():
    record = noted(event(100, 1, end_lsn=108))
    record.note_progress({"epoch": 5, "lsn": 500, "stream_seq": 3})
    assert (record.progress_lsn, record.recorded_lsn) == (500, 500)
    # An older one does not take it back.
    record.note_progress({"epoch": 5, "lsn": 400, "stream_seq": 2})
    assert record.recorded_lsn == 500
    assert record.next_seq == 2


def test_progress_of_a_newer_epoch_forgets_older_events():
    record = noted(event(100, 1, epoch=5, end_lsn=108))
    record.note_progress({"epoch": 6, "lsn": 50, "stream_seq": 3})
    assert position(record)[:4] == (6, 0, 0, 0)
    assert record.recorded_lsn == 50
    record.note(event(100, 7, epoch=5))
    assert record.commit_lsn == 0
    record.note(event(60, 0, epoch=6))
    assert record.commit_lsn == 60


def test_progress_of_an_older_epoch_proves_nothing_for_the_newer():
    record = noted(event(100, 1, epoch=6))
    record.note_progress({"epoch": 5, "lsn": 900, "stream_seq": 3})
    assert record.progress_lsn == 0
    assert record.recorded_lsn == 100


def test_held_is_what_stands_at_or_before_the_position():
    record = noted(event(100, 4), message(100, 1))

    common = {"subject": b"s", "msg_id": b"i", "headers": b"", "payload": b""}

    def change(lsn, seq):
        return OutgoingMessage.change(
            **common, token="t", transaction=TransactionHeader(lsn, 1, 0), ordinal=seq
        )

    def logical(lsn, ordinal):
        return OutgoingMessage.logical(
            **common, token="m", transaction=TransactionHeader(lsn, 1, 0), ordinal=ordinal
        )

    assert [is_recorded(change(lsn, 9), record) for lsn in (99, 101)] == [True, False]
    assert [is_recorded(change(100, seq), record) for seq in (0, 4, 5)] == [True, True, False]
    assert [is_recorded(logical(100, n), record) for n in (0, 1, 2)] == [True, True, False]
    assert has_position(change(100, 0))
    assert has_position(logical(100, 0))
    assert not has_position(OutgoingMessage.schema(**common, token="t"))
    assert not has_position(OutgoingMessage.progress(**common))
