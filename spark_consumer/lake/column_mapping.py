"""The type of a PostgreSQL column in the lake, and how types widen with new schema versions.

Types are given as Arrow types; Parquet, Delta and Spark each have one type for each used here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from consumer_sdk.wire import arrow_types

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql.types import DataType, StructType

    from consumer_sdk.wire.column_types import Column

TIMESTAMPTZ: Final = pa.timestamp("us", tz="UTC")
TIMESTAMP: Final = pa.timestamp("us")

# For each integer type, the decimal digits that it needs.
_INTEGER_DIGITS: Final = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
# The types whose values each float type represents exactly.
_EXACT_IN: Final = {
    pa.float32(): (pa.int16(),),
    pa.float64(): (pa.int16(), pa.int32(), pa.float32()),
}


def arrow_type(column: Column) -> pa.DataType:
    """The lake's type for a column; text for types without an equivalent."""
    found = arrow_types.arrow_type(
        column.base_type_oid, column.element_oid, column.type_modifier, widen_decimals=True
    )
    return found.build(pa)


def is_text(type_: pa.DataType) -> bool:
    """Whether a column of this type holds text, or lists of it."""
    return bool(pa.types.is_string(type_.value_type if pa.types.is_list(type_) else type_))


def can_be_unrepresentable(type_: pa.DataType) -> bool:
    """Whether PostgreSQL has values that a column of this type cannot represent.

    Those are infinity, years BC and after 9999, NaN in a numeric, and arrays with several
    dimensions or with bounds that do not start at 1.
    """
    limited = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_decimal, pa.types.is_list)
    return any(holds(type_) for holds in limited)


def widened(current: pa.DataType, column: Column) -> pa.DataType | None:
    """The narrowest type for the values in the lake and the future values of the column.

    None if there is no such type: the change needs a new bootstrap.
    """
    wanted = arrow_type(column)
    if current == wanted:
        return current
    if pa.types.is_list(current) and pa.types.is_list(wanted):
        element = _wider(current.value_type, wanted.value_type, numeric=_is_numeric(column))
        return None if element is None else pa.list_(element)
    return _wider(current, wanted, numeric=_is_numeric(column))


def _is_numeric(column: Column) -> bool:
    return "numeric" in (column.family, column.element_family)


def _wider(a: pa.DataType, b: pa.DataType, *, numeric: bool) -> pa.DataType | None:
    if a == b:
        return a
    for narrow, wide in ((a, b), (b, a)):
        if narrow in _EXACT_IN.get(wide, ()):
            return wide
        # numeric without a precision is text in the lake; numbers keep their spelling as text.
        if numeric and pa.types.is_string(wide) and pa.types.is_decimal(narrow):
            return wide
    if a in _INTEGER_DIGITS and b in _INTEGER_DIGITS:
        return a if _INTEGER_DIGITS[a] > _INTEGER_DIGITS[b] else b
    digits_a, digits_b = _decimal_digits(a), _decimal_digits(b)
    if digits_a and digits_b:
        before, after = (max(pair) for pair in zip(digits_a, digits_b, strict=True))
        if before + after <= arrow_types.LARGEST_DECIMAL_DIGITS:
            return pa.decimal128(before + after, after)
    return None


def _decimal_digits(type_: pa.DataType) -> tuple[int, int] | None:
    """Digits before and after the point."""
    if pa.types.is_decimal(type_):
        return type_.precision - type_.scale, type_.scale
    digits = _INTEGER_DIGITS.get(type_)
    return None if digits is None else (digits, 0)


def spark_type(type_: pa.DataType) -> DataType:
    """The Spark type for an Arrow type that `arrow_type` gives."""
    from pyspark.sql import types as spark

    if pa.types.is_list(type_):
        return spark.ArrayType(spark_type(type_.value_type))
    if pa.types.is_struct(type_):
        return spark_schema(pa.schema(list(type_)))
    if pa.types.is_decimal(type_):
        return spark.DecimalType(type_.precision, type_.scale)
    simple: dict[pa.DataType, DataType] = {
        pa.bool_(): spark.BooleanType(),
        pa.int16(): spark.ShortType(),
        pa.int32(): spark.IntegerType(),
        pa.int64(): spark.LongType(),
        pa.float32(): spark.FloatType(),
        pa.float64(): spark.DoubleType(),
        pa.string(): spark.StringType(),
        pa.binary(): spark.BinaryType(),
        pa.date32(): spark.DateType(),
        TIMESTAMP: spark.TimestampNTZType(),
        TIMESTAMPTZ: spark.TimestampType(),
    }
    return simple[type_]


def spark_schema(schema: pa.Schema) -> StructType:
    """The StructType of an Arrow schema; every column nullable, as in the lake."""
    from pyspark.sql import types as spark

    return spark.StructType(
        [spark.StructField(field.name, spark_type(field.type)) for field in schema]
    )


def exact(value: SparkColumn, type_: DataType) -> SparkColumn:
    """A value that equals another one only if both are the same, in groups and joins as well.

    Spark takes -0.0 for 0.0 there, and writes 0.0; as text they differ.
    """
    from pyspark.sql import types as spark

    element = type_.elementType if isinstance(type_, spark.ArrayType) else type_
    return (
        value.cast("string") if isinstance(element, (spark.FloatType, spark.DoubleType)) else value
    )
