"""The server's side of pgoutput: messages to bytes, written from the protocol page."""

from __future__ import annotations

from struct import pack

from bridge.wal.framing import POSTGRES_EPOCH_US
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
    Row,
    Truncate,
    Type,
    Update,
)


def encode_message(message: Message) -> bytes:
    match message:
        case Begin():
            return b"B" + pack(
                ">QqI", message.final_lsn, message.commit_time - POSTGRES_EPOCH_US, message.xid
            )
        case Commit():
            return b"C" + pack(
                ">BQQq",
                message.flags,
                message.commit_lsn,
                message.end_lsn,
                message.commit_time - POSTGRES_EPOCH_US,
            )
        case Origin():
            return b"O" + pack(">Q", message.commit_lsn) + string(message.name)
        case Relation():
            return (
                b"R"
                + pack(">I", message.relation_id)
                + namespace(message.namespace)
                + string(message.name)
                + message.replica_identity.encode()
                + pack(">H", len(message.columns))
                + b"".join(
                    pack(">B", column.flags)
                    + string(column.name)
                    + pack(">Ii", column.type_oid, column.type_modifier)
                    for column in message.columns
                )
            )
        case Type():
            return (
                b"Y"
                + pack(">I", message.type_oid)
                + namespace(message.namespace)
                + string(message.name)
            )
        case Insert():
            return b"I" + pack(">I", message.relation_id) + b"N" + encode_row(message.new)
        case Update():
            old = b""
            if message.old_kind is not None and message.old is not None:
                old = message.old_kind.encode() + encode_row(message.old)
            return b"U" + pack(">I", message.relation_id) + old + b"N" + encode_row(message.new)
        case Delete():
            return (
                b"D"
                + pack(">I", message.relation_id)
                + message.old_kind.encode()
                + encode_row(message.old)
            )
        case Truncate():
            options = message.cascade | message.restart_identity << 1
            return b"T" + pack(
                f">IB{len(message.relation_ids)}I",
                len(message.relation_ids),
                options,
                *message.relation_ids,
            )
        case LogicalMessage():
            return (
                b"M"
                + pack(">BQ", message.transactional, message.lsn)
                + string(message.prefix)
                + pack(">I", len(message.content))
                + message.content
            )


def encode_row(row: Row) -> bytes:
    encoded = [pack(">H", len(row))]
    for value in row:
        if value is None:
            encoded.append(b"n")
        elif value is UNCHANGED:
            encoded.append(b"u")
        elif isinstance(value, BinaryValue):
            encoded.append(b"b" + pack(">I", len(value.data)) + value.data)
        else:
            encoded.append(b"t" + pack(">I", len(value)) + value)
    return b"".join(encoded)


def string(text: str) -> bytes:
    return text.encode() + b"\0"


def namespace(name: str) -> bytes:
    return string("" if name == "pg_catalog" else name)
