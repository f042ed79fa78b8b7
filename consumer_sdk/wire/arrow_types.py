"""The Arrow type of each PostgreSQL column, the same in snapshots, Parquet files and the lake.

The types are plain data, because the wire must not need pyarrow; the caller passes that module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import family, numeric_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from consumer_sdk.wire.column_types import Family

LARGEST_DECIMAL_DIGITS: Final = 38
DECIMAL: Final = "decimal128"


@dataclass(frozen=True, slots=True)
class ArrowType:
    """An Arrow type, named by the pyarrow function that makes it, or a list of that type."""

    name: str
    parameters: tuple[int | str, ...] = ()
    is_list: bool = False

    def build(self, pyarrow: Any) -> Any:
        """The DataType, made with the pyarrow module that the caller has imported."""
        made = getattr(pyarrow, self.name)(*self.parameters)
        return pyarrow.list_(made) if self.is_list else made


TEXT: Final = ArrowType("string")
TIMESTAMP: Final = ArrowType("timestamp", ("us",))
TIMESTAMPTZ: Final = ArrowType("timestamp", ("us", "UTC"))

_NUMBERS: Final[Mapping[int, ArrowType]] = {
    oids.INT2: ArrowType("int16"),
    oids.INT4: ArrowType("int32"),
    oids.INT8: ArrowType("int64"),
    oids.OID: ArrowType("int64"),
    oids.FLOAT4: ArrowType("float32"),
    oids.FLOAT8: ArrowType("float64"),
}
_BY_FAMILY: Final[Mapping[Family, ArrowType]] = {
    "bool": ArrowType("bool_"),
    "bytea": ArrowType("binary"),
    "date": ArrowType("date32"),
    "timestamp": TIMESTAMP,
    "timestamptz": TIMESTAMPTZ,
}


def arrow_type(
    base_oid: int, element_oid: int, type_modifier: int, *, widen_decimals: bool = False
) -> ArrowType:
    """The Arrow type of a column; a type without an exact counterpart becomes text.

    PostgreSQL 15 and later allow `numeric(3, 5)` and `numeric(3, -2)`; Arrow needs
    0 <= scale <= precision. Such columns are text, or with `widen_decimals` decimals with as many
    digits as their values can have.
    """
    if family(base_oid, element_oid) == "array":
        element = element_oid or oids.ARRAY_ELEMENTS[base_oid]
        return replace(_scalar(element, type_modifier, widen_decimals), is_list=True)
    return _scalar(base_oid, type_modifier, widen_decimals)


def _scalar(oid: int, type_modifier: int, widen_decimals: bool) -> ArrowType:
    number = _NUMBERS.get(oid)
    if number is not None:
        return number
    kind = family(oid)
    if kind == "numeric":
        return _decimal(type_modifier, widen_decimals)
    return _BY_FAMILY.get(kind, TEXT)


def _decimal(type_modifier: int, widen: bool) -> ArrowType:
    bounds = numeric_bounds(type_modifier)
    if bounds is None:
        return TEXT
    precision, scale = bounds
    if widen:
        precision = max(precision, scale) if scale >= 0 else precision - scale
        scale = max(scale, 0)
    if 0 < precision <= LARGEST_DECIMAL_DIGITS and 0 <= scale <= precision:
        return ArrowType(DECIMAL, (precision, scale))
    return TEXT
