"""PostgreSQL types as Arrow types, so that Spark reads a chunk without converting it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import family

if TYPE_CHECKING:
    from bridge.values import ColumnType

_INTEGERS: Final = {
    oids.INT2: pa.int16(),
    oids.INT4: pa.int32(),
    oids.INT8: pa.int64(),
    oids.OID: pa.int64(),
}
LARGEST_PRECISION: Final = 38


def arrow_type(kind: ColumnType) -> Any:
    """The Arrow type of a column; whatever has no exact counterpart is text."""
    if family(kind.base_oid, kind.element_oid) == "array":
        element = kind.element_oid or oids.ARRAY_ELEMENTS[kind.base_oid]
        return pa.list_(_scalar(element, kind.typmod))
    return _scalar(kind.base_oid, kind.typmod)


def _scalar(oid: int, modifier: int) -> Any:
    if oid in _INTEGERS:
        return _INTEGERS[oid]
    match family(oid):
        case "bool":
            return pa.bool_()
        case "float":
            return pa.float32() if oid == oids.FLOAT4 else pa.float64()
        case "numeric":
            return _decimal(modifier)
        case "bytea":
            return pa.binary()
        case "timestamptz":
            return pa.timestamp("us", tz="UTC")
        case "timestamp":
            return pa.timestamp("us")
        case "date":
            return pa.date32()
        case _:
            return pa.string()


def _decimal(modifier: int) -> Any:
    # The modifier counts from 4: precision in the upper half, scale in 11 signed bits.
    packed = modifier - 4
    if packed < 0:
        return pa.string()
    precision, scale = (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400
    if precision <= LARGEST_PRECISION and 0 <= scale <= precision:
        return pa.decimal128(precision, scale)
    return pa.string()
