"""What each family of types becomes, by PostgreSQL's own spelling of the value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bridge.errors import ProtocolError
from bridge.events.values import ColumnType, RawText, converter_for, is_raw
from consumer_sdk.wire import oids

UNKNOWN_OID = 16_500


def convert(oid: int, text: str | bytes, **options: Any) -> Any:
    data = text.encode() if isinstance(text, str) else text
    return converter_for(ColumnType(oid), **options).convert(data)


@pytest.mark.parametrize(
    ("oid", "text", "value"),
    [
        (oids.BOOL, "t", True),
        (oids.BOOL, "f", False),
        (oids.INT2, "-32768", -32768),
        (oids.INT4, "2147483647", 2**31 - 1),
        (oids.INT8, "-9223372036854775808", -(2**63)),
        (oids.OID, "4294967295", 2**32 - 1),
        (oids.FLOAT4, "1.1", 1.1),
        (oids.FLOAT8, "0.30000000000000004", 0.1 + 0.2),
        (oids.FLOAT8, "1.7976931348623157e+308", 1.7976931348623157e308),
        (oids.FLOAT8, "5e-324", 5e-324),
        (oids.FLOAT8, "Infinity", math.inf),
        (oids.FLOAT8, "-Infinity", -math.inf),
        (oids.NUMERIC, "0.10", "0.10"),
        (oids.NUMERIC, "1" * 60 + ".000", "1" * 60 + ".000"),
        (oids.NUMERIC, "NaN", "NaN"),
        (oids.NUMERIC, "-Infinity", "-Infinity"),
        (oids.TEXT, "", ""),
        (oids.TEXT, "naïve 🐘\n\t\\", "naïve 🐘\n\t\\"),
        (oids.BPCHAR, "ab  ", "ab  "),
        (oids.VARCHAR, "NULL", "NULL"),
        (oids.NAME, "pg_class", "pg_class"),
        (oids.CHAR, "x", "x"),
        (oids.BYTEA, "\\x", b""),
        (oids.BYTEA, "\\x00ff0A", b"\x00\xff\n"),
        (oids.TIMESTAMPTZ, "2025-12-12 12:00:34.338547+00", "2025-12-12T12:00:34.338547Z"),
        (oids.TIMESTAMPTZ, "2025-12-12 12:00:34.3+00", "2025-12-12T12:00:34.3Z"),
        (oids.TIMESTAMPTZ, "2025-12-12 12:00:34+00", "2025-12-12T12:00:34Z"),
        (oids.TIMESTAMPTZ, "294276-12-31 23:59:59.999999+00", "294276-12-31T23:59:59.999999Z"),
        (oids.TIMESTAMPTZ, "0044-03-15 12:00:00+00 BC", "0044-03-15 12:00:00+00 BC"),
        (oids.TIMESTAMPTZ, "infinity", "infinity"),
        (oids.TIMESTAMPTZ, "-infinity", "-infinity"),
        (oids.TIMESTAMPTZ, "2025-12-12 17:30:34+05:30", "2025-12-12 17:30:34+05:30"),
        (oids.TIMESTAMP, "2025-12-12 12:00:34.338547", "2025-12-12T12:00:34.338547"),
        (oids.TIMESTAMP, "12025-12-12 12:00:34", "12025-12-12T12:00:34"),
        (oids.TIMESTAMP, "4713-01-01 00:00:00 BC", "4713-01-01 00:00:00 BC"),
        (oids.TIMESTAMP, "-infinity", "-infinity"),
        (oids.DATE, "2025-12-12", "2025-12-12"),
        (oids.DATE, "0044-03-15 BC", "0044-03-15 BC"),
        (oids.DATE, "infinity", "infinity"),
        (oids.TIME, "24:00:00", "24:00:00"),
        (oids.TIMETZ, "12:00:34.338547+05:30", "12:00:34.338547+05:30"),
        (oids.INTERVAL, "1 year 2 mons -3 days 04:05:06.7", "1 year 2 mons -3 days 04:05:06.7"),
        (oids.UUID, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        (oids.MONEY, "-$1,000.00", "-$1,000.00"),
        (oids.INET, "192.168.0.1/24", "192.168.0.1/24"),
        (oids.POINT, "(1,2)", "(1,2)"),
        (oids.BIT, "0101", "0101"),
        (oids.TSVECTOR, "'a':1 'b':2", "'a':1 'b':2"),
        (oids.INT4RANGE, "[1,10)", "[1,10)"),
        (oids.XML, "<a>1</a>", "<a>1</a>"),
        (oids.INT2VECTOR, "1 2 3", "1 2 3"),
        (UNKNOWN_OID, "happy", "happy"),
    ],
)
def test_scalars_become_what_the_wire_format_promises(oid: int, text: str, value: Any) -> None:
    converted = convert(oid, text)
    assert converted == value
    assert type(converted) is type(value)
    assert not is_raw(converted)


def test_float_keeps_nan_and_the_sign_of_zero() -> None:
    assert math.isnan(convert(oids.FLOAT8, "NaN"))
    assert math.copysign(1, convert(oids.FLOAT8, "-0")) == -1


def test_a_domain_converts_like_its_base_type() -> None:
    assert converter_for(ColumnType(UNKNOWN_OID, base_oid=oids.INT4)).convert(b"7") == 7


@pytest.mark.parametrize(
    ("oid", "data"),
    [
        (oids.BOOL, b"true"),
        (oids.BOOL, b""),
        (oids.INT4, b"1.5"),
        (oids.INT4, b""),
        (oids.FLOAT8, b"one"),
        (oids.BYTEA, b"abc"),
        (oids.BYTEA, b"\\x0"),
        (oids.BYTEA, b"\\xzz"),
        (oids.TEXT, b"\xff"),
        (oids.TIMESTAMPTZ, b"\xff+00"),
        (oids.TIMESTAMP, b"\xff"),
        (oids.JSON, b"\xff"),
        (oids.JSONB, b'"\xff"'),
        (1007, b"{1,x}"),
    ],
)
def test_text_the_type_cannot_print_is_refused_without_showing_it(oid: int, data: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        convert(oid, data)
    assert data.decode(errors="replace") not in str(refused.value) or not data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("0", 0),
        ("-7", -7),
        ("1.5", 1.5),
        ("1.0", 1.0),
        ("0.0000001", 1e-7),
        ("-0.25", -0.25),
        ("18446744073709551615", 2**64 - 1),
        ("-9223372036854775808", -(2**63)),
        ('"a\\"b\\\\\\n\\u0001é🐘"', 'a"b\\\n\x01é🐘'),
        ('"\\\\u0000"', "\\u0000"),
        ('"12345678901234567890123"', "12345678901234567890123"),
        ("[]", []),
        ("{}", {}),
        ('{"": [1, [2.5, null]], "b": {"c": false}}', {"": [1, [2.5, None]], "b": {"c": False}}),
        ("[" * 256 + "]" * 256, None),
    ],
)
def test_jsonb_that_survives_encoding_is_decoded(text: str, value: Any) -> None:
    converted = convert(oids.JSONB, text)
    assert not is_raw(converted)
    if text[:2] != "[[":
        assert converted == value
        assert type(converted) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "1234567890123456789012345678901234567890",
        "18446744073709551616",
        "-9223372036854775809",
        "9" * 5000,
        "1.10",
        "1e5",
        "0.1234567890123456789",
        "10000000000000000.0",
        "10000000000000000.5",
        "1" + "0" * 400 + ".5",
        "0." + "0" * 400 + "1",
        "-0",
        '{"a": [1, {"b": 2.50}]}',
        '"\\u0000"',
        '"\\ud800"',
        "NaN",
        "-Infinity",
        "[" * 257 + "]" * 257,
        "[" * 100_000 + "]" * 100_000,
        "{",
        "1 2",
    ],
)
def test_jsonb_that_decoding_would_change_stays_text_and_is_raw(text: str) -> None:
    converted = convert(oids.JSONB, text)
    assert converted == text
    assert is_raw(converted)


def test_jsonb_with_integers_beyond_2_53_is_raw_in_json_messages_only() -> None:
    exact, beyond = str(2**53), str(2**53 + 1)
    assert convert(oids.JSONB, beyond) == 2**53 + 1
    assert convert(oids.JSONB, exact, json_messages=True) == 2**53
    assert is_raw(convert(oids.JSONB, f"[{beyond}]", json_messages=True))


def test_json_always_stays_text_and_is_raw() -> None:
    text = '{ "a":1, "a" : 1.0 }'
    converted = convert(oids.JSON, text)
    assert converted == text
    assert isinstance(converted, RawText)


@pytest.mark.parametrize(
    ("oid", "text", "value"),
    [
        (1007, "{}", []),
        (1007, "{1,NULL,-3}", [1, None, -3]),
        (1007, "{{1,2},{3,4}}", [[1, 2], [3, 4]]),
        (1007, "{{{1}},{{2}}}", [[[1]], [[2]]]),
        (1007, "[2:3]={7,8}", "[2:3]={7,8}"),
        (1007, "[0:0][1:2]={{7,8}}", "[0:0][1:2]={{7,8}}"),
        (1000, "{t,f,NULL}", [True, False, None]),
        (1022, "{1.5,NaN,Infinity}", [1.5, math.nan, math.inf]),
        (1009, '{a,"b,c","",NULL,"NULL"}', ["a", "b,c", "", None, "NULL"]),
        (1009, r'{"a\"b","c\\d","{x}"," y "}', ['a"b', r"c\d", "{x}", " y "]),
        (1009, "{naïve,🐘}", ["naïve", "🐘"]),
        (1001, '{"\\\\x00ff","\\\\x"}', [b"\x00\xff", b""]),
        (1231, "{1.10,NaN}", ["1.10", "NaN"]),
        (1185, '{"2025-12-12 12:00:34+00",infinity}', ["2025-12-12T12:00:34Z", "infinity"]),
        (1115, '{"0044-03-15 12:00:00 BC"}', ["0044-03-15 12:00:00 BC"]),
        (1020, "{(2,2),(1,1);(4,4),(3,3)}", ["(2,2),(1,1)", "(4,4),(3,3)"]),
        (1017, '{"(1,2)","(3,4)"}', ["(1,2)", "(3,4)"]),
        (1006, '{"1 2","3"}', ["1 2", "3"]),
    ],
)
def test_arrays_become_nested_lists_and_odd_bounds_text(oid: int, text: str, value: Any) -> None:
    assert repr(convert(oid, text)) == repr(value)


def test_an_array_of_an_unknown_type_uses_its_delimiter() -> None:
    column_type = ColumnType(UNKNOWN_OID, element_oid=UNKNOWN_OID + 1, element_delimiter="|")
    assert converter_for(column_type).convert(b"{a,b|c}") == ["a,b", "c"]


@pytest.mark.parametrize("oid", [199, 3807])
def test_arrays_of_json_keep_their_elements_as_text_and_are_raw(oid: int) -> None:
    converted = convert(oid, '{"{\\"a\\": 1}",NULL,2}')
    assert converted == ['{"a": 1}', None, "2"]
    assert is_raw(converted)
    assert is_raw(convert(oid, "[2:2]={1}"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "{",
        "}",
        "{}}",
        "{1",
        "{1,}",
        "{,1}",
        "{1,,2}",
        "{{1},}",
        "{{1}2}",
        '{"1"2}',
        '{"1}',
        '{"1\\"}',
        "{1}{2}",
        "{1} ",
        '"1"',
        "{{{{{{{1}}}}}}}",
    ],
)
def test_damaged_array_literals_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        convert(1007, text)
    if text:
        with pytest.raises(ProtocolError):
            convert(1009, text)
