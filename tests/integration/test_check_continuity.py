"""`bridge check` says beforehand where the start would exit with code 4, and changes nothing."""

from __future__ import annotations

import json
import threading

import psycopg
import pytest

from bridge.jetstream.streams import api
from bridge.preflight.continuity import check_continuity, read_slot_position
from bridge.preflight.postgres import connect_for_check
from consumer_sdk.wire.envelope import encode
from tests.fixtures.postgres import both_versions


@pytest.fixture
def slot(database):
    return f"slot_{database.name}"


@pytest.fixture
def check(run_command, slot, prefix):
    """Run `bridge check`: exit code, and its findings on continuity."""

    def run(*flags, **environment):
        answer = run_command(
            "bridge", "check", "--slot", slot, "--pub", "pub", "--prefix", prefix, "--json", *flags,
            environment=environment,
        )  # fmt: skip
        assert answer.stderr == ""
        found = json.loads(answer.stdout)["findings"]
        return answer.returncode, [one for one in found if one["code"] == "continuity"]

    return run


@pytest.fixture
async def recorded(database, cdc, bridge_process):
    """A source that was streamed and stopped in good order."""
    database.execute("CREATE TABLE t (id bigserial PRIMARY KEY, a text)")
    database.publish("t")
    bridge = bridge_process()
    database.execute("INSERT INTO t (a) VALUES ('one')")
    await cdc.settle()
    bridge.terminate()
    assert bridge.wait() == 0
    return database


def assert_foretold(check, bridge_process, *texts):
    """The check refuses with this reason, and the bridge indeed stops."""
    code, [finding] = check()
    assert (code, finding["severity"], finding["blocks"]) == (3, "problem", True)
    for text in texts:
        assert text in finding["what"]
    assert "exits with code 4" in finding["why"]
    assert "--on-gap=new-epoch" in finding["fix"]
    code, [finding] = check("--on-gap=new-epoch")
    assert (code, finding["severity"]) == (0, "warning")
    assert "bootstrap again" in finding["why"]
    assert bridge_process(wait=False).wait() == 4


async def state_of_all(database, cdc, slot):
    info = await api(cdc.client, f"STREAM.INFO.{cdc.subjects.cdc_stream}")
    position = database.slot(slot)["confirmed_flush_lsn"]
    return info["state"], await cdc.kept_progress(slot), position


async def test_a_source_that_continues_is_fine_and_left_as_it_is(recorded, cdc, check, slot):
    before = await state_of_all(recorded, cdc, slot)
    code, [finding] = check()
    assert (code, finding["severity"]) == (0, "ok")
    assert "continues what the stream records" in finding["what"]
    assert await state_of_all(recorded, cdc, slot) == before
    assert before[0]["consumer_count"] == 0


async def test_a_source_without_a_record_is_fine(database, check):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    code, [finding] = check()
    assert (code, finding["severity"]) == (0, "ok")
    assert "nothing is recorded" in finding["what"]


@both_versions
async def test_a_slot_ahead_of_the_record_is_found(recorded, check, bridge_process, slot):
    recorded.execute("INSERT INTO t (a) VALUES ('two')")
    recorded.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [slot])
    assert_foretold(check, bridge_process, "the slot stands at", "the stream records only up to")


async def test_a_dropped_slot_is_found(recorded, check, bridge_process, slot):
    recorded.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    assert_foretold(check, bridge_process, f"slot {slot} is gone")


async def test_a_deleted_stream_is_found(recorded, cdc, check, bridge_process):
    name = cdc.subjects.cdc_stream
    await cdc.client.jetstream().delete_stream(name)
    assert_foretold(check, bridge_process, f"stream {name} is gone")
    # The bridge has left it so.
    assert_foretold(check, bridge_process, f"stream {name} is gone")


async def test_a_stream_that_was_created_again_is_found(recorded, cdc, check, bridge_process):
    js = cdc.client.jetstream()
    config = (await js.stream_info(cdc.subjects.cdc_stream)).config
    await js.delete_stream(cdc.subjects.cdc_stream)
    await js.add_stream(config)
    assert_foretold(check, bridge_process, "the CDC stream was deleted and created again")


async def test_a_purged_stream_is_no_gap(recorded, cdc, check):
    await cdc.client.jetstream().purge_stream(cdc.subjects.cdc_stream)
    assert check()[0] == 0


async def test_a_record_in_the_stream_alone_is_enough(recorded, cdc, check, slot):
    await cdc.client.jetstream().delete_key_value(cdc.subjects.bridge_bucket)
    assert check()[0] == 0
    recorded.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    code, [finding] = check()
    assert code == 3
    assert "is gone" in finding["what"]


async def test_a_foreign_message_on_a_subject_does_not_hide_the_record(recorded, cdc, check, slot):
    await cdc.client.jetstream().publish(f"{cdc.subjects.cdc}.t.insert", b"not ours")
    assert check()[0] == 0
    recorded.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    assert check()[0] == 3


async def test_another_system_is_found(recorded, check, own_postgres):
    other = own_postgres(18)
    with psycopg.connect(other.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE t")
    code, [finding] = check(DATABASE_URL=other.dsn())
    assert code == 3
    assert "another PostgreSQL system" in finding["what"]


async def test_a_timeline_that_is_no_descendant_is_found(
    recorded, cdc, check, bridge_process, slot
):
    document = await cdc.kept_progress(slot)
    store = await cdc.client.jetstream().key_value(cdc.subjects.bridge_bucket)
    value = encode({**document, "timeline": 7}, as_json=False)
    await store.put(f"progress.{slot}", value)
    assert_foretold(check, bridge_process, "does not descend from timeline 7")


async def test_a_running_bridge_is_no_finding_however_much_it_writes(
    recorded, cdc, check, bridge_process, slot
):
    """Another source writes to the same stream, so that its messages come in between."""
    recorded.execute("CREATE TABLE other (id bigserial PRIMARY KEY)")
    recorded.publish("other", name="others")
    first = bridge_process()
    bridge_process(slot=f"{slot}_2", pub="others")
    stop = threading.Event()

    def keep_writing():
        with recorded.connect() as connection:
            while not stop.is_set():
                connection.execute("INSERT INTO t (a) VALUES ('more')")
                connection.execute("INSERT INTO other DEFAULT VALUES")

    writer = threading.Thread(target=keep_writing)
    writer.start()
    connection = await connect_for_check(recorded.dsn)
    try:
        async with connection:
            for _ in range(60):
                position = await read_slot_position(connection, slot)
                assert position.active
                [finding] = await check_continuity(
                    cdc.client, recorded.dsn, subjects=cdc.subjects, slot=slot, publication="pub",
                    position=position,
                )  # fmt: skip
                assert finding.severity == "ok", finding
        assert check()[0] == 0
        # Nor is the name of another publication, as long as everything may still be confirmed.
        recorded.publish("t", name="renamed")
        assert check("--pub", "renamed")[0] == 0
    finally:
        stop.set()
        writer.join()
    assert first.running
