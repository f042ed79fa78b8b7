"""The embedded servers do what demo and tests rely on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nats
import psycopg
import pytest
from nats.js.api import StreamConfig

from bridge.embedded import NatsServer, PostgresServer, ServerError, free_port
from bridge.embedded.account import account_for, reachable_tree, temporary_directory
from bridge.embedded.guarded_process import process_alive
from bridge.embedded.postgres import wheel_tree
from tests.fixtures.bridge_process import REPOSITORY
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsCluster
    from tests.fixtures.postgres import Database

# Starts both servers, says where they are, and waits to be ended.
OWNER = """
import os, sys, time
from bridge.embedded import NatsServer, PostgresServer
with PostgresServer(18) as postgres, NatsServer() as broker:
    print(os.getpid(), postgres.pid, broker.pid, postgres.directory, broker.directory, flush=True)
    time.sleep(600)
"""


@both_versions
def test_postgres_is_the_version_asked_for_and_decodes_logically(
    pg: PostgresServer, database: Database
) -> None:
    assert database.value("SHOW server_version").split(".")[0] == str(pg.version)
    assert database.value("SHOW wal_level") == "logical"
    database.execute("SELECT pg_create_logical_replication_slot('probe', 'pgoutput')")
    assert (database.slot("probe") or {})["plugin"] == "pgoutput"


@both_versions
def test_a_restart_keeps_port_and_data(pg: PostgresServer, database: Database) -> None:
    database.execute("CREATE TABLE kept (id int); INSERT INTO kept VALUES (1)")
    port, pid = pg.port, pg.pid
    pg.restart()
    assert (pg.port, pg.pid == pid) == (port, False)
    database.execute("INSERT INTO kept VALUES (2)")
    pg.kill()
    pg.start()
    assert database.execute("SELECT id FROM kept ORDER BY 1") == [(1,), (2,)]


def test_kill_takes_every_process_of_the_server(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres()
    connection = psycopg.connect(server.dsn())
    backends = connection.execute("SELECT pid FROM pg_stat_activity").fetchall()
    pids = [server.pid, *(row[0] for row in backends)]
    assert connection.info.backend_pid in pids
    assert all(map(process_alive, pids))
    server.kill()
    assert not any(map(process_alive, pids))
    assert not server.running
    connection.close()


def test_a_wrong_password_is_refused(pg: PostgresServer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(pg.dsn(password="wrong"))


def test_settings_may_change_between_starts(own_postgres: Callable[..., PostgresServer]) -> None:
    server = own_postgres(settings={"wal_level": "replica", "application_name": "it's"})
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SHOW wal_level").fetchone() == ("replica",)
    server.settings["wal_level"] = "logical"
    server.restart()
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SHOW wal_level").fetchone() == ("logical",)


def test_a_wrong_setting_shows_the_log(own_postgres: Callable[..., PostgresServer]) -> None:
    with pytest.raises(ServerError, match='unrecognized configuration parameter "no_such_thing"'):
        own_postgres(settings={"no_such_thing": 1})


def test_a_given_directory_is_kept_and_used_again(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    parent = temporary_directory(account_for(None))
    try:
        directory = parent / "kept"
        first = own_postgres(directory=directory)
        with psycopg.connect(first.dsn()) as connection:
            connection.execute("CREATE TABLE kept ()")
        first.close()
        with psycopg.connect(own_postgres(directory=directory).dsn()) as connection:
            assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)
    finally:
        shutil.rmtree(parent)


def test_two_servers_are_two_systems(own_postgres: Callable[..., PostgresServer]) -> None:
    identifiers = set()
    for server in (own_postgres(), own_postgres()):
        with psycopg.connect(server.dsn()) as connection:
            query = "SELECT system_identifier FROM pg_control_system()"
            identifiers.add(connection.execute(query).fetchone())
    assert len(identifiers) == 2


def test_binaries_closed_to_the_account_are_copied_to_where_it_can_run_them(
    tmp_path: Path,
) -> None:
    closed = tmp_path / "closed"
    package = wheel_tree(18).parent
    for part in (package / "pginstall18", package.with_name(f"{package.name}.libs")):
        if part.exists():
            shutil.copytree(part, closed / part.relative_to(package.parent))
    closed.chmod(0o700)
    tree = closed / package.name / "pginstall18"
    account = account_for(None)
    if account is None:
        assert reachable_tree(tree, account, tmp_path) == tree
        return
    directory = temporary_directory(account)
    try:
        assert not account.can_run(tree / "bin" / "postgres")
        assert account.can_run(reachable_tree(tree, account, directory) / "bin" / "postgres")
    finally:
        shutil.rmtree(directory)
    with PostgresServer(18, installation=tree) as server, psycopg.connect(server.dsn()) as found:
        # libpqwalreceiver and pgoutput are loaded from the copy.
        found.execute("SELECT pg_create_logical_replication_slot('probe', 'pgoutput')")


def test_a_directory_closed_to_the_account_is_refused_with_a_remedy(tmp_path: Path) -> None:
    if account_for(None) is None:
        with PostgresServer(18, tmp_path) as server:
            assert server.running
        return
    tmp_path.chmod(0o700)
    with pytest.raises(ServerError, match="choose a directory that is open to all"):
        PostgresServer(18, tmp_path).start()


def test_an_unknown_version_names_the_known_ones() -> None:
    with pytest.raises(ServerError, match="16, 18"):
        PostgresServer(9)


async def test_nats_keeps_its_streams_over_restart_and_kill(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats()
    url = server.url
    client = await nats.connect(url)
    await client.jetstream().add_stream(StreamConfig(name="KEPT", subjects=["kept"]))
    await client.jetstream().publish("kept", b"1")
    await client.close()
    for stop in (server.stop, server.kill):
        stop()
        assert not server.running
        server.start()
        assert server.url == url
        client = await nats.connect(url)
        assert (await client.jsm().stream_info("KEPT")).state.messages == 1
        await client.close()


async def test_nats_takes_configuration_text(own_nats: Callable[..., NatsServer]) -> None:
    server = own_nats(
        config="max_payload: 4096\nauthorization { user: u, password: p }",
        jetstream={"max_file_store": "10MB", "sync_interval": "always"},
    )
    client = await nats.connect(server.url_as("u", "p"))
    assert client.max_payload == 4096
    assert (await client.jsm().account_info()).limits.max_storage == -1
    await client.close()
    assert server.monitor("/jsz")["config"]["max_storage"] == 10 * 1024 * 1024


def test_wrong_nats_configuration_shows_the_log(own_nats: Callable[..., NatsServer]) -> None:
    with pytest.raises(ServerError, match="no_such_field"):
        own_nats(config="no_such_field: 1")


async def test_three_nats_nodes_replicate_a_stream_and_survive_the_loss_of_one(
    nats_cluster: NatsCluster,
) -> None:
    client = await nats.connect(nats_cluster.url.split(","), reconnect_time_wait=0.1)
    jetstream = client.jetstream(timeout=20)
    await jetstream.add_stream(StreamConfig(name="R3", subjects=["r3"], num_replicas=3))
    await _publish_until_acknowledged(client, "r3", "before")
    info = await client.jsm().stream_info("R3")
    assert info.cluster is not None
    leader = next(server for server in nats_cluster.servers if server.name == info.cluster.leader)
    leader.kill()
    acknowledged = await _publish_until_acknowledged(client, "r3", "after")
    assert acknowledged == 2
    await client.close()


async def _publish_until_acknowledged(client: nats.NATS, subject: str, msg_id: str) -> int:
    # Without a leader, also right after the stream was created, a publish is answered by "no
    # responders" or not at all; the id makes it safe to repeat.
    for _ in range(100):
        try:
            headers = {"Nats-Msg-Id": msg_id}
            answer = await client.jetstream(timeout=1).publish(subject, b"", headers=headers)
        except (nats.errors.Error, nats.js.errors.APIError):
            await asyncio.sleep(0.1)
        else:
            return answer.seq
    raise AssertionError("the cluster elected no new leader")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_behind_when_the_owner_ends(signum: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    with owner.stdout as output:
        pid, postgres, broker, *directories = output.readline().split()
    servers = [int(postgres), int(broker)]
    assert all(map(process_alive, servers))
    os.kill(int(pid), signum)
    owner.wait(20)
    wait_until(lambda: not any(map(process_alive, servers)), 15, "the servers to end")
    wait_until(lambda: not any(Path(d).exists() for d in directories), 15, "directories to go")


def test_a_killed_guardian_takes_the_server_with_it_on_linux(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats()
    pid = server.pid
    assert server._process is not None
    os.kill(server._process._guardian.pid, signal.SIGKILL)
    if sys.platform.startswith("linux"):
        wait_until(lambda: not process_alive(pid), 10, "the server to end")
    else:
        os.kill(pid, signal.SIGKILL)


def test_ports_are_outside_the_range_of_outgoing_connections() -> None:
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(range_file.read_text().split()[0]) if range_file.exists() else 49152
    assert free_port() < lowest


@pytest.mark.parametrize("factory", [PostgresServer, NatsServer])
def test_a_taken_port_is_avoided_at_first_and_never_exchanged_later(
    factory: type[PostgresServer | NatsServer],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as neighbour:
        server = factory()
        server.port = neighbour.getsockname()[1]
        with server:
            assert server.port != neighbour.getsockname()[1]
            server.stop()
            with (
                socket.create_server(("127.0.0.1", server.port)),
                pytest.raises(ServerError, match=r"in use|no free port"),
            ):
                server.start()
            server.start()
            assert server.running
