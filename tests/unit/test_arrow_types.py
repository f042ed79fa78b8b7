from __future__ import annotations

import pyarrow as pa
import pytest

from consumer_sdk.wire import oids
from consumer_sdk.wire.arrow_types import arrow_type
from consumer_sdk.wire.checksums import sha256_hex, snapshot_checksum

NUMERIC_ARRAY = 1231


def modifier(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


@pytest.mark.parametrize(
    ("oid", "expected"),
    [
        (oids.BOOL, pa.bool_()),
        (oids.INT2, pa.int16()),
        (oids.INT4, pa.int32()),
        (oids.INT8, pa.int64()),
        (oids.OID, pa.int64()),
        (oids.FLOAT4, pa.float32()),
        (oids.FLOAT8, pa.float64()),
        (oids.BYTEA, pa.binary()),
        (oids.DATE, pa.date32()),
        (oids.TIMESTAMP, pa.timestamp("us")),
        (oids.TIMESTAMPTZ, pa.timestamp("us", tz="UTC")),
        (oids.NUMERIC, pa.string()),
        (oids.UUID, pa.string()),
        (oids.JSONB, pa.string()),
        (99999, pa.string()),
        (1007, pa.list_(pa.int32())),
    ],
)
def test_every_family_has_one_arrow_type(oid: int, expected: pa.DataType) -> None:
    assert arrow_type(oid, 0, -1).build(pa) == expected


@pytest.mark.parametrize(
    ("bounds", "exact", "widened"),
    [
        ((12, 2), pa.decimal128(12, 2), pa.decimal128(12, 2)),
        ((38, 38), pa.decimal128(38, 38), pa.decimal128(38, 38)),
        ((39, 2), pa.string(), pa.string()),
        ((3, 5), pa.string(), pa.decimal128(5, 5)),
        ((3, -2), pa.string(), pa.decimal128(5, 0)),
        ((37, -2), pa.string(), pa.string()),
    ],
)
def test_a_numeric_is_a_decimal_where_one_holds_every_value_of_it(
    bounds: tuple[int, int], exact: pa.DataType, widened: pa.DataType
) -> None:
    packed = modifier(*bounds)
    assert arrow_type(oids.NUMERIC, 0, packed).build(pa) == exact
    assert arrow_type(oids.NUMERIC, 0, packed, widen_decimals=True).build(pa) == widened
    assert arrow_type(NUMERIC_ARRAY, oids.NUMERIC, packed).build(pa) == pa.list_(exact)


def test_the_checksum_of_a_snapshot_follows_the_numbers_of_its_chunks() -> None:
    digests = {number: sha256_hex(bytes([number])) for number in (2, 0, 1)}
    joined = "".join(digests[number] for number in range(3))
    assert snapshot_checksum(digests, 3) == sha256_hex(joined.encode())
    assert snapshot_checksum({0: digests[0], 2: digests[2]}, 3) != snapshot_checksum(digests, 3)
