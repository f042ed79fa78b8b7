"""The SDK against a real bridge: the same values whatever the bridge writes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk import Client, Transaction, connect
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.embedded import NatsServer
    from consumer_sdk.wire.column_types import TableSchema
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

TABLE = """
CREATE DOMAIN amount AS numeric(12, 3);
CREATE TYPE mood AS ENUM ('ok', 'sad');
CREATE TABLE everything (
    id int PRIMARY KEY, flag bool, small int2, large int8, single float4, double float8,
    price numeric(10, 2), free numeric, cost amount, name text, fixed char(5), code varchar(9),
    blob bytea, day date, clock time, at timestamp, moment timestamptz, span interval,
    plain json, doc jsonb, token uuid, feeling mood, numbers int[], names text[], blobs bytea[],
    matrix int[], odd int[], period int4range, address inet, moments timestamptz[]
)
"""
FULL_ROW = r"""(
    1, true, -32768, 9223372036854775807, 0.1, 0.1, 1.50, 123456789012345678901234567890.5, 1.5,
    E'Zoë \\ "x" \t', 'ab', '', '\xff00', '2025-12-12', '12:30', '2025-12-12 12:00:34.3385',
    '2025-12-12 12:00:34.338547+02', '1 mon -2 days', '{"b": 1, "a": 1.0}', '{"k": [1, null, "é"]}',
    '00000000-0000-0000-0000-000000000001', 'sad', '{1,NULL,-3}', '{a,NULL,""}', '{"\\xff"}',
    '{{1,2},{3,4}}', '[2:3]={7,8}', '[1,5)', '::1/128', '{"2025-01-01 00:00:00+00"}'
)"""
EDGE_ROW = r"""(
    2, false, 0, -9007199254740993, 'NaN', '-Infinity', -0.01, 'NaN', 0, '', '', 'x', '',
    '0044-03-15 BC', '24:00', '-infinity', 'infinity', '0', 'null', '{"n": 1.10}', NULL, 'ok',
    '{}', '{}', '{}', '{}', NULL, 'empty', NULL, '{infinity}'
)"""
NULL_ROW = "(3" + ", NULL" * 29 + ")"


def comparable(schema: TableSchema, row: dict[str, Any], raw: Sequence[str]) -> dict[str, Any]:
    """A row with documents decoded and floats as text, so that rows of all formats can be equal."""
    found = {}
    for column in schema.columns:
        value = row[column.name]
        if column.name in raw and value is not None:
            value = ("document", json.loads(value))
        elif column.family in ("json", "jsonb") and value is not None:
            value = ("document", value)
        found[column.name] = repr(value) if isinstance(value, float) else value
    return found


async def snapshot_rows(client: Client, chunk_format: str) -> list[dict[str, Any]]:
    schema = await client.schema("everything")
    snapshot = await client.snapshot("everything", format=chunk_format)
    assert snapshot.meta.format == chunk_format
    return sorted(
        [
            comparable(schema, row, chunk.raw(index))
            async for chunk in snapshot.chunks()
            for index, row in enumerate(chunk)
        ],
        key=lambda row: row["id"],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--json", "--pack"], ["--zstd", "--zstd-events", "--pack"]], ids=" ".join
)
async def test_values_are_equal_in_every_encoding_of_changes_and_snapshots(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
    flags: list[str],
) -> None:
    database.execute(TABLE)
    database.publish("everything")
    await asyncio.to_thread(bridge_process, *flags)
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        database.execute(f"INSERT INTO everything VALUES {FULL_ROW}, {EDGE_ROW}, {NULL_ROW}")
        changes = client.changes(["everything"], after="start")
        transaction = await asyncio.wait_for(anext(changes), 20)
        await changes.aclose()
        schema = await client.schema("everything")
        from_log = [
            comparable(schema, event.data, event.raw)
            for event in transaction.events
            if event.operation == "INSERT"
        ]
        assert from_log[0]["large"] == 9223372036854775807
        assert from_log[0]["blob"] == b"\xff\x00"
        assert from_log[0]["moment"] == "2025-12-12T10:00:34.338547Z"
        assert from_log[0]["matrix"] == [[1, 2], [3, 4]]
        for chunk_format in ("msgpack", "json", "arrow"):
            assert await snapshot_rows(client, chunk_format) == from_log, chunk_format


# Powers of two, subnormal ones too, and integers with a shorter text half-way to the next float4.
ODD = """
CREATE TABLE odd (id int PRIMARY KEY, single float4, grid bytea[], relation regclass,
                  kinds regtype[]);
CREATE TYPE state AS ENUM ('on');
"""
ODD_ROWS = r"""
INSERT INTO odd SELECT n + 200, ('2e0'::float8 ^ n)::float4 FROM generate_series(-149, 127) n;
INSERT INTO odd SELECT n, n::float4 FROM generate_series(33554432, 33555432, 4) n;
INSERT INTO odd VALUES (1, 0, '{{"\\x00ff",NULL},{"","\\x5c"}}', 'odd', '{state,int4}')
"""


async def test_odd_values_are_equal_in_changes_and_snapshots(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
) -> None:
    database.execute(ODD)
    database.publish("odd")
    await asyncio.to_thread(bridge_process)
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        database.execute(ODD_ROWS)
        changes = client.changes(["odd"], after="start")
        async with asyncio.timeout(20):
            transaction = await anext(changes)
        await changes.aclose()
        from_log = {e.data["id"]: e.data for e in transaction.events if e.operation == "INSERT"}
        assert (from_log[1]["relation"], from_log[1]["kinds"]) == (
            "public.odd",
            ["public.state", "integer"],
        )
        assert from_log[33554448]["single"] == 33554448
        for chunk_format in ("msgpack", "json", "arrow"):
            snapshot = await client.snapshot("odd", format=chunk_format)
            rows = {row["id"]: row async for row in snapshot.rows()}
            assert rows == from_log, chunk_format


@pytest.mark.slow
async def test_wide_rows_come_whole_from_changes_and_snapshots(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
) -> None:
    database.execute("CREATE TABLE wide (id int PRIMARY KEY, body bytea)")
    database.publish("wide")
    await asyncio.to_thread(bridge_process)
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        database.execute(
            "INSERT INTO wide SELECT n, decode(repeat(md5(n::text), 60000 * n), 'hex') "
            "FROM generate_series(1, 3) n"
        )
        changes = client.changes(["wide"], after="start")
        transaction = await asyncio.wait_for(anext(changes), 30)
        await changes.aclose()
        rows = [event.data for event in transaction.events if event.operation == "INSERT"]
        assert [len(row["body"]) for row in rows] == [960_000, 1_920_000, 2_880_000]
        for chunk_format in ("msgpack", "arrow"):
            snapshot = await client.snapshot("wide", format=chunk_format)
            found = sorted([row async for row in snapshot.rows()], key=lambda row: row["id"])
            assert found == rows


async def test_transactions_across_tables_come_whole_under_load(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    database.execute("CREATE TABLE c (id int PRIMARY KEY)")
    database.publish("a", "b", "c")
    await asyncio.to_thread(bridge_process)
    total = 300
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        readers = [
            client.changes(["a", "b"], after="start"),
            client.changes(None, after="start"),
            client.changes(["a"], after="start"),
        ]
        sizes = (2, 5, 1)

        def write() -> None:
            with database.connect(autocommit=False) as connection:
                for number in range(total):
                    for table, key in (("a", number), ("c", number), ("b", number)):
                        connection.execute(f"INSERT INTO {table} VALUES (%s)", (key,))
                    connection.execute("UPDATE c SET id = -id - 1 WHERE id = %s", (number,))
                    connection.execute("DELETE FROM c WHERE id = %s", (-number - 1,))
                    connection.commit()

        writing = asyncio.ensure_future(asyncio.to_thread(write))
        for reader, size in zip(readers, sizes, strict=True):
            seen: list[Transaction] = []
            async with asyncio.timeout(60):
                while len(seen) < total:
                    seen.append(await anext(reader))
            rows = [[event for event in one.events if event.operation != "SCHEMA"] for one in seen]
            assert {len(events) for events in rows} == {size}
            assert [events[0].data["id"] for events in rows] == list(range(total))
            await reader.aclose()
        await writing


async def test_logical_messages_and_changes_of_one_transaction(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    database.publish("orders")
    await asyncio.to_thread(bridge_process)
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        database.execute(
            "SELECT pg_logical_emit_message(true, 'audit', 'before');"
            "INSERT INTO orders VALUES (1);"
            "SELECT pg_logical_emit_message(true, 'outbox', '\\xff'::bytea);"
            "SELECT pg_logical_emit_message(true, 'outbox', 'after')"
        )
        database.execute("SELECT pg_logical_emit_message(true, 'outbox', 'alone')")
        changes = client.changes(["orders"], after="start", messages=True)
        async with asyncio.timeout(30):
            found = [await anext(changes) for _ in range(3)]
        await changes.aclose()
        shapes = [
            [event.data for event in one.events if event.operation != "SCHEMA"] for one in found
        ]
        assert shapes == [["before", {"id": 1}], [b"\xff", "after"], ["alone"]]
        assert found[0].commit_lsn == found[1].commit_lsn < found[2].commit_lsn


@pytest.mark.slow
async def test_a_feed_survives_the_bridge(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    first = await asyncio.to_thread(bridge_process)
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        await eventually(client.tables)
        changes = client.changes(["users"], after="start")
        seen: list[int] = []
        for number in range(3):
            database.execute("INSERT INTO users VALUES (%s), (%s)", (2 * number, 2 * number + 1))
            transaction = await asyncio.wait_for(anext(changes), 40)
            seen += [event.data["id"] for event in transaction.events if event.data]
            first.kill()
            first = await asyncio.to_thread(bridge_process)
        await changes.aclose()
    assert seen == list(range(6))
