"""One Spark session for all tests here, since starting one takes longer than most tests, and jobs
that run on it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.reading.schemas import resolve_table
from consumer_sdk.transport.settings import NatsSettings
from spark_consumer.job.job import JobSettings, SparkJob
from spark_consumer.lake.table_definition import TableOptions
from spark_consumer.runtime.session import open_session
from spark_consumer.source.cdc_source import CdcSource
from spark_consumer.source.snapshot_source import SnapshotSource
from tests.fixtures.nats import READER_LOGIN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from bridge.embedded import NatsServer


QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For short jobs: a second compiler and a parallel collector would cost more than they earn."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session, as `spark-consumer` opens it, without its web page."""
    options = {
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": QUICK_JAVA,
    }
    # Spark's Python processes have the environment that Java started with.
    with pytest.MonkeyPatch.context() as environment:
        for name, value in READER_LOGIN.items():
            environment.setenv(name, value)
        session = open_session("local[2]", "tests", options)
    session.dataSource.register(CdcSource)
    session.dataSource.register(SnapshotSource)
    yield session
    session.stop()


class Jobs:
    """Runs jobs on one deployment and one lake."""

    def __init__(self, spark: SparkSession, nats: NatsSettings, lake: Path) -> None:
        self.spark = spark
        self.nats = nats
        self.lake = lake

    def _job(self, tables: tuple[str, ...], settings: dict[str, Any]) -> SparkJob:
        names = tuple(resolve_table(table) for table in tables)
        chosen = {one.name for one in fields(TableOptions)} & settings.keys()
        options = TableOptions(**{name: settings.pop(name) for name in chosen})
        return SparkJob(
            self.spark,
            JobSettings(
                nats=self.nats, tables=names, lake=str(self.lake), options=options, **settings
            ),
        )

    def once(self, *tables: str, **settings: Any) -> SparkJob:
        """Run a job to its end; what stops it is raised."""
        job = self._job(tables, {"once": True, **settings})
        job.run()
        return job

    @contextmanager
    def following(self, *tables: str, **settings: Any) -> Iterator[SparkJob]:
        """Have a job follow the stream while a block runs, then stop it gracefully."""
        job = self._job(tables, {"trigger_seconds": 0.1, **settings})
        failures: list[BaseException] = []

        def run() -> None:
            try:
                job.run()
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield job
        finally:
            job.stop()
            thread.join()
        if failures:
            raise failures[0]


@pytest.fixture
def jobs(spark: SparkSession, nats_server: NatsServer, prefix: str, tmp_path: Path) -> Jobs:
    """Jobs on the test's deployment and a lake of its own."""
    nats = NatsSettings.resolve(nats_server.url, prefix=prefix, environment=READER_LOGIN)
    return Jobs(spark, nats, tmp_path / "lake")
