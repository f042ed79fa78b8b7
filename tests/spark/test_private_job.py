"""A job in a hostile place: planted modules, an open umask, secrets of others around it."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.bridge_process import REPOSITORY, clean_environment
from tests.fixtures.waiting import wait_until
from tests.spark.conftest import QUICK_JAVA

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CANARY = "canary-4712"


def environments_below(pid: int) -> dict[str, str]:
    """The environments of the programs that a process has started, by their names."""
    found = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
        except OSError:
            continue
    for one, parent in parents.items():
        above = parent
        while above in parents and above != pid:
            above = parents[above]
        if above == pid:
            try:
                name = Path(f"/proc/{one}/comm").read_text().strip()
                found[name] = Path(f"/proc/{one}/environ").read_text(errors="replace")
            except OSError:
                continue
    return found


def test_a_job_runs_no_planted_module_shares_no_file_and_passes_no_secret_on(
    database: Database,
    nats_server: NatsServer,
    prefix: str,
    bridge_process: Callable[..., BridgeProcess],
    tmp_path: Path,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute("INSERT INTO users SELECT g, 'n' FROM generate_series(1, 100) g")
    database.publish("users")
    bridge_process()
    planted, lake, executed = tmp_path / "planted", tmp_path / "lake", tmp_path / "executed"
    planted.mkdir()
    for name in ("zstandard", "msgpack", "nats", "pyarrow", "pandas", "deltalake", "msgspec"):
        code = f"open({str(executed)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(99)\n"
        (planted / f"{name}.py").write_text(code)
    variables = clean_environment(
        NATS_URL=nats_server.url,
        BRIDGE_PREFIX=prefix,
        BRIDGE_ADMIN_TOKEN=CANARY,
        DATABASE_URL=CANARY,
        PGPASSWORD=CANARY,
        POSTGRES_BRIDGE_PASSWORD=CANARY,
        PYTHONPATH=str(REPOSITORY),
    )
    command = [sys.executable, "-m", "spark_consumer", "--tables", "users", "--lake", str(lake)]
    command += ["--once", "--conf", "spark.ui.enabled=false"]
    command += ["--conf", f"spark.driver.extraJavaOptions={QUICK_JAVA}"]
    seen: dict[str, str] = {}
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(
            command, cwd=planted, env=variables, stdout=out, stderr=out, umask=0o000
        )
        try:

            def ended() -> bool:
                if not {"java", "python"} <= seen.keys():
                    seen.update(environments_below(job.pid))
                return job.poll() is not None

            wait_until(ended, 300)
        finally:
            job.kill()
            job.wait()
    assert job.returncode == 0, (tmp_path / "out").read_text()[-3000:]
    assert not executed.exists(), executed.read_text()
    assert {"java", "python"} <= seen.keys()
    assert all(CANARY not in environment for environment in seen.values())
    files = [lake, *lake.rglob("*")]
    assert sum(one.suffix == ".parquet" for one in files) >= 1
    open_to_others = [
        str(one)
        for one in files
        if stat.S_IMODE(one.stat().st_mode) & 0o077 and not one.is_symlink()
    ]
    assert open_to_others == []
    assert all(one.suffix == ".py" for one in planted.iterdir())
