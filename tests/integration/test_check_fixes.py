"""Fixes of `bridge check` that are commands of ours, another address or another version.

Each is carried out to the letter, and the check asked again. What cannot be provoked here: a
PostgreSQL older than 14, of which there are no wheels.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import nats
import psycopg
import pytest

from bridge.jetstream.streams import api
from consumer_sdk.wire import Subjects
from tests.fault.nats_binaries import OLDEST, TOO_OLD, nats_binary
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsServer, PostgresServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database


@pytest.fixture
def found(
    run_command: Callable[..., subprocess.CompletedProcess[str]],
    database: Database,
    nats_server: NatsServer,
    prefix: str,
) -> Callable[..., dict[str, dict[str, Any]]]:
    """What `bridge check` finds, by code, without what is in order."""

    def run(*flags: str, slot: str = f"slot_{database.name}", **environment: str) -> Any:
        ended = run_command(
            "bridge", "check", "--slot", slot, "--pub", "pub", "--prefix", prefix, "--json",
            *flags, environment=environment,
        )  # fmt: skip
        findings = json.loads(ended.stdout)["findings"]
        return {one["code"]: one for one in findings if one["severity"] != "ok"}

    return run


def create_users(database: Database) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.publish("users")


def test_a_slot_far_behind_catches_up_once_the_bridge_is_started(
    database: Database, bridge_process: Callable[..., BridgeProcess], found: Any
) -> None:
    create_users(database)
    slot = f"slot_{database.name}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    database.execute("INSERT INTO users SELECT n, repeat('x', 100) FROM generate_series(1, 999) n")
    finding = found("--wal-warning", "50KB")["slot-lag"]
    assert finding["fix"] == "start the bridge and let it catch up"
    bridge_process()
    wait_until(lambda: "slot-lag" not in found("--wal-warning", "50KB"), 60)


def test_a_table_of_a_retired_source_is_free_after_the_printed_drop(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    run_command: Callable[..., subprocess.CompletedProcess[str]],
    found: Any,
    prefix: str,
) -> None:
    create_users(database)
    retired, mine = f"retired_{database.name}", f"mine_{database.name}"
    bridge = bridge_process(slot=retired)
    database.execute("INSERT INTO users VALUES (1, 'x')")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)
    bridge.terminate()
    assert bridge.wait() == 0
    finding = found(slot=mine)["table-owned"]
    assert finding["blocks"]
    commands = [line for line in finding["fix"].splitlines() if not line.startswith("#")]
    assert commands == [f"bridge drop --slot {retired} --yes"]
    ended = run_command(*shlex.split(commands[0]), environment={"BRIDGE_PREFIX": prefix})
    assert ended.returncode == 0, ended.stderr
    assert database.slot(retired) is None
    assert "table-owned" not in found(slot=mine)
    bridge_process(slot=mine)


def test_a_standby_is_no_finding_once_the_primary_is_connected_to(
    own_postgres: Callable[..., PostgresServer], found: Any
) -> None:
    primary, standby = own_postgres(), own_postgres()
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE users (id int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE users")
    standby.stop()
    primary.stop()
    data = standby.directory / "data"
    subprocess.run(["rm", "-r", data], check=True)
    subprocess.run(["cp", "-a", primary.directory / "data", data], check=True)
    primary.start()
    (data / "standby.signal").touch()
    standby.settings["primary_conninfo"] = primary.dsn()
    standby.start()
    address = standby.dsn(password=primary.password)
    finding = found(DATABASE_URL=address)["standby"]
    assert finding["fix"] == "connect to the primary: set PG_HOST or DATABASE_URL"
    assert "standby" not in found(DATABASE_URL=primary.dsn())


async def test_another_prefix_is_used_where_the_stream_is_a_mirror(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    own_nats: Callable[..., NatsServer],
    found: Any,
    prefix: str,
) -> None:
    create_users(database)
    server = own_nats()
    client = await nats.connect(server.url)
    name = Subjects(prefix).cdc_stream
    await api(client, "STREAM.CREATE.ORIGIN", {"name": "ORIGIN", "subjects": ["origin.>"]})
    await api(client, f"STREAM.CREATE.{name}", {"name": name, "mirror": {"name": "ORIGIN"}})
    await client.close()
    finding = found(NATS_URL=server.url)["stream-mirror"]
    assert finding["blocks"]
    assert finding["fix"] == "choose another stream name or --prefix for the bridge"
    other = f"{prefix}b"
    assert "stream-mirror" not in found("--prefix", other, NATS_URL=server.url)
    bridge = bridge_process(nats_url=server.url, prefix=other)
    database.execute("INSERT INTO users VALUES (1, 'x')")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)


def test_a_slot_beyond_its_limit_is_safe_again_after_the_printed_statements(
    own_postgres: Callable[..., PostgresServer], found: Any
) -> None:
    server = own_postgres(settings={"max_slot_wal_keep_size": "1MB"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE users (id int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE users")
        connection.execute("SELECT pg_create_logical_replication_slot('behind', 'pgoutput')")
        status = "SELECT wal_status FROM pg_replication_slots"
        # Beyond the limit, but no checkpoint has taken anything away yet.
        for number in range(3):
            connection.execute("INSERT INTO users VALUES (%s)", [number])
            connection.execute("SELECT pg_switch_wal()")
        assert connection.execute(status).fetchone() == ("unreserved",)
        finding = found(slot="behind", DATABASE_URL=server.dsn())["slot-unreserved"]
        for statement in finding["fix"].split("\n"):
            if not statement.startswith("--"):
                connection.execute(statement)
        wait_until(lambda: connection.execute(status).fetchone() != ("unreserved",))
        connection.execute("CHECKPOINT")
    left = found(slot="behind", DATABASE_URL=server.dsn())
    assert not {"slot-unreserved", "slot-lost"} & set(left)


def test_an_older_nats_server_is_told_what_it_lacks_until_it_is_upgraded(
    database: Database,
    own_nats: Callable[..., NatsServer],
    run_command: Callable[..., subprocess.CompletedProcess[str]],
    prefix: str,
) -> None:
    create_users(database)

    def finding(server: NatsServer) -> dict[str, Any]:
        ended = run_command(
            "bridge", "check", "--slot", "s", "--pub", "pub", "--prefix", prefix, "--json",
            environment={"NATS_URL": server.url},
        )  # fmt: skip
        findings = json.loads(ended.stdout)["findings"]
        return next(one for one in findings if one["code"] == "nats-version")

    too_old = finding(own_nats(binary=nats_binary(TOO_OLD)))
    assert too_old["what"] == f"nats-server {TOO_OLD} is older than 2.11"
    assert too_old["severity"] == "problem"
    assert "2.11 or newer" in too_old["fix"]

    assert finding(own_nats(binary=nats_binary(OLDEST)))["what"] == (
        f"nats-server {OLDEST}; from 2.14 on publishing is faster"
    )
    assert "faster" not in finding(own_nats())["what"]
