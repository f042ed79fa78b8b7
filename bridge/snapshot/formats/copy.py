r"""Rows of `COPY … TO STDOUT (FORMAT text)`: tabs between fields, backslash escapes, `\N` for null.

https://www.postgresql.org/docs/current/sql-copy.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from bridge.errors import ProtocolError
from bridge.events.values import converter_for, is_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.events.values import ColumnType, Converter, Value

    RowDecoder: TypeAlias = "Callable[[bytes], tuple[dict[str, Value], tuple[str, ...]]]"

_NULL: Final = b"\\N"
_ESCAPE: Final = re.compile(rb"\\(x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|.|$)", re.DOTALL)
_CONTROLS: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


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
