"""How values of settings are written, in flags, variables and files alike."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal

from bridge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["text", "integer", "flag", "seconds", "bytes"]

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "b": 1, "kb": 1024, "mb": 1024**2, "gb": 1024**3, "tb": 1024**4}
# nats-server counts nanoseconds and bytes in 64 bits.
_MOST: dict[str, float] = {"seconds": 100 * 365 * 86400, "bytes": 2**63 - 1}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def parse(
    text: Any,
    where: str,
    kind: Kind,
    *,
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> Any:
    """Turn what was written at `where` into a value of a kind, within its bounds."""
    shown = "***" if secret else repr(text)
    try:
        value = _PARSERS[kind](text)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{where}: {shown} is not {_EXPECTED[kind]}") from error
    if choices and value not in choices:
        raise SettingsError(f"{where}: {shown} is not one of {', '.join(choices)}")
    if low is not None and value < low:
        raise SettingsError(f"{where}: {shown} is too small; the least is {low}")
    high = _MOST.get(kind) if high is None else high
    if high is not None and value > high:
        raise SettingsError(f"{where}: {shown} is too large; the most is {high}")
    return value


def _parse_text(text: Any) -> str:
    if not isinstance(text, str) or "\0" in text:
        raise ValueError
    # Bytes of the command line or the environment that are no UTF-8 came as lone surrogates.
    text.encode()
    return text


def _parse_integer(text: Any) -> int:
    if isinstance(text, bool | float):
        raise TypeError
    return int(text)


def _parse_flag(text: Any) -> bool:
    if isinstance(text, bool):
        return text
    lowered = str(text).strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError


def _with_unit(text: Any, units: Mapping[str, float], default_unit: str) -> float:
    if isinstance(text, bool):
        raise TypeError
    if isinstance(text, int | float):
        if not math.isfinite(text):
            raise ValueError
        return float(text)
    match = _NUMBER.match(str(text))
    if match is None:
        raise ValueError
    unit = match[2].lower() or default_unit
    if unit not in units:
        raise ValueError
    return float(match[1]) * units[unit]


_PARSERS: dict[Kind, Any] = {
    "text": _parse_text,
    "integer": _parse_integer,
    "flag": _parse_flag,
    "seconds": lambda text: _with_unit(text, _SECONDS, "s"),
    "bytes": lambda text: int(_with_unit(text, _BYTES, "b")),
}
_EXPECTED: dict[Kind, str] = {
    "text": "a text in UTF-8",
    "integer": "a whole number",
    "flag": "yes or no",
    "seconds": "a duration such as 500ms, 30s, 2h or 8d",
    "bytes": "a size such as 256KB, 16MB or 1GB",
}
