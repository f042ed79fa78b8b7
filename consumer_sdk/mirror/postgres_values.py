"""Values as PostgreSQL's own text, from which every type reads them back exactly."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from consumer_sdk.wire.column_types import to_bytes
from consumer_sdk.wire.jsonb import jsonb_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from consumer_sdk.wire.column_types import Column

FIRST_USER_OID: Final = 16384

# Their values name things of the source: regproc to regcollation, and aclitem, which names roles.
_NAMES_OF_THINGS: Final = frozenset(
    {24, 1033, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191}
)

# Where text tells values apart that PostgreSQL's = does not (1.0 and 1.00), or where there is no =.
_COMPARED_AS_TEXT: Final = frozenset({"numeric", "interval", "json", "jsonb", "other"})
_BOOLEANS: Final = {True: "true", False: "false"}
_BARE_ELEMENT: Final = re.compile(r'[^\s{}",\\]+\Z')


def encoder(column: Column) -> Callable[[Any, bool], Any] | None:
    """What turns a value into text, None where it is text already."""
    family = column.family
    if family == "array":
        return _array_encoder(column.element_family)
    return _SCALARS.get(family)


def names_things(column: Column) -> bool:
    """Whether its values can be read only where everything exists that they name."""
    return not _NAMES_OF_THINGS.isdisjoint((column.base_type_oid, column.element_oid))


def is_compared_as_text(column: Column) -> bool:
    """Whether two values of the column are the same only if they print the same."""
    return (column.element_family or column.family) in _COMPARED_AS_TEXT


def _bool(value: Any, raw: bool) -> str:  # noqa: ARG001
    return _BOOLEANS[value]


def _int(value: Any, raw: bool) -> str:  # noqa: ARG001
    return str(value)


def _float(value: Any, raw: bool) -> str:  # noqa: ARG001
    number = float(value)
    if math.isfinite(number):
        return repr(number)
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _bytes(value: Any, raw: bool) -> str:  # noqa: ARG001
    return "\\x" + to_bytes(value).hex()


def _json(value: Any, raw: bool) -> str:
    return value if raw and isinstance(value, str) else jsonb_text(value)


_SCALARS: Final[dict[str, Callable[[Any, bool], Any]]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "bytea": _bytes,
    "json": _json,
    "jsonb": _json,
}


def _array_encoder(family: str | None) -> Callable[[Any, bool], str]:
    element = _SCALARS.get(family or "")

    def literal(value: Any, raw: bool) -> str:
        if value is None:
            return "NULL"
        if isinstance(value, list):
            return "{" + ",".join(literal(item, raw) for item in value) + "}"
        text = str(value) if element is None else element(value, raw)
        # PostgreSQL quotes the same elements, so that equal arrays have equal text.
        if _BARE_ELEMENT.match(text) and text.upper() != "NULL":
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def encode(value: Any, raw: bool) -> str:
        # An array with odd bounds has no list form and is PostgreSQL's text.
        return value if isinstance(value, str) else literal(value, raw)

    return encode
