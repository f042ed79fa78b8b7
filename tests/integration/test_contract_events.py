"""Changes as events: identity, order, ends of transactions, old rows, TOAST."""

from __future__ import annotations

import asyncio
import hashlib
import threading

import pytest

from consumer_sdk.wire import decode_payload, message_id, parse_lsn
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import eventually

EVENT_FIELDS = {
    "v", "source", "epoch", "table", "schema", "operation", "relation_id", "schema_version",
    "msg_id", "subject", "lsn", "xid", "seq", "ts", "data",
}  # fmt: skip


@both_versions
async def test_an_event_has_exactly_the_fields_of_the_contract(database, cdc, bridge_process):
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.publish("users")
    bridge = bridge_process()
    with database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO users VALUES (1, 'ada'), (2, 'bob')")
        xid = int(connection.execute("SELECT pg_current_xact_id()::text").fetchone()[0])
        connection.commit()
    database.execute("UPDATE users SET name = 'eve' WHERE id = 2")
    database.execute("DELETE FROM users WHERE id = 1")
    now_us = int(database.value("SELECT extract(epoch FROM clock_timestamp()) * 1000000"))
    await cdc.settle()

    stored = await cdc.of_table("users")
    subjects = [one.subject.removeprefix(f"{cdc.subjects.cdc}.") for one in stored]
    assert subjects == [f"users.{op}" for op in ("schema", "insert", "insert", "update", "delete")]
    status = bridge.status()
    relation_id = database.value("SELECT 'users'::regclass::oid::int8")
    events = [one for one in stored if one.document["operation"] != "SCHEMA"]
    for one in events:
        document = one.document
        assert set(document) - {"last", "end_lsn"} == EVENT_FIELDS
        assert document["v"] == 1
        assert (document["schema"], document["table"]) == ("public", "users")
        assert document["source"] == status["source"] == f"slot_{database.name}"
        assert document["epoch"] == status["epoch"]
        assert document["relation_id"] == relation_id
        assert document["schema_version"] == 1
        assert document["subject"] == one.subject
        assert document["operation"].lower() == one.subject.rpartition(".")[2]
        assert document["msg_id"] == message_id(
            document["lsn"], "users", document["operation"], document["seq"], document["epoch"]
        )
        assert document["msg_id"] == document["msg_id"].lower()
        assert one.headers["Nats-Msg-Id"] == document["msg_id"]
        assert one.headers["Content-Type"] == "application/msgpack"
        assert not {"Content-Encoding", "Cdc-Dict"} & set(one.headers)
        assert 0 <= now_us - document["ts"] < 60_000_000
        assert document["end_lsn"] > document["lsn"] if "last" in document else True
    documents = [one.document for one in events]
    assert [(d["operation"], d["data"], d["seq"], d.get("last")) for d in documents] == [
        ("INSERT", {"id": 1, "name": "ada"}, 0, None),
        ("INSERT", {"id": 2, "name": "bob"}, 1, True),
        ("UPDATE", {"id": 2, "name": "eve"}, 0, True),
        ("DELETE", {"id": 1}, 0, True),
    ]
    assert [d["xid"] for d in documents[:2]] == [xid, xid]
    assert len({d["xid"] for d in documents}) == 3
    assert documents[0]["lsn"] == documents[1]["lsn"]
    assert documents[1]["lsn"] < documents[2]["lsn"] < documents[3]["lsn"]
    assert documents[3]["lsn"] < parse_lsn(database.current_lsn())


@both_versions
async def test_20000_rows_by_copy_in_one_transaction_give_20000_distinct_messages(
    database, cdc, bridge_process
):
    database.execute("CREATE TABLE rows (id int PRIMARY KEY, text text)")
    database.publish("rows")
    bridge = bridge_process()
    with (
        database.connect() as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY rows FROM STDIN") as copy,
    ):
        for number in range(20_000):
            copy.write_row((number, f"row {number}"))
    await cdc.settle(60)
    stored = [one for one in await cdc.of_table("rows") if one.document["operation"] == "INSERT"]
    assert len(stored) == 20_000
    assert len({one.headers["Nats-Msg-Id"] for one in stored}) == 20_000
    assert [one.document["seq"] for one in stored] == list(range(20_000))
    assert len({one.document["lsn"] for one in stored}) == 1
    assert [one.document["seq"] for one in stored if "last" in one.document] == [19_999]
    assert [one.document["data"] for one in stored] == [
        {"id": number, "text": f"row {number}"} for number in range(20_000)
    ]
    await eventually(lambda: bridge.status()["cdc_events_published"] == 20_001)


@both_versions
async def test_a_key_changing_update_carries_the_old_key(database, cdc, bridge_process):
    database.execute("CREATE TABLE pairs (a int, b text, note text, PRIMARY KEY (b, a))")
    database.publish("pairs")
    bridge_process()
    database.execute("INSERT INTO pairs VALUES (1, 'x', 'n'), (2, 'y', 'm')")
    database.execute("UPDATE pairs SET a = 10 WHERE a = 1")
    database.execute("UPDATE pairs SET note = 'k' WHERE a = 2")
    database.execute("UPDATE pairs SET b = b || b, a = a + 1")
    await cdc.settle()
    updates = [e for e in await cdc.changes("pairs") if e.operation == "UPDATE"]
    assert [(e.old, e.data) for e in updates] == [
        ({"a": 1, "b": "x"}, {"a": 10, "b": "x", "note": "n"}),
        (None, {"a": 2, "b": "y", "note": "k"}),
        ({"a": 10, "b": "x"}, {"a": 11, "b": "xx", "note": "n"}),
        ({"a": 2, "b": "y"}, {"a": 3, "b": "yy", "note": "k"}),
    ]


@both_versions
async def test_an_unchanged_toast_value_is_absent_and_named(database, cdc, bridge_process):
    database.execute(
        """
        CREATE TABLE docs (id int PRIMARY KEY, body text, extra text, n int);
        ALTER TABLE docs ALTER body SET STORAGE EXTERNAL, ALTER extra SET STORAGE EXTERNAL;
        CREATE TABLE full_docs (id int PRIMARY KEY, body text, n int);
        ALTER TABLE full_docs ALTER body SET STORAGE EXTERNAL;
        ALTER TABLE full_docs REPLICA IDENTITY FULL;
        """
    )
    database.publish("docs", "full_docs")
    bridge_process()
    body, extra = "b" * 9000, "e" * 9000
    database.execute("INSERT INTO docs VALUES (1, %s, %s, 0)", [body, extra])
    database.execute("UPDATE docs SET n = 1")
    database.execute("UPDATE docs SET body = NULL, n = 2")
    database.execute("UPDATE docs SET extra = 'short', n = 3")
    database.execute("UPDATE docs SET id = 2")
    database.execute("INSERT INTO full_docs VALUES (1, %s, 0)", [body])
    database.execute("UPDATE full_docs SET n = 1")
    await cdc.settle()
    updates = [e for e in await cdc.changes("docs") if e.operation == "UPDATE"]
    assert [(e.data, e.unchanged, e.old) for e in updates] == [
        ({"id": 1, "n": 1}, ("body", "extra"), None),
        ({"id": 1, "body": None, "n": 2}, ("extra",), None),
        ({"id": 1, "body": None, "extra": "short", "n": 3}, (), None),
        ({"id": 2, "body": None, "extra": "short", "n": 3}, (), {"id": 1}),
    ]
    # With the whole old row at hand nothing is unknown: PostgreSQL sends the value in `old`.
    [update] = [e for e in await cdc.changes("full_docs") if e.operation == "UPDATE"]
    assert update.old == {"id": 1, "body": body, "n": 0}
    assert update.unchanged == ("body",)
    assert update.data == {"id": 1, "n": 1}


@both_versions
async def test_replica_identity_decides_what_old_and_delete_carry(database, cdc, bridge_process):
    database.execute(
        """
        CREATE TABLE by_full (id int PRIMARY KEY, a text, b int);
        ALTER TABLE by_full REPLICA IDENTITY FULL;
        CREATE TABLE by_index (id int PRIMARY KEY, code text NOT NULL, b int);
        CREATE UNIQUE INDEX by_code ON by_index (code);
        ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_code;
        CREATE TABLE keyless_full (a text, b int);
        ALTER TABLE keyless_full REPLICA IDENTITY FULL;
        CREATE TABLE by_nothing (id int PRIMARY KEY, a text);
        ALTER TABLE by_nothing REPLICA IDENTITY NOTHING;
        CREATE TABLE keyless (a text);
        """
    )
    database.publish()
    bridge_process()
    database.execute("INSERT INTO by_full VALUES (1, NULL, 7)")
    database.execute("UPDATE by_full SET a = 'x'")
    database.execute("DELETE FROM by_full")
    database.execute("INSERT INTO by_index VALUES (1, 'c1', 7)")
    database.execute("UPDATE by_index SET b = 8")
    database.execute("UPDATE by_index SET code = 'c2'")
    database.execute("DELETE FROM by_index")
    database.execute("INSERT INTO keyless_full VALUES ('a', 1), ('a', 1)")
    database.execute("UPDATE keyless_full SET b = 2")
    database.execute("DELETE FROM keyless_full")
    database.execute("INSERT INTO by_nothing VALUES (1, 'x')")
    database.execute("INSERT INTO keyless VALUES ('x')")
    await cdc.settle()

    async def told(table: str) -> list[tuple[str, object, object]]:
        return [(e.operation, e.data, e.old) for e in await cdc.changes(table)]

    assert await told("by_full") == [
        ("INSERT", {"id": 1, "a": None, "b": 7}, None),
        ("UPDATE", {"id": 1, "a": "x", "b": 7}, {"id": 1, "a": None, "b": 7}),
        ("DELETE", {"id": 1, "a": "x", "b": 7}, None),
    ]
    assert await told("by_index") == [
        ("INSERT", {"id": 1, "code": "c1", "b": 7}, None),
        ("UPDATE", {"id": 1, "code": "c1", "b": 8}, None),
        ("UPDATE", {"id": 1, "code": "c2", "b": 8}, {"code": "c1"}),
        ("DELETE", {"code": "c2"}, None),
    ]
    assert await told("keyless_full") == [
        *[("INSERT", {"a": "a", "b": 1}, None)] * 2,
        *[("UPDATE", {"a": "a", "b": 2}, {"a": "a", "b": 1})] * 2,
        *[("DELETE", {"a": "a", "b": 2}, None)] * 2,
    ]
    assert await told("by_nothing") == [("INSERT", {"id": 1, "a": "x"}, None)]
    assert await told("keyless") == [("INSERT", {"a": "x"}, None)]
    keys = {}
    for table in ("by_full", "by_index", "keyless_full", "by_nothing", "keyless"):
        document = await cdc.schema(table)
        keys[table] = (
            document["replica_identity"],
            document["primary_key"],
            [c["name"] for c in document["columns"] if c["is_key"]],
        )
        assert document["schema_version"] == 1
    assert keys == {
        "by_full": ("full", ["id"], ["id", "a", "b"]),
        "by_index": ("index", ["id"], ["code"]),
        "keyless_full": ("full", [], ["a", "b"]),
        "by_nothing": ("nothing", ["id"], []),
        "keyless": ("default", [], []),
    }


@both_versions
async def test_truncate_of_three_tables_is_one_event_for_each(database, cdc, bridge_process):
    database.execute(
        """
        CREATE TABLE a (id serial PRIMARY KEY);
        CREATE TABLE b (id int PRIMARY KEY);
        CREATE TABLE c (id int PRIMARY KEY, a_id int REFERENCES a);
        """
    )
    database.publish("a", "b", "c")
    bridge_process()
    database.execute("INSERT INTO b VALUES (1); TRUNCATE b, a, c; INSERT INTO b VALUES (2)")
    database.execute("TRUNCATE a RESTART IDENTITY CASCADE")
    database.execute("TRUNCATE b")
    await cdc.settle()
    documents = [one.document for one in await cdc.of_tables()]
    truncates = [d for d in documents if d["operation"] == "TRUNCATE"]
    first, second = truncates[0]["lsn"], truncates[3]["lsn"]
    in_first = [d for d in documents if d["lsn"] == first and d["operation"] != "SCHEMA"]
    order = [d["table"] for d in truncates[:3]]
    assert sorted(order) == ["a", "b", "c"]
    assert [(d["operation"], d["seq"]) for d in in_first] == [
        ("INSERT", 0), ("TRUNCATE", 1), ("TRUNCATE", 2), ("TRUNCATE", 3), ("INSERT", 4),
        ("COMMIT", 5), ("COMMIT", 6),
    ]  # fmt: skip
    assert [(d["cascade"], d["restart_identity"]) for d in truncates[:3]] == [(False, False)] * 3
    in_second = [d for d in truncates if d["lsn"] == second]
    assert sorted(d["table"] for d in in_second) == ["a", "c"]
    assert [(d["cascade"], d["restart_identity"]) for d in in_second] == [(True, True)] * 2
    last = truncates[-1]
    assert (last["table"], last["cascade"], last["restart_identity"]) == ("b", False, False)
    assert last["last"] is True
    assert last["subject"] == f"{cdc.subjects.cdc}.b.truncate"
    assert last["msg_id"] == message_id(last["lsn"], "b", "truncate", 0, last["epoch"])


@both_versions
async def test_what_was_rolled_back_gives_nothing(database, cdc, bridge_process):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge_process()
    with database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("SELECT pg_logical_emit_message(true, 'undone', 'x')")
        connection.rollback()
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("SAVEPOINT s")
        connection.execute("INSERT INTO t VALUES (3)")
        connection.execute("SAVEPOINT inner_s")
        connection.execute("INSERT INTO t VALUES (4)")
        connection.execute("RELEASE SAVEPOINT inner_s")
        connection.execute("ROLLBACK TO SAVEPOINT s")
        connection.execute("INSERT INTO t VALUES (5)")
        connection.commit()
    await cdc.settle()
    events = await cdc.changes("t")
    assert [(e.data["id"], e.seq, e.last) for e in events] == [(2, 0, False), (5, 1, True)]
    assert await cdc.messages("undone") == []


@both_versions
async def test_transactions_of_concurrent_writers_arrive_whole_and_in_commit_order(
    database, cdc, bridge_process
):
    database.execute(
        """
        CREATE TABLE log (id bigserial PRIMARY KEY, writer int, n int);
        CREATE TABLE turn (one bool PRIMARY KEY, holder int);
        INSERT INTO turn VALUES (true, 0);
        """
    )
    database.publish("log", "turn")
    bridge_process()
    committed: list[tuple[int, int]] = []

    def write(writer: int) -> None:
        with database.connect(autocommit=False) as connection:
            for n in range(15):
                connection.execute("INSERT INTO log (writer, n) VALUES (%s, %s)", [writer, n])
                connection.execute("INSERT INTO log (writer, n) VALUES (%s, %s)", [writer, n])
                # The row lock is held until the commit record is written: it defines an order.
                connection.execute("UPDATE turn SET holder = %s", [writer * 1000 + n])
                connection.execute("INSERT INTO log (writer, n) VALUES (%s, %s)", [writer, n])
                committed.append((writer, n))
                connection.commit()

    writers = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for writer in writers:
        writer.start()
    await asyncio.gather(*(asyncio.to_thread(writer.join) for writer in writers))
    await cdc.settle()
    events = await cdc.changes()
    assert len(events) == 4 * 15 * 4
    transactions = [events[start : start + 4] for start in range(0, len(events), 4)]
    for transaction in transactions:
        assert len({e.xid for e in transaction}) == len({e.commit_lsn for e in transaction}) == 1
        assert [e.seq for e in transaction] == [0, 1, 2, 3]
        assert [e.last for e in transaction] == [False, False, False, True]
        assert [e.table for e in transaction] == ["log", "log", "turn", "log"]
    found = [(t[0].data["writer"], t[0].data["n"]) for t in transactions]
    assert found == committed
    positions = [e.position for e in events]
    assert positions == sorted(set(positions))


@both_versions
async def test_a_transaction_over_three_tables_ends_once_for_each(database, cdc, bridge_process):
    database.execute(
        """
        CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY);
        CREATE SCHEMA s; CREATE TABLE s.c (id int PRIMARY KEY);
        """
    )
    database.publish("a", "b", "s.c")
    bridge_process()
    database.execute(
        """
        INSERT INTO b VALUES (1), (2); INSERT INTO s.c VALUES (1);
        INSERT INTO a VALUES (1); UPDATE b SET id = 3 WHERE id = 1; DELETE FROM s.c
        """
    )
    database.execute("INSERT INTO a VALUES (2)")
    await cdc.settle()
    documents = [o.document for o in await cdc.of_tables() if o.document["operation"] != "SCHEMA"]
    first = [d for d in documents if d["lsn"] == documents[0]["lsn"]]
    assert [(d["operation"], d["table"], d["seq"], d.get("last")) for d in first] == [
        ("INSERT", "b", 0, None), ("INSERT", "b", 1, None), ("INSERT", "c", 2, None),
        ("INSERT", "a", 3, None), ("UPDATE", "b", 4, None), ("DELETE", "c", 5, True),
        ("COMMIT", "b", 6, None), ("COMMIT", "a", 7, None),
    ]  # fmt: skip
    prefix = cdc.subjects.cdc
    commits = first[-2:]
    assert [d["subject"] for d in commits] == [f"{prefix}.b.commit", f"{prefix}.a.commit"]
    for document in commits:
        assert document["tables"] == ["b", "s.c", "a"]
        assert document["changes"] == 6
        assert document["end_lsn"] == first[5]["end_lsn"]
        assert document["msg_id"] == message_id(
            document["lsn"], document["table"], "commit", document["seq"], document["epoch"]
        )
        shared = ("xid", "ts", "epoch", "source", "lsn", "v")
        assert [document[key] for key in shared] == [first[0][key] for key in shared]
    # A transaction of one table needs no commit message.
    [alone] = [d for d in documents if d["lsn"] != documents[0]["lsn"]]
    assert (alone["operation"], alone["seq"], alone["last"]) == ("INSERT", 0, True)
    # Whoever reads one table by its filter sees the end exactly once.
    for token in ("a", "b", "s.c"):
        ends = [
            d
            for d in (o.document for o in await cdc.of_table(token))
            if d["lsn"] == first[0]["lsn"] and ("last" in d or d["operation"] == "COMMIT")
        ]
        assert len(ends) == 1, token


@pytest.mark.parametrize("flags", [(), ("--pack",), ("--json",)], ids=["plain", "pack", "json"])
async def test_a_row_beyond_max_payload_travels_by_reference(
    database, cdc, bridge_process, nats_client, flags
):
    database.execute(
        """
        CREATE TABLE big (id int PRIMARY KEY, body text, n int);
        ALTER TABLE big REPLICA IDENTITY FULL;
        """
    )
    database.publish("big")
    bridge_process(*flags)
    body = "x" * 1_100_000
    with database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO big VALUES (1, 'small', 0)")
        connection.execute("INSERT INTO big VALUES (2, %s, 0)", [body])
        connection.execute("INSERT INTO big VALUES (3, 'small', 0)")
        connection.execute("UPDATE big SET n = 1 WHERE id = 2")
        connection.commit()
    await cdc.settle()
    events = await cdc.changes("big")
    assert [(e.operation, e.seq, e.last) for e in events] == [
        ("INSERT", 0, False), ("INSERT", 1, False), ("INSERT", 2, False), ("UPDATE", 3, True),
    ]  # fmt: skip
    assert [e.data for e in events if e.ref is None] == [
        {"id": 1, "body": "small", "n": 0},
        {"id": 3, "body": "small", "n": 0},
    ]
    store = await nats_client.jetstream().object_store(cdc.subjects.objects_bucket)
    rows = []
    for event in events:
        if event.ref is None:
            continue
        assert event.data is None
        assert event.old is None
        assert set(event.ref) == {"bucket", "name", "size", "sha256"}
        assert event.ref["bucket"] == cdc.subjects.objects_bucket
        content = (await store.get(event.ref["name"])).data
        assert len(content) == event.ref["size"]
        assert hashlib.sha256(content).hexdigest() == event.ref["sha256"]
        kind = "application/json" if "--json" in flags else "application/msgpack"
        rows.append(decode_payload({"Content-Type": kind}, content, versioned=False))
    assert rows[0] == {"data": {"id": 2, "body": body, "n": 0}}
    assert rows[1] == {
        "data": {"id": 2, "n": 1},
        "old": {"id": 2, "body": body, "n": 0},
        "unchanged": ["body"],
    }
