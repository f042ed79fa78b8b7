from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import ProtocolError
from bridge.wal.framing import POSTGRES_EPOCH_US, parse_frame
from bridge.wal.messages import (
    UNCHANGED,
    Begin,
    BinaryValue,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    RelationColumn,
    Truncate,
    Type,
    Update,
)
from bridge.wal.pgoutput import decode
from tests.pgoutput_encoder import encode_message

uint8 = st.integers(0, 255)
uint32 = st.integers(0, 2**32 - 1)
lsns = st.integers(0, 2**64 - 1)
times = st.integers(-(2**63), 2**63 - 1).map(lambda time: time + POSTGRES_EPOCH_US)
names = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20
)
values = st.one_of(
    st.none(), st.just(UNCHANGED), st.binary(max_size=40), st.binary(max_size=9).map(BinaryValue)
)
rows = st.lists(values, max_size=8).map(tuple)
columns = st.builds(
    RelationColumn,
    flags=uint8,
    name=names,
    type_oid=uint32,
    type_modifier=st.integers(-(2**31), 2**31 - 1),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Begin, final_lsn=lsns, commit_time=times, xid=uint32),
    st.builds(Commit, flags=uint8, commit_lsn=lsns, end_lsn=lsns, commit_time=times),
    st.builds(Origin, commit_lsn=lsns, name=names),
    st.builds(
        Relation,
        relation_id=uint32,
        namespace=names | st.just("pg_catalog"),
        name=names,
        replica_identity=st.sampled_from("dnfi"),
        columns=st.lists(columns, max_size=6).map(tuple),
    ),
    st.builds(Type, type_oid=uint32, namespace=names, name=names),
    st.builds(Insert, relation_id=uint32, new=rows),
    st.builds(Update, relation_id=uint32, old_kind=st.none(), old=st.none(), new=rows),
    st.builds(Update, relation_id=uint32, old_kind=st.sampled_from("KO"), old=rows, new=rows),
    st.builds(Delete, relation_id=uint32, old_kind=st.sampled_from("KO"), old=rows),
    st.builds(
        Truncate,
        relation_ids=st.lists(uint32, max_size=5).map(tuple),
        cascade=st.booleans(),
        restart_identity=st.booleans(),
    ),
    st.builds(
        LogicalMessage,
        transactional=st.booleans(),
        lsn=lsns,
        prefix=names,
        content=st.binary(max_size=40),
    ),
)


def refuses(data: bytes) -> bool:
    try:
        decode(data)
    except ProtocolError:
        return True
    return False


@given(messages)
def test_every_message_decodes_to_what_was_encoded(message: Message) -> None:
    data = encode_message(message)
    assert decode(data) == message
    assert decode(memoryview(data)) == message


@given(messages)
def test_every_truncated_prefix_is_refused(message: Message) -> None:
    data = encode_message(message)
    assert [end for end in range(len(data)) if not refuses(data[:end])] == []


@given(messages, st.binary(min_size=1, max_size=9))
def test_bytes_after_the_end_are_refused(message: Message, extra: bytes) -> None:
    assert refuses(encode_message(message) + extra)


@given(st.sampled_from(b"BCORYIUDTM"), st.binary(max_size=80))
def test_random_bytes_decode_or_are_refused(kind: int, body: bytes) -> None:
    data = bytes([kind]) + body
    if not refuses(data):
        assert decode(encode_message(decode(data))) == decode(data)


@given(messages, st.data())
def test_a_damaged_byte_never_raises_anything_but_protocol_error(
    message: Message, data: st.DataObject
) -> None:
    damaged = bytearray(encode_message(message))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(uint8)
    refuses(bytes(damaged))


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda body: b"w" + body))
def test_random_frames_parse_or_are_refused(payload: bytes) -> None:
    try:
        frame = parse_frame(payload)
    except ProtocolError:
        return
    assert payload[:1] in (b"w", b"k")
    assert frame.end_lsn >= 0
