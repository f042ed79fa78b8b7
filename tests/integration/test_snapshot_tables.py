"""What a snapshot copies: filters, lists, generated columns, partitions, odd tables, wide rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.postgres import both_versions, versions_since
from tests.fixtures.snapshots import gather

if TYPE_CHECKING:
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Snapshots


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


@versions_since(15)
@pytest.mark.parametrize("form", ["msgpack", "arrow"])
async def test_row_filters_and_column_lists_of_the_publication_apply(
    database: Database, snapshots: Snapshots, form: str
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, secret text, shown text, kind text);"
        "INSERT INTO t SELECT g, 's', 'x' || g, CASE WHEN g % 2 = 0 THEN 'even' ELSE 'odd' END"
        " FROM generate_series(1, 100) g"
    )
    database.execute(
        "CREATE PUBLICATION pub FOR TABLE t (id, shown, kind) WHERE (kind = 'even' AND id < 51)"
    )
    await snapshots.start()
    rows = by_id((await snapshots.take("t", format=form)).rows)
    assert rows == [{"id": n, "shown": f"x{n}", "kind": "even"} for n in range(2, 51, 2)]
    # The filter needs a column that is not asked for.
    rows = by_id((await snapshots.take("t", columns=["id"], format=form)).rows)
    assert rows == [{"id": n} for n in range(2, 51, 2)]
    answer = await snapshots.ask("t", columns=["secret"])
    assert answer["ok"] is False


@both_versions
async def test_generated_columns_are_left_out_unless_published(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, twice int GENERATED ALWAYS AS (a * 2) STORED);"
        "INSERT INTO t VALUES (1, 5)"
    )
    database.publish("t")
    await snapshots.start()
    assert (await snapshots.take("t")).rows == [{"id": 1, "a": 5}]
    if database.server.version >= 18:
        database.execute("ALTER PUBLICATION pub SET (publish_generated_columns = stored)")
        assert (await snapshots.take("t")).rows == [{"id": 1, "a": 5, "twice": 10}]


@both_versions
async def test_a_partitioned_root_is_copied_from_all_its_leaves(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE m (id int, at date, v text, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);"
        "CREATE TABLE m_a PARTITION OF m FOR VALUES FROM ('2024-01-01') TO ('2025-01-01');"
        # Another order of columns, a dropped one, and a level of its own.
        "CREATE TABLE m_b (v text, gone int, at date NOT NULL, id int NOT NULL);"
        "ALTER TABLE m_b DROP COLUMN gone;"
        "ALTER TABLE m ATTACH PARTITION m_b FOR VALUES FROM ('2025-01-01') TO ('2026-01-01');"
        "CREATE TABLE m_c PARTITION OF m FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')"
        " PARTITION BY LIST (id);"
        "CREATE TABLE m_c1 PARTITION OF m_c DEFAULT;"
        "INSERT INTO m SELECT g, date '2024-01-01' + g, 'v' || g FROM generate_series(1, 1000) g"
    )
    database.publish("m", options="publish_via_partition_root = true")
    await snapshots.start()
    read = await snapshots.take("m")
    assert sorted(row["id"] for row in read.rows) == list(range(1, 1001))
    assert all(row["v"] == f"v{row['id']}" for row in read.rows)
    answer = await snapshots.ask("m_a")
    assert "partitioned root" in answer["error"]


async def test_a_root_is_readable_without_grants_on_its_leaves(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE m (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE m_a PARTITION OF m FOR VALUES FROM (0) TO (100);"
        "CREATE TABLE m_b PARTITION OF m FOR VALUES FROM (100) TO (200);"
        "INSERT INTO m SELECT g FROM generate_series(0, 199) g"
    )
    database.publish("m", options="publish_via_partition_root = true")
    dsn = database.role("LOGIN REPLICATION")
    database.execute(f"GRANT SELECT ON m TO {database.roles[0]}")
    await snapshots.start(conninfo=dsn)
    rows = (await snapshots.take("m")).rows
    assert sorted(row["id"] for row in rows) == list(range(200))


@versions_since(15)
async def test_grants_on_the_published_columns_are_enough(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE plain (id int PRIMARY KEY, shown text, hidden text);"
        "CREATE TABLE child () INHERITS (plain);"
        "INSERT INTO plain SELECT g, 's', 'h' FROM generate_series(1, 500) g;"
        "INSERT INTO child VALUES (9, 'not of', 'plain');"
        "CREATE TABLE root (id int PRIMARY KEY, shown text, hidden text) PARTITION BY RANGE (id);"
        "CREATE TABLE root_1 PARTITION OF root FOR VALUES FROM (0) TO (100);"
        "INSERT INTO root SELECT g, 's', 'h' FROM generate_series(1, 50) g;"
        "CREATE TABLE part (id int PRIMARY KEY, shown text);"
        "CREATE PUBLICATION pub FOR TABLE ONLY plain (id, shown), root (id, shown), part"
        " WITH (publish_via_partition_root = true)"
    )
    dsn = database.role("LOGIN REPLICATION")
    database.execute(
        f"GRANT SELECT (id, shown) ON plain, root TO {database.roles[0]};"
        f"GRANT SELECT (id) ON part TO {database.roles[0]}"
    )
    await snapshots.start(conninfo=dsn)
    for table, count in (("plain", 500), ("root", 50)):
        rows = (await snapshots.take(table)).rows
        assert by_id(rows) == [{"id": n, "shown": "s"} for n in range(1, count + 1)]
    refused = await snapshots.ask("part")
    assert "GRANT SELECT ON part" in refused["error"]


async def test_partitions_are_tables_of_their_own_without_publish_via_root(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE m (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE m_a PARTITION OF m FOR VALUES FROM (0) TO (100);"
        "INSERT INTO m VALUES (1), (2)"
    )
    database.publish("m")
    await snapshots.start()
    assert by_id((await snapshots.take("m_a")).rows) == [{"id": 1}, {"id": 2}]
    answer = await snapshots.ask("m")
    assert "ask for its partitions" in answer["error"]


async def test_children_of_inheritance_are_not_their_parent(
    database: Database, snapshots: Snapshots
) -> None:
    database.execute(
        "CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent);"
        "INSERT INTO parent VALUES (1); INSERT INTO child VALUES (2)"
    )
    database.publish("parent")
    await snapshots.start()
    assert (await snapshots.take("parent")).rows == [{"id": 1}]
    assert (await snapshots.take("child")).rows == [{"id": 2}]


@both_versions
async def test_empty_keyless_columnless_and_oddly_named_tables(
    database: Database, snapshots: Snapshots
) -> None:
    odd = '"Sales.EU"."Odd Table.1"'
    database.execute(
        "CREATE TABLE empty (id int PRIMARY KEY);"
        "CREATE TABLE keyless (a int, b text);"
        "INSERT INTO keyless VALUES (1, 'x'), (1, 'x'), (2, '');"
        "CREATE TABLE columnless (); INSERT INTO columnless DEFAULT VALUES;"
        "CREATE TABLE rootless (id int) PARTITION BY LIST (id);"
        'CREATE SCHEMA "Sales.EU";'
        f'CREATE TABLE {odd} ("Id ""x""" int PRIMARY KEY, "naïve, col" text);'
        f"INSERT INTO {odd} VALUES (-5, 'ü')"
    )
    tables = ("empty", "keyless", "columnless", "rootless", odd)
    database.publish(*tables, options="publish_via_partition_root = true")
    await snapshots.start()
    answers = await gather(*(snapshots.ask(table) for table in tables))
    reads = [
        await snapshots.read(table, answer["snapshot_id"])
        for table, answer in zip(tables, answers, strict=True)
    ]
    assert [read.meta["batch_count"] for read in reads] == [0, 1, 1, 0, 1]
    assert sorted(map(repr, reads[1].rows)) == sorted(
        map(repr, [{"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2, "b": ""}])
    )
    assert reads[2].rows == [{}]
    assert reads[4].rows == [{'Id "x"': -5, "naïve, col": "ü"}]
    assert (reads[4].meta["schema"], reads[4].meta["table"]) == ("Sales.EU", "Odd Table.1")
    refused = await snapshots.ask("columnless", format="arrow")
    assert "no columns" in refused["error"]


TRICKY = [
    "\ufeffa byte order mark in front",
    "plain",
    "comma, and ; semicolon",
    "double \"quotes\" and 'single'",
    "two\nlines\r\nand\ttab",
    "back\\slash \\n \\t \\\\ \\x41 \\101",
    "\\N",
    "\\.",
    "",
    " ",
    "NULL",
    "\\0 NUL-like \\x00 \\u0000",
    "emoji 😀 👩‍👩‍👧 ß ñ 漢字",
    "\b\f\v\x01\x7f",
    "trailing backslash \\",
    "\n",
    "\nd1234",
    None,
]


@pytest.mark.parametrize("form", ["msgpack", "json", "arrow"])
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "zstd"])
async def test_tricky_text_arrives_as_it_is(
    database: Database, snapshots: Snapshots, form: str, compressed: bool
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text, w text)")
    with database.connect() as connection:
        connection.cursor().executemany(
            "INSERT INTO t VALUES (%s, %s, %s)",
            [(n, text, text) for n, text in enumerate(TRICKY)],
        )
    database.publish("t")
    await snapshots.start()
    read = await snapshots.take("t", format=form, zstd=compressed)
    assert by_id(read.rows) == [{"id": n, "v": text, "w": text} for n, text in enumerate(TRICKY)]
    single = await snapshots.take("t", format=form, zstd=compressed, columns=["v"])
    assert [row["v"] for row in single.rows] == TRICKY


@pytest.mark.parametrize("form", ["msgpack", "json", "arrow"])
async def test_rows_of_three_megabytes_travel_by_reference(
    database: Database, snapshots: Snapshots, form: str
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text, b bytea)")
    database.execute(
        "INSERT INTO t SELECT g, 'row ' || g, '\\x00ff' FROM generate_series(1, 10000) g;"
        "UPDATE t SET v = repeat('wide ü ', 400000), b = decode(repeat('00ff', 50000), 'hex')"
        " WHERE id IN (1, 5000, 10000)"
    )
    database.publish("t")
    await snapshots.start()
    read = await snapshots.take("t", format=form)
    assert max(len(message.data) for message in read.messages) < 1_000_000
    assert sorted(row["id"] for row in read.rows) == list(range(1, 10001))
    wide = {row["id"]: row for row in read.rows if len(row["v"]) > 100}
    assert sorted(wide) == [1, 5000, 10000]
    assert all(row["v"] == "wide ü " * 400000 for row in wide.values())
    if form != "json":
        assert all(row["b"] == b"\x00\xff" * 50000 for row in wide.values())
    assert len(await snapshots.object_names()) == 3


async def test_chunks_stay_below_a_small_max_payload(
    database: Database, snapshots: Snapshots, own_nats: Any, prefix: str
) -> None:
    import nats

    from consumer_sdk.wire import Subjects
    from tests.fixtures.snapshots import Snapshots as Harness

    server = own_nats(config="max_payload: 64KB")
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, j jsonb);"
        "INSERT INTO t SELECT g, repeat('x', g % 3000), jsonb_build_object('n', 1e40 + g)"
        " FROM generate_series(1, 2000) g; UPDATE t SET v = repeat('y', 70000) WHERE id = 7"
    )
    columns = ", ".join(f"a_rather_long_name_of_column_{number} int[]" for number in range(300))
    database.execute(f"CREATE TABLE many (id int PRIMARY KEY, {columns})")
    database.execute("INSERT INTO many SELECT generate_series(1, 200)")
    database.publish("t", "many")
    client = await nats.connect(server.url)
    small = Harness(client, server.url, database, Subjects(prefix), snapshots.stack)
    await small.prepare()
    await small.start()
    for form in ("msgpack", "json", "arrow"):
        read = await small.take("t", format=form)
        assert sorted(row["id"] for row in read.rows) == list(range(1, 2001))
        assert max(len(message.data) for message in read.messages) < 64 * 1024
        if form != "arrow":
            assert sum(len(d.get("raw", {})) for d in read.documents) == 2000
            assert json.loads(read.rows[0]["j"])["n"] > 1e39
    read = await small.take("many", format="arrow")
    assert sorted(row["id"] for row in read.rows) == list(range(1, 201))
    snapshots.stack.push_async_callback(client.close)


@pytest.mark.parametrize("form", ["msgpack", "arrow"])
async def test_large_tables_are_split_over_workers_without_loss(
    database: Database, snapshots: Snapshots, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.snapshot.tables.PIECE_BYTES", 512 * 1024)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text);"
        "INSERT INTO t SELECT g, 'value number ' || g FROM generate_series(1, 60000) g;"
        "DELETE FROM t WHERE id BETWEEN 20000 AND 30000; UPDATE t SET v = 'moved' WHERE id < 100"
    )
    database.publish("t")
    await snapshots.start(workers=3, chunk_rows=1000)
    read = await snapshots.take("t", format=form)
    expected = {n: f"value number {n}" for n in (*range(100, 20000), *range(30001, 60001))}
    expected.update(dict.fromkeys(range(1, 100), "moved"))
    assert {row["id"]: row["v"] for row in read.rows} == expected
    assert len(read.rows) == len(expected)


@pytest.mark.parametrize("form", ["msgpack", "json"])
async def test_small_chunks_get_a_dictionary_that_readers_find(
    database: Database, snapshots: Snapshots, form: str
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, city text, note text);"
        "INSERT INTO t SELECT g, (ARRAY['Berlin','Paris','Lagos'])[1 + g % 3],"
        " 'delivered by courier number ' || g % 50 FROM generate_series(1, 1000) g"
    )
    database.publish("t")
    await snapshots.start(chunk_rows=4, zstd=True)
    first = await snapshots.take("t", format=form)
    assert all(message.headers["Content-Encoding"] == "zstd" for message in first.messages)
    assert not any("Cdc-Dict" in message.headers for message in first.messages)
    second = await snapshots.take("t", format=form, fresh=True)
    with_dictionary = ["Cdc-Dict" in message.headers for message in second.messages]
    assert with_dictionary.count(True) > 50
    assert sorted(map(repr, second.rows)) == sorted(map(repr, first.rows))
    before = sum(len(message.data) for message in first.messages)
    after = sum(len(message.data) for message in second.messages)
    assert after < before


async def test_values_of_all_keys_are_kept(database: Database, snapshots: Snapshots) -> None:
    database.execute(
        "CREATE TABLE negative (id bigint PRIMARY KEY);"
        "INSERT INTO negative VALUES (-9223372036854775808), (-1), (0), (9223372036854775807);"
        "CREATE TABLE composite (a int, b text, c date, PRIMARY KEY (a, b, c));"
        "INSERT INTO composite VALUES (1, 'x', '2024-02-29'), (1, 'y', 'infinity'),"
        " (-1, '', '0044-03-15 BC');"
        "CREATE TABLE named (code text PRIMARY KEY); INSERT INTO named VALUES ('é'), ('\"'), ('')"
    )
    database.publish("negative", "composite", "named")
    await snapshots.start()
    for form in ("msgpack", "json"):
        rows = (await snapshots.take("negative", format=form)).rows
        assert sorted(int(row["id"]) for row in rows) == [-(2**63), -1, 0, 2**63 - 1]
        rows = (await snapshots.take("composite", format=form)).rows
        assert {row["c"] for row in rows} == {"2024-02-29", "infinity", "0044-03-15 BC"}
        rows = (await snapshots.take("named", format=form)).rows
        assert {row["code"] for row in rows} == {"é", '"', ""}
