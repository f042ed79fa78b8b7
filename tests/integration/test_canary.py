"""Planted secrets and row values are nowhere but in the stream and the replicas."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import traceback
from typing import TYPE_CHECKING

import nats
import psycopg
import pytest

from bridge.cli import main as bridge_command
from consumer_sdk.commands.cli import run as cdc_command
from consumer_sdk.errors import TargetError
from consumer_sdk.targets.postgres import COPY_ROWS, PostgresEngine
from consumer_sdk.targets.sql_rows import DuplicateKey
from tests.fixtures.canaries import TABLE, Planted, children_of, read_process
from tests.fixtures.mirror import MirrorProcess
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.canaries import Deployment
    from tests.fixtures.postgres import Database

    Run = Callable[..., subprocess.CompletedProcess[str]]

PAGES = ("/", "/status", "/history", "/metrics", "/health", "/ready", "/streams/info?stream=CDC")


@pytest.fixture
def deployment(canary_deployment: Deployment) -> Deployment:
    return canary_deployment


@pytest.fixture
def start_bridge(canary_bridge: Callable[..., BridgeProcess]) -> Callable[..., BridgeProcess]:
    return canary_bridge


@pytest.fixture
def replica(deployment: Deployment) -> Iterator[str]:
    """The address of an empty database for a mirror, without its password."""
    server, name = deployment.database.server, f"replica_{secrets.token_hex(4)}"
    server.create_database(name)
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        connection.execute(f"GRANT CREATE ON DATABASE {name} TO {deployment.role}")  # type: ignore[arg-type]
        connection.execute(f"GRANT ALL ON SCHEMA public TO {deployment.role}")  # type: ignore[arg-type]
    yield f"postgresql://{deployment.role}@{server.host}:{server.port}/{name}"
    server.drop_database(name)


@pytest.fixture
def follow(
    deployment: Deployment, prefix: str, tmp_path: Path
) -> Iterator[Callable[[str], MirrorProcess]]:
    started: list[MirrorProcess] = []

    def start(url: str) -> MirrorProcess:
        started.append(
            MirrorProcess(
                "t", "--into", url, directory=tmp_path, nats_url=deployment.nats_url,
                prefix=prefix, environment={"PGPASSWORD": deployment.planted.pg_password},
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for one in started:
        one.kill()


def rows_in(url: str, password: str) -> int:
    try:
        with psycopg.connect(url, password=password) as connection:
            row = connection.execute("SELECT count(*) FROM t").fetchone()
            return 0 if row is None else int(row[0])
    except psycopg.Error:
        return 0


async def test_a_whole_scenario_writes_no_secret_and_no_row_value_anywhere(
    deployment: Deployment,
    start_bridge: Callable[..., BridgeProcess],
    follow: Callable[[str], MirrorProcess],
    replica: str,
    prefix: str,
    run_command: Run,
    tmp_path: Path,
) -> None:
    planted, written = deployment.planted, {}
    cdc = {"NATS_URL": deployment.nats_url, "BRIDGE_PREFIX": prefix,
           "PGPASSWORD": planted.pg_password}  # fmt: skip

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = run_command(*arguments, environment={**deployment.environment, **cdc})
        written[name] = done.stdout + done.stderr
        return done

    deployment.insert(1)
    flags = ("--slot", f"slot_{deployment.database.name}", "--pub", "pub", "--prefix", prefix)
    bridge = start_bridge()
    lite = follow(f"sqlite:///{tmp_path}/replica.db")
    other = follow(replica)
    assert run("snapshot", "cdc", "snapshot", "t", "--out", f"{tmp_path}/t.jsonl").returncode == 0
    # The workers of the snapshots are idle, and still there.
    processes = [bridge.pid, lite.pid, other.pid]
    for pid in list(processes):
        processes += children_of(pid)
    assert len(processes) > 3
    for pid in processes:
        written[f"command line of {pid}"] = read_process(pid, "cmdline").decode()
    for number in range(2, 6):
        deployment.insert(number)
    deployment.database.execute("UPDATE t SET amount = amount + 1; DELETE FROM t WHERE id = 3")
    await eventually(lambda: rows_in(replica, planted.pg_password) == 9, 60, other.describe)
    source = deployment.database_url
    for name, url in (("lite", f"sqlite:///{tmp_path}/replica.db"), ("postgres", replica)):
        done = run(f"verify {name}", "cdc", "verify", "t", "--source", source, "--replica", url)
        assert done.returncode == 0, written[f"verify {name}"]

    # Both connections break and are opened again.
    deployment.nats.restart()
    deployment.database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active"
    )
    deployment.insert(7)
    await eventually(lambda: rows_in(replica, planted.pg_password) == 11, 60, other.describe)
    wait_until(bridge.ready, 60, bridge.log_text)

    run("check", "bridge", "check", *flags)
    run("config", "bridge", "config", *flags)
    reader = {"Authorization": f"Bearer {planted.read_token}"}
    for path in PAGES:
        answer = bridge.http(path, headers=reader)
        written[path] = answer.text + json.dumps(answer.headers)
    # The target refuses a row, and quotes it.
    with psycopg.connect(replica, password=planted.pg_password) as target:
        target.execute("ALTER TABLE t ALTER name TYPE int USING 0")
    deployment.insert(8)
    assert other.wait() == 3
    stopped = bridge.http("/shutdown", "POST", {"Authorization": f"Bearer {planted.admin_token}"})
    assert stopped.status == 202
    assert bridge.wait() == 0
    lite.interrupt()
    lite.wait()
    written |= {"bridge log": bridge.log_text(), "lite log": lite.log_text(),
                "postgres log": other.log_text()}  # fmt: skip
    assert "level=debug" in written["bridge log"]
    for name, text in written.items():
        planted.refuse(name, text)


def test_snapshot_workers_have_no_secret_in_their_environment(
    deployment: Deployment,
    start_bridge: Callable[..., BridgeProcess],
    prefix: str,
    run_command: Run,
    tmp_path: Path,
) -> None:
    deployment.insert(1)
    bridge = start_bridge(environment={"SOMETHING_SECRET": deployment.planted.admin_token})
    done = run_command(
        "cdc", "snapshot", "t", "--out", f"{tmp_path}/t.jsonl",
        environment={"NATS_URL": deployment.nats_url, "BRIDGE_PREFIX": prefix},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    workers = children_of(bridge.pid)
    assert workers
    for pid in workers:
        environment = read_process(pid, "environ")
        deployment.planted.refuse(f"environment of {pid}", environment)
        assert b"PATH=" in environment


@pytest.mark.parametrize("wrong", ["pg_password", "nats_password"])
def test_a_refused_login_shows_no_password(
    deployment: Deployment,
    start_bridge: Callable[..., BridgeProcess],
    run_command: Run,
    prefix: str,
    wrong: str,
) -> None:
    planted, forged = deployment.planted, Planted.new()
    database_url = deployment.database_url.replace(planted.pg_password, forged.pg_password)
    nats_url = deployment.nats_url.replace(planted.nats_password, forged.nats_password)
    given = {"DATABASE_URL": database_url} if wrong == "pg_password" else {"NATS_URL": nats_url}
    bridge = start_bridge(environment=given, wait=False)
    assert bridge.wait() == 3
    texts = {"bridge": bridge.log_text()}
    flags = ("--slot", "s", "--pub", "pub", "--prefix", prefix)
    for name, command in {
        "check": ("bridge", "check", *flags),
        "tables": ("cdc", "tables"),
        "verify": ("cdc", "verify", "t", "--source", database_url, "--replica", database_url),
        "mirror": ("cdc", "mirror", "t", "--into", database_url),
    }.items():
        done = run_command(*command, environment={**deployment.environment, **given})
        texts[name] = done.stdout + done.stderr
    for name, text in texts.items():
        planted.refuse(name, text)
        forged.refuse(name, text)


@pytest.mark.parametrize(
    "address",
    [
        "host=127.0.0.1 password=x {secret}",
        "host=127.0.0.1 password='{secret}",
        "postgresql://user:{secret}@[127.0.0.1/db",
        "postgresql://user:{secret}@127.0.0.1:port/db",
        "postgresql://127.0.0.1/db?password={secret}&nosuch=1",
    ],
)
def test_an_address_that_cannot_be_read_is_not_quoted_with_its_password(
    address: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = Planted.new()
    url = address.format(secret=planted.pg_password)
    config = tmp_path / "bridge.toml"
    config.write_text(f"database_url = {json.dumps(url)}\npg_password = {planted.nats_password}\n")
    monkeypatch.setenv("NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    flags = ["--slot", "s", "--pub", "p", "--port", "0"]
    assert bridge_command([*flags, "--config", str(config)]) == 2
    into = ["mirror", "t", "--into", url, "--timeout", "100ms"]
    compare = ["verify", "t", "--source", url, "--replica", url, "--timeout", "100ms"]
    assert cdc_command(into) != 0
    assert cdc_command(compare) != 0
    monkeypatch.setenv("DATABASE_URL", url)
    assert bridge_command(flags) == 2
    bridge_command(["config"])
    bridge_command(["config", "--as-json"])
    written = capfd.readouterr()
    planted.refuse("a command", written.out + written.err)


@pytest.mark.parametrize("kind", ["creds", "nkey"])
def test_a_seed_is_not_shown_when_its_file_is_damaged_or_refused(
    kind: str, own_nats: Callable[..., NatsServer], run_command: Run, tmp_path: Path
) -> None:
    seed = "SUAMK2FG4MI6UE3ACF3FK3OIQBCEIEZV7NSWFFEW63UXMRLFM2XLAXK4GY"
    server = own_nats(config='authorization { user: "u", password: "p" }')
    path = tmp_path / "file"
    head, end = "-----BEGIN {}-----\n", "\n------END {}------\n"
    jwt = head.format("NATS USER JWT") + "eyJ0eXAi.e30.x" + end.format("NATS USER JWT")
    variables = {"NATS_URL": server.url, f"NATS_{kind.upper()}": str(path),
                 "DATABASE_URL": "postgresql://127.0.0.1:1/x"}  # fmt: skip
    for text in (seed, f"{seed[:-4]}!!!!"):
        key = head.format("USER NKEY SEED") + text + end.format("USER NKEY SEED")
        path.write_text(text if kind == "nkey" else jwt + key)
        done = run_command("cdc", "tables", environment=variables)
        assert done.returncode != 0
        assert seed[2:-6] not in done.stdout + done.stderr
    done = run_command("bridge", "check", "--slot", "s", "--pub", "p", environment=variables)
    assert done.returncode != 0
    assert seed[2:-6] not in done.stdout + done.stderr


TARGET_FAULTS = {
    "a value that does not fit": "ALTER TABLE t ALTER name DROP DEFAULT, ALTER name TYPE int "
    "USING 0",
    "a value that is too long": "ALTER TABLE t ALTER name TYPE varchar(3)",
    "a number that does not fit": "ALTER TABLE t ALTER amount TYPE int",
    "a value twice": "CREATE UNIQUE INDEX ON t (photo)",
    "a check": "ALTER TABLE t ADD CHECK (id < 0)",
    "a missing value": "ALTER TABLE t ALTER note SET NOT NULL",
    "an enumeration": "CREATE TYPE mood AS ENUM ('x'); ALTER TABLE t ALTER name DROP DEFAULT, "
    "ALTER name TYPE mood USING NULL",
    "a query of text": "ALTER TABLE t ALTER name DROP DEFAULT, ALTER name TYPE tsquery USING ''",
    "a trigger with the code of another error": "CREATE FUNCTION refuse() RETURNS trigger "
    "LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no: %'', NEW USING ERRCODE = ''55000''; END'; "
    "CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse()",
    "a trigger": "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
    "'BEGIN RAISE EXCEPTION ''no: %'', NEW; END'; "
    "CREATE TRIGGER refuse BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION refuse()",
}


@pytest.mark.parametrize("count", [2, COPY_ROWS])
@pytest.mark.parametrize("fault", TARGET_FAULTS)
def test_a_target_that_refuses_a_row_is_reported_without_its_values(
    database: Database, fault: str, count: int
) -> None:
    planted = Planted.new()
    database.execute(TABLE.format(default=planted.default))
    database.execute(TARGET_FAULTS[fault])
    row = (f"{planted.text} {{", planted.amount, planted.photo.encode(), None, None)
    with database.connect() as connection:
        engine = PostgresEngine("target", connection)
        with pytest.raises((TargetError, DuplicateKey)) as caught:
            engine.insert_many(
                "INSERT INTO t (id, name, amount, photo, note, document) "
                "VALUES (%s, %s, %s, %s, %s, %s)",
                [(number, *row) for number in range(count)],
            )
    planted.refuse("the error", str(caught.value))
    planted.refuse("its traceback", "".join(traceback.format_exception(caught.value)))
    assert "\n" not in str(caught.value)


async def test_a_damaged_message_is_reported_without_its_content(
    deployment: Deployment,
    start_bridge: Callable[..., BridgeProcess],
    run_command: Run,
    prefix: str,
    tmp_path: Path,
) -> None:
    planted = deployment.planted
    bridge = start_bridge()
    deployment.insert(1)
    wait_until(lambda: bridge.status()["cdc_events_published"] >= 2)
    environment = {"NATS_URL": deployment.nats_url, "BRIDGE_PREFIX": prefix,
                   "PGPASSWORD": planted.pg_password}  # fmt: skip
    into = ("cdc", "mirror", "t", "--once", "--into", f"sqlite:///{tmp_path}/t.db")
    assert run_command(*into, environment=environment).returncode == 0
    row = {"id": planted.text, "name": planted.text, "amount": planted.note, "photo": planted.photo,
           "note": planted.note, "document": planted.document}  # fmt: skip
    event = {"v": 1, "source": "x", "epoch": 1, "table": "t", "schema": "public",
             "operation": planted.text, "data": row}  # fmt: skip
    damaged = (
        planted.text.encode(),
        json.dumps(event).encode(),
        json.dumps({**event, "operation": "INSERT", "lsn": planted.text}).encode(),
    )
    client = await nats.connect(deployment.nats_url)
    stream = client.jetstream()
    try:
        for payload in damaged:
            stored = await stream.publish(
                f"{prefix}.cdc.t.insert", payload, headers={"Content-Type": "application/json"}
            )
            done = await asyncio.to_thread(run_command, *into, environment=environment)
            assert done.returncode == 4, done.stderr
            planted.refuse("the mirror", done.stdout + done.stderr)
            await client.jsm().delete_msg(f"{prefix}_CDC", stored.seq)
    finally:
        await client.close()


def test_a_value_quoted_by_an_error_of_the_source_is_not_shown(
    deployment: Deployment,
    start_bridge: Callable[..., BridgeProcess],
    run_command: Run,
    prefix: str,
    tmp_path: Path,
) -> None:
    """A row filter is evaluated by the walsender and by snapshots, which quote the bad value."""
    planted = deployment.planted
    bridge = start_bridge()
    deployment.database.execute(
        "ALTER PUBLICATION pub SET TABLE t WHERE (parse_ident(name) IS NOT NULL)"
    )
    deployment.insert(1)
    reader = {"Authorization": f"Bearer {planted.read_token}"}
    wait_until(lambda: bridge.http("/status", headers=reader).json()["last_error"], 30,
               bridge.log_text)  # fmt: skip
    planted.refuse("/status", bridge.http("/status", headers=reader).text)
    done = run_command(
        "cdc", "snapshot", "t", "--out", f"{tmp_path}/t.jsonl",
        environment={"NATS_URL": deployment.nats_url, "BRIDGE_PREFIX": prefix},
    )  # fmt: skip
    planted.refuse("snapshot", done.stdout + done.stderr)
    planted.refuse("the bridge", bridge.log_text())
