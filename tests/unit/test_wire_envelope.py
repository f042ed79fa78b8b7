"""Messages as bytes and as events."""

from __future__ import annotations

import base64
import copy
import json
import pickle
from typing import Any

import msgpack
import pytest

from consumer_sdk.wire.compression import (
    MAX_DECOMPRESSORS,
    LoadedDictionaries,
    compress,
    decompress,
)
from consumer_sdk.wire.envelope import (
    JSON,
    MSGPACK,
    decode_payload,
    encode,
    events_of,
    final_seq,
    read_events,
)
from consumer_sdk.wire.errors import DictionaryMissing, WireError, WireVersionError
from consumer_sdk.wire.position import Position

EVENT: dict[str, Any] = {
    "v": 1,
    "source": "shop",
    "epoch": 1_760_000_000,
    "table": "users",
    "schema": "public",
    "operation": "INSERT",
    "relation_id": 16384,
    "schema_version": 3,
    "msg_id": "1000-users-insert-2-68e7fd00",
    "subject": "cdc.users.insert",
    "lsn": 0x1000,
    "xid": 777,
    "seq": 2,
    "ts": 1_765_540_834_338_547,
    "data": {"id": 1, "name": "Ada", "blob": b"\x00\xff", "none": None, "list": [1, [2]]},
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**EVENT, **fields}


def test_an_event_carries_the_fields_of_its_message() -> None:
    [event] = read_events({"Content-Type": MSGPACK}, encode(EVENT))
    assert event.data == EVENT["data"]
    assert event.position == Position(0x1000, 2)
    assert (event.source, event.epoch, event.table, event.schema) == (
        "shop", 1_760_000_000, "users", "public",
    )  # fmt: skip
    assert (event.operation, event.xid, event.ts) == ("INSERT", 777, 1_765_540_834_338_547)
    assert (event.schema_version, event.relation_id) == (3, 16384)
    assert (event.msg_id, event.subject) == (EVENT["msg_id"], "cdc.users.insert")
    assert (event.old, event.unchanged, event.raw, event.ref) == (None, (), (), None)
    assert (event.last, event.end_lsn, event.document) == (False, 0, None)


def test_events_can_be_copied_and_sent_to_other_processes() -> None:
    [event] = events_of(changed(old={"id": 1}, unchanged=["bio"]))
    assert pickle.loads(pickle.dumps(event)) == event
    assert copy.deepcopy(event) == event


def test_without_headers_a_message_is_messagepack() -> None:
    assert read_events(None, encode(EVENT)) == read_events({}, encode(EVENT))


def test_optional_fields_are_read() -> None:
    document = changed(
        operation="UPDATE", old={"id": 0}, unchanged=["bio"], raw=["doc"], last=True, end_lsn=9
    )
    [event] = events_of(document)
    assert (event.old, event.unchanged, event.raw) == ({"id": 0}, ("bio",), ("doc",))
    assert (event.last, event.end_lsn) == (True, 9)


def test_the_short_way_and_the_careful_way_agree() -> None:
    for fields in ({}, {"old": {"id": 1}}, {"last": True, "end_lsn": 5}, {"operation": "DELETE"}):
        short = events_of(changed(**fields))
        careful = events_of(changed(**fields, unchanged=[], raw=[]))
        assert short == careful


def test_unknown_fields_are_ignored() -> None:
    assert events_of(changed(later="addition")) == events_of(EVENT)


def test_json_carries_bytes_and_large_numbers_as_text() -> None:
    payload = encode(
        changed(data={"b": b"\x00\xff", "big": 2**60, "edge": 2**53, "nan": float("nan"), "f": 1.5,
                      "inf": float("-inf"), "more": float("inf"), "t": True}),
        as_json=True,
    )  # fmt: skip
    assert json.loads(payload)["data"] == {
        "b": base64.b64encode(b"\x00\xff").decode(),
        "big": str(2**60),
        "edge": 2**53,
        "nan": "NaN",
        "f": 1.5,
        "inf": "-Infinity",
        "more": "Infinity",
        "t": True,
    }


def test_large_positions_survive_json() -> None:
    payload = encode(changed(lsn=2**64 - 1, end_lsn=2**63, last=True), as_json=True)
    [event] = read_events({"Content-Type": JSON}, payload)
    assert (event.commit_lsn, event.end_lsn) == (2**64 - 1, 2**63)


def test_packed_rows_share_what_is_common() -> None:
    rows = [
        {"data": {"id": 1}},
        {"data": {"id": 2}, "old": {"id": 3}, "unchanged": ["bio"], "raw": ["doc"]},
        {"ref": {"bucket": "b", "name": "n", "size": 1, "sha256": ""}},
    ]
    document = changed(operation="UPDATE", rows=rows, last=True, end_lsn=99)
    del document["data"]
    events = events_of(document)
    assert [event.seq for event in events] == [2, 3, 4]
    assert [event.last for event in events] == [False, False, True]
    assert [event.end_lsn for event in events] == [0, 0, 99]
    assert events[1].old == {"id": 3}
    assert events[2].ref is not None
    assert final_seq(document) == 4
    assert final_seq(EVENT) == 2


def test_other_operations_keep_their_document() -> None:
    commit = changed(operation="COMMIT", tables=["users"], changes=3)
    del commit["data"]
    [event] = events_of(commit)
    assert event.document is not None
    assert event.document["tables"] == ["users"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"data": "text", "encoding": "utf8"}, "text"),
        ({"data": b"\xff", "encoding": "binary"}, b"\xff"),
        ({"data": "/w==", "encoding": "base64"}, b"\xff"),
        ({"data": "/w==", "encoding": "binary"}, b"\xff"),
        ({"data": None, "ref": {"name": "n"}}, None),
    ],
)
def test_a_logical_message_is_text_or_bytes(fields: dict[str, Any], expected: Any) -> None:
    [event] = events_of(changed(operation="MESSAGE", **fields))
    assert event.data == expected


def test_a_larger_version_is_refused_and_a_missing_one_is_damage() -> None:
    with pytest.raises(WireVersionError, match="upgrade"):
        decode_payload(None, encode({"v": 2}))
    for version in (None, 0, -1, "1", True, 1.5):
        with pytest.raises(WireError, match="no wire version"):
            decode_payload(None, encode({"v": version}))


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": "NONSENSE"},
        {"operation": None},
        {"operation": ["INSERT"]},
        {"operation": "insert"},
        {"source": 1},
        {"source": None},
        {"epoch": -1},
        {"epoch": True},
        {"lsn": "abc"},
        {"lsn": 2**64},
        {"lsn": "9" * 5000},
        {"lsn": None},
        {"seq": -1},
        {"seq": 1.0},
        {"ts": "--5"},
        {"ts": None},
        {"ts": True},
        {"xid": "x"},
        {"data": None},
        {"data": [1]},
        {"data": "row"},
        {"old": [1]},
        {"unchanged": "bio"},
        {"unchanged": [1]},
        {"raw": {"a": 1}},
        {"ref": "name"},
        {"rows": []},
        {"rows": {}},
        {"rows": [1]},
        {"rows": [{}]},
        {"rows": [{"data": 5}]},
        {"operation": "TRUNCATE", "rows": [{"data": {}}]},
        {"end_lsn": "x", "last": True},
        {"table": 5},
        {"operation": "MESSAGE", "data": 5},
        {"operation": "MESSAGE", "data": "§", "encoding": "base64"},
    ],
)
def test_a_damaged_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        events_of(changed(**fields))


@pytest.mark.parametrize(
    ("headers", "payload"),
    [
        ({"Content-Type": "text/plain"}, b"{}"),
        ({"Content-Encoding": "gzip"}, b""),
        ({"Content-Type": JSON}, b"[1]"),
        ({"Content-Type": JSON}, b'{"v": NaN}'),
        ({"Content-Type": JSON}, b"\xff"),
        ({"Content-Type": JSON}, b"[" * 100_000),
        (None, b""),
        (None, b"\xc1"),
        (None, b"\x91" * 5000),
        (None, encode(EVENT) + b"\x00"),
        (None, msgpack.packb({1: 2})),
        ({"Content-Encoding": "zstd"}, b"not zstd"),
        ({"Content-Encoding": "zstd"}, compress(encode(EVENT))[:-1]),
        ({"Content-Encoding": "zstd"}, compress(encode(EVENT)) + b"x"),
    ],
)
def test_foreign_bytes_are_refused(headers: dict[str, str] | None, payload: bytes) -> None:
    with pytest.raises(WireError):
        read_events(headers, payload)


def test_compressed_messages_say_how() -> None:
    payload = compress(encode(EVENT))
    assert read_events({"Content-Encoding": "zstd"}, payload) == events_of(EVENT)


def test_a_dictionary_is_asked_for_by_its_id() -> None:
    dictionary = encode(EVENT) * 4
    payload = compress(encode(EVENT), dictionary=dictionary)
    headers = {"Content-Encoding": "zstd", "Cdc-Dict": "7"}
    with pytest.raises(DictionaryMissing) as caught:
        read_events(headers, payload)
    assert caught.value.dictionary_id == "7"
    with pytest.raises(DictionaryMissing):
        read_events(headers, payload, {"8": dictionary})
    assert read_events(headers, payload, {"7": dictionary}) == events_of(EVENT)


def test_many_dictionaries_do_not_pile_up() -> None:
    loaded = LoadedDictionaries()
    for number in range(100):
        dictionary = encode(changed(seq=number)) * 4
        payload = compress(b"x" * 100, dictionary=dictionary)
        name = str(number)
        loaded[name] = dictionary
        for _ in range(2):
            assert decompress(payload, dictionary_id=name, dictionaries=loaded) == b"x" * 100
    assert decompress(compress(b"y"), dictionaries=loaded) == b"y"
    assert len(loaded._ready) <= MAX_DECOMPRESSORS


def test_a_frame_that_claims_too_much_is_refused() -> None:
    # Magic, single segment with an 8-byte content size of 2^40, then an empty last block.
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(WireError, match="zstd frame of more than 67108864 bytes"):
        decompress(bomb)


def test_what_the_wire_cannot_carry_is_refused_when_written() -> None:
    for value in ({1, 2}, object()):
        with pytest.raises(TypeError):
            encode({"v": 1, "x": value}, as_json=True)
