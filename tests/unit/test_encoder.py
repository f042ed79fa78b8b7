"""Messages put together from fragments equal messages encoded whole."""

from __future__ import annotations

import json
import math

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given

from bridge.events.encoders import JsonEncoder, MsgpackEncoder
from consumer_sdk.wire import decode_payload, encode
from consumer_sdk.wire.envelope import to_json_value

STATIC = {
    "v": 1, "source": "s", "epoch": 5, "table": "größe", "schema": "public", "operation": "INSERT",
    "relation_id": 4711, "schema_version": 3, "subject": "cdc.t.insert",
}  # fmt: skip
TRANSACTION = {"lsn": 2**40, "xid": 2**32 - 1, "ts": 1_700_000_000_000_000}
COUNT = len(STATIC) + len(TRANSACTION)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
fields = st.dictionaries(
    st.text(min_size=1).filter(lambda key: key not in {*STATIC, *TRANSACTION}), values,
    min_size=1, max_size=9,
)  # fmt: skip


@pytest.mark.parametrize("encoder", [MsgpackEncoder(), JsonEncoder()], ids=["msgpack", "json"])
@given(own=fields)
def test_a_message_of_fragments_is_the_message_encoded_whole(encoder, own):
    shared = encoder.join(encoder.fragment(STATIC), encoder.fragment(TRANSACTION))
    payload = encoder.message(COUNT, shared, own)
    wanted = {**STATIC, **TRANSACTION, **own}
    assert decode_payload({"Content-Type": encoder.content_type}, payload) == wanted
    as_json = encoder.content_type == "application/json"
    whole = encode(wanted, as_json=as_json)
    if as_json:
        assert payload == whole
    assert encoder.document(wanted) == whole


def test_a_message_of_more_than_fifteen_fields_is_framed_right():
    encoder = MsgpackEncoder()
    own = {f"k{n}": n for n in range(15)}
    shared = encoder.join(encoder.fragment(STATIC), encoder.fragment(TRANSACTION))
    payload = encoder.message(COUNT, shared, own)
    assert decode_payload(None, payload) == {**STATIC, **TRANSACTION, **own}
    many = {f"k{n}": n for n in range(40)}
    assert decode_payload(None, encoder.document({"v": 1, **many})) == {"v": 1, **many}


def test_documents_in_json_adapt_what_json_cannot_carry():
    document = {
        "v": 1, "bytes": b"\xff\x00", "nan": math.nan, "low": -math.inf, "large": 2**53 + 1,
        "edge": 2**53, "rows": [{"deep": (b"x", 2**63)}],
    }  # fmt: skip
    payload = JsonEncoder().document(document)
    assert decode_payload({"Content-Type": "application/json"}, payload) == {
        "v": 1, "bytes": "/wA=", "nan": "NaN", "low": "-Infinity", "large": str(2**53 + 1),
        "edge": 2**53, "rows": [{"deep": ["eA==", str(2**63)]}],
    }  # fmt: skip
    assert to_json_value(document)["nan"] == "NaN"


def test_a_json_message_refuses_what_was_not_adapted():
    encoder = JsonEncoder()
    shared = encoder.join(encoder.fragment(STATIC), encoder.fragment(TRANSACTION))
    for wrong in ({"data": {"a": math.nan}}, {"data": {"a": b"x"}}):
        with pytest.raises((ValueError, TypeError)):
            encoder.message(COUNT, shared, wrong)


@pytest.mark.parametrize("encoder", [MsgpackEncoder(), JsonEncoder()], ids=["msgpack", "json"])
@pytest.mark.parametrize("seq", [0, 127, 128, 1023, 1024, 2**31])
@pytest.mark.parametrize("token", ["t", 'a"quote', "größe", "n" * 300])
def test_an_event_is_the_document_of_its_fields(encoder, seq, token):
    kind = {"Content-Type": encoder.content_type}
    shared = encoder.join(encoder.fragment(STATIC), encoder.fragment(TRANSACTION))
    msg_id = f"10a-{token}-insert-{seq}-5"
    row = {"data": {"id": 1, "note": None}, "old": {"id": 2}, "unchanged": ("big",)}
    body = encoder.body(row)
    wanted = {**STATIC, **TRANSACTION, "msg_id": msg_id, "seq": seq}
    row["unchanged"] = ["big"]
    payload = encoder.event(shared, msg_id.encode(), seq, body, len(row))
    assert decode_payload(kind, payload) == {**wanted, **row}
    ended = {"last": True, "end_lsn": 2**63}
    assert decode_payload(kind, encoder.with_end(payload, 2**63)) == {**wanted, **row, **ended}
    load = json.loads if encoder.content_type == "application/json" else msgpack.unpackb
    assert load(encoder.row(body, len(row))) == row
    packed = encoder.rows(shared, msg_id.encode(), seq, [encoder.row(body, len(row))] * 300)
    assert decode_payload(kind, packed) == {**wanted, "rows": [row] * 300}
    assert decode_payload(kind, encoder.with_end(packed, 2**63))["end_lsn"] == 2**63
