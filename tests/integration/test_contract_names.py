"""Subjects, streams and buckets: names, escaping, prefixes, and what is created."""

from __future__ import annotations

import json
from contextlib import suppress

import nats
import pytest
from nats.js.api import KeyValueConfig, StreamConfig
from nats.js.errors import NotFoundError

from consumer_sdk.wire import Subjects, parse_message_id
from tests.fixtures.cdc_log import CdcLog
from tests.fixtures.nats import delete_streams
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import eventually

DAY = 86400


async def raw_config(client, stream):
    """The stream's configuration with every field the server knows, also those of the future."""
    reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"")
    return json.loads(reply.data)["config"]


@both_versions
async def test_two_tables_of_one_name_in_two_schemas_stay_apart(database, cdc, bridge_process):
    database.execute(
        """
        CREATE SCHEMA sales; CREATE SCHEMA orders;
        CREATE TABLE orders (id int PRIMARY KEY, a text);
        CREATE TABLE sales.orders (id int PRIMARY KEY, b int);
        CREATE TABLE orders.insert (id int PRIMARY KEY);
        """
    )
    database.publish()
    bridge_process()
    database.execute("INSERT INTO orders VALUES (1, 'public')")
    database.execute("INSERT INTO sales.orders VALUES (1, 2)")
    database.execute("INSERT INTO orders.insert VALUES (9)")
    await cdc.settle()
    for token, schema, table, data in (
        ("orders", "public", "orders", {"id": 1, "a": "public"}),
        ("sales.orders", "sales", "orders", {"id": 1, "b": 2}),
        ("orders.insert", "orders", "insert", {"id": 9}),
    ):
        [event] = await cdc.changes(token)
        assert (event.schema, event.table, event.data) == (schema, table, data)
        assert event.subject == f"{cdc.subjects.cdc}.{token}.insert"
        assert parse_message_id(event.msg_id).token == token
        document = await cdc.schema(token)
        assert (document["schema"], document["table"]) == (schema, table)


@both_versions
async def test_names_outside_the_alphabet_are_escaped_byte_by_byte(database, cdc, bridge_process):
    database.execute(
        """
        CREATE SCHEMA "A*B";
        CREATE TABLE "A*B"."Odd Table.1=2" ("id" int PRIMARY KEY, "a b" text, "d""q'x" text);
        CREATE TABLE "größe" (id int PRIMARY KEY);
        CREATE TABLE "$message" (id int PRIMARY KEY);
        CREATE TABLE "a-b_C9" (id int PRIMARY KEY);
        """
    )
    database.publish()
    bridge_process()
    database.execute("INSERT INTO \"A*B\".\"Odd Table.1=2\" VALUES (1, 'x', 'y')")
    database.execute('INSERT INTO "größe" VALUES (2)')
    database.execute('INSERT INTO "$message" VALUES (3)')
    database.execute('INSERT INTO "a-b_C9" VALUES (4)')
    await cdc.settle()
    odd = "A=2AB.Odd=20Table=2E1=3D2"
    for token, name, data in (
        (odd, "Odd Table.1=2", {"id": 1, "a b": "x", "d\"q'x": "y"}),
        ("gr=C3=B6=C3=9Fe", "größe", {"id": 2}),
        ("=24message", "$message", {"id": 3}),
        ("a-b_C9", "a-b_C9", {"id": 4}),
    ):
        schema_message, change = await cdc.of_table(token)
        assert schema_message.subject == f"{cdc.subjects.cdc}.{token}.schema"
        assert change.subject == f"{cdc.subjects.cdc}.{token}.insert"
        assert change.document["subject"] == change.subject
        assert change.document["table"] == schema_message.document["table"] == name
        assert change.document["data"] == data
        assert f"-{token}-insert-0-" in change.document["msg_id"]
        document = await cdc.schema(token)
        assert [c["name"] for c in document["columns"]] == list(data)
    assert (await cdc.schema(odd))["schema"] == "A*B"


async def test_missing_streams_and_buckets_are_created_with_safe_defaults(
    database, prefix, nats_client, bridge_process, nats_server
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge_process("--cdc-max-bytes", "64MB")
    names = Subjects(prefix)
    cdc_stream = await raw_config(nats_client, names.cdc_stream)
    assert cdc_stream["subjects"] == [f"{prefix}.cdc.>"]
    assert cdc_stream["max_age"] == 8 * DAY * 10**9
    assert cdc_stream["max_bytes"] == 64 * 1024**2
    assert cdc_stream["retention"] == "limits"
    assert cdc_stream["storage"] == "file"
    # A full stream makes the bridge wait; nothing is removed before its age.
    assert cdc_stream["discard"] == "new"
    assert cdc_stream["max_msgs"] == cdc_stream["max_msgs_per_subject"] == -1
    assert cdc_stream["num_replicas"] == 1
    assert 0 < cdc_stream["duplicate_window"] <= 120 * 10**9
    init = await raw_config(nats_client, names.init_stream)
    assert init["subjects"] == [f"{prefix}.init.>"]
    assert init["max_age"] == 7 * DAY * 10**9
    assert (init["retention"], init["storage"], init["discard"]) == ("limits", "file", "new")
    assert 0 < init["max_bytes"] <= 60 * 1024**3
    for bucket in (names.schemas_bucket, names.bridge_bucket, names.dicts_bucket):
        config = await raw_config(nats_client, f"KV_{bucket}")
        # What is kept there outlives the stream's retention.
        assert config["max_age"] == 0
        assert config["storage"] == "file"
        assert config["max_msgs_per_subject"] >= 1
    objects = await raw_config(nats_client, f"OBJ_{names.objects_bucket}")
    assert objects["max_age"] == 0 or objects["max_age"] >= 8 * DAY * 10**9


async def test_existing_streams_and_buckets_are_used_as_they_are(
    database, cdc, prefix, nats_client, bridge_process
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    names = Subjects(prefix)
    js = nats_client.jetstream()
    hour = 3600.0
    await js.add_stream(
        StreamConfig(
            name=names.cdc_stream, subjects=[names.cdc_all, f"{prefix}.other"], max_age=hour,
            max_bytes=50_000_000, duplicate_window=60.0, description="mine",
        )
    )  # fmt: skip
    await js.add_stream(
        StreamConfig(name=names.init_stream, subjects=[names.init_all], max_age=hour, max_msgs=77)
    )
    await js.create_key_value(KeyValueConfig(bucket=names.schemas_bucket, history=3))
    await js.create_key_value(KeyValueConfig(bucket=names.bridge_bucket, description="mine too"))
    streams = [names.cdc_stream, names.init_stream]
    streams += [f"KV_{names.schemas_bucket}", f"KV_{names.bridge_bucket}"]
    before = {name: await raw_config(nats_client, name) for name in streams}
    bridge_process()
    database.execute("INSERT INTO t VALUES (1), (2)")
    await cdc.settle()
    assert [e.data for e in await cdc.changes("t")] == [{"id": 1}, {"id": 2}]
    assert {name: await raw_config(nats_client, name) for name in streams} == before
    assert (await cdc.schema("t"))["schema_version"] == 1


async def test_stream_names_are_configurable(database, prefix, nats_client, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    flags = ("--cdc-stream", f"{prefix}_Changes", "--init-stream", f"{prefix}_Snapshots")
    bridge_process(*flags, "--cdc-max-age", "36h", "--init-max-age", "90m")
    names = Subjects(prefix)
    names.cdc_stream = f"{prefix}_Changes"
    log = CdcLog(nats_client, names, database)
    database.execute("INSERT INTO t VALUES (1)")
    await log.settle()
    assert [e.data for e in await log.changes("t")] == [{"id": 1}]
    assert (await raw_config(nats_client, f"{prefix}_Changes"))["max_age"] == 36 * 3600 * 10**9
    assert (await raw_config(nats_client, f"{prefix}_Snapshots"))["max_age"] == 90 * 60 * 10**9
    await nats_client.request(names.snapshot_request("t"), timeout=5)
    js = nats_client.jetstream()

    async def snapshot_end():
        for subject in (names.meta("t"), names.error("t")):
            with suppress(NotFoundError):
                return (await js.get_last_msg(f"{prefix}_Snapshots", subject)).subject
        return None

    assert await eventually(snapshot_end) == names.meta("t")
    for name in (Subjects(prefix).cdc_stream, Subjects(prefix).init_stream):
        with pytest.raises(NotFoundError):
            await js.stream_info(name)


async def test_without_a_prefix_the_names_are_those_of_the_contract(
    database, own_nats, bridge_process
):
    server = own_nats()
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    # The fixture passes --prefix; the last one on the command line counts.
    bridge_process("--prefix", "", nats_url=server.url)
    client = await nats.connect(server.url)
    try:
        database.execute("INSERT INTO t VALUES (1)")
        log = CdcLog(client, Subjects(""), database)
        await log.settle()
        [schema, change] = await log.of_table("t")
        assert (schema.subject, change.subject) == ("cdc.t.schema", "cdc.t.insert")
        names = {info.config.name for info in await client.jsm().streams_info()}
        assert names == {
            "CDC", "INIT", "KV_schemas", "KV_bridge", "KV_zstd_dicts", "OBJ_cdc_objects"
        }  # fmt: skip
        assert (await log.schema("t"))["table"] == "t"
        source = f"slot_{database.name}"
        assert (await eventually(lambda: log.kept_progress(source)))["source"] == source
        assert [m.subject for m in await log.stored("cdc.$fence.*")] == [f"cdc.$fence.{source}"]
    finally:
        await client.close()


async def test_two_databases_share_one_nats_by_their_prefixes(
    database, pg, cdc, prefix, nats_client, nats_server, bridge_process
):
    for table in ("t", "u"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    database.publish("t", "u", name="one")
    database.publish("t", "u", name="two")
    other = f"{prefix}-2"
    try:
        bridge_process(pub="one", slot=f"one_{database.name}")
        bridge_process(pub="two", slot=f"two_{database.name}", prefix=other)
        database.execute("INSERT INTO t VALUES (1); INSERT INTO u VALUES (2)")
        second = CdcLog(nats_client, Subjects(other), database)
        for log, source in ((cdc, "one"), (second, "two")):
            await log.settle()
            events = await log.changes()
            assert [(e.table, e.data["id"]) for e in events] == [("t", 1), ("u", 2)]
            assert {e.source for e in events} == {f"{source}_{database.name}"}
    finally:
        await delete_streams(nats_server.url, other)


async def test_two_sources_of_different_tables_share_one_stream(database, cdc, bridge_process):
    for table in ("t", "u"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    database.publish("t", name="one")
    database.publish("u", name="two")
    first = bridge_process(pub="one", slot=f"one_{database.name}")
    second = bridge_process(pub="two", slot=f"two_{database.name}")
    for number in range(20):
        database.execute(f"INSERT INTO t VALUES ({number}); INSERT INTO u VALUES ({number})")
    await eventually(
        lambda: (
            first.status()["cdc_events_published"] == second.status()["cdc_events_published"] == 20
        )
    )
    for table, source in (("t", first), ("u", second)):
        events = await cdc.changes(table)
        assert [e.data["id"] for e in events] == list(range(20))
        assert {(e.source, e.epoch) for e in events} == {
            (source.status()["source"], source.status()["epoch"])
        }


async def test_a_second_bridge_that_would_publish_the_same_table_exits_3(
    database, cdc, bridge_process
):
    for table in ("t", "u", "v"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    database.publish("t", name="one")
    database.publish("t", "u", name="two")
    database.publish("v", name="three")
    first = bridge_process(pub="one", slot=f"one_{database.name}")
    # A table counts as taken before its first row.
    await eventually(lambda: cdc.schema("t"))
    second = bridge_process(pub="two", slot=f"two_{database.name}", wait=False)
    assert second.wait() == 3
    complaint = second.log_text().splitlines()[-1]
    assert complaint.startswith("bridge: table t is already published by source 'one_")
    assert "--prefix" in complaint
    assert "Traceback" not in second.log_text()
    # A slot that nobody reads would fill the disk.
    assert database.slot(f"two_{database.name}") is None
    # Also when the table joins the publication of a bridge that is running.
    third = bridge_process(pub="three", slot=f"three_{database.name}")
    database.execute("ALTER PUBLICATION three ADD TABLE t")
    database.execute("INSERT INTO t VALUES (1)")
    assert third.wait() == 3
    assert "table t is already published by source" in third.log_text().splitlines()[-1]
    await eventually(lambda: first.status()["cdc_events_published"] == 1)
    events = await cdc.changes("t")
    assert [(e.source, e.data) for e in events] == [(f"one_{database.name}", {"id": 1})]
    assert await cdc.changes("u") == []


async def test_bridges_that_start_together_on_one_table_do_not_both_publish_it(
    database, cdc, bridge_process
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t", name="one")
    database.publish("t", name="two")
    bridges = [
        bridge_process(pub=name, slot=f"{name}_{database.name}", wait=False)
        for name in ("one", "two")
    ]
    database.execute("INSERT INTO t VALUES (1)")
    await eventually(lambda: any(not bridge.running for bridge in bridges))
    [loser] = [bridge for bridge in bridges if not bridge.running]
    [winner] = [bridge for bridge in bridges if bridge.running]
    assert loser.exit_code == 3
    assert "already published by source" in loser.log_text().splitlines()[-1]
    winner.wait_ready()
    database.execute("INSERT INTO t VALUES (2)")
    await eventually(lambda: winner.status()["cdc_events_published"] >= 1)
    await eventually(lambda: cdc.changes("t"))
    assert {e.source for e in await cdc.changes("t")} == {winner.status()["source"]}
