"""A value has one canonical spelling, wherever it is read from."""

from __future__ import annotations

from typing import Any

import pytest

from consumer_sdk.errors import CorruptData
from consumer_sdk.targets.canonical import Spelling
from consumer_sdk.targets.stored_values import postgres_encoder, sqlite_encoder
from consumer_sdk.wire import oids
from consumer_sdk.wire.errors import MISFITS
from tests.mirror_model import column

INT4_ARRAY, TEXT_ARRAY, BYTEA_ARRAY, JSONB_ARRAY, FLOAT8_ARRAY, NUMERIC_ARRAY = (
    1007, 1009, 1001, 3807, 1022, 1231,
)  # fmt: skip

# Type, what PostgreSQL prints, what the log carries, whether that is raw.
SAME: list[tuple[int, str, Any, bool]] = [
    (oids.BOOL, "t", True, False),
    (oids.BOOL, "false", False, False),
    (oids.INT8, "-9223372036854775808", -(2**63), False),
    (oids.FLOAT8, "0.1", 0.1, False),
    (oids.FLOAT8, "NaN", float("nan"), False),
    (oids.FLOAT8, "-Infinity", float("-inf"), False),
    (oids.FLOAT8, "-0", -0.0, False),
    (oids.NUMERIC, "1.50", "1.50", False),
    (oids.BYTEA, "\\xdead", b"\xde\xad", False),
    (oids.BYTEA, "\\x", b"", False),
    (oids.TIMESTAMPTZ, "2024-02-29 12:00:00.5+00", "2024-02-29T12:00:00.5Z", False),
    (oids.TIMESTAMPTZ, "infinity", "infinity", False),
    (oids.TIMESTAMPTZ, "0044-03-15 00:00:00+00 BC", "0044-03-15 00:00:00+00 BC", False),
    (oids.TIMESTAMP, "2024-02-29 12:00:00", "2024-02-29T12:00:00", False),
    (oids.JSON, '{"b":1,  "a":2}', '{"b":1,  "a":2}', True),
    (oids.JSONB, '{"a": 1.50}', '{"a": 1.50}', True),
    (oids.JSONB, '{"b": 0.0000001, "a": [true, null, "x"]}',
     {"a": [True, None, "x"], "b": 1e-07}, False),
    (oids.JSONB, '"text"', "text", False),
    (oids.JSONB, "null", "null", True),
    (INT4_ARRAY, "{1,NULL,3}", [1, None, 3], False),
    (INT4_ARRAY, "{{1,2},{3,4}}", [[1, 2], [3, 4]], False),
    (INT4_ARRAY, "[2:3]={7,8}", "[2:3]={7,8}", False),
    (INT4_ARRAY, "{}", [], False),
    (TEXT_ARRAY, '{a,"b,c","NULL",NULL,"","\\"q\\\\"}', ["a", "b,c", "NULL", None, "", '"q\\'],
     False),
    (BYTEA_ARRAY, '{"\\\\xdead",NULL}', [b"\xde\xad", None], False),
    (JSONB_ARRAY, '{"{\\"a\\": 1.0}",NULL}', ['{"a": 1.0}', None], True),
    (FLOAT8_ARRAY, "{1.5,NaN,-Infinity}", [1.5, float("nan"), float("-inf")], False),
    (NUMERIC_ARRAY, "{1.0,2.00}", ["1.0", "2.00"], False),
]  # fmt: skip


def make(type_oid: int) -> Any:
    return column("v", 1, type_oid, element_oid=oids.ARRAY_ELEMENTS.get(type_oid, 0))


@pytest.mark.parametrize(("type_oid", "printed", "carried", "raw"), SAME)
def test_printed_carried_and_stored_values_are_spelt_alike(
    type_oid: int, printed: str, carried: Any, raw: bool
) -> None:
    it = make(type_oid)
    spelling = Spelling(it)
    expected = spelling.from_text(printed)
    assert spelling.from_wire(carried, raw) == expected
    encode = sqlite_encoder(it)
    stored = carried if encode is None else encode(carried, raw)
    assert spelling.from_sqlite(int(stored) if isinstance(stored, bool) else stored) == expected
    encode = postgres_encoder(it)
    assert spelling.from_text(str(carried) if encode is None else encode(carried, raw)) == expected


@pytest.mark.parametrize(
    ("type_oid", "one", "other"),
    [
        (oids.NUMERIC, "1.5", "1.50"),
        (oids.JSONB, '{"a": 1.0}', '{"a": 1.00}'),
        (oids.JSONB, "1", '"1"'),
        (oids.JSON, "[1]", "[1 ]"),
        (oids.TEXT, "a", "a "),
        (TEXT_ARRAY, '{"NULL"}', "{NULL}"),
        (INT4_ARRAY, "{1,2}", "{{1,2}}"),
        (oids.FLOAT8, "0.1", "0.10000000000000002"),
    ],
)
def test_different_values_are_spelt_differently(type_oid: int, one: str, other: str) -> None:
    spelling = Spelling(make(type_oid))
    assert spelling.from_text(one) != spelling.from_text(other)


@pytest.mark.parametrize("literal", ["", "{", "}", "{1", "{1}}", '{"a}', "{1}x", "{a\\"])
def test_damaged_array_literals_are_refused(literal: str) -> None:
    with pytest.raises(CorruptData):
        Spelling(make(INT4_ARRAY)).from_text(literal)


def test_null_stays_null() -> None:
    spelling = Spelling(make(oids.JSONB))
    assert spelling.from_text(None) is None
    assert spelling.from_wire(None, False) is None
    assert spelling.from_sqlite(None) is None


@pytest.mark.parametrize("value", ["false", "", None, [], {}, 2, b"\x00"])
def test_only_a_boolean_is_written_as_one(value: Any) -> None:
    encode = postgres_encoder(column("flag", 1, oids.BOOL))
    assert encode is not None
    assert (encode(True, False), encode(False, False)) == ("true", "false")
    with pytest.raises(MISFITS):
        encode(value, False)
