"""Log sequence numbers: 64-bit positions in the write-ahead log."""

from __future__ import annotations

import re

from consumer_sdk.wire.errors import WireError

_LSN = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")


def parse_lsn(text: str) -> int:
    """Turn PostgreSQL's `16/B374D848` into an integer."""
    match = _LSN.match(text)
    if match is None:
        raise WireError(f"not an LSN: {text!r}; expected a form like 16/B374D848")
    return (int(match[1], 16) << 32) | int(match[2], 16)


def format_lsn(value: int) -> str:
    """Turn an integer into PostgreSQL's `16/B374D848`."""
    return f"{value >> 32:X}/{value & 0xFFFFFFFF:X}"
