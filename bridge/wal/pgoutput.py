"""Decodes pgoutput messages, protocol version 1; safe on any bytes, without I/O."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, Literal, cast

from bridge.errors import ProtocolError
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
    OldKind,
    Origin,
    Relation,
    RelationColumn,
    Truncate,
    Type,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.wal.messages import ColumnValue, Row

_UINT16 = Struct(">H")
_UINT32 = Struct(">I")
_INT32 = Struct(">i")
_UINT64 = Struct(">Q")
_INT64 = Struct(">q")

_NULL: Final = 0x6E
_UNCHANGED: Final = 0x75
_TEXT: Final = 0x74
_BINARY: Final = 0x62


def decode(data: bytes | memoryview) -> Message:
    """Decode one message; truncated, corrupt and overlong input raises ProtocolError."""
    cursor = _Cursor(bytes(data))
    kind = cursor.byte()
    read = _READERS.get(kind)
    if read is None:
        raise ProtocolError(f"unknown pgoutput message type 0x{kind:02x}")
    message = read(cursor)
    cursor.finish()
    return message


class _Cursor:
    """Reads forward through one message and never past its end."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise ProtocolError(
                f"pgoutput message of {len(self._data)} bytes ends within a field at byte "
                f"{self._position}"
            )
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def uint16(self) -> int:
        return cast("int", _UINT16.unpack(self.take(2))[0])

    def uint32(self) -> int:
        return cast("int", _UINT32.unpack(self.take(4))[0])

    def int32(self) -> int:
        return cast("int", _INT32.unpack(self.take(4))[0])

    def lsn(self) -> int:
        return cast("int", _UINT64.unpack(self.take(8))[0])

    def time(self) -> int:
        return cast("int", _INT64.unpack(self.take(8))[0]) + POSTGRES_EPOCH_US

    def string(self) -> str:
        end = self._data.find(b"\0", self._position)
        if end < 0:
            raise ProtocolError(
                f"pgoutput message has a string without end at byte {self._position}"
            )
        taken = self._data[self._position : end]
        self._position = end + 1
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("pgoutput message has a name that is not UTF-8") from error

    def namespace(self) -> str:
        return self.string() or "pg_catalog"

    def expect(self, kind: bytes) -> None:
        found = self.byte()
        if found != kind[0]:
            raise ProtocolError(
                f"pgoutput message has 0x{found:02x} where {kind.decode()!r} is due"
            )

    def row(self) -> Row:
        return tuple([self._column() for _ in range(self.uint16())])

    def _column(self) -> ColumnValue:
        kind = self.byte()
        if kind == _TEXT:
            return self.take(self.uint32())
        if kind == _NULL:
            return None
        if kind == _UNCHANGED:
            return UNCHANGED
        if kind == _BINARY:
            return BinaryValue(self.take(self.uint32()))
        raise ProtocolError(f"unknown pgoutput column kind 0x{kind:02x}")

    def finish(self) -> None:
        left = len(self._data) - self._position
        if left:
            raise ProtocolError(f"pgoutput message has {left} bytes after its end")


def _begin(cursor: _Cursor) -> Begin:
    return Begin(final_lsn=cursor.lsn(), commit_time=cursor.time(), xid=cursor.uint32())


def _commit(cursor: _Cursor) -> Commit:
    return Commit(
        flags=cursor.byte(),
        commit_lsn=cursor.lsn(),
        end_lsn=cursor.lsn(),
        commit_time=cursor.time(),
    )


def _origin(cursor: _Cursor) -> Origin:
    return Origin(commit_lsn=cursor.lsn(), name=cursor.string())


def _relation(cursor: _Cursor) -> Relation:
    relation_id = cursor.uint32()
    namespace = cursor.namespace()
    name = cursor.string()
    identity = cursor.byte()
    if identity not in b"dnfi":
        raise ProtocolError(f"unknown replica identity 0x{identity:02x}")
    return Relation(
        relation_id=relation_id,
        namespace=namespace,
        name=name,
        replica_identity=cast("Literal['d', 'n', 'f', 'i']", chr(identity)),
        columns=tuple([_relation_column(cursor) for _ in range(cursor.uint16())]),
    )


def _relation_column(cursor: _Cursor) -> RelationColumn:
    return RelationColumn(
        flags=cursor.byte(),
        name=cursor.string(),
        type_oid=cursor.uint32(),
        type_modifier=cursor.int32(),
    )


def _type(cursor: _Cursor) -> Type:
    return Type(type_oid=cursor.uint32(), namespace=cursor.namespace(), name=cursor.string())


def _insert(cursor: _Cursor) -> Insert:
    relation_id = cursor.uint32()
    cursor.expect(b"N")
    return Insert(relation_id=relation_id, new=cursor.row())


def _update(cursor: _Cursor) -> Update:
    relation_id = cursor.uint32()
    kind = cursor.byte()
    old_kind: OldKind | None = None
    old: Row | None = None
    if kind in b"KO":
        old_kind = _old_kind(kind)
        old = cursor.row()
        cursor.expect(b"N")
    elif kind != ord("N"):
        raise ProtocolError(f"pgoutput update has 0x{kind:02x} where a row is due")
    return Update(relation_id=relation_id, old_kind=old_kind, old=old, new=cursor.row())


def _delete(cursor: _Cursor) -> Delete:
    relation_id = cursor.uint32()
    return Delete(relation_id=relation_id, old_kind=_old_kind(cursor.byte()), old=cursor.row())


def _old_kind(kind: int) -> OldKind:
    if kind not in b"KO":
        raise ProtocolError(f"unknown kind of old row 0x{kind:02x}")
    return "K" if kind == ord("K") else "O"


def _truncate(cursor: _Cursor) -> Truncate:
    count = cursor.uint32()
    options = cursor.byte()
    if options > 3:
        raise ProtocolError(f"unknown truncate options 0x{options:02x}")
    identifiers = cursor.take(4 * count)
    return Truncate(
        relation_ids=tuple([identifier for (identifier,) in _UINT32.iter_unpack(identifiers)]),
        cascade=bool(options & 1),
        restart_identity=bool(options & 2),
    )


def _logical_message(cursor: _Cursor) -> LogicalMessage:
    flags = cursor.byte()
    if flags > 1:
        raise ProtocolError(f"unknown logical message flags 0x{flags:02x}")
    return LogicalMessage(
        transactional=flags == 1,
        lsn=cursor.lsn(),
        prefix=cursor.string(),
        content=cursor.take(cursor.uint32()),
    )


_READERS: Final[dict[int, Callable[[_Cursor], Message]]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("O"): _origin,
    ord("R"): _relation,
    ord("Y"): _type,
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("M"): _logical_message,
}
