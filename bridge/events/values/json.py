"""json stays text; jsonb is decoded if encoding it again gives exactly the same jsonb.

PostgreSQL stores jsonb numbers as `numeric`, with any number of digits and with trailing zeros. If
a 64-bit integer or a double cannot reproduce all digits of a number, the whole jsonb value stays
text, as a `RawText`.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from bridge.events.values.converter import Converter, RawText
from bridge.events.values.scalars import to_text

if TYPE_CHECKING:
    from collections.abc import Callable

# MessagePack's integers; JSON readers that use doubles are exact up to 2^53.
_MSGPACK_INTEGERS: Final = (-(2**63), 2**64 - 1)
_JSON_INTEGERS: Final = (-(2**53), 2**53)

# MessagePack and JSON readers refuse deep nesting, some from 512 levels on, envelope included.
MAX_DEPTH: Final = 256

# Escapes of what UTF-8 cannot carry or PostgreSQL cannot take back: surrogates and NUL.
_UNSAFE_ESCAPE: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u(?:0000|[dD][89a-fA-F])")


class _InexactError(ValueError):
    """Decoding would change the value."""


def to_json_text(data: bytes) -> RawText:
    """Keep json as written: blanks, key order, duplicate keys and digits are part of it."""
    return RawText(to_text(data))


def _exact_float(text: str) -> float:
    value = float(text)
    if repr(value) != text and format(Decimal(repr(value)), "f") != text:
        raise _InexactError
    return value


def _exact_int(smallest: int, largest: int) -> Callable[[str], int]:
    def exact_int(text: str) -> int:
        # Longer text is out of range, and int() refuses thousands of digits.
        if len(text) > 20:
            raise _InexactError
        value = int(text)
        if smallest <= value <= largest and text != "-0":
            return value
        raise _InexactError

    return exact_int


def _refuse_constant(_: str) -> None:
    raise _InexactError


def _too_deep(text: str, value: Any) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _jsonb_reader(smallest: int, largest: int) -> Callable[[bytes], Any]:
    read = json.JSONDecoder(
        parse_float=_exact_float,
        parse_int=_exact_int(smallest, largest),
        parse_constant=_refuse_constant,
    ).raw_decode

    def to_jsonb(data: bytes) -> Any:
        text = to_text(data)
        try:
            value, end = read(text)
        except (ValueError, RecursionError):
            return RawText(text)
        # A column that holds the JSON value null is not a column that is null.
        if value is None or end != len(text) or _too_deep(text, value):
            return RawText(text)
        if "\\u" in text and _UNSAFE_ESCAPE.search(text):
            return RawText(text)
        return value

    return to_jsonb


to_jsonb: Final = _jsonb_reader(*_MSGPACK_INTEGERS)
"""Decode jsonb for MessagePack, or give its RawText."""

to_jsonb_for_json: Final = _jsonb_reader(*_JSON_INTEGERS)
"""Decode jsonb for JSON messages, where integers beyond 2^53 are not exact."""

JSON = Converter(to_json_text, may_be_raw=True)
JSONB = Converter(to_jsonb, may_be_raw=True)
JSONB_FOR_JSON = Converter(to_jsonb_for_json, may_be_raw=True)
