"""The messages of pgoutput, protocol version 1, one type each.

Field comments restate https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias


class _Absent(Enum):
    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = _Absent.UNCHANGED
"""A TOASTed value that did not change and was not sent: neither null nor known."""


@dataclass(frozen=True, slots=True)
class BinaryValue:
    """A value in the type's binary format ('b'), sent only to sessions that ask for it."""

    data: bytes


ColumnValue: TypeAlias = bytes | BinaryValue | Literal[_Absent.UNCHANGED] | None
"""Text as bytes, null as None."""

Row: TypeAlias = tuple[ColumnValue, ...]
OldKind: TypeAlias = Literal["K", "O"]
"""'K': only the replica identity's columns are filled in; 'O': the whole old row."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Opens a transaction; transactions arrive whole and in commit order."""

    final_lsn: int
    """Int64: LSN of the commit record, the same as the Commit's `commit_lsn`."""
    commit_time: int
    """Int64: microseconds since 1970."""
    xid: int
    """Int32: transaction id, unsigned."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Closes a transaction."""

    flags: int
    """Int8: unused by PostgreSQL so far."""
    commit_lsn: int
    """Int64: LSN of the commit record."""
    end_lsn: int
    """Int64: end of the commit record; confirming it releases the transaction."""
    commit_time: int
    """Int64: microseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Says that the transaction was replicated here from another server."""

    commit_lsn: int
    """Int64: LSN of the commit on the origin server."""
    name: str
    """String."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as the rows that follow carry it."""

    flags: int
    """Int8: 1 marks a part of the replica identity."""
    name: str
    """String."""
    type_oid: int
    """Int32, unsigned."""
    type_modifier: int
    """Int32: atttypmod, -1 for none."""

    @property
    def is_key(self) -> bool:
        """Whether the column belongs to the replica identity."""
        return bool(self.flags & 1)


@dataclass(frozen=True, slots=True)
class Relation:
    """Describes a table, before its first row in a session and again after any change to it."""

    relation_id: int
    """Int32: OID of the table, unsigned."""
    namespace: str
    """String: the schema; the empty string on the wire means pg_catalog."""
    name: str
    """String."""
    replica_identity: Literal["d", "n", "f", "i"]
    """Int8: pg_class.relreplident: default, nothing, full, index."""
    columns: tuple[RelationColumn, ...]
    """Int16 count, then the columns."""


@dataclass(frozen=True, slots=True)
class Type:
    """Names a type that is not built in, before the Relation that uses it."""

    type_oid: int
    """Int32, unsigned."""
    namespace: str
    """String: the schema; the empty string on the wire means pg_catalog."""
    name: str
    """String."""


@dataclass(frozen=True, slots=True)
class Insert:
    """A new row."""

    relation_id: int
    """Int32."""
    new: Row
    """Byte1('N'), TupleData."""


@dataclass(frozen=True, slots=True)
class Update:
    """A changed row."""

    relation_id: int
    """Int32."""
    old_kind: OldKind | None
    """Byte1: 'K' if the identity changed, 'O' under REPLICA IDENTITY FULL, else nothing."""
    old: Row | None
    """TupleData, only after 'K' or 'O'."""
    new: Row
    """Byte1('N'), TupleData."""


@dataclass(frozen=True, slots=True)
class Delete:
    """A removed row."""

    relation_id: int
    """Int32."""
    old_kind: OldKind
    """Byte1: 'K', or 'O' under REPLICA IDENTITY FULL."""
    old: Row
    """TupleData."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Emptied tables, all by one command."""

    relation_ids: tuple[int, ...]
    """Int32 count, and after the options one Int32 for each."""
    cascade: bool
    """Int8, bit 1."""
    restart_identity: bool
    """Int8, bit 2."""


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What pg_logical_emit_message wrote."""

    transactional: bool
    """Int8: 1 if it belongs to the transaction around it, 0 if it was sent at once."""
    lsn: int
    """Int64: LSN of the message."""
    prefix: str
    """String."""
    content: bytes
    """Int32 length, then the bytes."""


Message: TypeAlias = (
    Begin | Commit | Origin | Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage
)
