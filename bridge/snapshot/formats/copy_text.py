r"""Rows of `COPY … TO STDOUT (FORMAT text)` to values: tabs between fields, `\N` for null.

`compile_block_decoder` is the hot path of a worker: it converts a block of rows column by column,
each column in one comprehension, which costs about half of converting row by row. A block that the
quick code cannot convert is converted again row by row; the values are the same.
https://www.postgresql.org/docs/current/sql-copy.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from bridge.errors import ProtocolError
from bridge.events.values import converter_for, is_raw
from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import family
from consumer_sdk.wire.envelope import to_json_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.events.values import ColumnType, Converter, Value

    RowDecoder: TypeAlias = "Callable[[bytes], tuple[dict[str, Value], tuple[str, ...]]]"
    Rows: TypeAlias = list[dict[str, Any]]
    BlockDecoder: TypeAlias = "Callable[[list[bytes]], tuple[Rows, dict[int, list[str]]]]"

_NULL: Final = b"\\N"
_ESCAPE: Final = re.compile(rb"\\(x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|.|$)", re.DOTALL)
_CONTROLS: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}

# JSON carries their values only in another form; smaller integers fit as they are.
_ADAPTED: Final = frozenset({"int", "float", "bytea", "array"})
_SMALL_INTEGERS: Final = frozenset({oids.INT2, oids.INT4, oids.OID})


def unescape(field: bytes) -> bytes:
    """Undo COPY's escapes in one field that is not null."""
    return _ESCAPE.sub(_plain, field)


def _plain(escape: re.Match[bytes]) -> bytes:
    mark = escape[1]
    if not mark:
        raise ProtocolError("a COPY row ends within an escape")
    control = _CONTROLS.get(mark)
    if control is not None:
        return control
    if len(mark) > 1 and mark[:1] == b"x":
        return bytes([int(mark[1:], 16)])
    if mark.isdigit() and mark[0] < 0x38:
        return bytes([int(mark, 8) & 0xFF])
    return mark


def parse_row(line: bytes) -> list[bytes | None]:
    """Split a row, with or without its newline, into unescaped fields; null is None."""
    fields: list[bytes | None] = [*_without_newline(line).split(b"\t")]
    if b"\\" in line:
        return [
            None if field == _NULL else unescape(field) if field and b"\\" in field else field
            for field in fields
        ]
    return fields


def _without_newline(line: bytes) -> bytes:
    return line[:-1] if line[-1:] == b"\n" else line


def compile_row_decoder(
    columns: Sequence[tuple[str, ColumnType]], *, json_messages: bool = False
) -> RowDecoder:
    """Compile a decoder that turns a row into `(row by column name, names of raw columns)`.

    Values are those an event of the same row would carry. A row that does not fit the columns
    raises ProtocolError.
    """
    converters = [
        (name, converter_for(column_type, json_messages=json_messages))
        for name, column_type in columns
    ]

    def decode_carefully(line: bytes) -> tuple[dict[str, Value], tuple[str, ...]]:
        return _decode(line, converters)

    if not converters:
        return decode_carefully
    names: dict[str, object] = {
        "decode_carefully": decode_carefully,
        "unescape": unescape,
        "is_raw": is_raw,
        "ProtocolError": ProtocolError,
    }
    quick: list[str] = []
    escaped: list[str] = []
    for index, (name, converter) in enumerate(converters):
        names[f"convert{index}"] = converter.convert
        names.update(converter.names)
        template = converter.inline or f"convert{index}({{}})"
        field = f"f{index}"
        plain = (
            field if converter.plain else f"unescape({field}) if b'\\\\' in {field} else {field}"
        )
        quick.append(f"{name!r}: {template.format(field)}")
        escaped.append(
            f"{name!r}: None if {field} == b'\\\\N' else {template.format(f'({plain})')}"
        )
    raw = "()"
    marks = [name for name, converter in converters if converter.may_be_raw]
    if marks:
        raw = f"tuple([name for name in {tuple(marks)!r} if is_raw(row[name])])"
    fields = ", ".join(f"f{index}" for index in range(len(converters)))
    source = f"""
def decode_row(line):
    try:
        {fields}, = (line[:-1] if line[-1:] == b"\\n" else line).split(b"\\t")
        if b"\\\\" in line:
            row = {{{", ".join(escaped)}}}
        else:
            row = {{{", ".join(quick)}}}
    except (ValueError, LookupError, ProtocolError):
        return decode_carefully(line)
    return row, {raw}
"""
    # Column names enter the source only through repr(), as string literals.
    exec(source, names)  # noqa: S102
    return cast("RowDecoder", names["decode_row"])


def _decode(
    line: bytes, converters: Sequence[tuple[str, Converter]]
) -> tuple[dict[str, Value], tuple[str, ...]]:
    fields = parse_row(line)
    if not converters and fields == [b""]:
        fields = []
    if len(fields) != len(converters):
        raise ProtocolError(
            f"a COPY row has {len(fields)} fields, {len(converters)} columns were asked for"
        )
    row: dict[str, Value] = {}
    for (name, converter), field in zip(converters, fields, strict=True):
        try:
            row[name] = None if field is None else converter.convert(field)
        except ProtocolError as error:
            raise ProtocolError(f"column {name!r}: {error}") from error
    return row, tuple([name for name, value in row.items() if is_raw(value)])


def always_raw(kind: ColumnType) -> bool:
    """Whether every value of the type travels as text and is named once, in `raw_columns`."""
    own = family(kind.base_oid, kind.element_oid)
    if own == "array":
        element = kind.element_oid or oids.ARRAY_ELEMENTS.get(kind.base_oid, 0)
        return family(element) in ("json", "jsonb")
    return own == "json"


def compile_block_decoder(
    columns: Sequence[tuple[str, ColumnType]], *, as_json: bool = False
) -> BlockDecoder:
    """Compile a decoder that turns rows into maps, and names raw columns by row number.

    Columns that are raw in every row are not named. With `as_json` the values are such that JSON
    can carry them. A row that does not fit the columns raises ProtocolError.
    """
    careful = _careful_decoder(columns, as_json=as_json)
    if not columns:
        return careful
    names: dict[str, object] = {
        "careful": careful,
        "unescape": unescape,
        "is_raw": is_raw,
        "adapt": to_json_value,
        "ProtocolError": ProtocolError,
    }
    quick, escaped, adapted, raw = [], [], [], []
    for index, (name, kind) in enumerate(columns):
        converter = converter_for(kind, json_messages=as_json)
        names[f"convert{index}"] = converter.convert
        names.update(converter.names)
        template = converter.inline or f"convert{index}({{}})"
        plain = "f" if converter.plain else "(unescape(f) if b'\\\\' in f else f)"
        quick.append(f"v{index} = [{template.format('f')} for f in c{index}]")
        escaped.append(
            f"v{index} = [None if f == b'\\\\N' else {template.format(plain)} for f in c{index}]"
        )
        if as_json and _needs_adapting(kind):
            adapted.append(f"v{index} = [adapt(v) for v in v{index}]")
        if converter.may_be_raw and not always_raw(kind):
            raw.append(
                f"for row, v in enumerate(v{index}):\n"
                f"            if is_raw(v): raw.setdefault(row, []).append({name!r})"
            )
    every = range(len(columns))
    pairs = ", ".join(f"{name!r}: a{index}" for index, (name, _) in enumerate(columns))
    # Column names enter the source only through repr(), as string literals.
    source = f"""
def decode_block(lines):
    raw = {{}}
    try:
        {_joined("c", every)}, = zip(
            *[line.split(b"\\t") for line in lines], strict=True)
        if b"\\\\" in b"".join(lines):
            {"; ".join(escaped)}
        else:
            {"; ".join(quick)}
        {"; ".join(adapted) or "pass"}
        {(chr(10) + "        ").join(raw) or "pass"}
    except (ValueError, LookupError, ProtocolError):
        return careful(lines)
    return [{{{pairs}}} for {_joined("a", every)}, in zip({_joined("v", every)})], raw
"""
    exec(source, names)  # noqa: S102
    return cast("BlockDecoder", names["decode_block"])


def _joined(letter: str, numbers: range) -> str:
    return ", ".join(f"{letter}{number}" for number in numbers)


def _needs_adapting(kind: ColumnType) -> bool:
    own = family(kind.base_oid, kind.element_oid)
    return own in _ADAPTED and kind.base_oid not in _SMALL_INTEGERS


def _careful_decoder(columns: Sequence[tuple[str, ColumnType]], *, as_json: bool) -> BlockDecoder:
    decode = compile_row_decoder(columns, json_messages=as_json)
    constant = {name for name, kind in columns if always_raw(kind)}

    def decode_carefully(lines: list[bytes]) -> tuple[Rows, dict[int, list[str]]]:
        rows: Rows = []
        raw: dict[int, list[str]] = {}
        for index, line in enumerate(lines):
            row, marked = decode(line)
            named = [name for name in marked if name not in constant]
            if named:
                raw[index] = named
            rows.append(to_json_value(row) if as_json else row)
        return rows, raw

    return decode_carefully
