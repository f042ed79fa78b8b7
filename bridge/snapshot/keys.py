"""Rows of a table chosen by their key: ranges, lists of keys, and their SQL conditions.

A value of a key is PostgreSQL's text of it. It enters a statement only as a quoted literal with a
cast to the base type of its column, because COPY takes no parameters.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgpack

from bridge.errors import Refused
from bridge.events.values import ColumnType, converter_for
from bridge.postgres.errors import ValueRefused
from bridge.postgres.sessions import print_values
from consumer_sdk.wire.column_types import family

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bridge.postgres.connection import CatalogConnection

MOST_KEYS: Final = 1000
FORM: Final = (
    'option where must be {"keys": [[…], …]} or {"from": […], "to": […]}, with a list of values '
    "for each key"
)

Key: TypeAlias = tuple[str, ...]
"""The values of one key, as PostgreSQL prints them."""
Comparison: TypeAlias = Literal[">=", "<"]


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key: `type_name` is its base type for a cast, `place` its place in `where`.

    The columns of a key are in the order of its index.
    """

    name: str
    type: ColumnType
    type_name: str
    place: int


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The rows whose key is within all `bounds`, and is one of `among` if that is given.

    The values are in the order of `columns`.
    """

    columns: tuple[KeyColumn, ...]
    bounds: tuple[tuple[Comparison, Key], ...] = ()
    among: tuple[Key, ...] | None = None

    def until(self, end: Key | None) -> KeyRange:
        """The same range, but only the keys before `end`; None does not limit it."""
        if end is None:
            return self
        return KeyRange(self.columns, (*self.bounds, ("<", end)), self.among)

    def conditions(self, alias: str = "") -> list[str]:
        """The conditions of a WHERE clause; `alias` is the name of the table with a dot."""
        names = ", ".join(f"{alias}{quote(column.name)}" for column in self.columns)
        found = [f"({names}) {operator} {self._row(key)}" for operator, key in self.bounds]
        if self.among is not None:
            found.append(f"({names}) IN ({', '.join(self._row(key) for key in self.among)})")
        return found

    def _row(self, key: Key) -> str:
        values = [
            f"{literal(value)}::{column.type_name}"
            for column, value in zip(self.columns, key, strict=True)
        ]
        return f"({', '.join(values)})"


def quote(name: str) -> str:
    """An identifier for SQL, always in quotes."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string constant that reads the same whatever standard_conforming_strings is."""
    doubled = text.replace("'", "''")
    if "\\" in text:
        return " E'" + doubled.replace("\\", "\\\\") + "'"
    return f"'{doubled}'"


def end_sql(source: str, keys: KeyRange, rows: int) -> str:
    """A query for the key after the first `rows` keys of a range; no row if there are fewer."""
    # The alias makes sure that ORDER BY means the columns and not their text.
    columns = [f"t.{quote(column.name)}" for column in keys.columns]
    texts = ", ".join(f"pg_catalog.format('%s', {column})" for column in columns)
    conditions = keys.conditions("t.")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    order = ", ".join(columns)
    return f"SELECT {texts} FROM {source} AS t{where} ORDER BY {order} OFFSET {rows} LIMIT 1"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Where:
    """The option `where` of a request: equal ones choose the same rows, once they are resolved.

    `packed` is its document in MessagePack, which distinguishes true from 1. `keys` is set by
    `resolve`.
    """

    packed: bytes
    keys: KeyRange | None = field(default=None, compare=False)

    @property
    def document(self) -> dict[str, Any]:
        """The option as requests and metas have it."""
        return dict(msgpack.unpackb(self.packed))


def parse_where(asked: Any) -> Where | None:
    """Read the option; Refused if it has another form. Its values are checked by `resolve`."""
    if asked is None:
        return None
    if not isinstance(asked, dict) or not asked:
        raise Refused(FORM)
    given = {name: value for name, value in asked.items() if value is not None}
    if set(given) == {"keys"}:
        keys = given["keys"]
        if not isinstance(keys, list) or not keys or not all(map(_is_key, keys)):
            raise Refused(FORM)
        if len(keys) > MOST_KEYS:
            raise Refused(f"option where names {len(keys)} keys; the most are {MOST_KEYS}")
    elif not given or not set(given) <= {"from", "to"} or not all(map(_is_key, given.values())):
        raise Refused(FORM)
    return Where(_packed(given))


def _is_key(value: Any) -> bool:
    kinds = (bool, int, float, str, bytes)
    return isinstance(value, list) and bool(value) and all(isinstance(v, kinds) for v in value)


def _packed(document: dict[str, Any]) -> bytes:
    """The document with its keys sorted, each of them once: neither changes what is chosen."""
    try:
        if "keys" in document:
            distinct = {msgpack.packb(key): key for key in document["keys"]}
            document = {"keys": [distinct[packed] for packed in sorted(distinct)]}
        packed: bytes = msgpack.packb(dict(sorted(document.items())))
    except (OverflowError, ValueError):
        raise Refused("option where has a value that no type has") from None
    return packed


async def resolve(
    connection: CatalogConnection, table: str, key: Sequence[KeyColumn], where: Where
) -> Where:
    """Check the values against the table's key, and write them as events have them.

    Refused if the table has no such key, or PostgreSQL refuses a value.
    """
    if not key:
        raise Refused(
            f"option where needs a key, and {table} has no primary key or identity index whose "
            "order PostgreSQL itself defines"
        )
    columns = tuple(sorted(key, key=lambda column: column.place))
    names = ", ".join(column.name for column in columns)
    document = where.document
    is_list = "keys" in document
    rows: list[list[Any]] = document["keys"] if is_list else list(document.values())
    for row in rows:
        if len(row) != len(columns):
            raise Refused(
                f"option where has a key of {len(row)} values; {table} is identified by {names}"
            )
    printed = []
    for place, column in enumerate(columns):
        texts = [_text(row[place], column) for row in rows]
        try:
            printed.append(await print_values(connection, column.type_name, texts))
        except ValueRefused as error:
            raise Refused(f"option where, column {column.name}: {error}") from error
        if column.type_name in ("name", '"char"') and printed[-1] != texts:
            raise Refused(f"option where, column {column.name}: a value is too long")
    keys: list[Key] = list(zip(*printed, strict=True))
    shown = [_wire_values(columns, one) for one in keys]
    if is_list:
        chosen = KeyRange(columns, among=tuple(dict.fromkeys(keys)))
        return Where(_packed({"keys": shown}), chosen)
    return _resolved_range(columns, dict(zip(document, keys, strict=True)), shown)


def _resolved_range(
    columns: tuple[KeyColumn, ...], ends: Mapping[str, Key], shown: Sequence[list[Any]]
) -> Where:
    bounds: list[tuple[Comparison, Key]] = []
    if "from" in ends:
        bounds.append((">=", ends["from"]))
    if "to" in ends:
        bounds.append(("<", ends["to"]))
    packed = _packed(dict(zip(ends, shown, strict=True)))
    return Where(packed, KeyRange(columns, tuple(bounds)))


def _wire_values(columns: Sequence[KeyColumn], key: Key) -> list[Any]:
    return [
        converter_for(column.type).convert(text.encode())
        for column, text in zip(columns, key, strict=True)
    ]


def _text(value: Any, column: KeyColumn) -> str:
    """A wire value as text that PostgreSQL reads; JSON has some values as text already."""
    kind = family(column.type.base_oid)
    text = None
    if isinstance(value, bool):
        text = str(value).lower() if kind == "bool" else None
    elif isinstance(value, int):
        text = str(value) if kind in ("int", "float") else None
    elif isinstance(value, float):
        text = repr(value) if kind == "float" else None
    elif isinstance(value, bytes):
        text = f"\\x{value.hex()}" if kind == "bytea" else None
    elif kind == "bytea":
        try:
            text = f"\\x{base64.b64decode(value, validate=True).hex()}"
        except (binascii.Error, ValueError):
            text = None
    elif kind != "bool" and "\0" not in value:
        text = value
    if text is None:
        raise Refused(f"option where, column {column.name}: a value is not of its type")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(f"option where, column {column.name}: a value is not UTF-8") from None
    return text
