"""HOT PATH: generates code for each relation that converts a row to values or to MessagePack.

For speed, this module generates Python source. There are two kinds of functions. Readers return
the values of a row, for JSON messages and for rows that a writer declines. Writers return the row
in MessagePack. Both return None if the row must take the general path in `rows`, which reads every
valid row and reports what is wrong with an invalid one.

*Walking.* For a relation of an integer and a text column, the reader of a row is

    def walk(data, position):
        try:
            if data[position:position + 2] != b'\\x00\\x02':
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
            if data[position] == 116:
                end = unpack(data, position + 1)[0] + position + 5
                new1 = data[position + 5:end].decode()
                position = end
            elif data[position] == 110:
                new1 = None
                position += 1
            else:
                return None
            if position != len(data):
                return None
            return {'id': new0, 'name': new1}, ()
        except (ValueError, LookupError, OverflowError, StructError, ProtocolError):
            return None

A slice past the end of the data raises no error, but then `position` is beyond `len(data)`, so the
last comparison covers every column. A writer walks in the same way and builds MessagePack.

*Splitting.* Most rows have no null and no value of 256 bytes or more. Then every column begins with
`t` and three zero bytes, which no text of PostgreSQL contains, so one `split` separates all
columns; each part begins with the byte of its length. MessagePack strings of up to 255 bytes have
the same form, so text is copied unchanged. For the same relation the writer of a row is

    def write(data, position):
        try:
            if len(data) > 65536:
                return walk(data, position) if len(data) < 1048576 else None
            parts = data[position:].split(b't\\x00\\x00\\x00')
            if len(parts) != 3:
                return walk(data, position)
            (head, p0, p1) = parts
            if not (head == b'\\x00\\x02' and p1[0] + 1 == len(p1)):
                return walk(data, position)
            return (
                b'\\xa4data\\x82\\xa2id%b\\xa4name\\xd9%b'
                % (small(p0) or pack(int(p0[1:]) if p0[0] + 1 == len(p0) else wrong()), p1,)
            )
        except (ValueError, LookupError, OverflowError, ProtocolError):
            return walk(data, position)

A part that has the declared length ends where the next column begins, so no row is misread.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception, whatever its case
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import msgpack

from bridge.errors import ProtocolError
from bridge.events.values import converter_for, is_raw
from bridge.events.values.json import JSONB
from bridge.events.values.scalars import BOOL, INTEGER, TEXT, TIMESTAMPTZ

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from bridge.events.values import ColumnType, Converter, Value

    RowReader: TypeAlias = "Callable[[bytes, int], tuple[dict[str, Value], tuple[str, ...]] | None]"
    UpdateReader: TypeAlias = (
        "Callable[[bytes, int], tuple[dict[str, Value], dict[str, Value], tuple[str, ...]] | None]"
    )
    RowWriter: TypeAlias = "Callable[[bytes, int], bytes | None]"
    Columns: TypeAlias = tuple[tuple[str, ColumnType], ...]

KEPT_FUNCTIONS: Final = 4096
"""How many compiled functions of each kind are cached, since relations are described again."""
SHORT_ROW: Final = 64 * 1024
"""Longer rows are not split, because the copies cost more time than splitting saves."""
LONG_ROW: Final = 1024 * 1024
"""Longer rows are read, not written, because that needs fewer copies of the row at a time."""
_SEPARATOR: Final = b"t\0\0\0"
_FALSE, _TRUE, _NULL, _STR8, _STR32 = b"\xc2", b"\xc3", b"\xc0", b"\xd9", b"\xdb"
_DATA, _OLD = b"\xa4data", b"\xa3old"
_SMALL_INTEGERS: Final = {
    b"%c%d" % (len(str(number)), number): cast("bytes", msgpack.packb(number))
    for number in range(1000)
}


def compile_row_reader(
    columns: Sequence[tuple[str, ColumnType]],
    *,
    only: Collection[str] | None = None,
    json_messages: bool = False,
) -> RowReader:
    """Compile a reader of one TupleData that returns `(row, names of raw columns)`.

    The row must start at the given offset and end with the data. With `only`, the row has only
    those columns, as rows of kind 'K' need it.
    """
    return cast("RowReader", _row_reader(tuple(columns), _frozen(only), json_messages))


def compile_update_reader(
    columns: Sequence[tuple[str, ColumnType]],
    *,
    only: Collection[str] | None = None,
    json_messages: bool = False,
) -> UpdateReader:
    """Compile a reader of an update's old row, 'N' and new row: `(old, new, raw columns)`.

    The offset is that of the old row; `only` limits its columns. The reader also returns None if a
    column is raw in only one of the two rows.
    """
    return cast("UpdateReader", _update_reader(tuple(columns), _frozen(only), json_messages))


def can_write(columns: Sequence[tuple[str, ColumnType]]) -> bool:
    """Whether a writer can handle the relation: json columns must be read, as they are raw."""
    converters = [converter_for(column_type) for _, column_type in columns]
    return all(converter is JSONB or not converter.may_be_raw for converter in converters)


def compile_row_writer(
    columns: Sequence[tuple[str, ColumnType]], *, only: Collection[str] | None = None
) -> RowWriter:
    """Compile a writer of one TupleData that returns it as the field `data` in MessagePack.

    It is only for text that is known to be UTF-8, and for columns that `can_write` accepts. The
    offset and `only` are as in `compile_row_reader`.
    """
    return cast("RowWriter", _row_writer(tuple(columns), _frozen(only)))


def compile_update_writer(
    columns: Sequence[tuple[str, ColumnType]], *, only: Collection[str] | None = None
) -> RowWriter:
    """Compile a writer of an update's old row, 'N' and new row: the fields `data` and `old`."""
    return cast("RowWriter", _update_writer(tuple(columns), _frozen(only)))


def _frozen(only: Collection[str] | None) -> frozenset[str] | None:
    return None if only is None else frozenset(only)


@lru_cache(KEPT_FUNCTIONS)
def _row_reader(columns: Columns, only: frozenset[str] | None, json_messages: bool) -> object:
    return row_reader_code(columns, only, json_messages=json_messages).compile()


@lru_cache(KEPT_FUNCTIONS)
def _update_reader(columns: Columns, only: frozenset[str] | None, json_messages: bool) -> object:
    return update_reader_code(columns, only, json_messages=json_messages).compile()


@lru_cache(KEPT_FUNCTIONS)
def _row_writer(columns: Columns, only: frozenset[str] | None) -> object:
    walk = walking_writer_code(columns, only).compile()
    return walk if only is not None else splitting_writer_code(columns, walk).compile()


@lru_cache(KEPT_FUNCTIONS)
def _update_writer(columns: Columns, only: frozenset[str] | None) -> object:
    return update_writer_code(columns, only).compile()


def row_reader_code(
    columns: Columns, only: frozenset[str] | None = None, *, json_messages: bool = False
) -> RowCode:
    """The code of a row's reader."""
    code = _WalkCode(columns, _ValueForm(json_messages=json_messages))
    row, marks = code.walk_row("new", only)
    return code.finish(f"{row}, {_raw_names(marks)}")


def update_reader_code(
    columns: Columns, only: frozenset[str] | None = None, *, json_messages: bool = False
) -> RowCode:
    """The code of an update's reader."""
    code = _WalkCode(columns, _ValueForm(json_messages=json_messages))
    old, old_marks = code.walk_row("old", only)
    code.expect_new_row()
    new, new_marks = code.walk_row("new", None)
    if old_marks or new_marks:
        code.add(
            f"raw = {_raw_names(new_marks)}",
            f"if raw != {_raw_names(old_marks)}:",
            "    return None",
        )
    else:
        code.add("raw = ()")
    return code.finish(f"{old}, {new}, raw")


def walking_writer_code(columns: Columns, only: frozenset[str] | None = None) -> RowCode:
    """The code of a row's writer that accepts all rows without unchanged or raw values."""
    code = _WalkCode(columns, _MsgpackForm())
    row, _ = code.walk_row("new", only)
    return code.finish(f"{_DATA!r} + {row}")


def update_writer_code(columns: Columns, only: frozenset[str] | None = None) -> RowCode:
    """The code of an update's writer."""
    code = _WalkCode(columns, _MsgpackForm())
    old, _ = code.walk_row("old", only)
    code.expect_new_row()
    new, _ = code.walk_row("new", None)
    return code.finish(f"b''.join(({_DATA!r}, {new}, {_OLD!r}, {old}))")


class RowCode:
    """The source of one function, and the names it uses."""

    def __init__(self, function: str, names: dict[str, object]) -> None:
        self._function = function
        self._lines = [f"def {function}(data, position):", "    try:"]
        self.names = {"ProtocolError": ProtocolError, "StructError": StructError, **names}

    def add(self, *lines: str) -> None:
        """Add lines inside the function's `try`."""
        self._lines += [f"        {line}" for line in lines]

    def close(self, errors: str, result: str) -> None:
        """End the function: it returns `result` if one of the errors is raised."""
        self._lines += [f"    except ({errors}):", f"        return {result}"]

    @property
    def source(self) -> str:
        """The source of the function."""
        return "\n".join(self._lines) + "\n"

    def compile(self) -> object:
        # Column names enter the source only through repr(), as literals.
        exec(self.source, self.names)  # noqa: S102
        return self.names[self._function]


class _ValueForm:
    """Rows as dicts of values."""

    null = "None"
    names: Final[dict[str, object]] = {"is_raw": is_raw}

    def __init__(self, *, json_messages: bool) -> None:
        self._json_messages = json_messages

    def converter(self, column_type: ColumnType) -> Converter:
        return converter_for(column_type, json_messages=self._json_messages)

    def value(self, expression: str, converter: Converter) -> str:
        """Source of the value of a column that is not null; `expression` converts its text."""
        del converter
        return expression

    def row(self, items: Sequence[tuple[str, str]]) -> str:
        """Source of the row, from names and the variables that hold their values."""
        return f"{{{', '.join(f'{name!r}: {variable}' for name, variable in items)}}}"


class _MsgpackForm:
    """Rows in MessagePack."""

    null = repr(_NULL)

    def __init__(self) -> None:
        pack = msgpack.Packer(autoreset=True).pack
        self.names: dict[str, object] = {"pack": pack, "not_raw": _not_raw}

    def converter(self, column_type: ColumnType) -> Converter:
        return converter_for(column_type)

    def value(self, expression: str, converter: Converter) -> str:
        if converter is TEXT:
            return f"{_STR32!r} + data[position + 1:end]"
        return f"pack(not_raw({expression}))" if converter.may_be_raw else f"pack({expression})"

    def row(self, items: Sequence[tuple[str, str]]) -> str:
        template = _escaped(_map_head(len(items)))
        template += b"".join([_escaped(_packed(name)) + b"%b" for name, _ in items])
        return f"{template!r} % ({''.join(f'{variable}, ' for _, variable in items)})"


class _WalkCode(RowCode):
    """Code that reads one column after another."""

    def __init__(self, columns: Columns, form: _ValueForm | _MsgpackForm) -> None:
        super().__init__("walk", {"unpack": Struct(">I").unpack_from, **form.names})
        self._form = form
        self._columns = [(name, form.converter(column_type)) for name, column_type in columns]

    def walk_row(self, prefix: str, only: Collection[str] | None) -> tuple[str, list[str]]:
        """Add code that reads one row; return source of the row and of columns that may be raw."""
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
                template = converter.inline or f"convert{index}({{}})"
                expression = template.format("data[position + 5:end]")
                self.add(f"    {variable} = {self._form.value(expression, converter)}")
                items.append((name, variable))
                if converter.may_be_raw:
                    marks.append(f"({name!r}, {variable})")
            self.add("    position = end", "elif data[position] == 110:")
            if is_kept:
                self.add(f"    {variable} = {self._form.null}")
            self.add("    position += 1", "else:", "    return None")
        return self._form.row(items), marks

    def expect_new_row(self) -> None:
        """Add the step from an update's old row to its new row."""
        self.add("if data[position] != 78:", "    return None", "position += 1")

    def finish(self, result: str) -> RowCode:
        """Add the end, which returns `result` if the row ends with the data."""
        self.add("if position != len(data):", "    return None", f"return {result}")
        self.close("ValueError, LookupError, OverflowError, StructError, ProtocolError", "None")
        return self


def splitting_writer_code(columns: Columns, walk: object) -> RowCode:
    """The code of a row's writer that splits; rows that it cannot split go to `walk`."""
    count = len(columns)
    code = RowCode(
        "write",
        {
            "walk": walk,
            "pack": msgpack.Packer(autoreset=True).pack,
            "small": _SMALL_INTEGERS.get,
            "booleans": {b"\x01t": _TRUE, b"\x01f": _FALSE},
            "not_raw": _not_raw,
            "wrong": _wrong,
        },
    )
    template = _escaped(_DATA + _map_head(count))
    values: list[str] = []
    conditions = [f"head == {count.to_bytes(2, 'big')!r}"]
    for index, (name, column_type) in enumerate(columns):
        part = f"p{index}"
        whole = f"{part}[0] + 1 == len({part})"
        converter = converter_for(column_type)
        code.names[f"convert{index}"] = converter.convert
        template += _escaped(_packed(name))
        if converter is BOOL:
            template += b"%b"
            values.append(f"booleans[{part}]")
        elif converter is INTEGER:
            template += b"%b"
            values.append(f"small({part}) or pack(int({part}[1:]) if {whole} else wrong())")
        elif converter is TEXT:
            template += _STR8 + b"%b"
            values.append(part)
            conditions.append(whole)
        elif converter is TIMESTAMPTZ:
            # For years of four digits: 2025-12-12 12:00:34+00 becomes 2025-12-12T12:00:34Z.
            template += _STR8 + b"%c%bT%bZ"
            values += [f"{part}[0] - 2", f"{part}[1:11]", f"{part}[12:-3]"]
            conditions += [whole, f"{part}[11] == {ord(' ')}", f"{part}[-3:] == b'+00'"]
        else:
            template += b"%b"
            values.append(f"pack(not_raw(convert{index}({part}[1:])))")
            conditions.append(whole)
    variables = "".join(f", p{index}" for index in range(count))
    code.add(
        f"if len(data) > {SHORT_ROW}:",
        f"    return walk(data, position) if len(data) < {LONG_ROW} else None",
        f"parts = data[position:].split({_SEPARATOR!r})",
        f"if len(parts) != {count + 1}:",
        "    return walk(data, position)",
        f"(head{variables or ','}) = parts",
        f"if not ({' and '.join(conditions)}):",
        "    return walk(data, position)",
        "return (",
        f"    {template!r}",
        f"    % ({', '.join(values)}{',' if values else ''})",
        ")",
    )
    code.close("ValueError, LookupError, OverflowError, ProtocolError", "walk(data, position)")
    return code


def _not_raw(value: Value) -> Value:
    if is_raw(value):
        raise ValueError("its column must be named")
    return value


def _wrong() -> int:
    raise ValueError("not the length it declares")


def _raw_names(marks: Sequence[str]) -> str:
    """Source of an expression for the names of the raw columns."""
    if not marks:
        return "()"
    return f"tuple([name for name, value in ({', '.join(marks)},) if is_raw(value)])"


def _map_head(count: int) -> bytes:
    return cast("bytes", msgpack.Packer(autoreset=True).pack_map_header(count))


def _packed(name: str) -> bytes:
    return cast("bytes", msgpack.packb(name))


def _escaped(literal: bytes) -> bytes:
    """Escape bytes for a template: names, lengths and counts may contain a per cent sign."""
    return literal.replace(b"%", b"%%")
