"""Schema documents: their fields, their versions, their order with the rows, and publications."""

from __future__ import annotations

from tests.fixtures.postgres import both_versions, versions_since
from tests.fixtures.waiting import eventually

COLUMN_FIELDS = {
    "name", "position", "data_type", "type_oid", "type_modifier", "is_nullable", "column_default",
    "is_key", "base_type_oid", "element_oid",
}  # fmt: skip
DOCUMENT_FIELDS = {
    "v", "source", "epoch", "table", "schema", "timestamp", "schema_version", "lsn", "primary_key",
    "replica_identity", "columns",
}  # fmt: skip


def names(document):
    return [column["name"] for column in document["columns"]]


def told(stored):
    """Messages of a table as (operation, schema version, data or column names).

    A schema message may repeat; a repetition of the one before is left out.
    """
    said = []
    version = None
    for d in (one.document for one in stored):
        if "columns" in d:
            if d["schema_version"] == version:
                continue
            version = d["schema_version"]
        said.append(
            (d["operation"], d["schema_version"], names(d) if "columns" in d else d.get("data"))
        )
    return said


@both_versions
async def test_a_schema_document_has_the_fields_of_the_contract(database, cdc, bridge_process):
    database.execute(
        """
        CREATE DOMAIN code AS varchar(8);
        CREATE TABLE t (
            b text NOT NULL DEFAULT 'x', id bigint GENERATED ALWAYS AS IDENTITY, a numeric(10,2)[],
            at timestamptz(3) NOT NULL DEFAULT now(), c code, dropped int,
            PRIMARY KEY (id, b)
        );
        ALTER TABLE t DROP COLUMN dropped;
        """
    )
    database.publish("t")
    before_us = int(database.value("SELECT extract(epoch FROM clock_timestamp()) * 1000000"))
    bridge = bridge_process()
    # In KV before any row is written.
    document = await eventually(lambda: cdc.schema("t"))
    assert set(document) >= DOCUMENT_FIELDS
    status = bridge.status()
    assert (document["v"], document["source"], document["epoch"]) == (
        1, status["source"], status["epoch"],
    )  # fmt: skip
    assert (document["schema"], document["table"], document["schema_version"]) == ("public", "t", 1)
    assert document["primary_key"] == ["id", "b"]
    assert document["replica_identity"] == "default"
    assert 0 <= document["timestamp"] - before_us < 60_000_000
    columns = document["columns"]
    assert all(set(column) >= COLUMN_FIELDS for column in columns)
    assert [(c["name"], c["position"], c["data_type"]) for c in columns] == [
        ("b", 1, "text"),
        ("id", 2, "bigint"),
        ("a", 3, "numeric(10,2)[]"),
        ("at", 4, "timestamp(3) with time zone"),
        ("c", 5, "code"),
    ]
    catalog = database.execute(
        "SELECT attname, atttypid::int8, atttypmod FROM pg_attribute "
        "WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
    )
    assert [(c["name"], c["type_oid"], c["type_modifier"]) for c in columns] == catalog
    assert [c["is_nullable"] for c in columns] == [False, False, True, False, True]
    assert [c["is_key"] for c in columns] == [True, True, False, False, False]
    assert [c["column_default"] for c in columns] == ["'x'::text", None, None, "now()", None]
    assert [c["base_type_oid"] for c in columns[-2:]] == [1184, 1043]
    assert [c["element_oid"] for c in columns] == [0, 0, 1700, 0, 0]
    # The same document stands in the stream right before the first row.
    database.execute("INSERT INTO t (a) VALUES ('{1}')")
    await cdc.settle()
    schema, insert = await cdc.of_table("t")
    assert schema.subject == f"{cdc.subjects.cdc}.t.schema"
    assert schema.document["operation"] == "SCHEMA"
    assert schema.headers["Content-Type"] == "application/msgpack"
    assert {key: schema.document[key] for key in document} == document
    assert insert.document["schema_version"] == 1


@both_versions
async def test_ddl_in_the_middle_of_a_stream_needs_no_restart(database, cdc, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    database.publish("t")
    bridge_process()
    database.execute("INSERT INTO t VALUES (1, 'a')")
    database.execute("ALTER TABLE t ADD b int DEFAULT 5; INSERT INTO t VALUES (2, 'b', 6)")
    database.execute("INSERT INTO t VALUES (3, 'c', 7)")
    database.execute("ALTER TABLE t RENAME a TO name")
    database.execute("INSERT INTO t VALUES (4, 'd', 8)")
    database.execute("ALTER TABLE t ALTER b TYPE text USING 'n' || b")
    database.execute("UPDATE t SET name = 'z' WHERE id = 1")
    database.execute("ALTER TABLE t DROP b")
    database.execute("INSERT INTO t VALUES (5, 'e')")
    # Two versions within one transaction, and a change between them.
    with database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t VALUES (6, 'f')")
        connection.execute("ALTER TABLE t ADD c bool")
        connection.execute("INSERT INTO t VALUES (7, 'g', true)")
        connection.commit()
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("DELETE FROM t WHERE id = 7")
    await cdc.settle()
    assert told(await cdc.of_table("t")) == [
        ("SCHEMA", 1, ["id", "a"]),
        ("INSERT", 1, {"id": 1, "a": "a"}),
        ("SCHEMA", 2, ["id", "a", "b"]),
        ("INSERT", 2, {"id": 2, "a": "b", "b": 6}),
        ("INSERT", 2, {"id": 3, "a": "c", "b": 7}),
        ("SCHEMA", 3, ["id", "name", "b"]),
        ("INSERT", 3, {"id": 4, "name": "d", "b": 8}),
        ("SCHEMA", 4, ["id", "name", "b"]),
        ("UPDATE", 4, {"id": 1, "name": "z", "b": "n5"}),
        ("SCHEMA", 5, ["id", "name"]),
        ("INSERT", 5, {"id": 5, "name": "e"}),
        ("INSERT", 5, {"id": 6, "name": "f"}),
        ("SCHEMA", 6, ["id", "name", "c"]),
        ("INSERT", 6, {"id": 7, "name": "g", "c": True}),
        ("SCHEMA", 7, ["id", "name", "c"]),
        ("DELETE", 7, {"id": 7, "name": "g", "c": True}),
    ]
    kept = await cdc.schema("t")
    assert (kept["schema_version"], names(kept)) == (7, ["id", "name", "c"])
    stored = [one.document for one in await cdc.of_table("t")]
    sixth = next(d for d in stored if d["operation"] == "INSERT" and d["data"]["id"] == 6)
    in_transaction = [d for d in stored if d["lsn"] == sixth["lsn"]]
    assert [d.get("seq") for d in in_transaction if d["operation"] != "SCHEMA"] == [0, 1]


@both_versions
async def test_schema_versions_survive_a_restart_and_are_not_announced_twice(
    database, cdc, bridge_process
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    database.publish()
    first = bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("ALTER TABLE t ADD a int; INSERT INTO t VALUES (2, 2)")
    await cdc.settle()
    first.terminate()
    assert first.wait() == 0
    # Changed while nobody looks: the rows before still have the structure of their time.
    database.execute("INSERT INTO t VALUES (3, 3)")
    database.execute("ALTER TABLE t ADD b int")
    database.execute("ALTER TABLE t DROP a")
    database.execute("INSERT INTO t VALUES (4, 4)")
    bridge_process()
    database.execute("INSERT INTO t VALUES (5, 5)")
    database.execute("INSERT INTO u VALUES (1)")
    await cdc.settle()
    assert told(await cdc.of_table("t")) == [
        ("SCHEMA", 1, ["id"]),
        ("INSERT", 1, {"id": 1}),
        ("SCHEMA", 2, ["id", "a"]),
        ("INSERT", 2, {"id": 2, "a": 2}),
        ("INSERT", 2, {"id": 3, "a": 3}),
        ("SCHEMA", 3, ["id", "b"]),
        ("INSERT", 3, {"id": 4, "b": 4}),
        ("INSERT", 3, {"id": 5, "b": 5}),
    ]
    assert [one.document["operation"] for one in await cdc.of_table("u")] == ["SCHEMA", "INSERT"]


@both_versions
async def test_a_new_schema_is_in_kv_before_the_first_row_that_needs_it(
    database, cdc, bridge_process, holds
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    holds.set("between-kv-and-schema-message")
    database.execute("ALTER TABLE t ADD a int; INSERT INTO t VALUES (2, 2)")
    await holds.wait_reached("between-kv-and-schema-message")
    assert (await cdc.schema("t"))["schema_version"] == 2
    assert [one.document["operation"] for one in await cdc.of_table("t")] == ["SCHEMA", "INSERT"]
    holds.release("between-kv-and-schema-message")
    await cdc.settle()
    assert [one.document["operation"] for one in await cdc.of_table("t")] == [
        "SCHEMA", "INSERT", "SCHEMA", "INSERT",
    ]  # fmt: skip


async def test_a_schema_message_lost_in_a_crash_is_sent_after_all(
    database, cdc, bridge_process, holds
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge = bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    holds.set("between-kv-and-schema-message")
    database.execute("ALTER TABLE t ADD a int; INSERT INTO t VALUES (2, 2)")
    await holds.wait_reached("between-kv-and-schema-message")
    bridge.kill()
    holds.release("between-kv-and-schema-message")
    bridge_process()
    await cdc.settle()
    assert told(await cdc.of_table("t")) == [
        ("SCHEMA", 1, ["id"]),
        ("INSERT", 1, {"id": 1}),
        ("SCHEMA", 2, ["id", "a"]),
        ("INSERT", 2, {"id": 2, "a": 2}),
    ]


@both_versions
async def test_a_table_added_to_the_publication_needs_no_restart(database, cdc, bridge_process):
    database.execute(
        "CREATE TABLE old (id int PRIMARY KEY); CREATE TABLE late (id int PRIMARY KEY)"
    )
    database.publish("old")
    bridge = bridge_process()
    database.execute("INSERT INTO old VALUES (1)")
    database.execute("INSERT INTO late VALUES (1)")
    database.execute("ALTER PUBLICATION pub ADD TABLE late")
    database.execute("INSERT INTO late VALUES (2); INSERT INTO old VALUES (2)")
    database.execute("ALTER PUBLICATION pub DROP TABLE old")
    database.execute("INSERT INTO late VALUES (3); INSERT INTO old VALUES (3)")
    await cdc.settle()
    assert [e.data["id"] for e in await cdc.changes("old")] == [1, 2]
    assert [e.data["id"] for e in await cdc.changes("late")] == [2, 3]
    assert bridge.status()["reconnect_count"] == 0
    # Tables made later join a publication for all tables.
    assert (await cdc.schema("late"))["schema_version"] == 1


@both_versions
async def test_a_renamed_table_and_one_made_anew_go_on_under_their_names(
    database, cdc, bridge_process
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
    database.publish()
    bridge_process()
    database.execute("INSERT INTO t VALUES (1, 'a')")
    database.execute("ALTER TABLE t RENAME TO moved; INSERT INTO moved VALUES (2, 'b')")
    database.execute("CREATE TABLE t (id int PRIMARY KEY, b int)")
    database.execute("INSERT INTO t VALUES (3, 3); INSERT INTO moved VALUES (4, 'd')")
    database.execute("DROP TABLE moved")
    database.execute("CREATE SCHEMA s; ALTER TABLE t SET SCHEMA s; INSERT INTO s.t VALUES (5, 5)")
    await cdc.settle()
    assert told(await cdc.of_table("moved"))[:3] == [
        ("SCHEMA", 1, ["id", "a"]),
        ("INSERT", 1, {"id": 2, "a": "b"}),
        ("INSERT", 1, {"id": 4, "a": "d"}),
    ]
    assert [t for t in told(await cdc.of_table("t")) if t[0] != "COMMIT"] == [
        ("SCHEMA", 1, ["id", "a"]),
        ("INSERT", 1, {"id": 1, "a": "a"}),
        ("SCHEMA", 2, ["id", "b"]),
        ("INSERT", 2, {"id": 3, "b": 3}),
    ]
    assert told(await cdc.of_table("s.t")) == [
        ("SCHEMA", 1, ["id", "b"]),
        ("INSERT", 1, {"id": 5, "b": 5}),
    ]


PARTITIONED = """
CREATE TABLE parts (id int, region text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE parts_a PARTITION OF parts FOR VALUES IN ('a');
CREATE TABLE parts_b (region text, id int, PRIMARY KEY (id, region));
ALTER TABLE parts ATTACH PARTITION parts_b FOR VALUES IN ('b');
"""
ON_PARTITIONS = [
    "INSERT INTO parts VALUES (1, 'a'), (2, 'b')",
    "UPDATE parts SET region = 'b' WHERE id = 1",
    "DELETE FROM parts WHERE id = 2",
    "TRUNCATE parts",
]


@both_versions
async def test_partitions_are_published_under_their_own_names(database, cdc, bridge_process):
    database.execute(PARTITIONED)
    database.publish("parts")
    bridge_process()
    for statement in ON_PARTITIONS:
        database.execute(statement)
    await cdc.settle()
    assert await cdc.of_table("parts") == []
    assert [(e.operation, e.data) for e in await cdc.changes("parts_a")] == [
        ("INSERT", {"id": 1, "region": "a"}),
        ("DELETE", {"id": 1, "region": "a"}),
        ("TRUNCATE", {}),
    ]
    assert [(e.operation, e.data) for e in await cdc.changes("parts_b")] == [
        ("INSERT", {"region": "b", "id": 2}),
        ("INSERT", {"region": "b", "id": 1}),
        ("DELETE", {"region": "b", "id": 2}),
        ("TRUNCATE", {}),
    ]
    assert await cdc.schema("parts") is None
    assert (await cdc.schema("parts_b"))["primary_key"] == ["id", "region"]


@both_versions
async def test_partitions_are_published_as_their_root_on_demand(database, cdc, bridge_process):
    database.execute(PARTITIONED)
    database.publish("parts", options="publish_via_partition_root = true")
    bridge_process()
    await eventually(lambda: cdc.schema("parts"))
    for statement in ON_PARTITIONS:
        database.execute(statement)
    # A partition made later, and attached with rows in it, publishes as the root too.
    database.execute("CREATE TABLE parts_c PARTITION OF parts FOR VALUES IN ('c')")
    database.execute("INSERT INTO parts_c VALUES (3, 'c')")
    await cdc.settle()
    events = await cdc.changes()
    assert {(e.schema, e.table) for e in events} == {("public", "parts")}
    assert [(e.operation, e.data, e.seq, e.last) for e in events] == [
        ("INSERT", {"id": 1, "region": "a"}, 0, False),
        ("INSERT", {"id": 2, "region": "b"}, 1, True),
        ("DELETE", {"id": 1, "region": "a"}, 0, False),
        ("INSERT", {"id": 1, "region": "b"}, 1, True),
        ("DELETE", {"id": 2, "region": "b"}, 0, True),
        ("TRUNCATE", {}, 0, True),
        ("INSERT", {"id": 3, "region": "c"}, 0, True),
    ]
    assert (await cdc.schema("parts"))["schema_version"] == 1
    for leaf in ("parts_a", "parts_b", "parts_c"):
        assert await cdc.schema(leaf) is None
        assert await cdc.of_table(leaf) == []


@versions_since(15)
async def test_column_lists_and_row_filters_of_the_publication_apply(database, cdc, bridge_process):
    database.execute(
        """
        CREATE TABLE people (id int PRIMARY KEY, name text, secret text NOT NULL);
        CREATE TABLE items (id int PRIMARY KEY, price int);
        CREATE PUBLICATION pub FOR TABLE people (id, name), items WHERE (id > 10);
        """
    )
    bridge_process()
    assert names(await eventually(lambda: cdc.schema("people"))) == ["id", "name"]
    database.execute("INSERT INTO people VALUES (1, 'ada', 'hidden')")
    database.execute("UPDATE people SET secret = 'other'")
    database.execute("INSERT INTO items VALUES (1, 100), (11, 200)")
    database.execute("UPDATE items SET id = 20 WHERE id = 1")
    database.execute("UPDATE items SET id = 2 WHERE id = 11")
    await cdc.settle()
    people = [one.document for one in await cdc.of_table("people")]
    assert [(d["operation"], d["schema_version"]) for d in people] == [
        ("SCHEMA", 1), ("INSERT", 1), ("UPDATE", 1),
    ]  # fmt: skip
    assert [d["data"] for d in people[1:]] == [{"id": 1, "name": "ada"}] * 2
    stored = await cdc.stored()
    assert not any(b"hidden" in one.message.data for one in stored)
    # PostgreSQL turns an update into what it means for the filtered set.
    assert [(e.operation, e.data) for e in await cdc.changes("items")] == [
        ("INSERT", {"id": 11, "price": 200}),
        ("INSERT", {"id": 20, "price": 100}),
        ("DELETE", {"id": 11}),
    ]


@both_versions
async def test_generated_columns_are_left_out_unless_the_publication_has_them(
    database, cdc, bridge_process
):
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int, twice int GENERATED ALWAYS AS (a * 2) STORED)"
    )
    database.publish("t")
    bridge_process()
    assert names(await eventually(lambda: cdc.schema("t"))) == ["id", "a"]
    database.execute("INSERT INTO t VALUES (1, 5)")
    await cdc.settle()
    assert told(await cdc.of_table("t")) == [
        ("SCHEMA", 1, ["id", "a"]),
        ("INSERT", 1, {"id": 1, "a": 5}),
    ]
    if database.server.version >= 18:
        database.execute("ALTER PUBLICATION pub SET (publish_generated_columns = stored)")
        database.execute("INSERT INTO t VALUES (2, 6)")
        await cdc.settle()
        assert told(await cdc.of_table("t"))[2:] == [
            ("SCHEMA", 2, ["id", "a", "twice"]),
            ("INSERT", 2, {"id": 2, "a": 6, "twice": 12}),
        ]
        *_, twice = (await cdc.schema("t"))["columns"]
        assert (twice["backfilled"], twice["column_default"]) == (True, None)


@both_versions
async def test_a_publication_decides_which_operations_are_published(database, cdc, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE keyless (a int)")
    database.publish("t", "keyless", options="publish = 'insert, delete'")
    bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("UPDATE t SET id = 2")
    database.execute("DELETE FROM t")
    database.execute("TRUNCATE t")
    database.execute("INSERT INTO keyless VALUES (1)")
    await cdc.settle()
    assert [e.operation for e in await cdc.changes("t")] == ["INSERT", "DELETE"]
    assert [e.data for e in await cdc.changes("keyless")] == [{"a": 1}]


async def test_a_default_of_any_length_stops_nothing(database, cdc, bridge_process):
    database.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, a text DEFAULT '{'x' * 1_200_000}', b int DEFAULT 7)"
    )
    database.publish("t")
    bridge_process()
    database.execute("INSERT INTO t VALUES (1, 'a')")
    await eventually(lambda: cdc.changes("t"), 10)
    defaults = [one["column_default"] for one in (await cdc.schema("t"))["columns"]]
    assert defaults == [None, f"'{'x' * 999}", "7"]


@both_versions
async def test_defaults_of_any_number_stop_nothing(database, cdc, bridge_process):
    default = f"nullif('{'x' * 900}', '{'x' * 900}')"
    columns = ", ".join(f"c{number} text DEFAULT {default}" for number in range(1500))
    database.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    database.publish("t")
    bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    await eventually(lambda: cdc.changes("t"), 10)
    defaults = [one["column_default"] for one in (await cdc.schema("t"))["columns"]]
    # PostgreSQL writes the call in capitals.
    assert {one and one.lower() for one in defaults} == {None, default[:40]}


@both_versions
async def test_a_deferrable_key_is_no_identity_in_the_catalog_either(database, cdc, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, a text)")
    database.publish("t", options="publish = 'insert'")
    bridge_process()
    first = await eventually(lambda: cdc.schema("t"))
    database.execute("INSERT INTO t VALUES (1, 'a')")
    await cdc.settle()
    (event,) = await cdc.changes("t")
    assert event.schema_version == first["schema_version"]
    assert [one["is_key"] for one in first["columns"]] == [False, False]
    assert "primary_key_deferrable" not in first


async def test_a_deferrable_key_under_a_full_identity_is_called_that(database, cdc, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, a text)")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    database.publish("t")
    bridge_process()
    schema = await eventually(lambda: cdc.schema("t"))
    assert (schema["primary_key"], schema["primary_key_deferrable"]) == (["id"], True)


@both_versions
async def test_a_type_dropped_behind_the_log_changes_no_value_of_its_version(
    database, cdc, bridge_process
):
    database.execute(
        "CREATE DOMAIN positive AS int; CREATE TYPE mood AS ENUM ('sad');"
        "CREATE TABLE t (id int PRIMARY KEY, p positive, m mood[]);"
    )
    database.publish("t")
    bridge = bridge_process()
    database.execute("INSERT INTO t VALUES (1, 1, '{sad}')")
    await cdc.settle()
    bridge.kill()
    database.execute("INSERT INTO t VALUES (2, 2, '{sad,NULL}')")
    database.execute(
        "ALTER TABLE t DROP COLUMN p, DROP COLUMN m; DROP DOMAIN positive; DROP TYPE mood"
    )
    bridge_process()
    await cdc.settle()
    first, second = await cdc.changes("t")
    assert first.schema_version == second.schema_version
    assert first.data == {"id": 1, "p": 1, "m": ["sad"]}
    assert second.data == {"id": 2, "p": 2, "m": ["sad", None]}
