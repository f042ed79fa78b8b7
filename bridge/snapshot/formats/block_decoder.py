"""Rows of COPY to values, a block at a time and column by column: the hot path of a worker.

Converting a column in one comprehension costs about half of converting row by row; the values are
the same, and whatever the quick way stumbles over goes the careful way, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from bridge.errors import ProtocolError
from bridge.events.values import converter_for, is_raw
from bridge.snapshot.formats.copy import compile_row_decoder, unescape
from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import family
from consumer_sdk.wire.envelope import to_json_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.events.values import ColumnType

    Rows: TypeAlias = list[dict[str, Any]]
    BlockDecoder: TypeAlias = "Callable[[list[bytes]], tuple[Rows, dict[int, list[str]]]]"

# JSON carries their values only in another form; smaller integers fit as they are.
_ADAPTED: Final = frozenset({"int", "float", "bytea", "array"})
_SMALL_INTEGERS: Final = frozenset({oids.INT2, oids.INT4, oids.OID})


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
