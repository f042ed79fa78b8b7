"""What a converter is, and the values it gives."""

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

    `base_oid` is the type behind a domain, else `oid`; `element_oid` is the element type of an
    array (its domain resolved too), else 0; `element_delimiter` is that type's `typdelim`.
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
    """Turns the text PostgreSQL sends for one type into a value.

    `convert` raises ProtocolError for text that the type cannot print. `inline`, where given, is
    the same conversion as a Python expression over `{}`; on bad text it raises ValueError or
    KeyError, and names it uses stand in `names`. Only where `may_be_raw` can `is_raw` be true.
    `plain` promises that text with a backslash is refused, so that COPY need not unescape it.
    """

    convert: Callable[[bytes], Value]
    inline: str | None = None
    names: tuple[tuple[str, object], ...] = ()
    may_be_raw: bool = False
    plain: bool = False
