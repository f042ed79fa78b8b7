"""Every break in the history of a source is announced: exit 4, or a new epoch with the reason.

Where the history is unbroken, no gap is announced.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress

import nats.js.errors
import psycopg
import pytest

from consumer_sdk.wire import decode_payload
from tests.fault.nats_store import drop_last_messages
from tests.fault.scenario import Scenario, create_stream
from tests.fixtures.postgres import Database
from tests.fixtures.waiting import eventually

TABLE = "CREATE TABLE t (id bigserial PRIMARY KEY, body text)"


async def _streamed(scenario, rows=20):
    """A bridge that has streamed some rows and is still running."""
    scenario.database.execute(TABLE)
    scenario.database.publish("t")
    bridge = scenario.bridge()
    _write(scenario, rows)
    await scenario.drained()
    return bridge


def _write(scenario, rows=1, body="x"):
    with psycopg.connect(scenario.database.dsn) as connection:
        connection.execute(
            "INSERT INTO t (body) SELECT %s FROM generate_series(1, %s)", [body, rows]
        )


def _stop(bridge):
    bridge.terminate()
    assert bridge.wait() == 0


async def _announces(scenario, reason, refusal=None):
    """Exit 4 with the reason; then, with --on-gap=new-epoch, a record of a new epoch with it."""
    refused = scenario.bridge(wait=False)
    assert refused.wait(40) == 4
    assert (refusal or reason) in refused.log_text()
    assert "--on-gap=new-epoch" in refused.log_text()
    bridge = scenario.bridge("--on-gap", "new-epoch")
    _write(scenario, 3, "after the gap")
    await scenario.drained()
    source = (await scenario.history()).sources[scenario.slot]
    (gap,) = source.gaps
    assert reason in gap["reason"]
    assert gap["previous_epoch"] < source.epochs[-1]
    newest = [e for e in source.events if e.epoch == source.epochs[-1]]
    assert [e.data["body"] for e in newest][-3:] == ["after the gap"] * 3
    kept = await _kept_progress(scenario)
    assert kept["epoch"] == source.epochs[-1]
    bridge.kill()
    return source


async def _kept_progress(scenario):
    bucket = await scenario.client.jetstream().key_value(scenario.subjects.bridge_bucket)
    entry = await bucket.get(f"progress.{scenario.slot}")
    return decode_payload(None, entry.value or b"")


async def _continues(scenario, *, all_rows=True):
    """A bridge continues in the same epoch, with every row once."""
    bridge = scenario.bridge()
    _write(scenario, 5, "later")
    await scenario.drained()
    source = (await scenario.history()).sources[scenario.slot]
    assert source.gaps == []
    assert len(source.epochs) == 1
    ids = [event.data["id"] for event in source.events]
    assert len(ids) == len(set(ids))
    assert [event.data["body"] for event in source.events][-5:] == ["later"] * 5
    if all_rows:
        assert ids == [row[0] for row in scenario.database.execute("SELECT id FROM t ORDER BY id")]
    return bridge


async def test_a_slot_dropped_and_recreated_is_announced(scenario):
    _stop(await _streamed(scenario))
    scenario.database.execute("SELECT pg_drop_replication_slot(%s)", [scenario.slot])
    _write(scenario, 5, "lost")
    await _announces(scenario, "the slot was gone")
    # After the gap the history is unbroken.
    scenario.bridge()
    _write(scenario)
    await scenario.drained()
    assert len((await scenario.history()).sources[scenario.slot].gaps) == 1


async def test_a_slot_advanced_by_hand_is_announced(scenario):
    _stop(await _streamed(scenario))
    _write(scenario, 5, "lost")
    scenario.database.execute(
        "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [scenario.slot]
    )
    await _announces(scenario, "the slot stands at")


async def test_a_stream_deleted_while_stopped_is_announced(scenario):
    _stop(await _streamed(scenario))
    await scenario.client.jsm().delete_stream(scenario.subjects.cdc_stream)
    gone = f"stream {scenario.subjects.cdc_stream} is gone"
    await _announces(scenario, "deleted and created again", refusal=gone)


@pytest.mark.parametrize("recreated", [False, True], ids=["deleted", "recreated"])
async def test_a_stream_deleted_while_streaming_is_announced(scenario, recreated):
    bridge = await _streamed(scenario)
    await scenario.client.jsm().delete_stream(scenario.subjects.cdc_stream)
    if recreated:
        await create_stream(scenario)
    _write(scenario)
    assert bridge.wait(60) == 4
    assert ("deleted and created again" if recreated else "is gone") in bridge.log_text()


async def test_a_stream_purged_while_stopped_is_no_gap(scenario):
    _stop(await _streamed(scenario))
    await scenario.client.jsm().purge_stream(scenario.subjects.cdc_stream)
    await _continues(scenario, all_rows=False)


async def test_a_stream_purged_while_streaming_is_no_gap(scenario):
    bridge = await _streamed(scenario)
    await scenario.client.jsm().purge_stream(scenario.subjects.cdc_stream)
    _write(scenario, 5, "at once")
    await scenario.drained()
    source = (await scenario.history()).sources[scenario.slot]
    assert [event.data["body"] for event in source.events] == ["at once"] * 5
    assert bridge.ready()
    bridge.kill()
    await _continues(scenario, all_rows=False)


@pytest.mark.parametrize("purged", [False, True], ids=["kept", "purged"])
async def test_a_slot_that_sends_everything_again_repeats_nothing(scenario, purged):
    """The slot is far behind the stored changes; after a purge only KV records them."""
    _stop(await _streamed(scenario, 5))
    database, slot = scenario.database, scenario.slot
    database.execute("SELECT pg_copy_logical_replication_slot(%s, 'behind')", [slot])
    bridge = scenario.bridge()
    _write(scenario, 20, "stored before")
    await scenario.drained()
    _stop(bridge)
    database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    database.execute("SELECT pg_copy_logical_replication_slot('behind', %s)", [slot])
    if purged:
        await scenario.client.jsm().purge_stream(scenario.subjects.cdc_stream)
    await _continues(scenario, all_rows=not purged)
    if purged:
        source = (await scenario.history()).sources[slot]
        assert {event.data["body"] for event in source.events} == {"later"}


async def test_a_deleted_kv_bucket_is_no_gap(scenario):
    bridge = await _streamed(scenario)
    bridge.kill()
    await scenario.client.jetstream().delete_key_value(scenario.subjects.bridge_bucket)
    await _continues(scenario)


async def test_buckets_deleted_while_streaming_come_back_with_what_was_in_them(scenario):
    """Without further changes, a new reader finds schemas, and a restart finds its record."""
    await _streamed(scenario)
    js, names = scenario.client.jetstream(), scenario.subjects
    for bucket in (names.bridge_bucket, names.schemas_bucket):
        await js.delete_key_value(bucket)

    async def restored():
        with suppress(nats.js.errors.NotFoundError, nats.js.errors.KeyNotFoundError):
            schemas = await js.key_value(names.schemas_bucket)
            return await schemas.get("t") and await _kept_progress(scenario)

    await eventually(restored, 60, "the buckets are back")
    source = (await scenario.history()).sources[scenario.slot]
    assert (len(source.epochs), source.gaps) == (1, [])


async def test_another_publication_at_a_clean_point_is_no_gap(scenario):
    _stop(await _streamed(scenario))
    scenario.database.publish("t", name="other")
    bridge = scenario.bridge(pub="other")
    _write(scenario)
    await scenario.drained()
    assert (await scenario.history()).sources[scenario.slot].gaps == []
    assert bridge.ready()


async def test_another_publication_in_the_middle_is_announced(scenario, holds):
    bridge = await _streamed(scenario)
    holds.kill("after-ack-before-confirm")
    _write(scenario, 5, "stored, not confirmed")
    bridge.wait(30)
    holds.spare("after-ack-before-confirm")
    scenario.database.publish("t", name="other")
    refused = scenario.bridge(pub="other", wait=False)
    assert refused.wait(40) == 4
    assert "the publication changed" in refused.log_text()
    await _continues(scenario)


@pytest.fixture
async def movable(own_postgres, prefix, nats_server, nats_client, bridge_process):
    """A scenario on a private PostgreSQL, which a test may restore from a backup."""
    server = own_postgres(
        settings={"max_slot_wal_keep_size": "32MB", "min_wal_size": "32MB", "max_wal_size": "48MB"}
    )
    server.create_database("shop")
    return Scenario(
        Database(server, "shop"),
        prefix,
        nats_server.bridge_url,
        nats_client,
        lambda *flags, **options: bridge_process(
            *flags, **{"database_url": server.dsn("shop"), **options}
        ),
        slot="shop",
    )


def _copy(source, target):
    subprocess.run(["rm", "-rf", str(target)], check=True)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


@pytest.mark.parametrize("overtaken", [False, True], ids=["behind", "overtaken"])
async def test_a_database_restored_from_an_older_copy_is_announced(movable, overtaken):
    scenario, server = movable, movable.database.server
    _stop(await _streamed(scenario))
    server.stop()
    data, copy = server.directory / "data", server.directory / "copy"
    _copy(data, copy)
    server.start()
    bridge = scenario.bridge()
    _write(scenario, 20, "of a history that never was")
    await scenario.drained()
    _stop(bridge)
    server.stop(mode="immediate")
    _copy(copy, data)
    server.start()
    _write(scenario, 5, "after the restore")
    if overtaken:
        _write(scenario, 500, "until the log is longer than it was")
    reason = "history at" if overtaken else "restored from a backup?"
    source = await _announces(scenario, reason)
    newest = [e.data["body"] for e in source.events if e.epoch == source.epochs[-1]]
    assert newest.count("after the restore") == 5


async def test_a_slot_that_lost_its_log_is_announced(movable):
    scenario, server = movable, movable.database.server
    _stop(await _streamed(scenario))
    with psycopg.connect(server.dsn("shop"), autocommit=True) as connection:
        for _ in range(6):
            connection.execute(
                "SELECT pg_logical_emit_message(false, 'fill', repeat('x', 8000000))"
            )
            connection.execute("SELECT pg_switch_wal()")
            connection.execute("CHECKPOINT")
    slot = scenario.database.slot(scenario.slot)
    assert slot["wal_status"] == "lost"
    refused = scenario.bridge(wait=False)
    assert refused.wait(40) == 4
    bridge = scenario.bridge("--on-gap", "new-epoch")
    _write(scenario, 3, "after the gap")
    await scenario.drained()
    source = (await scenario.history()).sources[scenario.slot]
    assert len(source.epochs) == 2
    assert len(source.gaps) == 1
    assert [e.data["body"] for e in source.events][-3:] == ["after the gap"] * 3
    assert bridge.ready()


async def test_a_stream_that_lost_acknowledged_messages_is_announced(scenario_on):
    """After a power cut, NATS starts without the messages that it had not synced."""
    scenario, server = await scenario_on()
    _stop(await _streamed(scenario))
    server.kill()
    drop_last_messages(server, scenario.subjects.cdc_stream, 3)
    server.start()
    await eventually(lambda: scenario.client.is_connected)
    refused = scenario.bridge(wait=False)
    assert refused.wait(40) == 4
    assert "the CDC stream" in refused.log_text()


@pytest.mark.parametrize("written", ["meanwhile", "afterwards"])
async def test_a_stream_that_lost_its_tail_while_streaming_is_not_written_to(scenario_on, written):
    scenario, server = await scenario_on()
    bridge = await _streamed(scenario)
    server.kill()
    drop_last_messages(server, scenario.subjects.cdc_stream, 3)
    if written == "meanwhile":
        _write(scenario, 5, written)
    server.start()
    if written == "afterwards":
        await eventually(lambda: bridge.status()["nats_reconnect_count"])
        _write(scenario, 5, written)
    assert bridge.wait(60) == 4
    assert "the CDC stream" in bridge.log_text()
