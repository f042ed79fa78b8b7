"""`bridge demo`: everything at once on servers of its own, and a checked result at the end."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import psycopg

from bridge.demo import shop
from bridge.demo.console import Console
from bridge.demo.performance import Performance
from bridge.embedded import LOOPBACK, NatsServer, PostgresServer, free_port
from bridge.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SECONDS_IN_A_PIPE: Final = 20.0
LONGEST_SECONDS: Final = 7 * 86400.0

_SPARK_PACKAGES: Final = ("pyspark", "pandas", "deltalake", "duckdb")


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; it is taken as a Ctrl-C that means it."""

    signum: int = signal.SIGINT


def run_demo(seconds: float | None, spark: bool, port: int) -> int:
    """Run the demonstration; 0 if everything that was committed is found everywhere, else 1.

    It leaves neither processes nor directories behind, however it ends.
    """
    console = Console()
    if seconds is None and not console.live:
        seconds = SECONDS_IN_A_PIPE
    if seconds is not None and not 0 < seconds <= LONGEST_SECONDS:
        raise SettingsError(f"--seconds: {seconds:g} is not a time to run for; try --seconds 20")
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port: {port} is not a port; the default is 9090")
    if spark:
        _require_spark()
    with _ending_in_order(console) as stack:
        try:
            return asyncio.run(_set_the_stage(stack, console, seconds, spark, port).run())
        except (KeyboardInterrupt, asyncio.CancelledError) as end:
            console.keep()
            console.line(" interrupted: stopping everything and removing it")
            return 128 + (end.signum if isinstance(end, Terminated) else signal.SIGINT)
        except BrokenPipeError:
            # Nobody reads any more: nothing may be written at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def _require_spark() -> None:
    missing = [name for name in _SPARK_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"the Spark part needs {', '.join(missing)}; run: pip install 'tailrace[demo,spark]',"
            " or leave it out with --no-spark"
        )


@contextmanager
def _ending_in_order(console: Console) -> Iterator[ExitStack]:
    """Turn signals into exceptions, and let nothing interrupt the cleaning up."""

    def terminate(signum: int, _frame: FrameType | None) -> NoReturn:
        end = Terminated()
        end.signum = signum
        raise end

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
    for signum in before:
        signal.signal(signum, terminate)
    try:
        with ExitStack() as stack:
            try:
                yield stack
            finally:
                # It takes a moment; an impatient second Ctrl-C must not cut it short.
                for signum in before:
                    signal.signal(signum, signal.SIG_IGN)
                with suppress(OSError):
                    console.keep()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _set_the_stage(
    stack: ExitStack, console: Console, seconds: float | None, spark: bool, port: int
) -> Performance:
    """Start the servers and make the shop; what has to be undone is left in `stack`."""
    # Both say so if they are not installed, before anything is started.
    nats_server = NatsServer()
    stack.callback(nats_server.close)
    postgres = PostgresServer(18)
    stack.callback(postgres.close)
    console.line()
    console.line(
        f" {console.paint('bold', 'tailrace demo')}"
        "  real servers in a temporary directory, gone when this ends"
    )
    with console.step("starting NATS") as step:
        nats_server.start()
        version = nats_server.monitor("/varz")["version"]
        step.done(f"NATS {version} with JetStream on port {nats_server.port}")
    with console.step("starting PostgreSQL") as step:
        postgres.start()
        dsn = postgres.create_database(shop.DATABASE)
        step.done(f"PostgreSQL {postgres.version} on port {postgres.port}")
    with (
        console.step("making the shop") as step,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        rows = shop.set_up(connection)
        step.done(f"a shop of {len(shop.TABLES)} tables with {rows:,} rows")
    directory = Path(tempfile.mkdtemp(prefix="tailrace-demo-"))
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    return Performance(
        console=console,
        directory=directory,
        dsn=dsn,
        nats_url=nats_server.url,
        http_port=_dashboard_port(console, port),
        seconds=seconds,
        spark=spark,
    )


def _dashboard_port(console: Console, wanted: int) -> int:
    if wanted == 0:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except OSError:
            other = free_port()
            console.line(f" {console.paint('yellow', '!')} port {wanted} is taken; using {other}")
            return other
    return wanted
