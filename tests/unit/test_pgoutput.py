from __future__ import annotations

import pytest

from bridge.errors import ProtocolError
from bridge.wal.messages import (
    UNCHANGED,
    Begin,
    BinaryValue,
    Delete,
    Insert,
    LogicalMessage,
    Relation,
    RelationColumn,
    Truncate,
    Type,
    Update,
)
from bridge.wal.pgoutput import decode

RELATION = bytes.fromhex(
    "52 00004001 7075626c696300 757365727300 64 0002"
    " 01 696400 00000014 ffffffff"
    " 00 6e616d6500 00000413 00000024"
)


def test_begin_counts_time_from_1970() -> None:
    data = bytes.fromhex("42 0000001600000080 0002eb6c83e04000 000002d1")
    assert decode(data) == Begin(
        final_lsn=0x1600000080, commit_time=0x0002EB6C83E04000 + 946_684_800_000_000, xid=721
    )


def test_relation_names_its_columns_and_keys() -> None:
    relation = decode(RELATION)
    assert relation == Relation(
        0x4001,
        "public",
        "users",
        "d",
        (RelationColumn(1, "id", 20, -1), RelationColumn(0, "name", 1043, 36)),
    )
    assert isinstance(relation, Relation)
    assert [column.is_key for column in relation.columns] == [True, False]


def test_an_empty_namespace_is_pg_catalog() -> None:
    assert decode(b"Y" + bytes([0, 0, 0, 5]) + b"\0mood\0") == Type(5, "pg_catalog", "mood")


def test_every_kind_of_column_value_is_told_apart() -> None:
    data = (
        b"I\0\0\0\x01N\0\x05" + b"n" + b"u" + b"t\0\0\0\x02hi" + b"t\0\0\0\0" + b"b\0\0\0\x01\x07"
    )
    assert decode(data) == Insert(1, (None, UNCHANGED, b"hi", b"", BinaryValue(b"\x07")))


@pytest.mark.parametrize("kind", ["K", "O"])
def test_update_and_delete_keep_the_kind_of_the_old_row(kind: str) -> None:
    old = kind.encode() + b"\0\x01t\0\0\0\x011"
    assert decode(b"U\0\0\0\x01" + old + b"N\0\x01t\0\0\0\x012") == Update(
        1, kind, (b"1",), (b"2",)
    )
    assert decode(b"D\0\0\0\x01" + old) == Delete(1, kind, (b"1",))


def test_truncate_names_every_table() -> None:
    data = b"T\0\0\0\x03\x03" + bytes.fromhex("00000001 00000002 ffffffff")
    assert decode(data) == Truncate((1, 2, 2**32 - 1), cascade=True, restart_identity=True)


def test_logical_message_keeps_bytes_as_they_are() -> None:
    data = b"M\x01" + bytes(8) + b"audit\0" + b"\0\0\0\x03\x00\xff\n"
    assert decode(data) == LogicalMessage(True, 0, "audit", b"\x00\xff\n")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"S\0\0\0\x01\x01",
        RELATION.replace(b"users\0d", b"users\0x"),
        RELATION.replace(b"name", b"\xff\xfe\xfd\xfc"),
        b"I\0\0\0\x01K\0\0",
        b"I\0\0\0\x01N\0\x01x",
        b"I\0\0\0\x01N\0\x01t\xff\xff\xff\xff",
        b"U\0\0\0\x01X\0\0",
        b"D\0\0\0\x01N\0\0",
        b"T\xff\xff\xff\xff\0",
        b"T\0\0\0\0\x04",
        b"M\x02" + bytes(8) + b"p\0\0\0\0\0",
        b"O" + bytes(8) + b"unterminated",
    ],
)
def test_corrupt_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_unchanged_is_neither_null_nor_a_value() -> None:
    assert UNCHANGED is not None
    assert repr(UNCHANGED) == "UNCHANGED"
