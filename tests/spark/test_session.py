"""Where Spark runs: as asked for, as submitted, as configured, else on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

import spark_consumer
from spark_consumer.runtime.session import configured_master
from tests.fixtures.bridge_process import REPOSITORY, clean_environment
from tests.fixtures.nats import READER_ENVIRONMENT
from tests.spark.conftest import QUICK_JAVA
from tests.spark.lake_oracle import assert_same_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

CLUSTER = "spark://cluster:7077"


@pytest.mark.parametrize(
    ("options", "environment", "defaults", "master"),
    [
        ({}, {}, "", None),
        ({"spark.master": CLUSTER}, {"MASTER": "yarn"}, "spark.master yarn", CLUSTER),
        ({}, {"PYSPARK_SUBMIT_ARGS": f"--master {CLUSTER} pyspark-shell"}, "", CLUSTER),
        ({}, {"PYSPARK_SUBMIT_ARGS": f"--master={CLUSTER} pyspark-shell"}, "", CLUSTER),
        (
            {},
            {"PYSPARK_SUBMIT_ARGS": f"--name x --conf 'spark.master={CLUSTER}' pyspark-shell"},
            "spark.master yarn",
            CLUSTER,
        ),
        ({}, {}, f"# ours\nspark.master.rest.enabled true\nspark.master   {CLUSTER}\n", CLUSTER),
        ({}, {"MASTER": "yarn"}, f"spark.master={CLUSTER}", CLUSTER),
        ({}, {"MASTER": CLUSTER}, "#spark.master yarn", CLUSTER),
    ],
)
def test_the_configured_master_is_found(
    tmp_path: Path,
    options: dict[str, str],
    environment: dict[str, str],
    defaults: str,
    master: str | None,
) -> None:
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    found = configured_master(options, {"SPARK_CONF_DIR": str(tmp_path), **environment})
    assert found == master


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_job_runs_where_it_was_submitted_to(
    database: Database,
    nats_server: NatsServer,
    prefix: str,
    bridge_process: Callable[..., BridgeProcess],
    tmp_path: Path,
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute("INSERT INTO users SELECT g, 'n' FROM generate_series(1, 10) g")
    database.publish("users")
    bridge_process()
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    program = Path(spark_consumer.__file__).with_name("__main__.py")
    command = [str(submit), "--master", "local[1]", "--conf", "spark.ui.enabled=false"]
    command += ["--driver-java-options", QUICK_JAVA, str(program)]
    command += ["--tables", "users", "--lake", str(tmp_path / "lake"), "--prefix", prefix, "--once"]
    job = subprocess.run(
        command,
        env=clean_environment(
            NATS_URL=nats_server.reader_url,
            PYSPARK_PYTHON=sys.executable,
            SPARK_LOCAL_IP="127.0.0.1",
            PYTHONPATH=str(REPOSITORY),
            **READER_ENVIRONMENT,
        ),
        # spark-submit writes both to its standard output.
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert job.returncode == 0, job.stdout[-3000:]
    (started,) = [line for line in job.stdout.splitlines() if "spark started" in line]
    assert "master=local[1]" in started
    assert_same_rows(database.dsn, tmp_path / "lake", "users")
