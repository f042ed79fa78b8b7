"""Converters of bool, integers, floats, bytea, timestamps, text and "char".

All other types keep the text that PostgreSQL prints: numeric (which has no size limit), dates,
times, uuid, enums, ranges and unknown types. Timestamps are written as in ISO 8601; infinity,
-infinity and years BC have no such form and keep PostgreSQL's.
"""

from __future__ import annotations

from binascii import unhexlify
from typing import Final

from bridge.errors import ProtocolError
from bridge.events.values.converter import Converter

_BOOLEANS: Final = {b"t": True, b"f": False}


def to_text(data: bytes) -> str:
    """Decode text; the session's client_encoding makes it UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(
            f"a text value is not UTF-8 at byte {error.start}; set client_encoding to UTF8"
        ) from error


def to_char(data: bytes) -> str:
    r"""Read a "char"; before version 16 a byte from 128 on is printed raw, since then as `\310`."""
    if len(data) == 1 and data[0] >= 0x80:
        return f"\\{data[0]:03o}"
    return to_text(data)


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


def to_bytes(data: bytes) -> bytes:
    r"""Read `\x0aff`, the form that bytea_output hex prints."""
    if data[:2] != b"\\x":
        raise ProtocolError("a bytea value is not in hex format; set bytea_output to hex")
    try:
        return unhexlify(data[2:])
    except ValueError:
        raise ProtocolError("a bytea value has a damaged hex digit") from None


def to_timestamptz(data: bytes) -> str:
    """`2025-12-12 12:00:34.338547+00` becomes `2025-12-12T12:00:34.338547Z`."""
    return _zoned(to_text(data))


def to_timestamp(data: bytes) -> str:
    """`2025-12-12 12:00:34.338547` becomes `2025-12-12T12:00:34.338547`."""
    return _zoneless(to_text(data))


def _zoned(text: str) -> str:
    # A session in another time zone prints another offset; such text is exact and kept.
    if text.endswith("+00"):
        return text[:-3].replace(" ", "T", 1) + "Z"
    return text


def _zoneless(text: str) -> str:
    if text.endswith("BC"):
        return text
    return text.replace(" ", "T", 1)


TEXT = Converter(to_text, inline="{}.decode()")
CHAR = Converter(to_char)
BOOL = Converter(to_bool, inline="booleans[{}]", names=(("booleans", _BOOLEANS),), plain=True)
INTEGER = Converter(to_int, inline="int({})", plain=True)
FLOAT = Converter(to_float, inline="float({})", plain=True)
BYTEA = Converter(to_bytes)
# Timestamps with a year of four digits are converted inline, with the same result.
TIMESTAMPTZ = Converter(
    to_timestamptz,
    inline='(t[:10] + "T" + t[11:-3] + "Z" if (t := {}.decode())[10:11] == " "'
    ' and t[-3:] == "+00" else zoned(t))',
    names=(("zoned", _zoned),),
)
TIMESTAMP = Converter(
    to_timestamp, inline="zoneless({}.decode())", names=(("zoneless", _zoneless),)
)
