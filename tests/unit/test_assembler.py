"""Transactions become messages: ordinals, ends, packing, resuming, and what is refused."""

from __future__ import annotations

import hashlib

import pytest

from bridge.errors import BrokerError, HistoryBroken, ProtocolError
from bridge.events.messages import ITEM_OVERHEAD, OutgoingMessage, Oversized, SchemaNotice
from bridge.events.packed import PACK_BYTES, PACK_ROWS
from bridge.events.resume import Resume
from bridge.publish.ring import Ring
from bridge.wal.messages import (
    UNCHANGED,
    Begin,
    BinaryValue,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Origin,
    Truncate,
    Type,
    Update,
)
from consumer_sdk.wire import decode_payload, oids
from tests.assembler_harness import EPOCH, SOURCE, Harness, structure
from tests.pgoutput_encoder import encode_message

T, U = 1001, 1002


def harness(**options):
    made = Harness(**options)
    made.describe(structure(T, "t"))
    made.describe(structure(U, "u"))
    return made


def insert(relation, number, text="x"):
    return Insert(relation, (str(number).encode(), text.encode() if text is not None else None))


def said(prefix, content=b"hello", *, transactional=True):
    return LogicalMessage(transactional, 5, prefix, content)


def shape(documents):
    return [
        (d["operation"], d.get("table", d.get("prefix")), d["seq"], d.get("last", False))
        for d in documents
    ]


def test_ordinals_count_changes_truncates_and_commit_messages_and_nothing_else():
    made = harness()
    made.transaction(
        100,
        Origin(1, "elsewhere"),
        insert(T, 1),
        Type(99, "public", "mood"),
        said("note"),
        Update(U, None, None, (b"1", b"y")),
        Truncate((T, U), cascade=True, restart_identity=False),
        Delete(T, "K", (b"1", None)),
    )
    documents = made.documents()
    assert shape(documents) == [
        ("INSERT", "t", 0, False),
        ("MESSAGE", "note", 1, False),
        ("UPDATE", "u", 1, False),
        ("TRUNCATE", "t", 2, False),
        ("TRUNCATE", "u", 3, False),
        ("DELETE", "t", 4, True),
        ("COMMIT", "u", 5, False),
    ]
    assert documents[5]["data"] == {"id": 1}
    assert documents[5]["end_lsn"] == documents[6]["end_lsn"] == 108
    assert (documents[6]["tables"], documents[6]["changes"]) == (["t", "u"], 5)
    assert [(d["cascade"], d["restart_identity"]) for d in documents[3:5]] == [(True, False)] * 2
    # Only the final message of the transaction releases it.
    assert [item.end_lsn for item in made.outgoing()] == [None] * 6 + [108]
    assert made.assembler.complete_lsn == 108
    assert not made.assembler.in_transaction
    assert not made.assembler.outbox.bytes_held
    made.transaction(200, insert(T, 1), insert(U, 2))
    outbox = made.assembler.outbox
    assert (len(outbox), outbox.next_size > ITEM_OVERHEAD) == (3, True)
    held = outbox.bytes_held
    payloads = sum(len(item.payload) for item in made.outgoing()[7:])
    assert held == 3 * ITEM_OVERHEAD + payloads


def test_nothing_of_a_transaction_s_end_is_said_before_its_commit():
    made = harness()
    made.feed(Begin(100, 1, 7), insert(T, 1))
    assert made.out == []
    made.feed(insert(T, 2))
    assert shape(made.documents()) == [("INSERT", "t", 0, False)]
    assert made.assembler.in_transaction
    made.feed(Commit(0, 100, 108, 1))
    assert shape(made.documents())[1:] == [("INSERT", "t", 1, True)]


def test_what_the_ring_has_no_room_for_stays_in_the_outbox_in_order():
    made = harness()
    ring = Ring(4, 1024 * 1024)
    made.transaction(100, *(insert(T, number) for number in range(8)))
    outbox, moved = made.assembler.outbox, []
    while not outbox.move_into(ring):
        assert len(outbox) == 8 - len(moved) - len(ring)
        assert not ring.fits(outbox.next_size)
        moved += ring.take(2, 1024 * 1024)
    moved += ring.take(4, 1024 * 1024)
    assert [item.ordinal for item in moved] == list(range(8))
    assert [item.end_lsn for item in moved] == [None] * 7 + [108]
    assert (len(outbox), outbox.bytes_held) == (0, 0)


def test_a_transaction_without_changes_moves_the_position_alone():
    made = harness()
    made.transaction(100)
    made.feed(said("loose", transactional=False))
    assert made.out == []
    assert made.assembler.complete_lsn == 108


@pytest.mark.parametrize("pack", [False, True])
def test_logical_messages_stand_where_they_were_written(pack):
    made = harness(pack=pack)
    made.transaction(
        100, said("a"), said("b"), insert(T, 1), insert(T, 2), said("c"), said("d"), insert(T, 3)
    )
    made.transaction(200, insert(T, 4), said("e"), said("f", b"\xff"))
    made.transaction(300, said("g"), said("h", b""))
    documents = made.documents()
    rows = 1 if pack else 2
    assert [d.get("prefix", d["operation"]) for d in documents] == [
        "a", "b", *["INSERT"] * rows, "c", "d", "INSERT", "INSERT", "e", "f", "g", "h",
    ]  # fmt: skip
    messages = [d for d in documents if d["operation"] == "MESSAGE"]
    assert [(d["seq"], d["ordinal"]) for d in messages] == [
        (0, 0), (0, 1), (2, 2), (2, 3), (1, 0), (1, 1), (0, 0), (0, 1),
    ]  # fmt: skip
    assert messages[5]["data"] == b"\xff"
    ends = {item.transaction.commit_lsn: item.end_lsn for item in made.outgoing() if item.end_lsn}
    assert ends == {100: 108, 200: 208, 300: 308}


def test_many_large_messages_behind_a_change_are_not_all_held():
    made = harness()
    made.feed(Begin(100, 1, 7), insert(T, 1))
    for _ in range(8):
        made.feed(said("big", b"x" * 400_000))
    held = 8 - len(made.out)
    assert held <= 3
    made.feed(Commit(0, 100, 108, 1))
    documents = made.documents()
    assert sorted(d["ordinal"] for d in documents if d["operation"] == "MESSAGE") == list(range(8))
    [change] = [d for d in documents if d["operation"] == "INSERT"]
    assert change["last"] is True
    assert made.outgoing()[-1].end_lsn == 108


def test_packed_rows_share_a_message_up_to_the_bounds():
    made = harness(pack=True)
    made.transaction(100, *(insert(T, n) for n in range(PACK_ROWS * 2 + 1)))
    documents = made.documents()
    assert [(d["seq"], len(d["rows"])) for d in documents] == [
        (0, PACK_ROWS), (PACK_ROWS, PACK_ROWS), (2 * PACK_ROWS, 1),
    ]  # fmt: skip
    assert [d.get("last", False) for d in documents] == [False, False, True]
    assert [item.events for item in made.outgoing()] == [PACK_ROWS, PACK_ROWS, 1]
    wide = harness(pack=True)
    text = "y" * (PACK_BYTES // 4)
    wide.transaction(100, *(insert(T, n, text) for n in range(10)))
    assert [len(d["rows"]) for d in wide.documents()] == [3, 3, 3, 1]
    # A row larger than a whole message's bound is alone in its own.
    wide.transaction(200, insert(T, 1), insert(T, 2, "z" * 2 * PACK_BYTES), insert(T, 3))
    assert [len(d["rows"]) for d in wide.documents()[4:]] == [1, 1, 1]


def test_tables_operations_and_transactions_are_never_packed_together():
    made = harness(pack=True)
    made.transaction(
        100,
        insert(T, 1), insert(T, 2), insert(U, 1), insert(T, 3),
        Update(T, "K", (b"3", None), (b"4", b"n")), Update(T, None, None, (b"4", UNCHANGED)),
        Delete(T, "K", (b"4", None)), Truncate((T,), cascade=False, restart_identity=True),
    )  # fmt: skip
    made.transaction(200, insert(T, 1))
    made.transaction(300, insert(T, 2))
    assert [(d["operation"], d["table"], len(d.get("rows", [0]))) for d in made.documents()] == [
        ("INSERT", "t", 2), ("INSERT", "u", 1), ("INSERT", "t", 1), ("UPDATE", "t", 2),
        ("DELETE", "t", 1), ("TRUNCATE", "t", 1), ("COMMIT", "u", 1),
        ("INSERT", "t", 1), ("INSERT", "t", 1),
    ]  # fmt: skip
    assert made.documents()[3]["rows"] == [
        {"data": {"id": 4, "a": "n"}, "old": {"id": 3}},
        {"data": {"id": 4}, "unchanged": ["a"]},
    ]


def test_describing_a_relation_again_does_not_move_the_bounds_of_packed_messages():
    rows = [insert(T, n) for n in range(10)]
    once, often = harness(pack=True), harness(pack=True)
    once.transaction(100, *rows)
    often.feed(Begin(100, 1_700_000_000_000_100, 7))
    for row in rows:
        often.describe(structure(T, "t"))
        often.feed(row)
    often.feed(Commit(0, 100, 108, 1_700_000_000_000_100))
    assert often.outgoing() == once.outgoing()


def test_a_new_version_is_announced_before_its_first_row_and_ends_a_packed_message():
    made = harness(pack=True)
    document = {"schema_version": 2}
    columns = (("id", oids.INT4, -1, True), ("b", oids.BOOL, -1, False))
    made.feed(Begin(100, 1, 7), insert(T, 1))
    made.describe(structure(T, "t", columns), 2, SchemaNotice("t", document, must_store=True))
    # Described, but no row yet: nothing to announce, no ordinal spent.
    assert made.out == []
    made.feed(Insert(T, (b"2", b"t")), Insert(T, (b"3", b"f")), Commit(0, 100, 108, 1))
    kinds = [type(item).__name__ for item in made.out]
    assert kinds == ["OutgoingMessage", "SchemaNotice", "OutgoingMessage"]
    first, second = made.documents()
    assert (first["schema_version"], first["seq"]) == (1, 0)
    assert (second["schema_version"], second["seq"], len(second["rows"])) == (2, 1, 2)
    assert second["rows"][0]["data"] == {"id": 2, "b": True}


@pytest.mark.parametrize("pack", [False, True])
def test_a_row_beyond_the_payload_limit_becomes_an_object(pack):
    made = harness(pack=pack, max_payload=20_000)
    big = "b" * 30_000
    made.transaction(
        100, insert(T, 1), insert(T, 2, big), Update(T, "O", (b"2", big.encode()), (b"2", b"s"))
    )
    kinds = [type(item) for item in made.out]
    assert kinds == [OutgoingMessage, Oversized, Oversized]
    for item, wanted in zip(
        made.out[1:],
        [
            {"data": {"id": 2, "a": big}},
            {"data": {"id": 2, "a": "s"}, "old": {"id": 2, "a": big}},
        ],
        strict=True,
    ):
        assert isinstance(item, Oversized)
        document = decode_payload(None, item.message.payload)
        reference = document["rows"][0]["ref"] if pack else document["ref"]
        assert reference == {
            "bucket": "cdc_objects",
            "name": f"{SOURCE}/{document['msg_id']}",
            "size": len(item.content),
            "sha256": hashlib.sha256(item.content).hexdigest(),
        }
        assert item.name == reference["name"]
        assert decode_payload(None, item.content, versioned=False) == wanted
        assert not {"data", "old"} & set(document)
    assert made.documents()[2]["last"] is True
    assert made.outgoing()[2].end_lsn == 108


def test_packed_rows_beyond_the_payload_limit_are_halved_until_they_fit():
    made = harness(pack=True, max_payload=8_000)
    made.transaction(100, *(insert(T, n, "y" * 900) for n in range(20)))
    documents = made.documents()
    assert all(len(item.payload) < 8_000 for item in made.outgoing())
    assert sum(len(d["rows"]) for d in documents) == 20
    place = 0
    for document in documents:
        assert document["seq"] == place
        assert document["msg_id"] == f"64-t-insert-{place}-{EPOCH:x}"
        place += len(document["rows"])
    assert [d.get("last", False) for d in documents] == [False] * (len(documents) - 1) + [True]
    assert [item.end_lsn for item in made.outgoing()][-1] == 108


def test_commit_messages_of_very_many_tables_stay_below_the_limit():
    made = Harness(max_payload=8_000)
    for number in range(300):
        made.describe(structure(number + 1, f"a_table_with_a_longer_name_{number}"))
    made.transaction(100, *(insert(number + 1, 1) for number in range(300)))
    commits = [
        (item, d)
        for item, d in zip(made.outgoing(), made.documents(), strict=True)
        if d["operation"] == "COMMIT"
    ]
    assert len(commits) == 299
    assert all(len(item.payload) < 8_000 for item, _ in commits)
    assert all(d["changes"] == 300 and d["end_lsn"] == 108 for _, d in commits)
    assert all(type(item) is OutgoingMessage for item in made.out)


def test_a_commit_message_that_fits_no_message_stops_the_bridge_with_a_reason():
    made = harness(max_payload=2_200)
    with pytest.raises(BrokerError, match="raise max_payload of nats-server, which is 2200"):
        made.transaction(100, insert(T, 1), insert(U, 1))


def test_the_end_of_a_transaction_over_very_many_tables_takes_little_memory():
    made = Harness()
    for number in range(1500):
        made.describe(structure(number + 1, f"a_table_with_a_longer_name_{number}"))
    made.transaction(100, *(insert(number + 1, 1) for number in range(1500)))
    commits = [d for d in made.documents() if d["operation"] == "COMMIT"]
    assert len(commits) == 1499
    assert all(d["changes"] == 1500 and "tables" not in d for d in commits)
    assert sum(len(item.payload) for item in made.outgoing()) < 2_000_000


def test_json_messages_carry_the_same_events():
    plain, written = harness(), harness(json=True)
    for made in (plain, written):
        made.transaction(
            100, insert(T, 1), Update(T, "K", (b"1", None), (b"2", UNCHANGED)), insert(U, 1),
        )  # fmt: skip
    assert written.documents() == plain.documents()
    assert written.outgoing()[0].headers == b"Content-Type: application/json\r\n"
    binary = harness(json=True)
    binary.transaction(100, said("p", b"\xff\x00"))
    assert (binary.documents()[0]["data"], binary.documents()[0]["encoding"]) == ("/wA=", "base64")


def test_what_the_record_holds_is_skipped_and_the_rest_is_not():
    messages = [insert(T, 1), said("a"), insert(U, 2), said("b"), insert(T, 3)]
    whole = harness()
    whole.transaction(100, insert(T, 0))
    whole.transaction(200, *messages)
    resumed = harness(resume=Resume(200, next_seq=2, next_ordinal=1, must_reappear=True))
    resumed.transaction(100, insert(T, 0))
    assert resumed.out == []
    resumed.transaction(200, *messages)
    assert resumed.outgoing() == whole.outgoing()[4:]
    # All of it is stored: the position moves, nothing is sent.
    done = harness(resume=Resume(200, next_seq=4, next_ordinal=2))
    done.transaction(200, *messages)
    assert done.out == []
    assert done.assembler.complete_lsn == 208
    done.transaction(300, insert(T, 4))
    assert shape(done.documents()) == [("INSERT", "t", 0, True)]


def test_history_without_the_recorded_transaction_is_another_history():
    recorded = Resume(200, next_seq=1, ts=1_700_000_000_000_200, must_reappear=True)
    same = harness(resume=recorded)
    same.transaction(100, insert(T, 0))
    same.transaction(200, insert(T, 1))
    same.transaction(300, insert(T, 2))
    assert shape(same.documents()) == [("INSERT", "t", 0, True)]
    missing = harness(resume=recorded)
    missing.transaction(100, insert(T, 0))
    with pytest.raises(HistoryBroken, match="--on-gap=new-epoch"):
        missing.transaction(300, insert(T, 2))
    other = harness(resume=recorded)
    with pytest.raises(HistoryBroken):
        other.transaction(200, insert(T, 1), ts=1_700_000_000_000_999)
    silent = harness(resume=recorded)
    silent.assembler.expect_history(200)
    with pytest.raises(HistoryBroken):
        silent.assembler.expect_history(201)
    # Confirmed before: PostgreSQL does not send it again, and that is as it should be.
    confirmed = harness(resume=Resume(200, next_seq=1))
    confirmed.transaction(300, insert(T, 2))
    assert len(confirmed.out) == 1


def test_changes_where_the_log_is_known_to_hold_none_are_another_history():
    recorded = Resume(200, next_seq=1, must_reappear=False, nothing_before=500)
    made = harness(resume=recorded)
    made.transaction(300)
    for change in (insert(T, 1), said("a"), Truncate((T,), cascade=False, restart_identity=False)):
        impossible = harness(resume=recorded)
        with pytest.raises(HistoryBroken):
            impossible.transaction(400, change)
    made.transaction(500, insert(T, 2))
    assert len(made.out) == 1


def test_what_does_not_follow_the_protocol_is_refused():
    for wrong in (
        [Begin(100, 1, 7), Begin(101, 1, 7)],
        [Commit(0, 100, 108, 1)],
        [Begin(100, 1, 7), Commit(0, 99, 108, 1)],
        [Begin(100, 1, 7), insert(4711, 1)],
        [Begin(100, 1, 7), Truncate((4711,), cascade=False, restart_identity=False)],
        [said("outside")],
        [Begin(100, 1, 7), Insert(T, (b"1",))],
        [Begin(100, 1, 7), Insert(T, (b"1", b"x", b"y"))],
        [Begin(100, 1, 7), Insert(T, (b"one", b"x"))],
        [Begin(100, 1, 7), Insert(T, (BinaryValue(b"\0\0\0\1"), b"x"))],
        [Begin(100, 1, 7), Insert(T, (b"1", b"\xff"))],
        [b"Z", b"unknown"],
    ):
        with pytest.raises(ProtocolError):
            harness(utf8=False).feed(*wrong)
    made = harness()
    made.transaction(100, insert(T, 1))
    with pytest.raises(ProtocolError, match="came after"):
        made.feed(Begin(100, 1, 7))


def test_every_truncated_change_is_refused():
    for message in (
        insert(T, 1),
        Update(T, "K", (b"1", None), (b"2", b"x")),
        Update(T, "O", (b"1", b"w"), (b"2", UNCHANGED)),
        Delete(T, "K", (b"1", None)),
        Truncate((T, U), cascade=False, restart_identity=False),
        said("prefix"),
    ):
        whole = encode_message(message)
        for length in range(len(whole)):
            made = harness()
            made.feed(Begin(100, 1, 7))
            with pytest.raises((ProtocolError, IndexError)) as refused:
                made.feed(whole[:length])
            assert refused.type is ProtocolError or length == 0
