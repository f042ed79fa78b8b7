"""The text of decoded jsonb values."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, Final

# A match inside a string only costs time.
_EXPONENT: Final = re.compile(r"\de[-+]\d")


def jsonb_text(value: Any) -> str:
    """A jsonb value as PostgreSQL prints it, digit by digit."""
    text = _dumped(value)
    # Python writes very small and large numbers with an exponent, PostgreSQL never does.
    return text if _EXPONENT.search(text) is None else _written_out(value)


def _written_out(value: Any) -> str:
    if isinstance(value, dict):
        members = (f"{_dumped(name)}: {_written_out(one)}" for name, one in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written_out, value)) + "]"
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else _dumped(value)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
