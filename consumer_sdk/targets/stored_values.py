"""Converts values of the wire for storage: text for PostgreSQL, SQLite's own types for SQLite.

An encoder takes a value and whether it is raw, which means the text of a JSON document.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from consumer_sdk.wire.column_types import to_bytes
from consumer_sdk.wire.envelope import to_json_value
from consumer_sdk.wire.jsonb import jsonb_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from consumer_sdk.wire.column_types import Column

    Encode = Callable[[Any, bool], Any]

_BOOLEANS: Final = {True: "true", False: "false"}
_BARE_ELEMENT: Final = re.compile(r'[^\s{}",\\]+\Z')


def postgres_encoder(column: Column) -> Encode | None:
    """Converts values of a column to PostgreSQL's text; None if they need no conversion."""
    if column.family == "array":
        return _postgres_array(column.element_family)
    return _POSTGRES.get(column.family)


def sqlite_encoder(column: Column) -> Encode | None:
    """Converts values of a column to what SQLite stores; None if they need no conversion."""
    return _SQLITE.get(column.family)


def _document(value: Any, raw: bool) -> str:
    return value if raw and isinstance(value, str) else jsonb_text(value)


# PostgreSQL


def _postgres_bool(value: Any, raw: bool) -> str:  # noqa: ARG001
    return _BOOLEANS[value]


def _postgres_int(value: Any, raw: bool) -> str:  # noqa: ARG001
    return str(value)


def _postgres_float(value: Any, raw: bool) -> str:  # noqa: ARG001
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _postgres_bytea(value: Any, raw: bool) -> str:  # noqa: ARG001
    return "\\x" + to_bytes(value).hex()


_POSTGRES: Final[dict[str, Encode]] = {
    "bool": _postgres_bool,
    "int": _postgres_int,
    "float": _postgres_float,
    "bytea": _postgres_bytea,
    "json": _document,
    "jsonb": _document,
}


def _postgres_array(family: str | None) -> Callable[[Any, bool], str]:
    element = _POSTGRES.get(family or "")

    def literal(value: Any, raw: bool) -> str:
        if value is None:
            return "NULL"
        if isinstance(value, list):
            return "{" + ",".join(literal(item, raw) for item in value) + "}"
        text = str(value) if element is None else element(value, raw)
        # Quote the same elements as PostgreSQL does, so that equal arrays have equal texts.
        if _BARE_ELEMENT.match(text) and text.upper() != "NULL":
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def encode(value: Any, raw: bool) -> str:
        # An array whose bounds do not start at 1 has no list form; it is PostgreSQL's text.
        return value if isinstance(value, str) else literal(value, raw)

    return encode


# SQLite


def _sqlite_float(value: Any, raw: bool) -> Any:  # noqa: ARG001
    number = float(value)
    return number if number == number else "NaN"


def _sqlite_bytea(value: Any, raw: bool) -> bytes:  # noqa: ARG001
    return to_bytes(value)


def _sqlite_array(value: Any, raw: bool) -> str:  # noqa: ARG001
    # An array whose bounds do not start at 1 has no list form; it is PostgreSQL's text.
    if isinstance(value, str):
        return value
    return json.dumps(_with_hex(value), ensure_ascii=False, separators=(", ", ": "))


def _with_hex(value: Any) -> Any:
    """A list in which every bytea is written as PostgreSQL prints it."""
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return [_with_hex(item) for item in value] if isinstance(value, list) else to_json_value(value)


_SQLITE: Final[dict[str, Encode]] = {
    "float": _sqlite_float,
    "bytea": _sqlite_bytea,
    "json": _document,
    "jsonb": _document,
    "array": _sqlite_array,
}
