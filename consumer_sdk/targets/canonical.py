"""One canonical text for every value, whether read from PostgreSQL, from the log or from SQLite.

Two values are equal iff their canonical texts are equal. Null is None.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from consumer_sdk.errors import CorruptData
from consumer_sdk.wire.column_types import to_bytes
from consumer_sdk.wire.errors import MISFITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from consumer_sdk.wire.column_types import Column

Canonical = str | None

_TOKEN: Final = re.compile(r'([{}])|(,)|"((?:[^"\\]|\\.)*)"|((?:[^{},"\\]|\\.)+)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


class Spelling:
    """Converts the values of one column to their canonical texts."""

    def __init__(self, column: Column) -> None:
        self._name = column.name
        self._family = column.family
        self._element = column.element_family or "text"

    def from_text(self, text: str | None) -> Canonical:
        """The canonical text of a value as PostgreSQL prints it."""
        if text is None:
            return None
        if self._family != "array":
            return _FROM_TEXT.get(self._family, str)(text)
        if text.startswith("["):
            return text
        convert = _FROM_TEXT.get(self._element, str)
        return _list_text(_parse_array(text), convert)

    def column_from_text(self, texts: Sequence[str | None]) -> Sequence[Canonical]:
        """`from_text` of a whole column."""
        if self._family == "array":
            return [self.from_text(text) for text in texts]
        convert = _FROM_TEXT.get(self._family)
        if convert is None:
            return texts
        return [None if text is None else convert(text) for text in texts]

    def column_from_sqlite(self, values: Sequence[Any]) -> Sequence[Canonical]:
        """`from_sqlite` of a whole column."""
        if self._family in _CONVERTED:
            return [self.from_sqlite(value) for value in values]
        return [None if value is None else str(value) for value in values]

    def from_wire(self, value: Any, raw: bool) -> Canonical:
        """The canonical text of a value in an event; `raw` means that a JSON document is text."""
        if value is None:
            return None
        try:
            if self._family != "array":
                return _from_value(self._family, value, raw)
            if isinstance(value, str):
                return value
            return _list_text(value, lambda item: _from_value(self._element, item, raw))
        except MISFITS as error:
            raise CorruptData(
                f"{self._family} column {self._name!r} holds a value of another type"
            ) from error

    def from_sqlite(self, value: Any) -> Canonical:
        """The canonical text of a value as a mirror stores it in SQLite."""
        if value is None:
            return None
        try:
            if self._family != "array":
                return _from_value(self._family, value, raw=True)
            items = json.loads(value)
            convert = _FROM_TEXT["bytea"] if self._element == "bytea" else None
            return _list_text(
                items, convert or (lambda item: _from_value(self._element, item, True))
            )
        except MISFITS:
            # The value is the text of an array whose bounds do not start at 1, or the mirror did
            # not write it.
            return str(value)


def to_sqlite(family: str, text: Canonical) -> Any:
    """The value that SQLite stores for a canonical text, to find rows by it."""
    if text is None:
        return None
    if family == "int":
        return int(text)
    if family == "bool":
        return int(text == "true")
    if family == "float":
        return text if text == "NaN" else float(text)
    return bytes.fromhex(text[2:]) if family == "bytea" else text


def _from_value(family: str, value: Any, raw: bool) -> str:
    if family == "bool":
        return "true" if value else "false"
    if family == "float":
        return _float(value)
    if family == "bytea":
        return "\\x" + to_bytes(value).hex()
    if family == "json":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if family == "jsonb":
        return _jsonb(value) if raw and isinstance(value, str) else _number_exact(value)
    return str(value)


_CONVERTED: Final = frozenset({"array", "bool", "float", "bytea", "json", "jsonb"})
"""Families for which `_from_value` does more than to take the value's text."""


def _float(value: Any) -> str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    # To PostgreSQL -0 equals 0, and SQLite does not keep its sign.
    return repr(number + 0.0)


def _bool(text: str) -> str:
    return "true" if text in ("true", "t") else "false"


def _timestamptz(text: str) -> str:
    return text[:-3].replace(" ", "T", 1) + "Z" if text.endswith("+00") else text


def _timestamp(text: str) -> str:
    return text if text.endswith("BC") else text.replace(" ", "T", 1)


def _jsonb(text: str) -> str:
    try:
        return _number_exact(json.loads(text, parse_float=Decimal))
    except (ValueError, RecursionError):
        return text


def _number_exact(value: Any) -> str:
    """A document with sorted keys and every digit of its numbers."""
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}:{_number_exact(value[key])}" for key in sorted(value))
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_number_exact, value)) + "]"
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")
    if isinstance(value, Decimal):
        return format(value, "f")
    return json.dumps(value)


_FROM_TEXT: Final[dict[str, Callable[[str], str]]] = {
    "bool": _bool,
    "bytea": str.lower,
    "float": _float,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "jsonb": _jsonb,
}


def _list_text(items: Any, convert: Callable[[Any], str]) -> str:
    def spell(item: Any) -> Any:
        if item is None:
            return None
        return [spell(inner) for inner in item] if isinstance(item, list) else convert(item)

    return json.dumps(spell(items), ensure_ascii=False)


def _parse_array(text: str) -> list[Any]:
    """An array literal as nested lists of element texts."""
    open_lists: list[list[Any]] = [[]]
    end = 0
    for token in _TOKEN.finditer(text):
        if token.start() != end:
            break
        end = token.end()
        brace, comma, quoted, bare = token.groups()
        if brace == "{":
            open_lists.append([])
        elif brace == "}" and len(open_lists) > 1:
            closed = open_lists.pop()
            open_lists[-1].append(closed)
        elif quoted is not None:
            open_lists[-1].append(_ESCAPED.sub(r"\1", quoted))
        elif bare is not None:
            open_lists[-1].append(None if bare.upper() == "NULL" else _ESCAPED.sub(r"\1", bare))
        elif not comma:
            raise CorruptData("an array literal cannot be read")
    if end != len(text) or len(open_lists) != 1 or len(open_lists[0]) != 1:
        raise CorruptData("an array literal cannot be read")
    found: list[Any] = open_lists[0][0]
    return found
