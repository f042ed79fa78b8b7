"""HOT PATH: readers compiled per relation, from the bytes of a row straight to its dict.

This module trades beauty for speed: it writes Python source. For a relation of an integer and a
text column it comes to

    def read(data, position):
        try:
            if data[position:position + 2] != b"\\x00\\x02":
                return None
            position += 2
            if data[position] == 116:
                end = unpack(data, position + 1)[0] + position + 5
                new0 = int(data[position + 5:end])
                position = end
            elif data[position] == 110:
                new0 = None
                position += 1
            else:
                return None
            ...
            if position != len(data):
                return None
            return {"id": new0, "name": new1}, ()
        except (ValueError, LookupError, OverflowError, StructError, ProtocolError):
            return None

Slices do not complain past the end of the data, but then `position` ends beyond `len(data)`: the
last comparison covers every column.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception, whatever its case
from typing import TYPE_CHECKING, TypeAlias, cast

from bridge.errors import ProtocolError
from bridge.events.values import converter_for, is_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from bridge.events.values import ColumnType, Converter, Value

    RowReader: TypeAlias = "Callable[[bytes, int], tuple[dict[str, Value], tuple[str, ...]] | None]"
    UpdateReader: TypeAlias = (
        "Callable[[bytes, int], tuple[dict[str, Value], dict[str, Value], tuple[str, ...]] | None]"
    )


COMPILED_READERS = 4096
"""How many readers are kept: PostgreSQL describes a relation again whenever it likes."""


def compile_row_reader(
    columns: Sequence[tuple[str, ColumnType]],
    *,
    only: Collection[str] | None = None,
    json_messages: bool = False,
) -> RowReader:
    """Compile a reader of one TupleData that gives `(row, names of raw columns)`.

    The row must start at the given offset and end with the data; `only` keeps those columns, as
    rows of kind 'K' need it. None means: take the general path, which reads the rows this one
    does not (unchanged and binary values) and says what is wrong with those nobody can read.
    """
    kept = None if only is None else frozenset(only)
    return _row_reader(tuple(columns), kept, json_messages)


@lru_cache(COMPILED_READERS)
def _row_reader(
    columns: tuple[tuple[str, ColumnType], ...], only: frozenset[str] | None, json_messages: bool
) -> RowReader:
    source = RowSource(columns, json_messages=json_messages)
    row, marks = source.read_row("new", only)
    source.finish(f"{row}, {source.raw_names(marks)}")
    return cast("RowReader", source.compile())


def compile_update_reader(
    columns: Sequence[tuple[str, ColumnType]],
    *,
    only: Collection[str] | None = None,
    json_messages: bool = False,
) -> UpdateReader:
    """Compile a reader of an update's old row, 'N' and new row: `(old, new, raw columns)`.

    The offset is that of the old row, of which `only` keeps those columns. None means: take the
    general path, also where a column is raw in one of the two rows alone.
    """
    kept = None if only is None else frozenset(only)
    return _update_reader(tuple(columns), kept, json_messages)


@lru_cache(COMPILED_READERS)
def _update_reader(
    columns: tuple[tuple[str, ColumnType], ...], only: frozenset[str] | None, json_messages: bool
) -> UpdateReader:
    source = RowSource(columns, json_messages=json_messages)
    old, old_marks = source.read_row("old", only)
    source.expect_new_row()
    new, new_marks = source.read_row("new", None)
    if old_marks or new_marks:
        source.add(
            f"raw = {source.raw_names(new_marks)}",
            f"if raw != {source.raw_names(old_marks)}:",
            "    return None",
        )
    else:
        source.add("raw = ()")
    source.finish(f"{old}, {new}, raw")
    return cast("UpdateReader", source.compile())


class RowSource:
    """The source of one reader, while it is being written."""

    null = "None"
    """What stands for a null."""

    def __init__(self, columns: Sequence[tuple[str, ColumnType]], *, json_messages: bool) -> None:
        self._columns = [
            (name, converter_for(column_type, json_messages=json_messages))
            for name, column_type in columns
        ]
        self._lines = ["def read(data, position):", "    try:"]
        self.names: dict[str, object] = {
            "unpack": Struct(">I").unpack_from,
            "is_raw": is_raw,
            "StructError": StructError,
            "ProtocolError": ProtocolError,
        }

    def add(self, *lines: str) -> None:
        self._lines += [f"        {line}" for line in lines]

    def value(self, index: int, converter: Converter) -> str:
        """Source of the value of a column that is there."""
        template = converter.inline or f"convert{index}({{}})"
        return template.format("data[position + 5:end]")

    def row(self, items: Sequence[tuple[str, str]]) -> str:
        """Source of the row, from names and the variables that hold their values."""
        return f"{{{', '.join(f'{name!r}: {variable}' for name, variable in items)}}}"

    def read_row(self, prefix: str, only: Collection[str] | None) -> tuple[str, list[str]]:
        """Write the reading of one row; give the row and the pairs that may be raw, as source."""
        self.add(
            f"if data[position:position + 2] != {len(self._columns).to_bytes(2, 'big')!r}:",
            "    return None",
            "position += 2",
        )
        items: list[tuple[str, str]] = []
        marks: list[str] = []
        for index, (name, converter) in enumerate(self._columns):
            variable = f"{prefix}{index}"
            is_kept = only is None or name in only
            self.names[f"convert{index}"] = converter.convert
            self.names.update(converter.names)
            self.add(
                "if data[position] == 116:",
                "    end = unpack(data, position + 1)[0] + position + 5",
            )
            if is_kept:
                self.add(f"    {variable} = {self.value(index, converter)}")
                items.append((name, variable))
                if converter.may_be_raw:
                    marks.append(f"({name!r}, {variable})")
            self.add("    position = end", "elif data[position] == 110:")
            if is_kept:
                self.add(f"    {variable} = {self.null}")
            self.add("    position += 1", "else:", "    return None")
        return self.row(items), marks

    def expect_new_row(self) -> None:
        """Write the step from an update's old row to its new one."""
        self.add("if data[position] != 78:", "    return None", "position += 1")

    @staticmethod
    def raw_names(marks: list[str]) -> str:
        if not marks:
            return "()"
        return f"tuple([name for name, value in ({', '.join(marks)},) if is_raw(value)])"

    def finish(self, result: str) -> None:
        self.add("if position != len(data):", "    return None", f"return {result}")
        self._lines += [
            "    except (ValueError, LookupError, OverflowError, StructError, ProtocolError):",
            "        return None",
        ]

    def compile(self) -> object:
        # Column names enter the source only through repr(), as literals.
        exec("\n".join(self._lines), self.names)  # noqa: S102
        return self.names["read"]
