"""Values survive exactly, from every type that can be a column, in both encodings."""

from __future__ import annotations

import json
import math

from bridge.embedded.postgres import WHEEL_TREES
from consumer_sdk.wire.column_types import TableSchema, restore_json
from tests.fixtures.cdc_log import CdcLog
from tests.fixtures.nats import delete_streams
from tests.fixtures.postgres import both_versions

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'very "happy", indeed');
CREATE TYPE pair AS (x int, y text);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN money_text AS numeric(20, 4);
CREATE DOMAIN tags AS text[];
CREATE TYPE span AS RANGE (subtype = float8);
"""

FORTY_DIGITS = "1234567890123456789012345678901234567890"

# Column definition, the value in SQL, the value in MessagePack, and in JSON where that differs.
VALUES = [
    ("bool", "true", True),
    ("int2", "-32768", -32768),
    ("int4", "2147483647", 2**31 - 1),
    ("int8", "'-9223372036854775808'", -(2**63), "-9223372036854775808"),
    ("int8", "9007199254740993", 2**53 + 1, "9007199254740993"),
    ("int8", "9007199254740992", 2**53),
    ("oid", "4294967295", 2**32 - 1),
    ("float4", "16777216.5::float4", 16777216.0),
    ("float4", "0.1", 0.1),
    ("float8", "0.1::float8 + 0.2::float8", 0.1 + 0.2),
    ("float8", "'5e-324'", 5e-324),
    ("float8", "'1.7976931348623157e308'", 1.7976931348623157e308),
    ("float8", "'-Infinity'", -math.inf, "-Infinity"),
    ("float8", "'Infinity'", math.inf, "Infinity"),
    ("float8", "'NaN'", math.nan, "NaN"),
    ("numeric", f"'{FORTY_DIGITS}.{FORTY_DIGITS}'", f"{FORTY_DIGITS}.{FORTY_DIGITS}"),
    ("numeric", "'NaN'", "NaN"),
    ("numeric(12, 3)", "1.5", "1.500"),
    ("money_text", "2", "2.0000"),
    ("text", r"E'naïve 🐘\n\t\\\u0001'", "naïve 🐘\n\t\\\x01"),
    ("text", "''", ""),
    ("char(4)", "'ab'", "ab  "),
    ("bytea", r"'\x00ff0a5c'", b"\x00\xff\n\\", "AP8KXA=="),
    ("timestamptz", "'2025-12-12 14:00:34.338547+02'", "2025-12-12T12:00:34.338547Z"),
    ("timestamptz", "'infinity'", "infinity"),
    ("timestamptz", "'0044-03-15 12:00:00+00 BC'", "0044-03-15 12:00:00+00 BC"),
    ("timestamp", "'2025-12-12 12:00:34.338547'", "2025-12-12T12:00:34.338547"),
    ("timestamp", "'-infinity'", "-infinity"),
    ("timestamp", "'4713-01-01 00:00:00 BC'", "4713-01-01 00:00:00 BC"),
    ("date", "'2025-12-12'", "2025-12-12"),
    ("date", "'0044-03-15 BC'", "0044-03-15 BC"),
    ("date", "'infinity'", "infinity"),
    ("time", "'24:00'", "24:00:00"),
    ("time", "'01:02:03.000004'", "01:02:03.000004"),
    ("timetz", "'12:00:34.5+05:30'", "12:00:34.5+05:30"),
    ("interval", "'1 year 2 mons -3 days 04:05:06.7'", "1 year 2 mons -3 days +04:05:06.7"),
    ("uuid", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("mood", "'very \"happy\", indeed'", 'very "happy", indeed'),
    ("pair", "ROW(1, 'a b')", '(1,"a b")'),
    ("positive", "7", 7),
    ("tags", "'{a,NULL}'", ["a", None]),
    ("int4range", "'(1,5]'", "[2,6)"),
    ("span", "'[1.5,2.5)'", "[1.5,2.5)"),
    ("int4multirange", "'{[1,2],[5,6]}'", "{[1,3),[5,7)}"),
    ("inet", "'192.168.0.1/24'", "192.168.0.1/24"),
    ("point", "'(1,2.5)'", "(1,2.5)"),
    ("bit(4)", "B'0101'", "0101"),
    ("tsvector", "'b a'", "'a' 'b'"),
    ("pg_lsn", "'16/B374D848'", "16/B374D848"),
    ("int2vector", "'1 2 3'", "1 2 3"),
    ("oidvector", "'1 2'", "1 2"),
    ("int4[]", "'{}'", []),
    ("int4[]", "'{{1,NULL},{3,4}}'", [[1, None], [3, 4]]),
    ("int4[]", "'[2:3]={7,8}'", "[2:3]={7,8}"),
    ("int8[]", "'{1,9007199254740993}'", [1, 2**53 + 1], [1, "9007199254740993"]),
    ("float8[]", "'{1.5,-Infinity}'", [1.5, -math.inf], [1.5, "-Infinity"]),
    ("bytea[]", r"ARRAY['\x00ff'::bytea, NULL]", [b"\x00\xff", None], ["AP8=", None]),
    ("text[]", r"""ARRAY[[['x'], ['y,"{z}']]]""", [[["x"], ['y,"{z}']]]),
    ("text[]", "ARRAY['NULL', NULL, '']", ["NULL", None, ""]),
    ("timestamptz[]", "ARRAY['2025-12-12 12:00Z'::timestamptz]", ["2025-12-12T12:00:00Z"]),
    ("mood[]", "ARRAY['sad']::mood[]", ["sad"]),
    ("pair[]", "ARRAY[ROW(1, 'a')::pair]", ["(1,a)"]),
    ("box[]", "'{(0,0),(1,1);(2,2),(3,3)}'", ["(1,1),(0,0)", "(3,3),(2,2)"]),
    ("jsonb", '\'{"b":[1,2.5,null],"a":{"c":true}}\'', {"a": {"c": True}, "b": [1, 2.5, None]}),
    ("int4", "NULL", None),
    ("jsonb", "NULL", None),
]  # fmt: skip

# Of an extension that comes with the wheel.
VECTORS = [
    ("vector(3)", "'[1, 2.5, -3]'", "[1,2.5,-3]"),
    ("vector(2)[]", "ARRAY['[1,2]']::vector(2)[]", ["[1,2]"]),
]

# The same for columns that travel as text in both encodings and are named in `raw`.
RAW_VALUES = [
    ("jsonb", f"'{{\"n\": {FORTY_DIGITS}}}'", f'{{"n": {FORTY_DIGITS}}}'),
    ("jsonb", "'0.1234567890123456789'", "0.1234567890123456789"),
    ("jsonb", "'1.10'", "1.10"),
    ("jsonb", "'null'", "null"),
    ("json", '\'{ "a":1, "a" : 1.0 }\'', '{ "a":1, "a" : 1.0 }'),
    ("json", "'null'", "null"),
    ("jsonb[]", "ARRAY['{\"a\": 1}'::jsonb, NULL, 'null']", ['{"a": 1}', None, "null"]),
]
# Exact in MessagePack, but not in JSON.
RAW_IN_JSON = [("jsonb", "'[9007199254740993]'", [2**53 + 1], "[9007199254740993]")]


def same(left, right):
    """Equality of values where NaN is itself and 1 is not 1.0 is not True."""
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@both_versions
async def test_values_of_every_type_survive_exactly_in_both_encodings(
    database, cdc, prefix, nats_client, nats_server, bridge_process
):
    plain = list(VALUES)
    if database.server.version in WHEEL_TREES:
        database.execute("CREATE EXTENSION vector")
        plain += VECTORS
    cases = [*plain, *RAW_VALUES, *RAW_IN_JSON]
    database.execute(TYPES)
    columns = ", ".join(f"c{number} {case[0]}" for number, case in enumerate(cases))
    database.execute(f"CREATE TABLE wide (id int PRIMARY KEY, {columns})")
    database.execute("ALTER TABLE wide REPLICA IDENTITY FULL")
    database.publish("wide")
    # Nothing that an administrator sets for the database or the role may change what is sent.
    database.execute(
        f"""
        ALTER DATABASE {database.name} SET timezone = 'Asia/Tokyo';
        ALTER DATABASE {database.name} SET datestyle = 'German';
        ALTER DATABASE {database.name} SET intervalstyle = 'iso_8601';
        ALTER DATABASE {database.name} SET extra_float_digits = 0;
        ALTER DATABASE {database.name} SET bytea_output = 'escape';
        """
    )
    other = f"{prefix}-json"
    bridge_process()
    bridge_process("--json", slot=f"json_{database.name}", prefix=other)
    values = ", ".join(case[1] for case in cases)
    with database.connect(options="-c timezone=UTC -c datestyle=ISO") as connection:
        connection.execute(f"INSERT INTO wide VALUES (1, {values})")
        connection.execute("UPDATE wide SET id = 2")
        connection.execute("DELETE FROM wide")
    try:
        in_json = CdcLog(nats_client, type(cdc.subjects)(other), database)
        await cdc.settle()
        await in_json.settle()
        packed, written = await cdc.changes("wide"), await in_json.changes("wide")
        stored = await in_json.of_table("wide")
        document = await in_json.schema("wide")
    finally:
        await delete_streams(nats_server.url, other)
    raw = {f"c{len(plain) + n}" for n in range(len(RAW_VALUES))}
    inexact = {f"c{len(cases) - 1}"}
    for events, is_json in ((packed, False), (written, True)):
        assert [e.operation for e in events] == ["INSERT", "UPDATE", "DELETE"]
        rows = [e.data for e in events] + [events[1].old]
        for row in rows:
            for number, case in enumerate(cases):
                wanted = case[-1] if is_json else case[2]
                assert same(row[f"c{number}"], wanted), (case, row[f"c{number}"], is_json)
        for event in events:
            assert set(event.raw) == (raw | inexact if is_json else raw)
    for one in stored:
        assert one.headers["Content-Type"] == "application/json"
        # Strict JSON: no NaN, nothing beyond what a double carries.
        json.loads(one.message.data.decode(), parse_constant=lambda word: 1 / 0)
    # Whoever knows the column types reads the same rows from both.
    schema = TableSchema.from_document(document)
    for mine, theirs in zip(packed, written, strict=True):
        for column in schema.columns:
            if column.name not in inexact:
                restored = restore_json(theirs.data[column.name], column)
                assert same(restored, mine.data[column.name]), (column, restored)
