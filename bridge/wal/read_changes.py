"""Changes whose rows must be read, since nothing compiled can write them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.wal.messages import Delete, Insert, Update
from bridge.wal.pgoutput import decode

if TYPE_CHECKING:
    from bridge.wal.relations import CompiledRelation, MessageParts

_INSERT, _DELETE = b"ID"


def read_change(
    relation: CompiledRelation, frame: bytes, start: int
) -> tuple[MessageParts, dict[str, Any]]:
    """The kind of message, and the fields of the row that begins at `start` of the frame."""
    kind, tag = frame[start], frame[start + 5 : start + 6]
    if tag == b"N":
        read = relation.read_row(frame, start + 6)
        if read is not None:
            parts = relation.insert if kind == _INSERT else relation.update
            return parts, _fields(read[0], None, (), read[1])
    elif kind == _DELETE:
        read = (relation.read_key if tag == b"K" else relation.read_row)(frame, start + 6)
        if read is not None and tag in (b"K", b"O"):
            return relation.delete, _fields(read[0], None, (), read[1])
    elif tag in (b"K", b"O"):
        reader = relation.read_update_key if tag == b"K" else relation.read_update
        both = reader(frame, start + 6)
        if both is not None:
            return relation.update, _fields(both[1], both[0], (), both[2])
    return _decode_change(relation, frame[start:])


def _decode_change(relation: CompiledRelation, data: bytes) -> tuple[MessageParts, dict[str, Any]]:
    """Read a change with values the compiled readers leave alone, or refuse a broken one."""
    message = decode(data)
    convert = relation.converter.convert
    old: dict[str, Any] | None = None
    if isinstance(message, Insert):
        parts = relation.insert
        row = convert(message.new)
        raw = row.raw
    elif isinstance(message, Update):
        parts = relation.update
        if message.old is None:
            row = convert(message.new)
            raw = row.raw
        else:
            only = relation.identity if message.old_kind == "K" else None
            before, row = relation.converter.convert_pair(message.old, message.new, only=only)
            old = before.data
            raw = tuple(dict.fromkeys((*row.raw, *before.raw)))
    else:
        assert isinstance(message, Delete)
        parts = relation.delete
        row = convert(message.old, only=relation.identity if message.old_kind == "K" else None)
        raw = row.raw
    if relation.adapt is not None:
        relation.adapt(row.data)
        if old is not None:
            relation.adapt(old)
    return parts, _fields(row.data, old, row.unchanged, raw)


def _fields(
    data: dict[str, Any],
    old: dict[str, Any] | None,
    unchanged: tuple[str, ...],
    raw: tuple[str, ...],
) -> dict[str, Any]:
    fields: dict[str, Any] = {"data": data}
    if old is not None:
        fields["old"] = old
    if unchanged:
        fields["unchanged"] = unchanged
    if raw:
        fields["raw"] = raw
    return fields
