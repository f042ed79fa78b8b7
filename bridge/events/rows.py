"""The general path for rows that no generated writer accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import ProtocolError
from bridge.events.values import RawText, converter_for, is_raw
from bridge.events.values.scalars import to_text
from bridge.wal.messages import UNCHANGED, BinaryValue, Delete, Insert, Update
from bridge.wal.pgoutput import decode
from consumer_sdk.wire.envelope import to_json_value

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from bridge.events.relations import CompiledRelation, MessageParts
    from bridge.events.values import ColumnType, Value
    from bridge.wal.messages import Row


@dataclass(frozen=True, slots=True)
class EventRow:
    """A converted row: values by column name, and the columns that are unchanged or raw."""

    data: dict[str, Value]
    unchanged: tuple[str, ...]
    raw: tuple[str, ...]


class RowConverter:
    """Converts the rows of one relation, whatever the types of its columns."""

    __slots__ = ("_columns",)

    def __init__(
        self, columns: Sequence[tuple[str, ColumnType]], *, json_messages: bool = False
    ) -> None:
        self._columns = [
            (name, converter_for(column_type, json_messages=json_messages).convert)
            for name, column_type in columns
        ]

    def convert(
        self, row: Row, *, only: Collection[str] | None = None, as_raw: Collection[str] = ()
    ) -> EventRow:
        """Convert a row, or with `only` the named columns of a row that has no others ('K').

        The jsonb columns in `as_raw` keep their text. A row that does not fit its relation raises
        ProtocolError, whose message never contains a value.
        """
        if len(row) != len(self._columns):
            raise ProtocolError(
                f"a row has {len(row)} columns, its relation has {len(self._columns)}"
            )
        data: dict[str, Value] = {}
        unchanged: list[str] = []
        raw: list[str] = []
        for (name, convert), sent in zip(self._columns, row, strict=True):
            if only is not None and name not in only:
                continue
            if sent is None:
                data[name] = None
            elif isinstance(sent, bytes):
                try:
                    value = convert(sent)
                except ProtocolError as error:
                    raise ProtocolError(f"column {name!r}: {error}") from error
                if name in as_raw and not is_raw(value):
                    value = RawText(to_text(sent))
                data[name] = value
                if is_raw(value):
                    raw.append(name)
            elif sent is UNCHANGED:
                unchanged.append(name)
            else:
                assert isinstance(sent, BinaryValue)
                raise ProtocolError(
                    f"column {name!r}: a binary value came although text was asked for"
                )
        return EventRow(data, tuple(unchanged), tuple(raw))

    def convert_pair(
        self, old: Row, new: Row, *, only: Collection[str] | None = None
    ) -> tuple[EventRow, EventRow]:
        """Convert the old row (limited to `only`) and the new row of one event.

        An event has one `raw` for both rows, so a column that is raw in one is made raw in both.
        """
        old_row = self.convert(old, only=only)
        new_row = self.convert(new)
        if old_row.raw != new_row.raw:
            either = {*old_row.raw, *new_row.raw}
            old_row = self.convert(old, only=only, as_raw=either)
            new_row = self.convert(new, as_raw=either)
        return old_row, new_row


_INSERT, _DELETE = b"ID"


def read_change(
    relation: CompiledRelation, frame: bytes, start: int
) -> tuple[MessageParts, dict[str, Any]]:
    """Read the change that begins at `start`: its message parts and its fields."""
    parts, fields = _read_change(relation, frame, start)
    if relation.json_adapted:
        _adapt_to_json(fields["data"], relation.json_adapted)
        if "old" in fields:
            _adapt_to_json(fields["old"], relation.json_adapted)
    return parts, fields


def _adapt_to_json(row: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if name in row:
            row[name] = to_json_value(row[name])


def _read_change(
    relation: CompiledRelation, frame: bytes, start: int
) -> tuple[MessageParts, dict[str, Any]]:
    """Read a change with a generated reader, or on the general path if the reader declines."""
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
    """Read a change that the generated readers decline; ProtocolError if it is invalid."""
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
