"""How the commands begin and end: passwords, interrupts, and every kind of standard output."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.nats import READER_ENVIRONMENT
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BIN = Path(sys.executable).parent
SECRET = "s3cret-Word"
FULL = "cannot be written: No space left on device"


@pytest.fixture
def shop(database, bridge_process, nats_server, prefix):
    """Two rows behind a bridge; the environment in which the commands find it."""
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.publish("users")
    bridge_process()
    database.execute("INSERT INTO users VALUES (1, 'Zoë'), (2, 'Åsa')")
    return clean_environment(
        DATABASE_URL=database.dsn, NATS_URL=nats_server.url, BRIDGE_PREFIX=prefix
    )


def run(
    *arguments: str, environment: dict[str, str], **options
) -> subprocess.CompletedProcess[bytes]:
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        [BIN / arguments[0], *arguments[1:]],
        env=environment, stderr=subprocess.PIPE, timeout=60, check=False, **options,
    )  # fmt: skip


@pytest.fixture
def nobody() -> Iterator[int]:
    """A pipe that nobody reads."""
    ours, theirs = os.pipe()
    os.close(ours)
    yield theirs
    os.close(theirs)


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts commands that do not get beyond their imports."""
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "msgpack.py").write_text(
        "import pathlib, time\n"
        "pathlib.Path(__file__).with_suffix('.loading').touch()\n"
        "time.sleep(60)\n"
    )

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [BIN / arguments[0], *arguments[1:]],
            env=clean_environment(PYTHONPATH=str(tmp_path)),
            stderr=subprocess.PIPE,
        )
        started.append(process)
        wait_until((tmp_path / "msgpack.loading").exists, what="the import")
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "command",
    [
        "bridge --slot s --pub p",
        "bridge check --slot s --pub p",
        "cdc tail",
        "spark-consumer --tables t --lake unused",
    ],
)
def test_an_interrupt_during_the_imports_ends_quietly(command: str, loading) -> None:
    process = loading(*command.split())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert (process.returncode, stderr) == (130, b"")


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (
            ("cdc", "verify", "t", "--source", f"host=h password={SECRET}", "--replica", "x"),
            "PGPASSWORD or ~/.pgpass",
        ),
        (("cdc", "tail", "--nats", f"nats://u:{SECRET}@h:0"), "NATS_URL or NATS_CREDS"),
        (
            ("bridge", "--slot", "s", f"--database-url=postgresql://u:{SECRET}@h/d"),
            "DATABASE_URL, PGPASSWORD or ~/.pgpass",
        ),
        (("spark-consumer", "--nats", f"nats://u:{SECRET}@h", "--bad"), "NATS_URL or NATS_CREDS"),
    ],
)
def test_a_password_among_the_arguments_is_warned_of_in_one_line(
    arguments: tuple[str, ...], instead: str
) -> None:
    done = run(*arguments, environment=clean_environment())
    assert done.returncode == 2
    lines = done.stderr.decode().splitlines()
    assert lines[0] == (
        f"{arguments[0]}: warning: a password on the command line can be seen by others on this "
        f"machine; use {instead} instead"
    )
    assert len(lines) == 2
    assert SECRET not in done.stderr.decode()


def test_a_password_among_the_arguments_works(shop, nats_server) -> None:
    done = run(
        "cdc", "tables", "--nats", nats_server.reader_url, environment=shop | READER_ENVIRONMENT
    )
    assert done.returncode == 0
    assert b"users" in done.stdout
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("package", "command"),
    [("bridge", "bridge"), ("consumer_sdk", "cdc"), ("spark_consumer", "spark-consumer")],
)
def test_a_module_starts_as_its_command_does(package: str, command: str) -> None:
    environment = clean_environment()
    as_command = run(command, "--version", environment=environment)
    as_module = run("python", "-m", package, "--version", environment=environment)
    assert (as_module.returncode, as_module.stdout) == (0, as_command.stdout)
    with Path("/dev/full").open("w") as full:
        failed = run("python", "-m", package, "--help", environment=environment, stdout=full)
    assert failed.returncode == 3
    assert failed.stderr.startswith(f"{command}: standard output {FULL}".encode())


@pytest.mark.slow
def test_a_full_output_is_one_line_and_not_usable(shop, database) -> None:
    slot = ("--slot", f"slot_{database.name}", "--pub", "pub")
    for arguments in (
        ("cdc", "--version"),
        ("cdc", "--help"),
        ("cdc", "tables"),
        ("cdc", "schema", "users"),
        ("cdc", "snapshot", "users", "--out", "-"),
        ("cdc", "tail", "--from-start", "users"),
        ("bridge", "--version"),
        ("bridge", "--help"),
        ("bridge", "config"),
        ("bridge", "check", *slot),
        ("spark-consumer", "--help"),
    ):
        for unbuffered in ({}, {"PYTHONUNBUFFERED": "1"}):
            with Path("/dev/full").open("w") as full:
                done = run(*arguments, environment={**shop, **unbuffered}, stdout=full)
            assert done.returncode == 3, (arguments, done.stderr)
            assert len(done.stderr.splitlines()) == 1, done.stderr
            assert done.stderr.startswith(f"{arguments[0]}: standard output {FULL}".encode())


def test_listing_tables_loads_no_other_database_and_no_websockets(shop) -> None:
    program = (
        "import sys; sys.argv = ['cdc', 'tables']; from consumer_sdk.launch.commands import cdc\n"
        "try: cdc()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = run("python", "-c", program, environment=shop)
    assert (done.returncode, b"users" in done.stdout) == (0, True)
    loaded = set(done.stderr.decode().split())
    assert {"nats", "consumer_sdk.client"} <= loaded
    heavy = {"aiohttp.client", "psycopg", "pyarrow", "pyspark", "pandas", "sqlite3"}
    assert not heavy & loaded


def test_a_closed_output_is_no_output(shop) -> None:
    for arguments in (("cdc", "tables"), ("cdc", "snapshot", "users", "--out", "-")):
        done = subprocess.run(
            ["sh", "-c", '"$0" "$@" >&-', BIN / arguments[0], *arguments[1:]],
            env=shop, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr


def test_what_the_encoding_lacks_is_written_as_an_escape(shop, tmp_path: Path) -> None:
    ascii_only = {**shop, "PYTHONIOENCODING": "ascii"}
    tail = run("cdc", "tail", "users", "--from-start", "-n", "3", environment=ascii_only)
    assert (tail.returncode, tail.stderr) == (0, b"")
    assert b"Zo\\xeb" in tail.stdout
    rows = run("cdc", "snapshot", "users", "--out", "-", environment=ascii_only)
    assert rows.returncode == 0, rows.stderr
    assert b"Zo\\xeb" in rows.stdout
    usage = run("cdc", "mirror", "--help", environment=ascii_only)
    assert (usage.returncode, usage.stderr) == (0, b"")
    # Files are what they always are.
    path = tmp_path / "users.jsonl"
    file = run("cdc", "snapshot", "users", "--out", str(path), environment=ascii_only)
    assert file.returncode == 0, file.stderr
    assert "Zoë" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_answer_of_a_comparison_outlives_its_reader(shop, database, tmp_path, nobody) -> None:
    replica = f"sqlite:///{tmp_path / 'r.db'}"
    mirrored = run("cdc", "mirror", "users", "--into", replica, "--once", environment=shop)
    assert mirrored.returncode == 0, mirrored.stderr
    url = urlsplit(database.dsn)
    shop["PGPASSWORD"] = str(url.password)
    source = database.dsn.replace(f":{url.password}@", "@")
    verify = ("cdc", "verify", "users", "--source", source, "--replica", replica)
    for unbuffered in ({}, {"PYTHONUNBUFFERED": "1"}):
        environment = {**shop, **unbuffered}
        assert run(*verify, environment=environment, stdout=nobody).returncode == 0
        with sqlite3.connect(tmp_path / "r.db") as connection:
            connection.execute("UPDATE users SET name = 'other' WHERE id = 1")
        connection.close()
        different = run(*verify, environment=environment, stdout=nobody)
        assert (different.returncode, different.stderr) == (1, b"")
        with sqlite3.connect(tmp_path / "r.db") as connection:
            connection.execute("UPDATE users SET name = 'Zoë' WHERE id = 1")
        connection.close()


def test_the_answer_of_a_check_outlives_its_reader(database, nats_server, nobody) -> None:
    environment = clean_environment(DATABASE_URL=database.dsn, NATS_URL=nats_server.url)
    check = ("bridge", "check", "--slot", "s", "--pub", "nowhere")
    said = run(*check, environment=environment)
    assert said.returncode != 0
    for unbuffered in ({}, {"PYTHONUNBUFFERED": "1"}):
        unheard = run(*check, environment={**environment, **unbuffered}, stdout=nobody)
        assert (unheard.returncode, unheard.stderr) == (said.returncode, b"")


def test_tail_ends_when_its_reader_has_left_though_nothing_happens(shop) -> None:
    with subprocess.Popen(
        [BIN / "cdc", "tail", "--from-start", "users"],
        env=shop, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as tail:  # fmt: skip
        try:
            assert tail.stdout is not None
            assert b"SCHEMA" in tail.stdout.readline()
            tail.stdout.close()
            assert tail.wait(10) == 0
            assert tail.stderr is not None
            assert tail.stderr.read() == b""
        finally:
            tail.kill()
