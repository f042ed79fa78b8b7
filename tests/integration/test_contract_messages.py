"""Logical messages, packing, progress and fence: what travels beside one change per message."""

from __future__ import annotations

import json
from itertools import pairwise

import msgpack
import pytest

from bridge.events.packed import PACK_ROWS
from consumer_sdk.wire import parse_lsn, parse_message_id, read_events
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import eventually

BINARY = b"\x00\xff\xfe binary"


@both_versions
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["msgpack", "json"])
async def test_transactional_messages_are_published_and_others_are_not(
    database, cdc, bridge_process, flags
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge_process(*flags)
    emit = "SELECT pg_logical_emit_message(%s, %s, %s::bytea)"
    # Alone in a transaction, several prefixes, before, between and after changes.
    database.execute(emit, [True, "alone", b"text \xc3\xa9"])
    database.execute("SELECT pg_logical_emit_message(true, 'alone', '')")
    with database.connect(autocommit=False) as connection:
        connection.execute(emit, [True, "alone", b"before"])
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute(emit, [True, "a b.c", BINARY])
        connection.execute(emit, [False, "alone", b"not transactional"])
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("INSERT INTO t VALUES (3)")
        connection.execute(emit, [True, "alone", b"after"])
        connection.execute(emit, [True, "", b"no prefix"])
        xid = int(connection.execute("SELECT pg_current_xact_id()::text").fetchone()[0])
        connection.commit()
    database.execute(emit, [False, "alone", b"not transactional"])
    await cdc.settle()
    prefix = cdc.subjects.cdc
    alone = await cdc.messages("alone")
    assert {one.subject for one in alone} == {f"{prefix}.$message.alone"}
    assert [(d["data"], d["seq"], d["ordinal"]) for d in (one.document for one in alone)] == [
        ("text é", 0, 0), ("", 0, 0), ("before", 0, 0), ("after", 3, 2),
    ]  # fmt: skip
    kind = "application/json" if flags else "application/msgpack"
    for one in alone:
        document = one.document
        assert one.headers["Content-Type"] == kind
        assert one.headers["Nats-Msg-Id"] == document["msg_id"]
        assert document["operation"] == "MESSAGE"
        assert document["encoding"] == "utf8"
        assert document["subject"] == one.subject
        assert (document["v"], document["source"]) == (1, f"slot_{database.name}")
        parsed = parse_message_id(document["msg_id"])
        assert parsed.operation == "message"
        assert parsed.token == "$message.alone"
        assert (parsed.commit_lsn, parsed.epoch) == (document["lsn"], document["epoch"])
    [odd] = await cdc.messages("a b.c")
    assert odd.subject == f"{prefix}.$message.a=20b=2Ec"
    assert odd.document["prefix"] == "a b.c"
    assert (odd.document["seq"], odd.document["ordinal"]) == (1, 1)
    assert odd.document["encoding"] == ("base64" if flags else "binary")
    [event] = read_events(odd.headers, odd.message.data)
    assert event.data == BINARY
    [nameless] = await cdc.messages("")
    assert nameless.document["data"] == "no prefix"
    # Among the changes they stand where they were written, and cost them no number.
    lsn = odd.document["lsn"]
    transaction = [
        d for d in (one.document for one in await cdc.stored())
        if d.get("lsn") == lsn and d.get("operation") in ("INSERT", "MESSAGE")
    ]  # fmt: skip
    assert {d["xid"] for d in transaction} == {xid}
    assert [d.get("prefix", d["operation"]) for d in transaction] == [
        "alone", "INSERT", "a b.c", "INSERT", "INSERT", "alone", "",
    ]  # fmt: skip
    assert [d["seq"] for d in transaction if d["operation"] == "INSERT"] == [0, 1, 2]
    assert [d.get("last") for d in transaction if d["operation"] == "INSERT"] == [None, None, True]


async def test_a_message_beyond_max_payload_travels_by_reference(database, cdc, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge_process()
    database.execute(
        "SELECT pg_logical_emit_message(true, 'big', repeat('x', 1200000)),"
        " pg_logical_emit_message(true, 'big', 'small')"
    )
    await cdc.settle()
    first, second = [one.document for one in await cdc.messages("big")]
    assert "data" not in first
    store = await cdc.client.jetstream().object_store(cdc.subjects.objects_bucket)
    content = (await store.get(first["ref"]["name"])).data
    assert content is not None
    assert len(content) == first["ref"]["size"] > 1_200_000
    assert second["data"] == "small"
    assert (first["ordinal"], second["ordinal"]) == (0, 1)


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["msgpack", "json"])
async def test_a_prefix_of_any_length_is_published_once(database, cdc, bridge_process, flags):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge = bridge_process(*flags)
    prefixes = ["x" * 255, "x" * 256, "é" * 5000, "z" * 1_200_000]
    for prefix in prefixes:
        database.execute("SELECT pg_logical_emit_message(true, %s, 'content')", [prefix])
    await eventually(lambda: cdc.messages(prefixes[-1]), 10)
    bridge.kill()
    bridge_process(*flags)
    await cdc.settle()
    for prefix in prefixes[:-1]:
        (one,) = await cdc.messages(prefix)
        assert (one.document["prefix"], one.document["data"]) == (prefix, "content")
        assert len(one.subject) < 300
    (longest,) = await cdc.messages(prefixes[-1])
    assert longest.document["prefix"] == "z" * 1000
    store = await cdc.client.jetstream().object_store(cdc.subjects.objects_bucket)
    content = (await store.get(longest.document["ref"]["name"])).data
    assert content is not None
    assert (json.loads if flags else msgpack.unpackb)(content) == {
        "data": "content", "encoding": "utf8", "prefix": prefixes[-1],
    }  # fmt: skip


@both_versions
async def test_packed_messages_share_one_transaction_table_and_operation(
    database, cdc, bridge_process
):
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a text); CREATE TABLE u (id int PRIMARY KEY);"
        "ALTER TABLE t ALTER a SET STORAGE EXTERNAL"
    )
    database.publish("t", "u")
    bridge = bridge_process("--pack")
    many = PACK_ROWS * 2 + 100
    body = "x" * 9000
    with database.connect(autocommit=False) as connection:
        connection.execute(f"INSERT INTO t SELECT n, 'r' || n FROM generate_series(1, {many}) n")
        connection.execute("UPDATE t SET id = -id WHERE id <= 2")
        connection.execute("INSERT INTO u VALUES (1), (2)")
        connection.execute("INSERT INTO t VALUES (0, %s)", [body])
        connection.execute("SELECT pg_logical_emit_message(true, 'between', 'x')")
        connection.execute("INSERT INTO t VALUES (-100, NULL)")
        connection.execute("UPDATE t SET id = -200 WHERE id = 0")
        connection.execute("DELETE FROM t WHERE id IN (-1, -2)")
        connection.commit()
    database.execute("INSERT INTO u VALUES (3)")
    database.execute("INSERT INTO u VALUES (4)")
    database.execute("TRUNCATE t, u")
    await cdc.settle()
    stored = [one for one in await cdc.of_tables() if one.document["operation"] != "SCHEMA"]
    shape = []
    for one in stored:
        document = one.document
        rows = document.get("rows")
        assert ("data" in document) != (rows is not None) or document["operation"] == "COMMIT"
        assert one.headers["Nats-Msg-Id"] == document["msg_id"]
        assert parse_message_id(document["msg_id"]).seq == document["seq"]
        count = len(rows) if rows is not None else None
        shape.append(
            (document["table"], document["operation"], document["seq"], count, document.get("last"))
        )
    lsn = stored[0].document["lsn"]
    assert shape[: [one.document["lsn"] == lsn for one in stored].count(True)] == [
        ("t", "INSERT", 0, PACK_ROWS, None),
        ("t", "INSERT", PACK_ROWS, PACK_ROWS, None),
        ("t", "INSERT", 2 * PACK_ROWS, 100, None),
        ("t", "UPDATE", many, 2, None),
        ("u", "INSERT", many + 2, 2, None),
        ("t", "INSERT", many + 4, 1, None),
        ("t", "INSERT", many + 5, 1, None),
        ("t", "UPDATE", many + 6, 1, None),
        ("t", "DELETE", many + 7, 2, True),
        ("u", "COMMIT", many + 9, None, None),
    ]
    # Two transactions are never one message, however small.
    assert shape[10:] == [
        ("u", "INSERT", 0, 1, True),
        ("u", "INSERT", 0, 1, True),
        *[(s[0], "TRUNCATE", n, None, True if n else None) for n, s in enumerate(shape[12:14])],
        (shape[12][0], "COMMIT", 2, None, None),
    ]
    # Every reader gets one event for each row, with its own position, old row and notes.
    events = await cdc.changes()
    first = [e for e in events if e.commit_lsn == lsn]
    assert [e.seq for e in first] == list(range(many + 9))
    assert [e.last for e in first] == [False] * (many + 8) + [True]
    assert [e.data for e in first[:many]] == [{"id": n, "a": f"r{n}"} for n in range(1, many + 1)]
    assert [(e.old, e.data) for e in first[many : many + 2]] == [
        ({"id": n}, {"id": -n, "a": f"r{n}"}) for n in (1, 2)
    ]
    moved = first[many + 6]
    assert (moved.old, moved.data, moved.unchanged) == ({"id": 0}, {"id": -200}, ("a",))
    assert [e.data for e in first[-2:]] == [{"id": -1}, {"id": -2}]
    await eventually(lambda: bridge.status()["cdc_events_published"] >= len(events))


@both_versions
async def test_progress_and_fence_say_who_writes_and_how_far(database, cdc, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE other (id int)")
    database.publish("t")
    before = parse_lsn(database.current_lsn())
    bridge = bridge_process()
    source = f"slot_{database.name}"
    status = bridge.status()
    [first] = (await cdc.progress())[:1]
    assert set(first) >= {
        "v", "source", "epoch", "system_id", "timeline", "database", "publication", "lsn",
        "stream_seq", "source_lsn", "gap", "ts",
    }  # fmt: skip
    assert (first["v"], first["source"], first["epoch"]) == (1, source, status["epoch"])
    assert first["system_id"] == str(
        database.value("SELECT system_identifier FROM pg_control_system()")
    )
    assert first["timeline"] == database.value("SELECT timeline_id FROM pg_control_checkpoint()")
    assert (first["database"], first["publication"]) == (database.name, "pub")
    assert first["gap"] is None
    assert before <= first["lsn"] <= first["source_lsn"]
    assert abs(first["ts"] / 1e6 - status["now"]) < 60
    # An epoch is the Unix second at which the history began.
    assert 0 <= status["started_at"] + 30 - first["epoch"] < 60
    progress_subject = cdc.subjects.progress(source)
    stored = await cdc.stored()
    sequence = {one.subject: one.message.sequence for one in stored}
    assert first["stream_seq"] < sequence[progress_subject]
    fences = [one for one in stored if one.subject == cdc.subjects.fence(source)]
    assert len(fences) == 1
    assert {"v", "source", "ts"} <= set(fences[0].document)
    assert fences[0].document["source"] == source
    # Rows of tables outside the publication move the position without events.
    database.execute("INSERT INTO other SELECT generate_series(1, 1000)")
    written = parse_lsn(database.current_lsn())

    async def passed():
        found = await cdc.progress()
        return found if found[-1]["lsn"] >= written else None

    records = await eventually(passed)
    assert all(r["gap"] is None and r["epoch"] == first["epoch"] for r in records)
    lsns = [r["lsn"] for r in records]
    assert lsns == sorted(lsns)
    moments = [r["ts"] for r in records[1:]]
    assert all(later - sooner > 900_000 for sooner, later in pairwise(moments))

    async def kept_beyond(lsn):
        record = await cdc.kept_progress(source)
        return record if record and record["lsn"] >= lsn else None

    # The newest is also in KV, and PostgreSQL may forget what it covers.
    kept = await eventually(lambda: kept_beyond(written))
    assert {k: kept[k] for k in ("source", "epoch", "system_id", "database")} == {
        k: first[k] for k in ("source", "epoch", "system_id", "database")
    }
    await eventually(
        lambda: parse_lsn(str(database.slot(source)["confirmed_flush_lsn"])) >= written
    )
    # Every change up to `lsn` is stored at or before `stream_seq`.
    database.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    done = parse_lsn(database.current_lsn())
    database.execute("INSERT INTO other VALUES (0)")
    record = await eventually(lambda: kept_beyond(done))
    [change] = [one for one in await cdc.of_table("t") if one.document["operation"] == "INSERT"]
    assert change.document["end_lsn"] <= record["lsn"]
    assert change.message.sequence <= record["stream_seq"]
