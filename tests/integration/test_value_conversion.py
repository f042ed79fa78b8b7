"""Values as a real PostgreSQL prints them: in a query, in COPY and in the log."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from bridge.events.row_code import compile_row_reader, compile_update_reader
from bridge.events.rows import RowConverter
from bridge.events.values import ColumnType, converter_for, is_raw
from bridge.snapshot.formats.copy_text import compile_row_decoder
from bridge.wal.messages import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Relation,
    Truncate,
    Type,
    Update,
)
from bridge.wal.pgoutput import decode
from tests.fixtures.postgres import both_versions
from tests.pgoutput_encoder import encode_row

if TYPE_CHECKING:
    from psycopg import Connection

    from tests.fixtures.postgres import Database

SESSION = """
SET client_encoding = 'UTF8'; SET DateStyle = 'ISO'; SET TimeZone = 'UTC';
SET IntervalStyle = 'postgres'; SET extra_float_digits = 1; SET bytea_output = 'hex'
"""

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'very "happy", indeed');
CREATE TYPE pair AS (x int, y text);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN more_positive AS positive CHECK (VALUE > 1);
CREATE DOMAIN tags AS text[];
"""

# Each type behind its domains; an element type is one whose array type is this one, because
# pg_type.typelem alone is also set for name, point, int2vector and the like.
COLUMN_TYPE = """
WITH RECURSIVE resolved AS (
    SELECT oid, oid AS base FROM pg_type WHERE typtype <> 'd'
    UNION ALL
    SELECT domain.oid, resolved.base
    FROM pg_type domain JOIN resolved ON domain.typtype = 'd' AND domain.typbasetype = resolved.oid
)
SELECT a.atttypid, a.atttypmod, resolved.base,
       coalesce(element_base.base, 0), coalesce(element.typdelim::text, ',')
FROM pg_attribute a
JOIN resolved ON resolved.oid = a.atttypid
LEFT JOIN pg_type element ON element.typarray = resolved.base
LEFT JOIN resolved element_base ON element_base.oid = element.oid
WHERE a.attrelid = %(table)s::regclass AND a.attname = %(column)s
"""

# Type, then SQL expressions with the values they must become.
CASES: dict[str, list[tuple[str, Any]]] = {
    "boolean": [("true", True), ("false", False)],
    "smallint": [("'-32768'", -32768)],
    "integer": [("2147483647", 2**31 - 1)],
    "bigint": [("'-9223372036854775808'", -(2**63)), ("9007199254740993", 2**53 + 1)],
    "oid": [("4294967295", 2**32 - 1)],
    "real": [("1.1", 1.1), ("'NaN'", math.nan), ("1e-45", 1e-45), ("16777217", 16777216.0)],
    "double precision": [
        ("0.1::float8 + 0.2::float8", 0.1 + 0.2),
        ("'1.7976931348623157e308'", 1.7976931348623157e308),
        ("'5e-324'", 5e-324),
        ("'-0'", -0.0),
        ("'-Infinity'", -math.inf),
        ("1", 1.0),
    ],
    "numeric": [
        ("0.10", "0.10"),
        ("'NaN'", "NaN"),
        ("'Infinity'", "Infinity"),
        ("1e-30", "0." + "0" * 29 + "1"),
        ("'" + "1" * 60 + ".0'", "1" * 60 + ".0"),
    ],
    "numeric(10,2)": [("1", "1.00")],
    "money": [("-1000", "-$1,000.00")],
    "text": [("''", ""), (r"E'naïve 🐘\n\t\r\b\f\x0b\\N \\.'", "naïve 🐘\n\t\r\b\f\v\\N \\.")],
    "varchar(10)": [(r"'\N'", r"\N")],
    "char(4)": [("'ab'", "ab  ")],
    "name": [("'pg_class'", "pg_class")],
    '"char"': [("'x'", "x"), ("''", ""), ("(-56)", "\\310"), ("(-1)", "\\377")],
    '"char"[]': [("ARRAY['x', (-56)::\"char\", '']::\"char\"[]", ["x", "\\310", ""])],
    "bytea": [("''", b""), (r"'\x00ff0a5c'", b"\x00\xff\n\\")],
    "timestamptz": [
        ("'2025-12-12 12:00:34.338547+00'", "2025-12-12T12:00:34.338547Z"),
        ("'2025-12-12 14:00:34.3+02'", "2025-12-12T12:00:34.3Z"),
        ("'2025-12-12 12:00:34+00'", "2025-12-12T12:00:34Z"),
        ("'294276-12-31 23:59:59.999999+00'", "294276-12-31T23:59:59.999999Z"),
        ("'0044-03-15 12:00:00+00 BC'", "0044-03-15 12:00:00+00 BC"),
        ("'infinity'", "infinity"),
        ("'-infinity'", "-infinity"),
    ],
    "timestamp": [
        ("'2025-12-12 12:00:34.338547'", "2025-12-12T12:00:34.338547"),
        ("'4713-01-01 00:00:00 BC'", "4713-01-01 00:00:00 BC"),
        ("'-infinity'", "-infinity"),
    ],
    "timestamp(0)": [("'2025-12-12 12:00:34.6'", "2025-12-12T12:00:35")],
    "date": [("'2025-12-12'", "2025-12-12"), ("'0044-03-15 BC'", "0044-03-15 BC")],
    "time": [("'24:00'", "24:00:00"), ("'01:02:03.000004'", "01:02:03.000004")],
    "timetz": [("'12:00:34.5+05:30'", "12:00:34.5+05:30")],
    "interval": [
        ("'1 year 2 mons -3 days 04:05:06.7'", "1 year 2 mons -3 days +04:05:06.7"),
        ("'-1 day'", "-1 days"),
    ],
    "uuid": [("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")],
    "mood": [("'very \"happy\", indeed'", 'very "happy", indeed')],
    "pair": [("ROW(1, 'a b')", '(1,"a b")'), ("ROW(NULL, NULL)", "(,)")],
    "positive": [("7", 7)],
    "more_positive": [("7", 7)],
    "tags": [("'{a,NULL}'", ["a", None])],
    "int4range": [("'(1,5]'", "[2,6)"), ("'empty'", "empty")],
    "tstzrange": [
        ("'[2025-01-01 00:00+00,)'", '["2025-01-01 00:00:00+00",)'),
    ],
    "int4multirange": [("'{[1,2],[5,6]}'", "{[1,3),[5,7)}")],
    "inet": [("'192.168.0.1/24'", "192.168.0.1/24")],
    "cidr": [("'10/8'", "10.0.0.0/8")],
    "macaddr": [("'08-00-2b-01-02-03'", "08:00:2b:01:02:03")],
    "point": [("'(1,2.5)'", "(1,2.5)")],
    "box": [("'(0,0),(1,1)'", "(1,1),(0,0)")],
    "line": [("'{1,2,3}'", "{1,2,3}")],
    "path": [("'[(0,0),(1,1)]'", "[(0,0),(1,1)]")],
    "circle": [("'<(0,0),1>'", "<(0,0),1>")],
    "bit(4)": [("B'0101'", "0101")],
    "bit varying": [("B''", "")],
    "tsvector": [("'b a'", "'a' 'b'")],
    "pg_lsn": [("'16/B374D848'", "16/B374D848")],
    "xid": [("'4294967295'", "4294967295")],
    "int2vector": [("'1 2 3'", "1 2 3")],
    "regclass": [("'pg_class'", "pg_class")],
    "json": [('\'{ "a":1, "a" : 1.0 }\'', '{ "a":1, "a" : 1.0 }')],
    "jsonb": [
        ('\'{"b":[1,2.5,null],"a":{"c":true}}\'', {"a": {"c": True}, "b": [1, 2.5, None]}),
        ("'\"text\"'", "text"),
        ("'null'", "null"),
        ("'1.10'", "1.10"),
        ("'1e3'", 1000),
        ("'-0'", 0),
        ("'18446744073709551615'", 2**64 - 1),
        ("'18446744073709551616'", "18446744073709551616"),
        ("'[" + "1" * 40 + "]'", "[" + "1" * 40 + "]"),
        ("'1e400'", "1" + "0" * 400),
        ("'0.1234567890123456789'", "0.1234567890123456789"),
        (r"""'"\\u0000 \u0001 \" é 🐘"'""", '\\u0000 \x01 " é 🐘'),
    ],
    "integer[]": [
        ("'{}'", []),
        ("'{1,NULL,-3}'", [1, None, -3]),
        ("'{{1,2},{3,4}}'", [[1, 2], [3, 4]]),
        ("'[2:3]={7,8}'", "[2:3]={7,8}"),
    ],
    "boolean[]": [("'{t,f,NULL}'", [True, False, None])],
    "double precision[]": [("'{1.5,-Infinity}'", [1.5, -math.inf])],
    "numeric(5,1)[]": [("'{1,2.5}'", ["1.0", "2.5"])],
    "text[]": [
        (
            r"""ARRAY['a', '', 'NULL', NULL, 'b,c', 'd"e', 'f\g', ' h ', '{i}', E'j\tk\n']""",
            ["a", "", "NULL", None, "b,c", 'd"e', r"f\g", " h ", "{i}", "j\tk\n"],
        ),
        ("ARRAY[[['x'], ['y z']]]", [[["x"], ["y z"]]]),
    ],
    "bytea[]": [(r"ARRAY['\x00ff'::bytea, '', NULL]", [b"\x00\xff", b"", None])],
    "timestamptz[]": [
        (
            "ARRAY['2025-12-12 12:00Z'::timestamptz, 'infinity']",
            ["2025-12-12T12:00:00Z", "infinity"],
        )
    ],
    "box[]": [("'{(0,0),(1,1);(2,2),(3,3)}'", ["(1,1),(0,0)", "(3,3),(2,2)"])],
    "point[]": [("ARRAY[point(1,2), NULL]", ["(1,2)", None])],
    "mood[]": [("ARRAY['sad', 'very \"happy\", indeed']::mood[]", ["sad", 'very "happy", indeed'])],
    "pair[]": [("ARRAY[ROW(1, 'a \"b\"')::pair]", ['(1,"a ""b""")'])],
    "more_positive[]": [("'{2,3}'::more_positive[]", [2, 3])],
    "jsonb[]": [("ARRAY['{\"a\": 1}'::jsonb, NULL, '2']", ['{"a": 1}', None, "2"])],
    "json[]": [("ARRAY['[1 ]'::json]", ["[1 ]"])],
}

RAW = {
    "json": {0},
    "jsonb": {2, 3, 7, 8, 9, 10},
    "jsonb[]": {0},
    "json[]": {0},
}


def column_type(connection: Connection[Any], column: str) -> ColumnType:
    row = connection.execute(COLUMN_TYPE, {"table": "sample", "column": column}).fetchone()
    assert row is not None
    return ColumnType(*row)


def logged(connection: Connection[Any], *options: str) -> list[Message]:
    """What pgoutput has written since the last call."""
    arguments = ["proto_version", "1", "publication_names", "pub", *options]
    marks = ", ".join(["%s"] * len(arguments))
    rows = connection.execute(
        f"SELECT data FROM pg_logical_slot_get_binary_changes('slot', NULL, NULL, {marks})",
        arguments,
    ).fetchall()
    return [decode(data) for (data,) in rows]


@pytest.fixture
def slot(database: Database) -> Any:
    with database.connect() as connection:
        connection.execute(SESSION)
        connection.execute(TYPES)
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        connection.execute("SELECT pg_create_logical_replication_slot('slot', 'pgoutput')")
        yield connection
        connection.execute("SELECT pg_drop_replication_slot('slot')")


@both_versions
def test_every_type_has_its_value_in_queries_copies_and_the_log(slot: Connection[Any]) -> None:
    names = {f"c{number}": sql_type for number, sql_type in enumerate(CASES)}
    definitions = ", ".join(f"{name} {sql_type}" for name, sql_type in names.items())
    slot.execute(f"CREATE TABLE sample (n int PRIMARY KEY, {definitions})")
    columns = [(name, column_type(slot, name)) for name in ("n", *names)]

    rounds = max(len(cases) for cases in CASES.values())
    expected: list[dict[str, Any]] = []
    expected_raw: list[tuple[str, ...]] = []
    for number in range(rounds):
        row: dict[str, Any] = {"n": number}
        expressions = [str(number)]
        raw: list[str] = []
        for name, sql_type in names.items():
            cases = CASES[sql_type]
            expression, value = cases[number] if number < len(cases) else ("NULL", None)
            row[name] = value
            expressions.append(f"({expression})::{sql_type}")
            if number in RAW.get(sql_type, ()):
                raw.append(name)
        slot.execute(f"INSERT INTO sample VALUES ({', '.join(expressions)})")
        expected.append(row)
        expected_raw.append(tuple(raw))

    everything = ", ".join(name for name, _ in columns)
    decode_line = compile_row_decoder(columns)
    with slot.cursor().copy(f"COPY (SELECT {everything} FROM sample ORDER BY n) TO STDOUT") as copy:
        copied = [decode_line(bytes(line)) for line in copy]
    assert repr([row for row, _ in copied]) == repr(expected)
    assert [raw for _, raw in copied] == expected_raw

    inserts = [message for message in logged(slot) if isinstance(message, Insert)]
    general = RowConverter(columns)
    rows = [general.convert(message.new) for message in inserts]
    assert repr([row.data for row in rows]) == repr(expected)
    assert [row.raw for row in rows] == expected_raw

    read = compile_row_reader(columns)
    fast = [read(encode_row(message.new), 0) for message in inserts]
    assert repr(fast) == repr(list(zip(expected, expected_raw, strict=True)))

    queried = slot.execute(f"SELECT {everything} FROM sample ORDER BY n").pgresult
    assert queried is not None
    sent = [
        tuple(queried.get_value(row, column) for column in range(len(columns)))
        for row in range(queried.ntuples)
    ]
    assert repr([general.convert(row).data for row in sent]) == repr(expected)


def test_decoded_jsonb_stored_again_is_the_same_jsonb(slot: Connection[Any]) -> None:
    slot.execute("CREATE TABLE sample (v jsonb)")
    values = [expression for expression, _ in CASES["jsonb"]] + [
        "'[0.5, 1.0, 0.000001, 123456789.123456, -1e-10, 1e15, 9007199254740993]'",
        "to_jsonb(0.1::float8 + 0.2::float8)",
        "to_jsonb(1e300::float8)",
        "to_jsonb(5e-324::float8)",
    ]
    convert = converter_for(column_type(slot, "v")).convert
    for expression in values:
        row = slot.execute(f"SELECT ({expression})::jsonb::text").fetchone()
        assert row is not None
        (text,) = row
        value = convert(text.encode())
        again = value if is_raw(value) else json.dumps(value)
        assert slot.execute("SELECT %s::jsonb::text", [again]).fetchone() == (text,)


@both_versions
def test_every_pgoutput_message_of_a_real_server_decodes(slot: Connection[Any]) -> None:
    slot.execute("""
        CREATE TABLE sample (id int PRIMARY KEY, feeling mood, body text);
        ALTER TABLE sample ALTER body SET STORAGE EXTERNAL;
        CREATE TABLE whole (id int, body text);
        ALTER TABLE whole REPLICA IDENTITY FULL;
        ALTER TABLE whole ALTER body SET STORAGE EXTERNAL;
        SELECT pg_replication_origin_create('elsewhere');
    """)
    slot.execute("SELECT pg_replication_origin_session_setup('elsewhere')")
    with slot.transaction():
        slot.execute("SELECT pg_replication_origin_xact_setup('0/AA', now())")
        slot.execute("INSERT INTO sample VALUES (1, 'sad', repeat('x', 9000))")
        slot.execute("UPDATE sample SET feeling = NULL")
        slot.execute("UPDATE sample SET id = 2")
        slot.execute("DELETE FROM sample")
        slot.execute("INSERT INTO whole VALUES (1, repeat('y', 9000))")
        slot.execute("UPDATE whole SET id = 2")
        slot.execute("DELETE FROM whole")
        slot.execute("SELECT pg_logical_emit_message(true, 'audit', '\\x00ff'::bytea)")
        slot.execute("TRUNCATE sample, whole RESTART IDENTITY CASCADE")
    slot.execute("SELECT pg_replication_origin_session_reset()")
    slot.execute("SELECT pg_replication_origin_drop('elsewhere')")

    messages = logged(slot, "messages", "true")
    begin = next(
        index
        for index, message in enumerate(messages)
        if isinstance(message, Begin) and isinstance(messages[index + 1], Origin)
    )
    messages = messages[begin:]
    of_kind = {kind: [m for m in messages if type(m) is kind] for kind in map(type, messages)}
    first, last = messages[0], of_kind[Commit][0]
    assert isinstance(first, Begin)
    assert isinstance(last, Commit)
    assert first.final_lsn == last.commit_lsn < last.end_lsn
    assert first.commit_time == last.commit_time
    assert of_kind[Origin] == [Origin(0xAA, "elsewhere")]
    # TRUNCATE invalidates relation and type: they come again.
    assert {(t.namespace, t.name) for t in of_kind[Type] if isinstance(t, Type)} == {
        ("public", "mood")
    }

    tables = {r.name: r for r in of_kind[Relation] if isinstance(r, Relation)}
    sample, whole = tables["sample"], tables["whole"]
    assert (sample.namespace, sample.replica_identity) == ("public", "d")
    assert [c.is_key for c in sample.columns] == [True, False, False]
    assert whole.replica_identity == "f"
    assert [c.is_key for c in whole.columns] == [True, True]

    x, y = b"x" * 9000, b"y" * 9000
    changes = [m for m in messages if isinstance(m, (Insert, Update, Delete))]
    assert changes == [
        Insert(sample.relation_id, (b"1", b"sad", x)),
        Update(sample.relation_id, None, None, (b"1", None, UNCHANGED)),
        Update(sample.relation_id, "K", (b"1", None, None), (b"2", None, UNCHANGED)),
        Delete(sample.relation_id, "K", (b"2", None, None)),
        Insert(whole.relation_id, (b"1", y)),
        Update(whole.relation_id, "O", (b"1", y), (b"2", changes[5].new[1])),
        Delete(whole.relation_id, "O", (b"2", y)),
    ]
    message = of_kind[LogicalMessage][0]
    assert isinstance(message, LogicalMessage)
    assert (message.transactional, message.prefix, message.content) == (True, "audit", b"\x00\xff")
    (truncate,) = of_kind[Truncate]
    assert truncate == Truncate(
        (sample.relation_id, whole.relation_id), cascade=True, restart_identity=True
    )


def test_compiled_readers_read_the_bytes_of_a_real_server(slot: Connection[Any]) -> None:
    slot.execute("CREATE TABLE sample (id int, note text, at timestamptz, doc jsonb)")
    slot.execute("ALTER TABLE sample REPLICA IDENTITY FULL")
    slot.execute("INSERT INTO sample VALUES (1, 'é', '2025-12-12 12:00Z', '{\"a\": 1}')")
    slot.execute("UPDATE sample SET note = NULL, doc = '[1]'")
    columns = [(name, column_type(slot, name)) for name in ("id", "note", "at", "doc")]
    payloads = [
        data
        for (data,) in slot.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes("
            "'slot', NULL, NULL, 'proto_version', '1', 'publication_names', 'pub')"
        ).fetchall()
    ]
    first = {"id": 1, "note": "é", "at": "2025-12-12T12:00:00Z", "doc": {"a": 1}}
    (insert,) = [data for data in payloads if data[:1] == b"I"]
    (update,) = [data for data in payloads if data[:1] == b"U"]
    assert compile_row_reader(columns)(insert, 6) == (first, ())
    assert update[5:6] == b"O"
    assert compile_update_reader(columns)(update, 6) == (
        first,
        first | {"note": None, "doc": [1]},
        (),
    )
