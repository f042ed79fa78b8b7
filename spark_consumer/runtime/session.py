"""The Spark session of the job, with the settings its results depend on."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from consumer_sdk.transport.holds import hold
from spark_consumer.errors import SetupError
from spark_consumer.runtime.failures import root_cause
from spark_consumer.runtime.java import JavaProcess, known_gateway, prepare_java

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

INSTALL_HINT: Final = "Spark is not installed; run: pip install 'tailrace[spark]'"

_MASTER: Final = "spark.master"
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"

# Values must mean the same whatever the defaults of the place are.
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.compression.codec": "snappy",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # A row may be a message of up to a megabyte: thousands of those at a time do not fit a heap.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 1024 * 1024),
    "spark.sql.inMemoryColumnarStorage.batchSize": "64",
    "spark.ui.showConsoleProgress": "false",
    # The tables know their positions; Spark's own record is worth nothing after the run.
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.stopTimeout": "60000",
}


def open_session(
    master: str | None = None,
    name: str = "tailrace",
    options: Mapping[str, str] | None = None,
    java: JavaProcess | None = None,
) -> SparkSession:
    """Start Spark, or join the session that exists; `options` are Spark settings.

    `java` is where to run it, for a caller who may want to end it before it has started.
    """
    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SetupError(INSTALL_HINT) from error
    java_home = prepare_java()
    if java_home is not None:
        os.environ["JAVA_HOME"] = java_home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Spark would announce its own address by a name that may not resolve.
    local = master is not None and master.startswith("local")
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    settings = dict(_SETTINGS)
    log4j = Path(__file__).with_name("log4j2.properties")
    if local:
        settings["spark.sql.shuffle.partitions"] = str(max(2, os.cpu_count() or 2))
    settings.update(options or {})
    java_options = f"-Dlog4j2.configurationFile={log4j.as_uri()}"
    traced = logger.isEnabledFor(logging.DEBUG)
    if traced:
        java_options += " -Dtailrace.traces=full"
    wanted = settings.get(_JAVA_OPTIONS)
    settings[_JAVA_OPTIONS] = f"{java_options} {wanted}" if wanted else java_options
    for key, value in settings.items():
        builder = builder.config(key, value)
    if SparkContext._gateway is not None or _elsewhere():
        return _opened(builder)
    java = java or JavaProcess()
    if traced:
        java.pass_output_on()
    own = {"spark.app.name": name} if master is None else {"spark.app.name": name, _MASTER: master}
    with known_gateway(*java.start({**settings, **own})):
        hold("spark-before-session")
        session = _opened(builder)
    java.pass_output_on()
    return session


def _elsewhere() -> bool:
    """Whether Spark runs already, started by spark-submit or as a server to connect to."""
    return any(name in os.environ for name in ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"))


def _opened(builder: SparkSession.Builder) -> SparkSession:
    try:
        session = builder.getOrCreate()
        # Settings of SQL are looked at with its first use.
        session.conf.get("spark.sql.session.timeZone")
        return session
    except Exception as error:
        text = str(error).strip()
        reason = root_cause(text) or next(iter(text.splitlines()), type(error).__name__)
        raise SetupError(f"Spark does not start: {reason}") from error
