"""Where continuity is lost the bridge stops with 4, or goes on in an epoch that says so."""

from __future__ import annotations

import psycopg
import pytest

from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import eventually, wait_until


def create(database):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")


async def stop_after_one_row(database, cdc, bridge_process):
    """A bridge that has stored row 1 and was stopped in good order; its epoch."""
    create(database)
    bridge = bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    epoch = bridge.status()["epoch"]
    bridge.terminate()
    assert bridge.wait() == 0
    return epoch


async def _keeps_epoch(cdc, slot, epoch):
    kept = await cdc.kept_progress(slot)
    return kept is not None and kept["epoch"] == epoch


def assert_at_risk(bridge, *texts):
    assert bridge.wait() == 4
    complaint = bridge.log_text().splitlines()[-1]
    assert complaint.startswith("bridge: ")
    assert "--on-gap=new-epoch" in complaint
    for text in texts:
        assert text in complaint
    assert "Traceback" not in bridge.log_text()


@both_versions
async def test_a_slot_ahead_of_the_record_is_never_passed_over_in_silence(
    database, cdc, bridge_process
):
    epoch = await stop_after_one_row(database, cdc, bridge_process)
    slot = f"slot_{database.name}"
    database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    database.execute("INSERT INTO t VALUES (2)")
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    before = [one.document for one in await cdc.of_table("t")]
    kept = await cdc.kept_progress(slot)
    for _ in range(2):
        refusing = bridge_process(wait=False)
        assert_at_risk(refusing, "the slot stands at", "the stream records only up to")
    # Refusing leaves no trace that a reader could take for progress.
    assert [one.document for one in await cdc.of_table("t")] == before
    assert await cdc.kept_progress(slot) == kept
    bridge = bridge_process("--on-gap=new-epoch")
    database.execute("INSERT INTO t VALUES (3)")
    await cdc.settle()
    events = await cdc.changes("t")
    assert [(e.data["id"], e.epoch > epoch) for e in events] == [(1, False), (3, True)]
    assert events[-1].epoch == bridge.status()["epoch"]
    gaps = [record for record in await cdc.progress() if record["gap"] is not None]
    assert len(gaps) == 1
    assert gaps[0]["epoch"] == events[-1].epoch
    assert "the slot stands at" in gaps[0]["gap"]["reason"]
    assert gaps[0]["gap"]["previous_epoch"] == epoch
    # Readers of the new epoch find its schema in the stream and in KV.
    schemas = [o.document for o in await cdc.of_table("t") if o.document["operation"] == "SCHEMA"]
    assert [d["epoch"] for d in schemas] == [epoch, events[-1].epoch]
    assert (await cdc.schema("t"))["epoch"] == events[-1].epoch
    await eventually(lambda: _keeps_epoch(cdc, slot, events[-1].epoch))
    # The flag stays on the command line of a supervisor: no second gap without a second reason.
    bridge.terminate()
    assert bridge.wait() == 0
    again = bridge_process("--on-gap=new-epoch")
    assert again.status()["epoch"] == events[-1].epoch


@pytest.mark.parametrize("how", ["delete", "purge"])
async def test_a_stream_that_lost_what_it_held_is_noticed(database, cdc, bridge_process, how):
    epoch = await stop_after_one_row(database, cdc, bridge_process)
    js = cdc.client.jetstream()
    if how == "delete":
        await js.delete_stream(cdc.subjects.cdc_stream)
        assert_at_risk(bridge_process(wait=False), f"stream {cdc.subjects.cdc_stream} is gone")
        bridge = bridge_process("--on-gap=new-epoch")
        assert bridge.status()["epoch"] > epoch
    else:
        # What is purged was stored and confirmed: consumers notice, the source goes on.
        await js.purge_stream(cdc.subjects.cdc_stream)
        bridge = bridge_process()
        assert bridge.status()["epoch"] == epoch
    database.execute("INSERT INTO t VALUES (2)")
    await cdc.settle()
    assert [(e.data["id"], e.epoch) for e in await cdc.changes("t")] == [
        (2, bridge.status()["epoch"])
    ]


async def test_a_lost_slot_is_replaced_only_on_request(own_postgres, cdc, bridge_process):
    server = own_postgres(18, settings={"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE filler (a text)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE t")
        first = bridge_process(database_url=server.dsn(), slot="lossy")
        connection.execute("INSERT INTO t VALUES (1)")
        wait_until(lambda: first.status()["cdc_events_published"] == 1)
        epoch = first.status()["epoch"]
        first.kill()
        lost = "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = 'lossy'"

        def is_lost():
            connection.execute(
                "INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 20000)"
            )
            connection.execute("SELECT pg_switch_wal()")
            connection.execute("CHECKPOINT")
            return connection.execute(lost).fetchone()[0]

        wait_until(is_lost, 60)
        assert_at_risk(
            bridge_process(wait=False, database_url=server.dsn(), slot="lossy"), "slot lossy"
        )
        assert connection.execute(lost).fetchone()[0]
        bridge = bridge_process("--on-gap=new-epoch", database_url=server.dsn(), slot="lossy")
        assert bridge.status()["epoch"] > epoch
        connection.execute("INSERT INTO t VALUES (2)")
        wait_until(lambda: bridge.status()["cdc_events_published"] == 1)
    assert [e.data["id"] for e in await cdc.changes("t")] == [1, 2]
    assert any(record["gap"] for record in await cdc.progress())
