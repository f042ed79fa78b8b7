"""Stops, restarts and the small commands: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
import threading

import pytest

from bridge.cli import COMMANDS, main
from consumer_sdk.transport.version import __version__
from consumer_sdk.wire import parse_lsn
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import eventually, wait_until

SLOT_LSN = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"


def create(database):
    database.execute("CREATE TABLE t (id bigserial PRIMARY KEY, a text)")
    database.publish("t")


def write(database, transactions, rows=10):
    """Commit so many transactions of so many rows."""
    with database.connect() as connection:
        for _ in range(transactions):
            connection.execute(
                f"INSERT INTO t (a) SELECT 'row ' || n FROM generate_series(1, {rows}) n"
            )


async def assert_exactly_once(database, cdc):
    """The stream holds every row of the table once, in order, and nothing else."""
    await cdc.settle(60)
    events = await cdc.changes("t")
    wanted = database.execute("SELECT id, a FROM t ORDER BY id")
    assert [(e.data["id"], e.data["a"]) for e in events] == wanted
    assert len({e.epoch for e in events}) == 1
    positions = [e.position for e in events]
    assert positions == sorted(set(positions))
    return events


@pytest.mark.parametrize(
    ("pg", "flags"),
    [(18, ()), (16, ()), (18, ("--pack",))],
    indirect=["pg"],
    ids=["pg18", "pg16", "pg18-pack"],
)
async def test_rows_written_while_the_bridge_is_stopped_arrive_exactly_once(
    database, cdc, bridge_process, flags
):
    create(database)
    bridge = bridge_process(*flags)
    write(database, 3)
    bridge.terminate()
    write(database, 3)
    assert bridge.wait() == 0
    write(database, 3)
    bridge = bridge_process(*flags)
    write(database, 20, rows=200)
    bridge.kill()
    write(database, 3)
    bridge_process(*flags)
    write(database, 3)
    events = await assert_exactly_once(database, cdc)
    assert len(events) == 15 * 10 + 20 * 200


@both_versions
async def test_restarts_of_postgresql_lose_nothing_and_are_counted(
    database, cdc, pg, bridge_process
):
    create(database)
    bridge = bridge_process()
    write(database, 3)
    pg.restart()
    write(database, 30)
    wait_until(lambda: bridge.status()["reconnect_count"] == 1, 30)
    # A crash right behind a commit: what was not confirmed comes again.
    write(database, 5)
    pg.kill()
    assert bridge.http("/health").status == 200
    wait_until(lambda: not bridge.ready())
    pg.start()
    write(database, 5)
    bridge.wait_ready()
    write(database, 5)
    await assert_exactly_once(database, cdc)
    status = bridge.status()
    assert status["reconnect_count"] == 2
    assert status["nats_reconnect_count"] == 0
    assert status["is_connected"] is True
    assert status["last_error"] is None


async def test_restarts_of_nats_lose_nothing_and_are_counted(
    database, cdc, nats_server, bridge_process
):
    create(database)
    bridge = bridge_process()
    stop = threading.Event()

    def keep_writing():
        while not stop.is_set():
            write(database, 1)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for count in (1, 2):
            published = bridge.status()["cdc_events_published"]
            wait_until(lambda before=published: bridge.status()["cdc_events_published"] > before)
            nats_server.restart()
            wait_until(lambda n=count: bridge.status()["nats_reconnect_count"] == n, 30)
    finally:
        stop.set()
        writer.join()
    await eventually(lambda: cdc.client.is_connected)
    await assert_exactly_once(database, cdc)
    assert bridge.ready()
    assert bridge.status()["nats_connected"] is True


async def test_sigterm_drains_confirms_and_sums_up(database, cdc, bridge_process):
    create(database)
    bridge = bridge_process()
    write(database, 10, rows=300)
    await eventually(lambda: bridge.status()["cdc_events_published"] == 3000)
    bridge.terminate()
    assert bridge.wait() == 0
    [last] = (await cdc.changes("t"))[-1:]
    slot = f"slot_{database.name}"
    # Confirmed up to the end of the last commit, and the slot is free.
    assert parse_lsn(database.value(SLOT_LSN, [slot])) >= last.end_lsn
    assert not database.slot(slot)["active"]
    log = bridge.log_text()
    assert "event=stopping" in log
    summary = next(line for line in log.splitlines() if "event=stopped" in line)
    assert " events=3000 " in summary
    confirmed = summary.partition("confirmed_lsn=")[2].split()[0]
    assert parse_lsn(confirmed) >= last.end_lsn
    assert "Traceback" not in log
    # Nothing is left to do for the next one.
    again = bridge_process()
    await assert_exactly_once(database, cdc)
    assert again.status()["cdc_events_published"] <= 1


async def test_a_stop_in_the_middle_of_a_backlog_confirms_only_what_is_stored(
    database, cdc, bridge_process
):
    create(database)
    first = bridge_process("--ring-bytes", "64KB", "--batch-events", "50")
    first.terminate()
    assert first.wait() == 0
    write(database, 40, rows=500)
    bridge = bridge_process("--ring-bytes", "64KB", "--batch-events", "50")
    await eventually(lambda: bridge.status()["cdc_events_published"] > 100)
    bridge.interrupt()
    assert bridge.wait() == 0
    stored = await cdc.changes("t")
    confirmed = parse_lsn(database.value(SLOT_LSN, [f"slot_{database.name}"]))
    ends = [e.end_lsn for e in stored if e.last]
    assert confirmed <= max(ends, default=stored[0].commit_lsn)
    assert len(stored) < 40 * 500
    bridge_process()
    await assert_exactly_once(database, cdc)


async def test_a_second_signal_forces_the_end(database, nats_server, bridge_process, tcp_proxy):
    create(database)
    to_nats = tcp_proxy(nats_server.port)
    bridge = bridge_process(
        "--drain-timeout", "60s", nats_url=to_nats.through(nats_server.bridge_url)
    )
    to_nats.deaf()
    write(database, 3)
    wait_until(lambda: bridge.status()["wal_messages_received"] >= 30)
    bridge.terminate()
    bridge.wait_logged("event=stopping")
    # It drains as long as it may, and NATS does not answer.
    assert bridge.running
    bridge.terminate()
    assert bridge.wait(5) == 130
    assert "forced to stop" in bridge.log_text()


async def test_a_drain_that_cannot_end_is_given_up_in_time(
    database, cdc, nats_server, bridge_process, tcp_proxy
):
    create(database)
    to_nats = tcp_proxy(nats_server.port)
    bridge = bridge_process(
        "--drain-timeout", "1s", nats_url=to_nats.through(nats_server.bridge_url)
    )
    to_nats.deaf()
    write(database, 3)
    wait_until(lambda: bridge.status()["wal_messages_received"] >= 30)
    bridge.terminate()
    assert bridge.wait(15) == 0
    bridge_process()
    await assert_exactly_once(database, cdc)


async def test_drop_ends_a_source_and_only_on_request(database, cdc, bridge_process, run_command):
    create(database)
    bridge = bridge_process()
    await eventually(lambda: cdc.schema("t"))
    slot = f"slot_{database.name}"
    prefix = cdc.subjects.prefix

    def drop(*flags):
        return run_command("bridge", "drop", "--slot", slot, "--prefix", prefix, *flags,
                           environment={"DATABASE_URL": database.dsn,
                                        "NATS_URL": cdc.client.connected_url.geturl()})  # fmt: skip

    unasked = drop()
    assert unasked.returncode == 2
    assert "add --yes" in unasked.stderr
    in_use = drop("--yes")
    assert in_use.returncode == 3
    assert "in use" in in_use.stderr
    assert "stop that bridge first" in in_use.stderr
    assert bridge.running
    bridge.terminate()
    assert bridge.wait() == 0
    done = drop("--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"slot {slot} dropped" in done.stdout
    assert database.slot(slot) is None
    assert await cdc.schema("t") is None
    gone = drop("--yes")
    assert gone.returncode == 0
    assert "does not exist" in gone.stdout
    # The table is free for another source.
    bridge_process(slot=f"next_{database.name}")
    write(database, 1)
    await eventually(lambda: cdc.changes("t"))
    assert {e.source for e in await cdc.changes("t")} == {f"next_{database.name}"}


def test_drop_without_postgresql_or_nats_says_so(database, run_command, nats_server):
    slot = f"slot_{database.name}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    nowhere = {"DATABASE_URL": "postgresql://u@127.0.0.1:1/d"}
    failed = run_command("bridge", "drop", "--slot", slot, "--yes", environment=nowhere)
    assert failed.returncode == 3
    assert "start PostgreSQL or correct its address" in failed.stderr
    assert "Traceback" not in failed.stderr
    # The slot is what fills the disk: it goes also while NATS is away.
    away = {"NATS_URL": "nats://127.0.0.1:1"}
    done = run_command("bridge", "drop", "--slot", slot, "--yes", environment=away)
    assert done.returncode == 0
    assert "not released on NATS" in done.stdout
    assert database.slot(slot) is None


def test_config_shows_every_setting_and_its_origin(run_command, tmp_path):
    path = tmp_path / "bridge.toml"
    path.write_text('pub = "from_file"\nnats_password = "hidden-Word"\n')
    environment = {"BRIDGE_SLOT": "from_env", "DATABASE_URL": "postgresql://u:hidden-Word@h/d"}
    arguments = ("config", "--port", "7", "--config", str(path))
    shown = run_command("bridge", *arguments, environment=environment)
    assert shown.returncode == 0
    lines = {line.split()[0]: line for line in shown.stdout.splitlines()}
    assert lines["slot"].split(maxsplit=2)[1:] == ["from_env", "environment BRIDGE_SLOT"]
    assert lines["pub"].split(maxsplit=2)[1:] == ["from_file", f"file {path}"]
    assert lines["port"].split(maxsplit=2)[1:] == ["7", "flag --port"]
    assert lines["database_url"].split(maxsplit=2)[1:] == ["***", "environment DATABASE_URL"]
    assert "hidden-Word" not in shown.stdout
    as_json = run_command("bridge", *arguments, "--as-json", environment=environment)
    document = json.loads(as_json.stdout)
    assert document["nats_password"] == {"value": "***", "origin": f"file {path}"}
    assert document["batch_events"] == {"value": "500", "origin": "default"}
    assert set(document) == set(lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_version_everywhere(capsys, name):
    command = [] if name == "run" else [name]
    for flag, wanted in (("--help", f"usage: bridge {' '.join(command)}".rstrip()), (
        "--version", f"tailrace {__version__}\n"
    )):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main([*command, flag])
        assert ended.value.code == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(wanted)
        assert printed.err == ""


def test_the_installed_command_and_the_module_are_the_same(run_command):
    assert run_command("bridge", "--version").stdout == f"tailrace {__version__}\n"
    assert run_command("python", "-m", "bridge", "--version").stdout == f"tailrace {__version__}\n"


@both_versions
async def test_a_locked_table_keeps_nobody_from_streaming_the_others(database, cdc, bridge_process):
    create(database)
    database.execute("CREATE TYPE mood AS ENUM ('glad', 'sad')")
    database.execute("CREATE TABLE other (id int PRIMARY KEY, mood mood)")
    database.execute("ALTER PUBLICATION pub ADD TABLE other")
    bridge = bridge_process()
    await eventually(lambda: cdc.kept_coverage(f"slot_{database.name}"))
    bridge.terminate()
    assert bridge.wait() == 0
    with database.connect(autocommit=False) as holder:
        holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        bridge_process(ready_timeout=10)
        database.execute("INSERT INTO other VALUES (1, 'glad')")

        async def arrived():
            return [event.data for event in await cdc.changes("other")]

        assert await eventually(arrived, 10) == [{"id": 1, "mood": "glad"}]


@both_versions
async def test_a_row_of_another_structure_waits_for_no_lock_on_its_table(
    database, cdc, bridge_process
):
    """Nobody but the log is asked for it, and the catalog for what takes no lock."""
    create(database)
    bridge = bridge_process()
    await eventually(lambda: cdc.kept_coverage(f"slot_{database.name}"))
    bridge.terminate()
    assert bridge.wait() == 0
    database.execute("ALTER TABLE t ADD COLUMN more int DEFAULT 5")
    database.execute("INSERT INTO t (id) VALUES (77)")
    with database.connect(autocommit=False) as holder:
        holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        bridge_process(ready_timeout=10)

        async def arrived():
            return [event.data["more"] for event in await cdc.changes("t") if "more" in event.data]

        assert await eventually(arrived, 10) == [5]
        (column,) = [c for c in (await cdc.schema("t"))["columns"] if c["name"] == "more"]
        assert column["column_default"] == "5"
