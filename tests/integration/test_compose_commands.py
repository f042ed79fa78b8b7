"""The start commands of compose/compose.yaml, run without containers on the same configuration."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats
import nats.errors
import psycopg
import pytest
import yaml
from nats.js.errors import APIError

from bridge.embedded import GuardedProcess, free_port
from bridge.embedded.nats import find_binary
from bridge.preflight.permissions import READER_INBOX
from tests.fixtures.bridge_process import BridgeProcess, clean_environment
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.embedded import PostgresServer

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())[
    "services"
]


class Stack:
    """PostgreSQL and NATS as the compose file sets them up, on free ports."""

    def __init__(self, postgres: PostgresServer, nats_port: int, monitor_port: int) -> None:
        self.postgres = postgres
        self.nats_port = nats_port
        self.monitor_port = monitor_port

    def environment(self, service: str) -> dict[str, str]:
        """The service's variables, host names replaced by where things are here."""
        given = {key: str(value) for key, value in SERVICES[service]["environment"].items()}
        here = {
            "PG_HOST": "127.0.0.1",
            "PG_PORT": str(self.postgres.port),
            "NATS_HOST": "127.0.0.1",
            "NATS_PORT": str(self.nats_port),
            "BRIDGE_NATS_MONITOR": f"http://127.0.0.1:{self.monitor_port}",
        }
        return clean_environment(**{key: here.get(key, value) for key, value in given.items()})

    def nats_url(self, user: str) -> str:
        password = SERVICES["nats"]["environment"][f"NATS_{user.upper()}_PASSWORD"]
        return f"nats://{user}:{password}@127.0.0.1:{self.nats_port}"

    def command(self, service: str) -> list[str]:
        words = [*SERVICES[service].get("entrypoint", []), *SERVICES[service]["command"]]
        return [
            word.replace("@replica:5432/", f"@127.0.0.1:{self.postgres.port}/") for word in words
        ]


@pytest.fixture
def stack(own_postgres: Callable[..., PostgresServer], tmp_path: Path) -> Iterator[Stack]:
    words = SERVICES["postgres"]["command"]
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    postgres = own_postgres(18, settings=settings)
    # One server for both: the stack has two so that the mirror cannot reach the source.
    initialise(postgres, "postgres")
    initialise(postgres, "replica")
    nats_port, monitor_port = free_port(), free_port()
    process = GuardedProcess(
        "nats-server",
        [
            find_binary(), *_nats_flags(tmp_path / "jetstream"),
            "--port", str(nats_port), "--http_port", str(monitor_port),
        ],
        log_path=tmp_path / "nats.log",
        stop_signal=signal.SIGKILL,
        environment={**os.environ, **SERVICES["nats"]["environment"]},
    )  # fmt: skip
    wait_until(
        lambda: healthy(monitor_port) or not process.running,
        what=(tmp_path / "nats.log").read_text,
    )
    yield Stack(postgres, nats_port, monitor_port)
    process.kill()


def _nats_flags(store: Path) -> list[str]:
    here = {"/etc/nats/nats.conf": str(COMPOSE / "nats/nats.conf"), "/data": str(store)}
    return [here.get(word, word) for word in SERVICES["nats"]["command"]]


def initialise(postgres: PostgresServer, service: str) -> None:
    """What the image's entry point does with the mounted files, in order."""
    variables = {key: str(value) for key, value in SERVICES[service]["environment"].items()}
    if "POSTGRES_DB" in variables:
        with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {variables['POSTGRES_DB']}")  # type: ignore[arg-type]
    environment = {
        **os.environ,
        **variables,
        "POSTGRES_USER": "postgres",
        "PGPASSWORD": postgres.password,
        "PGHOST": "127.0.0.1",
        "PGPORT": str(postgres.port),
        "PATH": f"{postgres.bin_directory}:{os.environ['PATH']}",
    }
    mounts = [volume for volume in SERVICES[service]["volumes"] if "initdb.d" in volume]
    for volume in sorted(mounts, key=lambda one: one.split(":")[1]):
        path = COMPOSE / volume.split(":")[0]
        command = ["sh", str(path)]
        if path.suffix == ".sql":
            command = ["psql", "-qX", "-v", "ON_ERROR_STOP=1", "-U", "postgres",
                       "-d", variables["POSTGRES_DB"], "-f", str(path)]  # fmt: skip
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture
def bridge(stack: Stack, tmp_path: Path) -> Iterator[BridgeProcess]:
    port = free_port()
    arguments = [*stack.command("bridge"), "--port", str(port)]
    environment = {**stack.environment("bridge"), "BRIDGE_HOST": "127.0.0.1"}
    process = BridgeProcess(arguments, environment, port, tmp_path / "bridge.log")
    process.wait_ready()
    yield process
    process.kill()


def run(stack: Stack, service: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / arguments[0]
    return subprocess.run(
        [str(program), *arguments[1:]],
        env=stack.environment(service),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_the_stack_passes_its_own_check_before_the_first_start(stack: Stack) -> None:
    answer = run(stack, "bridge", "bridge", "check", *stack.command("bridge"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "0 problems, 0 warnings" in answer.stdout


async def test_the_bridge_of_the_stack_streams_with_no_more_rights_than_given(
    stack: Stack, bridge: BridgeProcess
) -> None:
    with psycopg.connect(stack.postgres.dsn("app")) as connection:
        connection.execute("INSERT INTO users (name) VALUES ('new')")
        connection.execute("CREATE TABLE later (id int PRIMARY KEY)")
        connection.execute("INSERT INTO later VALUES (1)")
    await eventually(lambda: bridge.status()["cdc_events_published"] >= 2, what=bridge.log_text)
    assert "permission" not in bridge.log_text().lower()
    answer = run(stack, "bridge", "bridge", "check", *stack.command("bridge"))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert bridge.http("/shutdown", "POST").status == 401
    token = SERVICES["bridge"]["environment"]["BRIDGE_ADMIN_TOKEN"]
    stopped = bridge.http("/shutdown", "POST", {"Authorization": f"Bearer {token}"})
    assert stopped.status == 202
    assert bridge.wait() == 0


async def test_the_consumer_of_the_stack_reads_but_cannot_write(
    stack: Stack, bridge: BridgeProcess
) -> None:
    with psycopg.connect(stack.postgres.dsn("app")) as connection:
        connection.execute("INSERT INTO users (name) VALUES ('new')")
    await eventually(lambda: bridge.status()["cdc_events_published"] >= 1)
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    client = await nats.connect(
        stack.nats_url("consumer"), error_cb=note, inbox_prefix=READER_INBOX
    )
    try:
        info = await client.jsm().stream_info("CDC")
        assert info.state.messages > 0
        message = await client.jetstream().get_msg("CDC", seq=info.state.last_seq)
        assert message.subject.startswith("cdc.")
        with pytest.raises((nats.errors.Error, APIError, TimeoutError)):
            await client.jetstream().publish("cdc.users.insert", b"forged", timeout=1)
        with pytest.raises((nats.errors.Error, APIError, TimeoutError)):
            await client.jsm().delete_stream("CDC")
    finally:
        await client.close()
    assert any(re.search("permissions violation", text, re.IGNORECASE) for text in refused)


def test_the_mirror_of_the_stack_follows_into_its_own_database(
    stack: Stack, bridge: BridgeProcess, tmp_path: Path
) -> None:
    process = GuardedProcess(
        "mirror",
        [Path(sys.executable).parent / stack.command("mirror")[0], *stack.command("mirror")[1:]],
        log_path=tmp_path / "mirror.log",
        stop_signal=signal.SIGKILL,
        environment=stack.environment("mirror") | {"PGPASSWORD": "mirror"},
    )
    try:
        with psycopg.connect(stack.postgres.dsn("app")) as connection:
            connection.execute("UPDATE orders SET state = 'paid' WHERE id <= 10")

        def mirrored() -> bool:
            try:
                with psycopg.connect(stack.postgres.dsn("mirror")) as connection:
                    row = connection.execute(
                        "SELECT count(*), count(*) FILTER (WHERE state = 'paid') FROM orders"
                    ).fetchone()
            except psycopg.Error:
                return False
            return row == (1000, 10)

        wait_until(mirrored, 60, what=(tmp_path / "mirror.log").read_text)
    finally:
        process.kill()
