"""PostgreSQL types in the lake: what each column becomes, and what each value becomes."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from consumer_sdk.errors import CorruptData
from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import Column
from spark_consumer.errors import UnrepresentableError
from spark_consumer.lake.column_mapping import arrow_type, spark_schema, widened
from spark_consumer.lake.column_values import ColumnWriter

INT4_ARRAY, NUMERIC_ARRAY, JSONB_ARRAY = 1007, 1231, 3807


def column(oid: int, modifier: int = -1, *, name: str = "c", **fields: Any) -> Column:
    document = {"name": name, "position": 1, "data_type": "t", "type_oid": oid}
    return Column.from_document({**document, "type_modifier": modifier, **fields})


def numeric(precision: int, scale: int, oid: int = oids.NUMERIC) -> Column:
    return column(oid, ((precision << 16) | (scale & 0x7FF)) + 4)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (column(oids.BOOL), pa.bool_()),
        (column(oids.INT2), pa.int16()),
        (column(oids.INT4), pa.int32()),
        (column(oids.INT8), pa.int64()),
        (column(oids.OID), pa.int64()),
        (column(oids.FLOAT4), pa.float32()),
        (column(oids.FLOAT8), pa.float64()),
        (numeric(12, 2), pa.decimal128(12, 2)),
        (numeric(38, 38), pa.decimal128(38, 38)),
        (numeric(3, 5), pa.decimal128(5, 5)),
        (numeric(3, -2), pa.decimal128(5, 0)),
        (numeric(39, 2), pa.string()),
        (column(oids.NUMERIC), pa.string()),
        (column(oids.BYTEA), pa.binary()),
        (column(oids.TIMESTAMP), pa.timestamp("us")),
        (column(oids.TIMESTAMPTZ), pa.timestamp("us", tz="UTC")),
        (column(oids.DATE), pa.date32()),
        (column(oids.TIME), pa.string()),
        (column(oids.INTERVAL), pa.string()),
        (column(oids.UUID), pa.string()),
        (column(oids.JSONB), pa.string()),
        (column(INT4_ARRAY), pa.list_(pa.int32())),
        (numeric(10, 3, NUMERIC_ARRAY), pa.list_(pa.decimal128(10, 3))),
        (column(JSONB_ARRAY), pa.list_(pa.string())),
        (column(99999), pa.string()),
        (column(99999, base_type_oid=oids.INT4), pa.int32()),
    ],
)
def test_each_type_has_its_place_in_the_lake(source: Column, expected: pa.DataType) -> None:
    assert arrow_type(source) == expected
    assert spark_schema(pa.schema([("c", expected)])).names == ["c"]


@pytest.mark.parametrize(
    ("current", "then", "expected"),
    [
        (pa.int16(), column(oids.INT8), pa.int64()),
        (pa.int64(), column(oids.INT4), pa.int64()),
        (pa.float32(), column(oids.FLOAT8), pa.float64()),
        (pa.int32(), column(oids.FLOAT8), pa.float64()),
        (pa.int64(), column(oids.FLOAT8), None),
        (pa.int32(), numeric(6, 2), pa.decimal128(12, 2)),
        (pa.decimal128(10, 2), numeric(8, 4), pa.decimal128(12, 4)),
        (pa.decimal128(38, 0), numeric(10, 5), None),
        (pa.decimal128(10, 2), column(oids.NUMERIC), pa.string()),
        (pa.string(), numeric(10, 2), pa.string()),
        (pa.string(), column(oids.INT4), None),
        (pa.int32(), column(oids.TEXT), None),
        (pa.timestamp("us"), column(oids.TIMESTAMPTZ), None),
        (pa.list_(pa.int16()), column(INT4_ARRAY), pa.list_(pa.int32())),
        (pa.int32(), column(INT4_ARRAY), None),
    ],
)
def test_types_widen_only_where_no_value_is_lost(
    current: pa.DataType, then: Column, expected: pa.DataType | None
) -> None:
    assert widened(current, then) == expected


def written(values: list[Any], type_: pa.DataType, policy: Any = "error") -> Any:
    array, texts = ColumnWriter("t", "c", type_, policy=policy).write(values, lambda i: f"row{i}")
    assert array.type == type_
    return (array.to_pylist(), texts.to_pylist() if texts is not None else None)


@pytest.mark.parametrize(
    ("type_", "wire", "value"),
    [
        (pa.int32(), 5, 5),
        (pa.bool_(), True, True),
        (pa.float32(), 0.5, 0.5),
        (pa.float64(), 3, 3.0),
        (pa.string(), "x\x00y", "x\x00y"),
        (pa.binary(), b"\x00", b"\x00"),
        (pa.date32(), "0001-01-01", date(1, 1, 1)),
        (pa.timestamp("us"), "2025-12-12T12:00:34.3", datetime(2025, 12, 12, 12, 0, 34, 300000)),  # noqa: DTZ001
        (
            pa.timestamp("us", tz="UTC"),
            "9999-12-31T23:59:59.999999Z",
            datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        ),
        (pa.decimal128(12, 2), "-12.5", Decimal("-12.50")),
        (pa.decimal128(12, 2), 7, Decimal("7.00")),
        (pa.list_(pa.int32()), [1, None], [1, None]),
        (pa.list_(pa.int32()), [], []),
        (pa.list_(pa.decimal128(4, 1)), ["1.5"], [Decimal("1.5")]),
        (pa.list_(pa.date32()), ["2020-01-01"], [date(2020, 1, 1)]),
    ],
)
def test_values_keep_their_meaning(type_: pa.DataType, wire: Any, value: Any) -> None:
    assert written([wire, None], type_) == ([value, None], None)


@pytest.mark.parametrize(
    ("type_", "wire"),
    [
        (pa.timestamp("us"), "infinity"),
        (pa.timestamp("us", tz="UTC"), "-infinity"),
        (pa.timestamp("us"), "0044-03-15 00:00:00 BC"),
        (pa.timestamp("us", tz="UTC"), "12000-01-01T00:00:00Z"),
        (pa.date32(), "infinity"),
        (pa.date32(), "0044-03-15 BC"),
        (pa.decimal128(12, 2), "NaN"),
        (pa.decimal128(12, 2), "123456789012.00"),
        (pa.decimal128(12, 2), "1.555"),
        (pa.list_(pa.int32()), [[1, 2], [3, 4]]),
        (pa.list_(pa.int32()), "[2:3]={7,8}"),
        (pa.list_(pa.string()), "[2:3]={a,b}"),
        (pa.list_(pa.timestamp("us")), ["infinity"]),
    ],
)
def test_what_has_no_place_is_named_dropped_or_kept_as_text(type_: pa.DataType, wire: Any) -> None:
    refusal = r"table t, column c, row row1: .*does not fit"
    with pytest.raises(UnrepresentableError, match=refusal) as caught:
        written([None, wire], type_)
    assert str(wire) not in str(caught.value)
    assert written([None, wire], type_, "null") == ([None, None], None)
    array, texts = written([None, wire], type_, "text")
    assert array == [None, None]
    assert texts[0] is None
    assert texts[1] in (wire, "[[1, 2], [3, 4]]", '["infinity"]')


@pytest.mark.parametrize(
    ("type_", "wire"),
    [
        (pa.int32(), "5"),
        (pa.int32(), 1.5),
        (pa.int32(), True),
        (pa.string(), 5),
        (pa.string(), b"x"),
        (pa.binary(), "x"),
        (pa.bool_(), 1),
        (pa.float64(), "1.5"),
        (pa.timestamp("us"), 5),
        (pa.decimal128(12, 2), "one"),
    ],
)
def test_a_value_of_another_type_is_corrupt_not_converted(type_: pa.DataType, wire: Any) -> None:
    with pytest.raises(CorruptData, match="table t, column c, row row0"):
        written([wire], type_, "null")
