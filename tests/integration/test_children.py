"""What programs that we start find: no modules of the working directory, none of our secrets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.demo.programs import Programs
from bridge.embedded import GuardedProcess, NatsServer, PostgresServer
from bridge.embedded.account import Account, account_for
from consumer_sdk.transport.child_processes import child_environment
from tests.fixtures.bridge_process import REPOSITORY, clean_environment

CANARY = "canary-4711"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "BRIDGE_ADMIN_TOKEN": CANARY,
    "DATABASE_URL": f"postgresql://bridge:{CANARY}@127.0.0.1/db",
    "NATS_BRIDGE_PASSWORD": CANARY,
    "NATS_URL": f"nats://{CANARY}@127.0.0.1:1",
    "POSTGRES_BRIDGE_PASSWORD": CANARY,
    "SOME_OTHER_TOKEN": CANARY,
}
PLANTED = (
    "aiohttp", "msgpack", "msgspec", "nats", "nkeys", "prometheus_client", "psycopg", "pyarrow",
    "zstandard", "tomllib", "sqlite3", "asyncio",
)  # fmt: skip

START_WORKER = """
import asyncio
from pathlib import Path
from bridge.snapshot.coordinator.worker_pool import WorkerProcess

async def main():
    worker = await WorkerProcess.start(0)
    try:
        print("answers:", await worker.answers())
        print(Path(f"/proc/{worker._process.pid}/environ").read_text())
    finally:
        await worker.end()

asyncio.run(main())
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory with modules that are called like our dependencies, and say that they ran."""
    directory = tmp_path / "planted"
    directory.mkdir()
    for name in PLANTED:
        code = (
            f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r} + ' ')\nraise SystemExit(99)"
        )
        (directory / f"{name}.py").write_text(code)
    return directory


def executed(planted: Path) -> str:
    marks = planted.with_name("executed")
    return marks.read_text() if marks.exists() else ""


def run_in(
    directory: Path, *command: str, python_path: str = str(REPOSITORY), **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=clean_environment(**variables) | {"PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# An empty entry of PYTHONPATH means the working directory.
@pytest.mark.parametrize("python_path", [f"{REPOSITORY}", f"{REPOSITORY}{os.pathsep}"])
def test_a_snapshot_worker_runs_no_module_of_the_working_directory(
    planted: Path, python_path: str
) -> None:
    program = (
        f"import sys; sys.path.remove({str(planted)!r}) if {str(planted)!r} in sys.path else 0\n"
    )
    ended = run_in(planted, "-P", "-c", program + START_WORKER, python_path=python_path)
    assert "answers: True" in ended.stdout, ended.stderr
    assert executed(planted) == ""


def test_a_snapshot_worker_inherits_no_secret_but_what_libpq_reads(tmp_path: Path) -> None:
    ended = run_in(tmp_path, "-P", "-c", START_WORKER, **SECRETS, PGPASSFILE="/x/pgpass")
    assert "answers: True" in ended.stdout, ended.stderr
    assert CANARY not in ended.stdout
    assert "PGPASSFILE=/x/pgpass" in ended.stdout
    assert "PATH=" in ended.stdout


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("bridge", ["config"]),
        ("bridge", ["check", "--slot", "s", "--pub", "p"]),
        ("consumer_sdk", ["tables", "--timeout", "0.1"]),
        ("spark_consumer", ["--tables", "t", "--lake", "lake"]),
    ],
)
def test_python_m_runs_no_module_of_the_working_directory(
    planted: Path, module: str, arguments: list[str]
) -> None:
    ended = run_in(
        planted, "-m", module, *arguments,
        NATS_URL="nats://127.0.0.1:0", DATABASE_URL="postgresql://127.0.0.1:1/db",
    )  # fmt: skip
    assert executed(planted) == ""
    assert ended.returncode in (0, 2, 3), ended.stderr


def test_a_checkout_still_runs_from_its_own_directory() -> None:
    for module in ("bridge", "consumer_sdk", "spark_consumer"):
        ended = run_in(REPOSITORY, "-m", module, "--version", python_path="")
        assert ended.returncode == 0, ended.stderr
    ended = run_in(REPOSITORY, "-c", START_WORKER, python_path="")
    assert "answers: True" in ended.stdout, ended.stderr


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


@pytest.fixture
def secrets_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secrets_in_environment")
def test_embedded_servers_and_their_guardians_inherit_no_secret() -> None:
    with NatsServer() as broker, PostgresServer(18) as postgres:
        for server in (broker, postgres):
            assert server._process is not None
            for pid in (server.pid, server._process._guardian.pid):
                assert CANARY not in environment_of(pid), server.title


@pytest.mark.usefixtures("secrets_in_environment")
def test_the_programs_of_the_demo_inherit_no_secret(tmp_path: Path) -> None:
    programs = Programs(tmp_path, {"NATS_URL": "nats://127.0.0.1:4222"})
    process = programs._start("env", ["/usr/bin/env"])
    assert process.wait(10)
    seen = process.log_path.read_text()
    assert CANARY not in seen
    assert "NATS_URL=nats://127.0.0.1:4222" in seen
    assert "PYTHONSAFEPATH=1" in seen


@pytest.mark.usefixtures("secrets_in_environment")
def test_what_is_tried_as_another_account_inherits_no_secret() -> None:
    account = Account("ours", os.geteuid(), os.getegid())
    if os.geteuid() != 0:
        # Nobody but root changes accounts.
        assert account_for(None) is None
        return
    assert account._succeeds("/bin/sh", "-c", 'test -z "$NATS_URL$DATABASE_URL$SOME_OTHER_TOKEN"')


def test_a_child_environment_has_what_was_asked_for_and_nothing_else() -> None:
    given = {**SECRETS, "PATH": "/bin", "PGHOST": "h", "LC_ALL": "C", "PYTHONPATH": ":/a::b"}
    found = child_environment("PG", environment=given)
    assert set(found) == {"PATH", "PGHOST", "LC_ALL", "PYTHONPATH", "PYTHONSAFEPATH"}
    places = found["PYTHONPATH"].split(os.pathsep)
    assert places[:2] == ["/a", str(Path("b").absolute())]
    assert "" not in places


def test_a_guarded_process_ends_with_what_it_was_given(tmp_path: Path) -> None:
    process = GuardedProcess(
        "env", ["/usr/bin/env"], log_path=tmp_path / "log", stop_signal=signal.SIGKILL,
        environment={"ONLY": "this"},
    )  # fmt: skip
    assert process.wait(10)
    assert (tmp_path / "log").read_text() == "ONLY=this\n"
