"""HOT PATH: writers compiled per relation, from the bytes of a row straight to MessagePack.

Most rows have no null and no value of 256 bytes or more. Then every column begins with `t` and
three zero bytes, which no text of PostgreSQL contains, and one `split` gives all of them, each
behind the byte of its length. MessagePack's strings of up to 255 bytes look just the same, so text
is copied as it stands. For a relation of an integer and a text column it comes to

    def write(data, position):
        try:
            if len(data) > 65536:
                return walk(data, position) if len(data) < 1048576 else None
            parts = data[position:].split(b"t\\x00\\x00\\x00")
            if len(parts) != 3:
                return walk(data, position)
            (head, p0, p1) = parts
            if not (head == b"\\x00\\x02" and p1[0] + 1 == len(p1)):
                return walk(data, position)
            return b"\\xa4data\\x82\\xa2id%b\\xa4name\\xd9%b" % (small(p0) or pack(...), p1)
        except (ValueError, LookupError, OverflowError, ProtocolError):
            return walk(data, position)

A part of the length it declares ends where the next column begins, so nothing is misread. `walk`
goes from column to column and takes any row but those with unchanged, binary or raw values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import msgpack

from bridge.errors import ProtocolError
from bridge.events.fastpath import COMPILED_READERS, RowSource
from bridge.events.values import converter_for, is_raw
from bridge.events.values.json import JSONB
from bridge.events.values.numeric import BOOL, INTEGER
from bridge.events.values.temporal import TIMESTAMPTZ
from bridge.events.values.text import TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from bridge.events.values import ColumnType, Converter, Value

    RowWriter: TypeAlias = "Callable[[bytes, int], bytes | None]"

    Columns: TypeAlias = tuple[tuple[str, ColumnType], ...]

SHORT_ROW: Final = 64 * 1024
"""Longer rows are not split: the copies would cost more than they gain."""
LONG_ROW: Final = 1024 * 1024
"""Longer ones are read, which takes fewer copies of them at a time."""
_SEPARATOR: Final = b"t\0\0\0"
_FALSE, _TRUE, _NULL, _STR8, _STR32 = b"\xc2", b"\xc3", b"\xc0", b"\xd9", b"\xdb"
_DATA, _OLD = b"\xa4data", b"\xa3old"
_SMALL_INTEGERS: Final = {
    b"%c%d" % (len(str(number)), number): cast("bytes", msgpack.packb(number))
    for number in range(1000)
}


def _not_raw(value: Value) -> Value:
    if is_raw(value):
        raise ValueError("its column must be named")
    return value


def can_write(columns: Sequence[tuple[str, ColumnType]]) -> bool:
    """Whether the rows of a relation can do without being read: json is always raw."""
    converters = [converter_for(column_type) for _, column_type in columns]
    return all(converter is JSONB or not converter.may_be_raw for converter in converters)


def compile_row_writer(
    columns: Sequence[tuple[str, ColumnType]], *, only: Collection[str] | None = None
) -> RowWriter:
    """Compile a writer of one TupleData that gives it as the field `data` in MessagePack.

    Only for text that is known to be UTF-8, and for columns that `can_write` accepts. The rest is
    as with `compile_row_reader`: None means that the row must be read.
    """
    kept = None if only is None else frozenset(only)
    return _row_writer(tuple(columns), kept)


@lru_cache(COMPILED_READERS)
def _row_writer(columns: Columns, only: frozenset[str] | None) -> RowWriter:
    source = _WriterSource(columns)
    row, _ = source.read_row("new", only)
    source.finish(f"{_DATA!r} + {row}")
    walk = cast("RowWriter", source.compile())
    return walk if only is not None else _compile_split(columns, walk)


def compile_update_writer(
    columns: Sequence[tuple[str, ColumnType]], *, only: Collection[str] | None = None
) -> RowWriter:
    """Compile a writer of an update's old row, 'N' and new row: the fields `data` and `old`."""
    kept = None if only is None else frozenset(only)
    return _update_writer(tuple(columns), kept)


@lru_cache(COMPILED_READERS)
def _update_writer(columns: Columns, only: frozenset[str] | None) -> RowWriter:
    source = _WriterSource(columns)
    old, _ = source.read_row("old", only)
    source.expect_new_row()
    new, _ = source.read_row("new", None)
    source.finish(f"b''.join(({_DATA!r}, {new}, {_OLD!r}, {old}))")
    return cast("RowWriter", source.compile())


class _WriterSource(RowSource):
    """Walks like a reader, and gives bytes."""

    null = repr(_NULL)

    def __init__(self, columns: Columns) -> None:
        super().__init__(columns, json_messages=False)
        self.names |= {"pack": msgpack.Packer(autoreset=True).pack, "not_raw": _not_raw}

    def value(self, index: int, converter: Converter) -> str:
        if converter is TEXT:
            return f"{_STR32!r} + data[position + 1:end]"
        template = super().value(index, converter)
        return f"pack(not_raw({template}))" if converter.may_be_raw else f"pack({template})"

    def row(self, items: Sequence[tuple[str, str]]) -> str:
        parts = [_head(len(items)), *(_key(name) + b"%b" for name, _ in items)]
        return _formatted(parts, [variable for _, variable in items])


def _compile_split(columns: Columns, walk: RowWriter) -> RowWriter:
    """Compile the writer that splits, with `walk` for what it leaves alone."""
    count = len(columns)
    names: dict[str, object] = {
        "walk": walk,
        "pack": msgpack.Packer(autoreset=True).pack,
        "small": _SMALL_INTEGERS.get,
        "booleans": {b"\x01t": _TRUE, b"\x01f": _FALSE},
        "not_raw": _not_raw,
        "wrong": _wrong,
        "ProtocolError": ProtocolError,
    }
    parts = [_DATA, _head(count)]
    values: list[str] = []
    conditions = [f"head == {count.to_bytes(2, 'big')!r}"]
    for index, (name, column_type) in enumerate(columns):
        part = f"p{index}"
        whole = f"{part}[0] + 1 == len({part})"
        converter = converter_for(column_type)
        names[f"convert{index}"] = converter.convert
        if converter is BOOL:
            parts.append(_key(name) + b"%b")
            values.append(f"booleans[{part}]")
        elif converter is INTEGER:
            parts.append(_key(name) + b"%b")
            values.append(f"small({part}) or pack(int({part}[1:]) if {whole} else wrong())")
        elif converter is TEXT:
            parts.append(_key(name) + _STR8 + b"%b")
            values.append(part)
            conditions.append(whole)
        elif converter is TIMESTAMPTZ:
            # As with years of four digits: 2025-12-12 12:00:34+00 becomes 2025-12-12T12:00:34Z.
            parts.append(_key(name) + _STR8 + b"%c%bT%bZ")
            values += [f"{part}[0] - 2", f"{part}[1:11]", f"{part}[12:-3]"]
            conditions += [whole, f"{part}[11] == {ord(' ')}", f"{part}[-3:] == b'+00'"]
        else:
            parts.append(_key(name) + b"%b")
            values.append(f"pack(not_raw(convert{index}({part}[1:])))")
            conditions.append(whole)
    variables = "".join(f", p{index}" for index in range(count))
    lines = [
        "def write(data, position):",
        "    try:",
        f"        if len(data) > {SHORT_ROW}:",
        f"            return walk(data, position) if len(data) < {LONG_ROW} else None",
        f"        parts = data[position:].split({_SEPARATOR!r})",
        f"        if len(parts) != {count + 1}:",
        "            return walk(data, position)",
        f"        (head{variables or ','}) = parts",
        f"        if not ({' and '.join(conditions)}):",
        "            return walk(data, position)",
        f"        return {_formatted(parts, values)}",
        "    except (ValueError, LookupError, OverflowError, ProtocolError):",
        "        return walk(data, position)",
    ]
    # Column names enter the source only through repr(), as literals.
    exec("\n".join(lines), names)  # noqa: S102
    return cast("RowWriter", names["write"])


def _wrong() -> int:
    raise ValueError("not the length it declares")


def _head(count: int) -> bytes:
    return cast("bytes", msgpack.Packer(autoreset=True).pack_map_header(count))


def _key(name: str) -> bytes:
    return cast("bytes", msgpack.packb(name)).replace(b"%", b"%%")


def _formatted(parts: Sequence[bytes], values: Sequence[str]) -> str:
    """Source of the bytes of one map."""
    return f"{b''.join(parts)!r} % ({''.join(f'{value}, ' for value in values)})"
