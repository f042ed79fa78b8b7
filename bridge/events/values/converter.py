"""Converters of column values, and the values that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Value: TypeAlias = bool | int | float | str | bytes | list[Any] | dict[str, Any] | None
"""What an event or a snapshot row can hold; only jsonb gives a dict."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column, with its domain resolved.

    `base_oid` is the base type of a domain, else `oid`. `element_oid` is the element type of an
    array (its domain resolved too), else 0. `element_delimiter` is that type's `typdelim`.
    """

    oid: int
    typmod: int = -1
    base_oid: int = 0
    element_oid: int = 0
    element_delimiter: str = ","

    def __post_init__(self) -> None:
        if not self.base_oid:
            object.__setattr__(self, "base_oid", self.oid)


class RawText(str):
    """A json or jsonb value that travels as PostgreSQL's text: its column belongs in `raw`."""

    __slots__ = ()


class RawList(list[Any]):
    """An array of json or jsonb: its elements travel as text, its column belongs in `raw`."""

    __slots__ = ()


def is_raw(value: object) -> bool:
    """Whether the column that holds this value must be named in `raw`."""
    return isinstance(value, (RawText, RawList))


@dataclass(frozen=True, slots=True)
class Converter:
    """Converts PostgreSQL's text form of one type to a value.

    `convert` raises ProtocolError for text that is not a value of the type. `inline`, if given, is
    the same conversion as a Python expression over `{}`; it raises ValueError or KeyError for such
    text, and `names` holds the names that it uses. If `may_be_raw` is false, no value is raw. If
    `plain` is true, text with a backslash is refused, so that COPY text need not be unescaped.
    """

    convert: Callable[[bytes], Value]
    inline: str | None = None
    names: tuple[tuple[str, object], ...] = ()
    may_be_raw: bool = False
    plain: bool = False
