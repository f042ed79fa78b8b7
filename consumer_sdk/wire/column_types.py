"""Column types on the wire: OIDs, families, schema documents, and values read back from JSON."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from consumer_sdk.wire.errors import MISFITS, WireError, WireVersionError
from consumer_sdk.wire.oids import (
    ARRAY_ELEMENTS,
    BOOL,
    BOX,
    BPCHAR,
    BYTEA,
    CHAR,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT2VECTOR,
    INT4,
    INT8,
    INTERVAL,
    JSON,
    JSONB,
    LINE,
    LSEG,
    NAME,
    NUMERIC,
    OID,
    OIDVECTOR,
    POINT,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    TIMETZ,
    UUID,
    VARCHAR,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIRE_VERSION: Final = 1

Family = Literal[
    "bool",
    "int",
    "float",
    "numeric",
    "text",
    "bytea",
    "timestamp",
    "timestamptz",
    "date",
    "time",
    "timetz",
    "interval",
    "json",
    "jsonb",
    "uuid",
    "array",
    "other",
]

_SCALAR_FAMILIES: Final[Mapping[int, Family]] = {
    BOOL: "bool",
    INT2: "int",
    INT4: "int",
    INT8: "int",
    OID: "int",
    FLOAT4: "float",
    FLOAT8: "float",
    NUMERIC: "numeric",
    TEXT: "text",
    VARCHAR: "text",
    BPCHAR: "text",
    NAME: "text",
    CHAR: "text",
    BYTEA: "bytea",
    TIMESTAMP: "timestamp",
    TIMESTAMPTZ: "timestamptz",
    DATE: "date",
    TIME: "time",
    TIMETZ: "timetz",
    INTERVAL: "interval",
    JSON: "json",
    JSONB: "jsonb",
    UUID: "uuid",
}

# pg_type gives these an element type, but PostgreSQL does not print them as array literals.
_SUBSCRIPTED_SCALARS: Final = frozenset({INT2VECTOR, OIDVECTOR, POINT, LSEG, BOX, LINE})

_JSON_ADAPTED: Final = frozenset({"bytea", "int", "float"})


def family(base_oid: int, element_oid: int = 0) -> Family:
    """The family of a type, by which its values are encoded; for a domain pass its base type."""
    scalar = _SCALAR_FAMILIES.get(base_oid)
    if scalar is not None:
        return scalar
    if base_oid in _SUBSCRIPTED_SCALARS:
        return "other"
    return "array" if element_oid or base_oid in ARRAY_ELEMENTS else "other"


def numeric_bounds(type_modifier: int) -> tuple[int, int] | None:
    """Precision and scale of `numeric(p, s)`, None if it is unbounded; the scale may be negative.

    The modifier counts from 4: precision in the upper half, the scale in 11 signed bits.
    """
    packed = type_modifier - 4
    if packed < 0:
        return None
    return (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table at one schema version.

    `base_type_oid` is the type behind a domain, else `type_oid`; `element_oid` is the element type
    of an array, else 0. `backfilled`: whether rows older than the column have values in it.
    `number`: no other column of the table ever has the same. Both are None if not known.
    """

    name: str
    position: int
    data_type: str
    type_oid: int
    type_modifier: int
    is_nullable: bool
    column_default: str | None
    is_key: bool
    base_type_oid: int
    element_oid: int
    backfilled: bool | None = None
    number: int | None = None

    @property
    def family(self) -> Family:
        """The family of the column's values."""
        return family(self.base_type_oid, self.element_oid)

    @property
    def element_family(self) -> Family | None:
        """The family of an array's elements, None for a column that is not an array."""
        return family(self.element_oid) if self.element_oid and self.family == "array" else None

    @property
    def numeric_precision(self) -> int | None:
        """Digits of a `numeric(p, s)` column or of an array of them, None if unbounded."""
        bounds = self._numeric_bounds()
        return bounds[0] if bounds else None

    @property
    def numeric_scale(self) -> int | None:
        """Digits after the point of `numeric(p, s)`, possibly negative; None if unbounded."""
        bounds = self._numeric_bounds()
        return bounds[1] if bounds else None

    def _numeric_bounds(self) -> tuple[int, int] | None:
        if NUMERIC not in (self.base_type_oid, self.element_oid):
            return None
        return numeric_bounds(self.type_modifier)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Column:
        """Read a column of a schema document, ignoring fields it does not know."""
        type_oid = int(document["type_oid"])
        base_type_oid = int(document.get("base_type_oid") or type_oid)
        element_oid = document.get("element_oid")
        if element_oid is None:
            element_oid = ARRAY_ELEMENTS.get(base_type_oid, 0)
        default = document.get("column_default")
        backfilled = document.get("backfilled")
        return cls(
            name=str(document["name"]),
            position=int(document["position"]),
            data_type=str(document["data_type"]),
            type_oid=type_oid,
            type_modifier=int(document.get("type_modifier", -1)),
            is_nullable=bool(document.get("is_nullable", True)),
            column_default=None if default is None else str(default),
            is_key=bool(document.get("is_key", False)),
            base_type_oid=base_type_oid,
            element_oid=int(element_oid),
            backfilled=backfilled if isinstance(backfilled, bool) else None,
            number=None if document.get("number") is None else int(document["number"]),
        )

    def to_document(self) -> dict[str, Any]:
        """The column as written in a schema document."""
        document: dict[str, Any] = {
            "name": self.name,
            "position": self.position,
            "data_type": self.data_type,
            "type_oid": self.type_oid,
            "type_modifier": self.type_modifier,
            "is_nullable": self.is_nullable,
            "column_default": self.column_default,
            "is_key": self.is_key,
            "base_type_oid": self.base_type_oid,
            "element_oid": self.element_oid,
        }
        if self.backfilled is not None:
            document["backfilled"] = self.backfilled
        if self.number is not None:
            document["number"] = self.number
        return document


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table as of one schema version of one source and epoch.

    `replica_identity` is one of "default", "nothing", "full", "index". `filenode` changes when
    PostgreSQL rewrites the table; None if it is not known. With `primary_key_deferrable`, two rows
    may have the same key until their transaction ends.
    """

    source: str
    epoch: int
    table: str
    schema: str
    timestamp: int
    schema_version: int
    lsn: int
    primary_key: tuple[str, ...]
    replica_identity: str
    columns: tuple[Column, ...]
    filenode: int | None = None
    primary_key_deferrable: bool = False

    @property
    def row_key(self) -> tuple[str, ...]:
        """The columns by which events identify a row; () if events do not identify rows.

        These are the primary key if the replica identity contains it, else the identity columns.
        Under REPLICA IDENTITY FULL without a primary key, these are all columns, and rows may be
        equal.
        """
        if self.replica_identity == "nothing":
            return ()
        names = tuple(column.name for column in self.columns)
        if self.replica_identity == "full":
            identity = names
        else:
            identity = tuple(column.name for column in self.columns if column.is_key)
        if self.primary_key and set(self.primary_key) <= set(identity):
            return self.primary_key
        return identity

    def column(self, name: str) -> Column | None:
        """Find a column by name."""
        return next((column for column in self.columns if column.name == name), None)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TableSchema:
        """Read a schema document (KV value or SCHEMA event), ignoring fields it does not know.

        A document that is not a schema raises WireError.
        """
        version = document.get("v", _WIRE_VERSION)
        if isinstance(version, int) and version > _WIRE_VERSION:
            raise WireVersionError(
                f"schema document has wire version {version}, this reader understands "
                f"{_WIRE_VERSION}; upgrade it"
            )
        try:
            return cls(
                source=str(document["source"]),
                epoch=int(document["epoch"]),
                table=str(document["table"]),
                schema=str(document["schema"]),
                timestamp=int(document["timestamp"]),
                schema_version=int(document["schema_version"]),
                lsn=int(document["lsn"]),
                primary_key=tuple(str(name) for name in document["primary_key"] or ()),
                replica_identity=str(document["replica_identity"]),
                columns=tuple(Column.from_document(column) for column in document["columns"]),
                filenode=None if document.get("filenode") is None else int(document["filenode"]),
                primary_key_deferrable=document.get("primary_key_deferrable") is True,
            )
        except MISFITS as error:
            raise WireError(f"not a schema document: {error!r}") from error

    def to_document(self) -> dict[str, Any]:
        """The schema as the document stored in the bucket."""
        document: dict[str, Any] = {
            "v": _WIRE_VERSION,
            "source": self.source,
            "epoch": self.epoch,
            "table": self.table,
            "schema": self.schema,
            "timestamp": self.timestamp,
            "schema_version": self.schema_version,
            "lsn": self.lsn,
            "primary_key": list(self.primary_key),
            "replica_identity": self.replica_identity,
            "columns": [column.to_document() for column in self.columns],
        }
        if self.filenode is not None:
            document["filenode"] = self.filenode
        if self.primary_key_deferrable:
            document["primary_key_deferrable"] = True
        return document


def restore_json(value: Any, column: Column) -> Any:
    """Convert a value read from a JSON message to what MessagePack would have carried.

    bytea is decoded from base64, integers and floats from text; arrays are converted by element.
    An array whose bounds do not start at 1 is text in both encodings. A value that does not fit
    its column raises WireError.
    """
    if value is None:
        return None
    kind = column.family
    if kind != "array":
        return _restore_scalar(value, kind)
    try:
        return _restore_elements(value, family(column.element_oid))
    except RecursionError as error:
        raise WireError("damaged message: an array is nested too deeply") from error


def to_bytes(value: Any) -> bytes:
    """The bytes of a bytea value, which JSON carries as base64; other values raise an error."""
    if isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if not isinstance(value, bytes):
        raise TypeError(f"a {type(value).__name__} is not bytes")
    return value


def _restore_elements(value: Any, kind: Family) -> Any:
    if not isinstance(value, list):
        return value
    return [
        _restore_elements(item, kind) if isinstance(item, list) else _restore_scalar(item, kind)
        for item in value
    ]


def _restore_scalar(value: Any, kind: Family) -> Any:
    if value is None or kind not in _JSON_ADAPTED:
        return value
    try:
        if kind == "bytea":
            return to_bytes(value)
        if kind == "int" and isinstance(value, str):
            return int(value)
        if kind == "float" and isinstance(value, (str, int)):
            return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(
            f"damaged message: a {kind} column holds a value of another type"
        ) from error
    return value
