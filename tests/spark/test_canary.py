"""Planted secrets and row values are not in Spark's pages, configuration, processes and log."""

from __future__ import annotations

import http.client
import json
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from bridge.embedded import LOOPBACK, GuardedProcess, free_port
from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.canaries import children_of, read_process
from tests.fixtures.waiting import wait_until
from tests.spark.conftest import QUICK_JAVA

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.canaries import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE = 300
PAGES = ("/environment/", "/SQL/", "/StreamingQuery/", "/executors/", "/jobs/", "/stages/")


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode(errors="replace")
    except OSError:
        return ""
    finally:
        connection.close()


def test_the_job_shows_no_secret_and_no_row_value_anywhere(
    canary_deployment: Deployment,
    canary_bridge: Callable[..., BridgeProcess],
    prefix: str,
    tmp_path: Path,
) -> None:
    planted = canary_deployment.planted
    canary_bridge()
    canary_deployment.insert(1)
    port = free_port()
    # Its own process: Spark's Python processes read the password from the environment of Java.
    job = GuardedProcess(
        "spark-consumer",
        [sys.executable, "-m", "spark_consumer", "--tables", "t", "--lake", str(tmp_path / "lake"),
         "--prefix", prefix, "--log-level", "debug", "--trigger", "200ms", "--master", "local[2]",
         "--conf", f"spark.ui.port={port}",
         "--conf", f"spark.driver.extraJavaOptions={QUICK_JAVA}"],
        log_path=tmp_path / "spark.log",
        stop_signal=signal.SIGKILL,
        environment=clean_environment(NATS_URL=canary_deployment.nats_url),
    )  # fmt: skip
    try:

        def completed() -> bool:
            found = get(port, "/StreamingQuery/")
            return not job.running or ("RUNNING" in found and has_rows(port))

        canary_deployment.insert(2)
        wait_until(completed, PATIENCE, job.log_path.read_text)
        assert job.running, job.log_path.read_text()
        (application,) = json.loads(get(port, "/api/v1/applications"))
        api = f"/api/v1/applications/{application['id']}"
        paths = [*PAGES, f"{api}/environment", f"{api}/sql?details=true", f"{api}/jobs"]
        paths += [f"/SQL/execution/?id={number}" for number in range(3)]
        written = {path: get(port, path) for path in paths}
        assert all(written[path] for path in paths)
        for pid in (job.pid, *children_of(job.pid)):
            written[f"command line of {pid}"] = read_process(pid, "cmdline").decode()
        # An array with bounds that no array of Spark has.
        canary_deployment.database.execute(
            "INSERT INTO t (id, tags) VALUES (5000, %s)", (f"[2:3]={{{planted.text},b}}",)
        )
        assert job.wait(PATIENCE), job.log_path.read_text()
        assert job.exit_code == 4, job.log_path.read_text()
        written["log"] = job.log_path.read_text()
        assert "does not fit" in written["log"]
        for name, text in written.items():
            planted.refuse(name, text)
    finally:
        job.kill()


def has_rows(port: int) -> bool:
    (application,) = json.loads(get(port, "/api/v1/applications"))
    jobs = json.loads(get(port, f"/api/v1/applications/{application['id']}/jobs"))
    return any(one["status"] == "SUCCEEDED" for one in jobs)
