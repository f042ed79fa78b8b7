"""Whatever is wrong is said in one line with its remedy, and ends with the right exit code.

What waiting can heal is waited for instead.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import nkeys
import psycopg
import pytest
from nats.js.api import StreamConfig

from bridge.cli import main
from consumer_sdk.wire import Subjects
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import eventually, wait_until

only_16 = pytest.mark.parametrize("pg", [16], indirect=True, ids=["pg16"])


def assert_refused(code, stderr, wanted, *texts):
    """One line beside the log, no traceback, the exit code, and what the line says."""
    said = [line for line in stderr.splitlines() if not line.startswith("ts=")]
    assert len(said) == 1, stderr
    assert said[0].startswith("bridge: "), stderr
    assert "Traceback" not in stderr
    for text in texts:
        assert text in said[0]
    assert code == wanted, stderr


@pytest.fixture
def command(capsys, monkeypatch):
    """Run `bridge` in this process, which is quick: exit code and what it printed."""
    for name in list(os.environ):
        if name.startswith(("BRIDGE_", "PG", "POSTGRES_", "NATS_", "DATABASE_URL")):
            monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments, environment=None):
        with monkeypatch.context() as context:
            for name, value in (environment or {}).items():
                context.setenv(name, value)
            code = main(arguments)
        return code, capsys.readouterr()

    yield run
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def refused(command, database, prefix, nats_server):
    """Run the bridge, which must end by itself: `refused(exit code, texts…, flags=…)`."""

    def run(wanted, *texts, flags=(), pub="pub", environment=None):
        code, printed = command(
            "--slot", f"slot_{database.name}", "--pub", pub, "--port", "0", "--prefix", prefix,
            *flags,
            environment={
                "DATABASE_URL": database.dsn,
                "NATS_URL": nats_server.bridge_url,
                **(environment or {}),
            },
        )  # fmt: skip
        assert_refused(code, printed.err, wanted, *texts)
        return printed.err

    return run


def publish_one(database):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")


def test_an_unknown_publication_is_refused(database, bridge_process):
    bridge = bridge_process(pub="nowhere", wait=False)
    texts = ("publication nowhere does not exist", "CREATE PUBLICATION")
    assert_refused(bridge.wait(), bridge.log_text(), 3, *texts)
    assert database.slot(f"slot_{database.name}") is None


@only_16
async def test_a_publication_younger_than_the_slot_is_refused_and_the_remedy_works(
    database, cdc, run_command, bridge_process
):
    slot = f"slot_{database.name}"
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    database.execute("INSERT INTO t VALUES (1)")
    database.publish("t")
    refusing = bridge_process(wait=False)
    code = refusing.wait(30)
    texts = ("publication pub is younger than slot", f"bridge drop --slot {slot} --yes")
    assert_refused(code, refusing.log_text(), 3, *texts)
    # As the line says.
    dropped = run_command(
        "bridge", "drop", "--slot", slot, "--yes", "--prefix", cdc.subjects.prefix
    )
    assert dropped.returncode == 0
    bridge_process("--on-gap=new-epoch")
    database.execute("INSERT INTO t VALUES (2)")
    await cdc.settle()
    assert [e.data["id"] for e in await cdc.changes("t")] == [2]


async def test_a_publication_younger_than_the_slot_is_fine_from_version_18_on(
    database, cdc, bridge_process
):
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute(
        "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"slot_{database.name}"]
    )
    database.execute("INSERT INTO t VALUES (1)")
    database.publish("t")
    bridge_process()
    database.execute("INSERT INTO t VALUES (2)")
    await cdc.settle()
    # Row 1 was written while the table was not published.
    assert [e.data["id"] for e in await cdc.changes("t")] == [2]


@both_versions
def test_missing_rights_are_refused_with_what_to_grant(database, refused):
    publish_one(database)
    role = database.role("LOGIN")
    name = database.roles[0]
    refused(
        3, "REPLICATION", f'ALTER ROLE "{name}" REPLICATION', environment={"DATABASE_URL": role}
    )
    database.execute(f"ALTER ROLE {name} REPLICATION")
    database.execute(f"REVOKE CONNECT ON DATABASE {database.name} FROM PUBLIC")
    refused(3, "permission denied for database", "; ", environment={"DATABASE_URL": role})
    database.execute(f"ALTER ROLE {name} NOLOGIN")
    refused(3, "not permitted to log in", "; ", environment={"DATABASE_URL": role})
    assert database.slot(f"slot_{database.name}") is None


def test_a_role_with_replication_alone_is_enough_to_stream(database, bridge_process):
    publish_one(database)
    bridge = bridge_process(database_url=database.role("LOGIN REPLICATION"))
    database.execute("INSERT INTO t VALUES (1)")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)


def test_a_server_without_logical_wal_or_without_free_slots_is_refused(
    own_postgres, refused, database
):
    server = own_postgres(18, settings={"wal_level": "replica", "max_replication_slots": 1})
    dsn = server.dsn()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE t")
    remedy = "ALTER SYSTEM SET wal_level = 'logical'"
    refused(3, "wal_level is replica", remedy, environment={"DATABASE_URL": dsn})
    server.settings["wal_level"] = "logical"
    server.restart()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_physical_replication_slot('taken')")
    refused(
        3, "all 1 replication slots are taken", "max_replication_slots",
        environment={"DATABASE_URL": dsn},
    )  # fmt: skip


def test_a_slot_that_is_not_ours_is_refused(database, pg, refused):
    publish_one(database)
    slot = f"slot_{database.name}"
    database.execute("SELECT pg_create_physical_replication_slot(%s)", [slot])
    refused(3, "is a physical slot", "--slot")
    database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    database.execute("SELECT pg_create_logical_replication_slot(%s, '$libdir/pgoutput')", [slot])
    refused(3, "is a $libdir/pgoutput slot, not one of pgoutput")
    database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    with psycopg.connect(pg.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        try:
            refused(3, "belongs to database postgres", f"not to {database.name}")
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])


@only_16
def test_what_a_server_version_lacks_is_refused(database, refused):
    publish_one(database)
    refused(3, "--failover needs PostgreSQL 17", flags=["--failover"])
    assert database.slot(f"slot_{database.name}") is None


async def test_flags_about_the_slot_reach_postgresql(database, cdc, bridge_process):
    publish_one(database)
    bridge_process("--failover", "--origin", "none")
    assert database.slot(f"slot_{database.name}")["failover"]
    # Changes that were themselves replicated are left out.
    database.execute("SELECT pg_replication_origin_create(%s)", [f"origin_{database.name}"])
    with database.connect() as connection:
        connection.execute(
            "SELECT pg_replication_origin_session_setup(%s)", [f"origin_{database.name}"]
        )
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("SELECT pg_replication_origin_session_reset()")
        connection.execute("INSERT INTO t VALUES (2)")
    await cdc.settle()
    assert [e.data["id"] for e in await cdc.changes("t")] == [2]
    database.execute("SELECT pg_replication_origin_drop(%s)", [f"origin_{database.name}"])


def test_wrong_postgresql_credentials_are_refused(database, refused):
    publish_one(database)
    server = database.server
    secret = "wrong-S3cret"
    for dsn, text in (
        (server.dsn(database.name, user="tailrace", password=secret), "; check"),
        (server.dsn(database.name, user="nobody_at_all", password=secret), "; check"),
        (server.dsn("no_such_db"), 'database "no_such_db" does not exist; create the database'),
        (server.dsn(database.name, user="tailrace"), "; check"),
        (f"{database.dsn}?sslmode=require", "does not support SSL"),
        (f"{database.dsn}?sslmode=never", "sslmode"),
    ):
        result = refused(3, text, environment={"DATABASE_URL": dsn})
        assert secret not in result
        assert server.password not in result


def test_nats_that_cannot_be_used_is_refused(database, own_nats, refused):
    publish_one(database)
    without = own_nats(jetstream=None)
    refused(3, "has no JetStream", "-js", environment={"NATS_URL": without.url})
    guarded = own_nats(
        config="""
        authorization {
          users = [
            { user: bridge, password: right }
            { user: narrow, password: narrow,
              permissions: { publish: ["$JS.API.INFO", "$JS.API.STREAM.INFO.>"],
                             subscribe: ["_INBOX.>"] } }
          ]
        }
        """
    )
    for url in (guarded.url, guarded.url_as("bridge", "wr0ng-Word"), guarded.url_as("who", "x")):
        result = refused(
            3, "refuses the credentials", "NATS_BRIDGE_PASSWORD", environment={"NATS_URL": url}
        )
        assert "wr0ng-Word" not in result
    result = refused(
        3, "refuses the credentials",
        environment={
            "NATS_URL": "", "NATS_HOST": guarded.host, "NATS_PORT": str(guarded.port),
            "NATS_BRIDGE_USER": "bridge", "NATS_BRIDGE_PASSWORD": "wr0ng-Word",
        },
    )  # fmt: skip
    assert "wr0ng-Word" not in result
    refused(3, "stream", "permission", environment={"NATS_URL": guarded.url_as("narrow", "narrow")})


@pytest.mark.parametrize("name", ["NATS_CREDS", "NATS_NKEY", "NATS_CA"])
def test_unusable_credential_files_of_nats_are_refused(database, refused, tmp_path, name):
    path = tmp_path / "file"
    path.write_text("not what it should be\n")
    refused(2, "; ", environment={name: str(path)})
    refused(2, "no file /nowhere/at/all", environment={name: "/nowhere/at/all"})


def test_a_key_is_enough_to_be_let_in(database, own_nats, bridge_process, tmp_path):
    publish_one(database)
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    path = tmp_path / "user.nk"
    path.write_text(seed.decode() + "\n")
    server = own_nats(config=f"authorization {{ users = [ {{ nkey: {public} }} ] }}")
    bridge = bridge_process(nats_url=server.url, environment={"NATS_NKEY": str(path)})
    database.execute("INSERT INTO t VALUES (1)")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)


async def test_streams_that_do_not_fit_are_refused(database, bridge_process, nats_client, prefix):
    publish_one(database)
    names = Subjects(prefix)
    js = nats_client.jetstream()
    other = f"{prefix}_other"
    await js.add_stream(StreamConfig(name=other, subjects=[names.cdc_all]))
    first = bridge_process(wait=False)
    texts = (f"stream {names.cdc_stream} cannot be created", "overlap", "bridge check")
    assert_refused(first.wait(), first.log_text(), 3, *texts)
    await js.delete_stream(other)
    await js.add_stream(StreamConfig(name=names.cdc_stream, subjects=[f"{prefix}.elsewhere"]))
    second = bridge_process(wait=False)
    texts = (f"stream {names.cdc_stream} does not hold {names.cdc_all}", "--prefix")
    assert_refused(second.wait(), second.log_text(), 3, *texts)
    assert database.slot(f"slot_{database.name}") is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--slot is missing; give it or set BRIDGE_SLOT"),
        (["--slot", "s"], "--pub is missing"),
        (["--slot", "S!", "--pub", "p"], "is not a slot name"),
        (["--slot", "s", "--pub", "p", "--port", "x"], "--port: 'x' is not a whole number"),
        (["--slot", "s", "--pub", "p", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["--slot"], "--slot: expected one argument"),
        (["frobnicate"], "unrecognized arguments: frobnicate"),
        (["drop", "--slot", "s"], "add --yes to do it"),
        (["drop", "--yes"], "--slot is missing"),
        (["--config", "/nowhere/bridge.toml"], "No such file"),
        (["--database-url", "postgresql://u:geheim@h/d", "--slot", "s"], "--pub is missing"),
        (["--nats-url", "nats://u:geheim@h", "--slot", "s"], "--pub is missing"),
        (["--pg-password", "geheim"], "unrecognized arguments"),
        (["demo", "--seconds", "soon"], "--seconds"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(command, arguments, text):
    code, printed = command(*arguments)
    assert_refused(code, printed.err, 2, text)
    assert printed.out == ""
    if "unrecognized" not in text:
        assert "geheim" not in printed.err


def test_a_wrong_settings_file_is_refused_in_one_line(command, tmp_path):
    path = tmp_path / "bridge.toml"
    for content, text in (
        ("slot = [", "not valid TOML"),
        ('unheard = "of"', "unknown setting 'unheard'"),
        ('port = "x"', "port: 'x' is not a whole number"),
        ("pg_password = 5", "pg_password: *** is not a text"),
    ):
        path.write_text(content)
        for name in ([], ["config"], ["check"], ["drop"]):
            code, printed = command(*name, "--config", str(path))
            assert_refused(code, printed.err, 2, text, str(path))


def test_a_damaged_connection_string_is_refused(database, refused):
    for variable, value in (
        ("DATABASE_URL", "nonsense geheim"),
        ("DATABASE_URL", "postgresql://u:geheim@h/d?unheard=of"),
        ("NATS_URL", "nats://u:geheim@h:port"),
    ):
        result = refused(2, f"{variable} is not a", environment={variable: value})
        assert "geheim" not in result


def test_a_taken_http_port_is_refused(database, refused):
    publish_one(database)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(2, f"port {port}", "already in use", "--port", flags=["--port", str(port)])
    refused(2, "--host", flags=["--host", "192.0.2.1"])


async def test_postgresql_and_nats_that_are_not_there_yet_are_waited_for(
    database, cdc, pg, nats_server, bridge_process, tcp_proxy
):
    publish_one(database)
    to_pg, to_nats = tcp_proxy(pg.port), tcp_proxy(nats_server.port)
    to_pg.stop()
    to_nats.stop()
    bridge = bridge_process(
        wait=False,
        database_url=to_pg.through(database.dsn),
        nats_url=to_nats.through(nats_server.bridge_url),
    )
    bridge.wait_logged(f"cannot connect to NATS at 127.0.0.1:{to_nats.port}: connection refused")
    bridge.wait_logged(
        'event="wal monitor cannot read" reason="cannot connect to PostgreSQL: connection failed: '
    )
    assert bridge.http("/health").status == 200
    assert not bridge.ready()
    assert bridge.status()["nats_connected"] is False
    to_nats.start()
    bridge.wait_logged('event="not streaming" reason="cannot connect to PostgreSQL')
    assert not bridge.ready()
    assert "cannot connect to PostgreSQL" in bridge.status()["last_error"]
    to_pg.start()
    bridge.wait_ready()
    assert bridge.status()["last_error"] is None
    database.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    assert len(await cdc.changes("t")) == 1
    assert "Traceback" not in bridge.log_text()


def test_a_cluster_without_a_leader_is_waited_for(database, nats_cluster, bridge_process):
    publish_one(database)
    for node in nats_cluster.servers[1:]:
        node.stop()
    bridge = bridge_process(wait=False, nats_url=nats_cluster.servers[0].url)
    bridge.wait_logged('event="not streaming"', 30)
    for node in nats_cluster.servers[1:]:
        node.launch()
    bridge.wait_ready(60)
    assert "Traceback" not in bridge.log_text()


async def test_a_session_ended_by_the_administrator_during_the_start_is_retried(
    database, bridge_process
):
    publish_one(database)
    with database.connect(autocommit=False) as connection:
        # Held by any change to the view. A catalog itself must not be locked: every new session
        # waits for it whenever PostgreSQL has dropped the file of its relation cache.
        connection.execute("SET allow_system_table_mods = on")
        connection.execute("ALTER VIEW pg_catalog.pg_publication_tables SET (security_barrier)")
        bridge = bridge_process(wait=False)
        blocked = await eventually(
            lambda: database.execute(
                "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND application_name LIKE 'tailrace%' AND datname = current_database()"
            )
        )
        database.execute("SELECT pg_terminate_backend(%s)", [blocked[0][0]])
        bridge.wait_logged("terminating connection due to administrator command")
        connection.rollback()
    bridge.wait_ready()
    assert "Traceback" not in bridge.log_text()


async def test_a_stop_does_not_wait_for_what_the_start_waits_for(
    database, pg, nats_server, bridge_process, tcp_proxy
):
    publish_one(database)
    # A new slot waits for transactions that were open before it.
    with database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        bridge = bridge_process(wait=False)
        bridge.wait_logged("creating slot")
        bridge.terminate()
        assert bridge.wait(10) == 0
        assert "Traceback" not in bridge.log_text()
        connection.rollback()
    wait_until(lambda: database.slot(f"slot_{database.name}") is None)
    to_nats = tcp_proxy(nats_server.port)
    to_nats.deaf()
    waiting = bridge_process(wait=False, nats_url=to_nats.through(nats_server.bridge_url))
    wait_until(lambda: to_nats.connections)
    waiting.interrupt()
    assert waiting.wait(10) == 0


async def test_secrets_appear_nowhere(database, own_nats, tcp_proxy, bridge_process, run_command):
    publish_one(database)
    server = own_nats(config="authorization { user: bridge, password: nats-S3cret }")
    role = database.role("LOGIN REPLICATION")
    database.execute(f"ALTER ROLE {database.roles[0]} PASSWORD 'pg-S3cret'")
    dsn = database.server.dsn(database.name, user=database.roles[0], password="pg-S3cret")
    assert role != dsn
    secrets = ("pg-S3cret", "nats-S3cret", "admin-S3cret")
    to_pg, to_nats = tcp_proxy(database.server.port), tcp_proxy(server.port)
    bridge = bridge_process(
        "--log-level", "debug",
        database_url=to_pg.through(dsn),
        nats_url=to_nats.through(server.url_as("bridge", "nats-S3cret")),
        environment={"BRIDGE_ADMIN_TOKEN": "admin-S3cret"},
    )  # fmt: skip
    # Through trouble on both sides, which is when things get logged.
    to_nats.stop()
    wait_until(lambda: not bridge.status()["nats_connected"])
    to_pg.stop()
    wait_until(lambda: bridge.status()["last_error"])
    texts = [bridge.http(path).text for path in ("/status", "/metrics", "/health", "/")]
    to_nats.start()
    to_pg.start()
    bridge.wait_ready()
    assert bridge.http("/shutdown", "POST").status == 401
    texts += [bridge.http(path).text for path in ("/status", "/streams/info?stream=CDC")]
    command_line = Path(f"/proc/{bridge.pid}/cmdline").read_bytes().decode()
    database.execute(f"ALTER ROLE {database.roles[0]} PASSWORD 'other'")
    to_pg.cut()
    bridge.wait_logged("password authentication failed")
    bridge.terminate()
    assert bridge.wait() == 0
    shown = run_command(
        "bridge", "config",
        environment={
            "DATABASE_URL": dsn, "NATS_URL": server.url_as("bridge", "nats-S3cret"),
            "BRIDGE_ADMIN_TOKEN": "admin-S3cret",
        },
    )  # fmt: skip
    assert shown.returncode == 0
    for text in (*texts, command_line, bridge.log_text(), shown.stdout):
        assert text
        for secret in secrets:
            assert secret not in text
