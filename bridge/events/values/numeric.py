"""bool, integers and floats natively; numeric stays text, because it has no size limit."""

from __future__ import annotations

from typing import Final

from bridge.errors import ProtocolError
from bridge.events.values.converter import Converter
from bridge.events.values.text import TEXT

_BOOLEANS: Final = {b"t": True, b"f": False}


def to_bool(data: bytes) -> bool:
    """Read `t` or `f`."""
    value = _BOOLEANS.get(data)
    if value is None:
        raise ProtocolError("a boolean value is neither t nor f")
    return value


def to_int(data: bytes) -> int:
    """Read an integer of any of PostgreSQL's widths."""
    try:
        return int(data)
    except ValueError:
        raise ProtocolError("an integer value is not a number") from None


def to_float(data: bytes) -> float:
    """Read a float; extra_float_digits 1 makes the text exact, NaN and Infinity included."""
    try:
        return float(data)
    except ValueError:
        raise ProtocolError("a float value is not a number") from None


BOOL = Converter(to_bool, inline="booleans[{}]", names=(("booleans", _BOOLEANS),), plain=True)
INTEGER = Converter(to_int, inline="int({})", plain=True)
FLOAT = Converter(to_float, inline="float({})", plain=True)
NUMERIC = TEXT
