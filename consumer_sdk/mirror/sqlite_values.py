"""Values as SQLite keeps them: exact, and readable without knowing this project.

Booleans and integers are INTEGER, floats REAL (NaN, which SQLite does not have, is the text
`NaN`), bytea is BLOB. Everything else is TEXT: numbers of any length as their digits, json and
arrays as JSON documents, the rest as it travels.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from consumer_sdk.wire.column_types import to_bytes
from consumer_sdk.wire.envelope import to_json_value
from consumer_sdk.wire.jsonb import jsonb_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from consumer_sdk.wire.column_types import Column

_TYPES = {"bool": "INTEGER", "int": "INTEGER", "float": "REAL", "bytea": "BLOB"}


def column_type(column: Column) -> str:
    """The declared type; it decides how SQLite stores values."""
    return _TYPES.get(column.family, "TEXT")


def encoder(column: Column) -> Callable[[Any, bool], Any] | None:
    """What turns a value into its stored form, None where they are the same."""
    family = column.family
    if family == "float":
        return _float
    if family == "bytea":
        return _bytes
    if family in ("json", "jsonb"):
        return _json
    if family == "array":
        return _array
    return None


def _float(value: Any, raw: bool) -> Any:  # noqa: ARG001
    number = float(value)
    return number if number == number else "NaN"


def _bytes(value: Any, raw: bool) -> bytes:  # noqa: ARG001
    return to_bytes(value)


def _json(value: Any, raw: bool) -> str:
    return value if raw and isinstance(value, str) else jsonb_text(value)


def _array(value: Any, raw: bool) -> str:  # noqa: ARG001
    # An array with odd bounds has no list form and is PostgreSQL's text.
    return value if isinstance(value, str) else _list_text(value)


def _list_text(value: list[Any]) -> str:
    return json.dumps(_with_hex(value), ensure_ascii=False, separators=(", ", ": "))


def _with_hex(value: Any) -> Any:
    """bytea inside of arrays as PostgreSQL prints it."""
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return [_with_hex(item) for item in value] if isinstance(value, list) else to_json_value(value)
