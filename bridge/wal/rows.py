"""Rows as PostgreSQL sent them to rows as events carry them: the general path, for any row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.errors import ProtocolError
from bridge.values import RawText, converter_for, is_raw
from bridge.values.text import to_text
from bridge.wal.messages import UNCHANGED, BinaryValue

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from bridge.values import ColumnType, Value
    from bridge.wal.messages import Row


@dataclass(frozen=True, slots=True)
class EventRow:
    """A converted row: values by column name, and the columns that need a word."""

    data: dict[str, Value]
    unchanged: tuple[str, ...]
    raw: tuple[str, ...]


class RowConverter:
    """Converts the rows of one relation, of whatever kind its columns are."""

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
        """Convert a row, or `only` the named columns of one that carries nothing else ('K').

        The jsonb columns of `as_raw` keep their text. A row that does not fit its relation raises
        ProtocolError, which never shows a value.
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
        """Convert the old row (`only` those columns of it) and the new row of one event.

        An event has one `raw` for both, so a column that is raw in one row is so in the other.
        """
        old_row = self.convert(old, only=only)
        new_row = self.convert(new)
        if old_row.raw != new_row.raw:
            either = {*old_row.raw, *new_row.raw}
            old_row = self.convert(old, only=only, as_raw=either)
            new_row = self.convert(new, as_raw=either)
        return old_row, new_row
