"""Dates and times: timestamps in ISO 8601's spelling, everything else as PostgreSQL prints it.

infinity, -infinity and years BC have no ISO spelling and keep PostgreSQL's.
"""

from __future__ import annotations

from bridge.events.values.converter import Converter
from bridge.events.values.text import TEXT, to_text


def to_timestamptz(data: bytes) -> str:
    """`2025-12-12 12:00:34.338547+00` becomes `2025-12-12T12:00:34.338547Z`."""
    return _zoned(to_text(data))


def to_timestamp(data: bytes) -> str:
    """`2025-12-12 12:00:34.338547` becomes `2025-12-12T12:00:34.338547`."""
    return _zoneless(to_text(data))


def _zoned(text: str) -> str:
    # A session in another zone would print another offset: such text is exact as it stands.
    if text.endswith("+00"):
        return text[:-3].replace(" ", "T", 1) + "Z"
    return text


def _zoneless(text: str) -> str:
    if text.endswith("BC"):
        return text
    return text.replace(" ", "T", 1)


# Years of four digits take the short way, which is the same for them.
TIMESTAMPTZ = Converter(
    to_timestamptz,
    inline='(t[:10] + "T" + t[11:-3] + "Z" if (t := {}.decode())[10:11] == " "'
    ' and t[-3:] == "+00" else zoned(t))',
    names=(("zoned", _zoned),),
)
TIMESTAMP = Converter(
    to_timestamp, inline="zoneless({}.decode())", names=(("zoneless", _zoneless),)
)
DATE = TIME = TIMETZ = INTERVAL = TEXT
