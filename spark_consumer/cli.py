"""The command `spark-consumer`."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from consumer_sdk.commands.options import Parser, count
from consumer_sdk.errors import CdcError, GapError, UsageError
from consumer_sdk.launch.commands import INTERRUPTED
from consumer_sdk.transport.logfmt import LogfmtFormatter, event, mask_secrets
from consumer_sdk.transport.settings import NatsSettings
from consumer_sdk.transport.version import ShowVersion
from consumer_sdk.wire.escaping import printable
from spark_consumer.errors import SetupError
from spark_consumer.lake.directory import keep_private, lake_directory, require_usable_directory
from spark_consumer.runtime.java import JavaProcess
from spark_consumer.runtime.signals import Interrupted, run_interruptible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spark_consumer.job.job import SparkJob

DESCRIPTION = (
    "Replicate tables of a PostgreSQL database into a Delta Lake: load them from a snapshot, then "
    "apply every change exactly once."
)
EPILOG = """\
Write tables as in SQL: users, sales.orders, sales."Odd Table.1" (quote them for the shell).
The NATS connection comes from --nats and --prefix, or from NATS_URL (or NATS_HOST, NATS_PORT,
NATS_BRIDGE_USER, NATS_BRIDGE_PASSWORD, NATS_PASSWORD_FILE or NATS_PASSWORD_COMMAND), NATS_CREDS,
NATS_NKEY, NATS_CA, NATS_CERT, NATS_KEY, NATS_TLS_FIRST and BRIDGE_PREFIX.
Exit codes: 0 success, 1 the table is not published, 2 bad settings, 3 NATS, bridge or table not
usable as configured, 4 data at risk: the job stopped before it wrote anything wrong. One SIGINT or
SIGTERM ends the job after the current batch, with 0. A second one ends it at once, with 128 + its
number; so does the first one before the job has started.
"""
logger = logging.getLogger(__name__)

_NEEDED = ("pyspark", "pyarrow", "pandas", "deltalake")
_TRIGGER = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|seconds?|m|min|minutes?)?\Z")
_MINUS = re.compile(r"-\.?\d")


def build_parser() -> argparse.ArgumentParser:
    """The options of the command; parsing them does not import Spark."""
    parser = Parser(
        prog="spark-consumer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, const="spark-consumer")
    parser.add_argument("--tables", metavar="A,B", required=True, help="the tables to replicate")
    parser.add_argument(
        "--lake",
        metavar="DIR",
        required=True,
        help="directory of the Delta tables, local or mounted",
    )
    parser.add_argument(
        "--once", action="store_true", help="end when everything stored before the start is applied"
    )
    parser.add_argument(
        "--trigger",
        metavar="TIME",
        type=_trigger_seconds,
        default=2.0,
        help="time between batches: 500ms, 10s, 1m; default 2s",
    )
    parser.add_argument(
        "--rows-per-batch",
        metavar="N",
        type=count,
        default=200_000,
        help="approximate number of changes in a batch, default 200000; transactions stay whole",
    )
    parser.add_argument(
        "--unrepresentable",
        choices=("error", "null", "text"),
        default="error",
        help="what to do with values Spark cannot represent, such as infinity or numeric NaN: "
        "stop, write null, or null with the text in a column NAME__text; default error",
    )
    parser.add_argument(
        "--soft-deletes",
        action="store_true",
        help="keep deleted rows, marked in a column _deleted",
    )
    parser.add_argument(
        "--synced-at", action="store_true", help="add a column _synced_at: when a row was written"
    )
    parser.add_argument(
        "--rebootstrap",
        action="store_true",
        help="load a table again from a new snapshot if it cannot continue (gap in the stream, "
        "rows changed by another writer, incompatible change of columns) instead of stopping",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what to log; debug shows the stack traces of errors too, default info",
    )
    spark = parser.add_argument_group("Spark")
    spark.add_argument(
        "--master",
        metavar="URL",
        help="Spark master; default: that of spark-submit or spark-defaults.conf, else local[*]",
    )
    spark.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=_setting,
        help="a Spark setting; may be given several times",
    )
    nats = parser.add_argument_group("NATS")
    nats.add_argument(
        "--nats",
        metavar="URL",
        help="address, or several separated by commas; put an address with a password into the "
        "environment instead [NATS_URL]",
    )
    nats.add_argument(
        "--prefix", metavar="NAME", help="prefix of subjects, streams and buckets [BRIDGE_PREFIX]"
    )
    return parser


def _trigger_seconds(text: str) -> float:
    match = _TRIGGER.match(text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}; write 500ms, 10s or 1m")
    unit = match[2] or "s"
    factor = 0.001 if unit == "ms" else 60.0 if unit.startswith("m") else 1.0
    return float(match[1]) * factor


def _setting(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found or not key.startswith("spark."):
        raise argparse.ArgumentTypeError(f"not a Spark setting: {text!r}; write spark.key=value")
    return key, value


def _values_with_minus(arguments: Sequence[str]) -> list[str]:
    """Join `-1s` with its option, because argparse would read it as another option."""
    tied: list[str] = []
    for argument in arguments:
        if tied and tied[-1] == "--trigger" and _MINUS.match(argument):
            tied[-1] += f"={argument}"
        else:
            tied.append(argument)
    return tied


def run(arguments: Sequence[str]) -> int:
    """Run the job; every error is one line on standard error and an exit code."""
    try:
        options = build_parser().parse_args(_values_with_minus(arguments))
        _require_packages()
        return _run_job(options)
    except CdcError as error:
        logger.debug("stopped", exc_info=error)
        text = " ".join(str(error).split())
        if isinstance(error, GapError):
            text += " with --rebootstrap, which rebuilds the tables"
        print(f"spark-consumer: {printable(mask_secrets(text))}", file=sys.stderr)
        return error.exit_code
    except Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _require_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"{', '.join(missing)} not installed; run: pip install 'tailrace[spark]'")


def _run_job(options: argparse.Namespace) -> int:
    run = _Run(options)
    run_interruptible(run.work, run.stop, run.kill)
    return 0


class _Run:
    """One run of the command, from its checks to its end; a signal may end it at any moment."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._java = JavaProcess()
        self._job: SparkJob | None = None

    def stop(self) -> bool:
        """Ask the job to end after the current batch; False if no job has started."""
        job = self._job
        if job is not None:
            job.stop()
        return job is not None

    def kill(self) -> None:
        """End Java at once; the lake holds only what was committed."""
        self._java.kill()

    def work(self) -> None:
        from py4j.protocol import Py4JError

        from spark_consumer.job.job import JobSettings, SparkJob
        from spark_consumer.job.table_setup import find_schemas, require_usable_tables
        from spark_consumer.lake.directory import lake_lock
        from spark_consumer.lake.embedded import EmbeddedDeltaLake
        from spark_consumer.lake.table_definition import TableOptions
        from spark_consumer.runtime.nats_thread import NatsThread
        from spark_consumer.runtime.session import open_session
        from spark_consumer.source.options import split_tables

        options = self._options
        tables = split_tables(options.tables)
        if not tables:
            raise UsageError("--tables names no table; see spark-consumer --help")
        lake = lake_directory(options.lake)
        require_usable_directory(lake)
        keep_private(lake)
        nats_settings = NatsSettings.resolve(
            options.nats, prefix=options.prefix, name="spark-consumer"
        )
        if options.nats:
            # Spark's Python processes read the NATS address and password from the environment.
            os.environ["NATS_URL"] = options.nats
        _start_logging(options.log_level)
        with NatsThread(nats_settings) as nats:
            # Checked before Spark starts, so that bad settings are reported within a second.
            schemas = nats.run(lambda client: find_schemas(client, tables))
        table_options = TableOptions(
            options.unrepresentable, options.soft_deletes, options.synced_at
        )
        require_usable_tables(
            EmbeddedDeltaLake(lake), schemas, table_options, rebootstrap=options.rebootstrap
        )
        with lake_lock(lake):
            pass
        settings = JobSettings(
            nats=nats_settings,
            tables=tables,
            lake=lake,
            options=table_options,
            once=options.once,
            trigger_seconds=options.trigger,
            rebootstrap=options.rebootstrap,
            rows_per_batch=options.rows_per_batch,
        )
        spark = open_session(options.master, "spark-consumer", dict(options.conf), self._java)
        event(logger, "spark started", master=spark.sparkContext.master)
        try:
            self._job = SparkJob(spark, settings)
            self._job.run()
        finally:
            # If Java has ended, there is nothing to stop, and its error is already being raised.
            with suppress(Py4JError, OSError):
                spark.stop()
            self._java.end()


def _start_logging(level: str) -> None:
    """Send the log lines of this package to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogfmtFormatter())
    logger = logging.getLogger("spark_consumer")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.isEnabledFor(logging.DEBUG):
        # py4j also logs the errors that it raises, some of them through the root logger.
        logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
        logging.getLogger().addFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in Path(record.pathname).parts


def main() -> NoReturn:
    """Entry point of the program."""
    sys.exit(run(sys.argv[1:]))
