"""The Spark session of the job, with the settings that its results depend on."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from consumer_sdk.transport.holds import hold
from spark_consumer.errors import SetupError
from spark_consumer.runtime.failures import root_cause
from spark_consumer.runtime.java import JavaProcess, gateway_environment, prepare_java

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

INSTALL_HINT: Final = "Spark is not installed; run: pip install 'tailrace[spark]'"

_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_MASTER: Final = "spark.master"
_LOCAL: Final = "local[*]"
_PARTITIONS: Final = "spark.sql.shuffle.partitions"
# As in a Java properties file: the key ends at a blank, `=` or `:`.
_PROPERTY: Final = re.compile(r"\s*([^\s=:#!]+)\s*[\s=:]\s*(\S+)\s*\Z")

# Results must not depend on the defaults of the installation.
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.compression.codec": "snappy",
    # A missing or damaged file must be an error, never fewer rows.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # A row may be a message of up to a megabyte: thousands at a time would not fit into the heap.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(16 * 1024 * 1024),
    "spark.sql.inMemoryColumnarStorage.batchSize": "64",
    "spark.ui.showConsoleProgress": "false",
    # The tables hold the positions; Spark's checkpoint is not used after the run.
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.stopTimeout": "60000",
}


def open_session(
    master: str | None = None,
    name: str = "tailrace",
    options: Mapping[str, str] | None = None,
    java: JavaProcess | None = None,
) -> SparkSession:
    """Start Spark, or use the existing session; `options` are Spark settings.

    Without `master` it is the one that spark-submit was given or that Spark is configured with, and
    local[*] if there is none. Pass `java` to be able to end the Java process while it starts.
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
    runs = SparkContext._gateway is not None or _runs_already()
    if master is None and not runs:
        master = configured_master(options or {}, os.environ) or _LOCAL
    # Otherwise Spark would announce its address by a host name that may not resolve.
    local = _is_local(master)
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = _settings(options or {}, local=local) | {"spark.app.name": name}
    if master is not None:
        settings["spark.master"] = master
    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    if runs:
        return _with_few_partitions(_get_session(builder))
    java = java or JavaProcess()
    if logger.isEnabledFor(logging.DEBUG):
        java.forward_output()
    with gateway_environment(*java.start(settings)):
        hold("spark-before-session")
        session = _get_session(builder)
    # It would print a traceback when Java ends, although the caller reports that in one line.
    session.sparkContext._accumulatorServer.handle_error = _print_nothing  # type: ignore[method-assign,assignment]
    java.forward_output()
    return session


def _settings(options: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """The options over the defaults; given Java options follow those of this package."""
    settings = dict(_SETTINGS)
    if local:
        settings[_PARTITIONS] = _few_partitions()
    # Hadoop's own umask otherwise, whatever that of this process is.
    settings["spark.hadoop.fs.permissions.umask-mode"] = f"{_umask():03o}"
    settings.update(options)
    log4j = Path(__file__).with_name("log4j2.properties")
    java_options = f"-Dlog4j2.configurationFile={log4j.as_uri()}"
    if logger.isEnabledFor(logging.DEBUG):
        java_options += " -Dtailrace.traces=full"
    given = settings.get(_JAVA_OPTIONS)
    settings[_JAVA_OPTIONS] = f"{java_options} {given}" if given else java_options
    return settings


def _few_partitions() -> str:
    return str(max(2, os.cpu_count() or 2))


def _with_few_partitions(session: SparkSession) -> SparkSession:
    """On one machine, Spark's default of 200 partitions costs a small batch more than its work."""
    if "SPARK_REMOTE" not in os.environ:
        context = session.sparkContext
        if _is_local(context.master) and context.getConf().get(_PARTITIONS) is None:
            session.conf.set(_PARTITIONS, _few_partitions())
    return session


def _is_local(master: str | None) -> bool:
    return master is not None and re.match(r"local(\[|$)", master) is not None


def configured_master(options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """The master that spark-submit would take: from the settings, its arguments or its files.

    https://spark.apache.org/docs/latest/configuration.html#dynamically-loading-spark-properties
    """
    from pyspark.find_spark_home import _find_spark_home

    if _MASTER in options:
        return options[_MASTER]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--master")
    parser.add_argument("--conf", "-c", action="append", default=[])
    parser.add_argument("--properties-file")
    submit_arguments = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", ""))
    given, _ = parser.parse_known_args(submit_arguments)
    settings = dict(one.partition("=")[::2] for one in given.conf)
    asked: str | None = given.master or settings.get(_MASTER)
    if asked:
        return asked
    directory = environment.get("SPARK_CONF_DIR") or Path(_find_spark_home(), "conf")
    file = Path(given.properties_file or Path(directory, "spark-defaults.conf"))
    with suppress(OSError):
        for line in file.read_text().splitlines():
            found = _PROPERTY.match(line)
            if found is not None and found[1] == _MASTER:
                return found[2]
    return environment.get("MASTER") or None


def _umask() -> int:
    """The umask of this process, which can be read only by setting another one."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def _print_nothing(_request: object, _address: object) -> None:
    """Replace `socketserver.BaseServer.handle_error`, which prints a traceback."""


def _runs_already() -> bool:
    """Whether spark-submit has started Java, or Spark is a server to connect to."""
    return any(name in os.environ for name in ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"))


def _get_session(builder: SparkSession.Builder) -> SparkSession:
    try:
        session = builder.getOrCreate()
        # Spark checks its SQL settings only when they are first used.
        session.conf.get("spark.sql.session.timeZone")
        return session
    except Exception as error:
        text = str(error).strip()
        reason = root_cause(text) or next(iter(text.splitlines()), type(error).__name__)
        raise SetupError(f"Spark does not start: {reason}") from error
