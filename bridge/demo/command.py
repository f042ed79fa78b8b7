"""`bridge demo`: runs all parts on embedded servers and checks the result at the end."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bridge.demo import checks, shop
from bridge.demo.observer import END_MARK_STATEMENT, Observer, StreamReader, bridge_is_ready
from bridge.demo.programs import Programs, command_line, interrupt
from bridge.demo.view import Console, View
from bridge.demo.workload import Workload
from bridge.embedded import NatsServer, PostgresServer, free_port, port_is_free
from bridge.errors import SettingsError
from consumer_sdk.transport.cancellation import errors_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import GuardedProcess

    T = TypeVar("T")

DEFAULT_PORT: Final = 9090
SECONDS_IN_A_PIPE: Final = 20.0
LONGEST_SECONDS: Final = 7 * 86400.0
READY_SECONDS: Final = 60.0
FRAME_SECONDS: Final = 0.2
LINE_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.5
CANCEL_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.05

_SPARK_PACKAGES: Final = ("pyspark", "pandas", "deltalake", "duckdb")


def run_demo(seconds: float | None, spark: bool, port: int) -> int:
    """Run the demonstration; 0 if all committed changes are found everywhere, else 1.

    However it ends, it leaves no processes and no directories behind.
    """
    console = Console()
    if seconds is None and not console.live:
        seconds = SECONDS_IN_A_PIPE
    if seconds is not None and not 0 < seconds <= LONGEST_SECONDS:
        raise SettingsError(f"--seconds: {seconds:g} is not a time to run for; try --seconds 20")
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port: {port} is not a port; the default is {DEFAULT_PORT}")
    if spark:
        _require_spark()
    try:
        return asyncio.run(Demo(console, seconds, spark=spark, port=port).run())
    except BrokenPipeError:
        # The reader has closed the pipe, so nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _require_spark() -> None:
    missing = [name for name in _SPARK_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"the Spark part needs {', '.join(missing)}; run: pip install 'tailrace[demo,spark]',"
            " or leave it out with --no-spark"
        )


class Demo:
    """Runs the demonstration from the start of the servers to the last check.

    Ctrl-C during the workload ends the workload, and the checks follow; otherwise it ends all.
    """

    def __init__(self, console: Console, seconds: float | None, *, spark: bool, port: int) -> None:
        self._console = console
        self._seconds = seconds
        self._spark = spark
        self._port = port
        self._is_working = False
        self._end_workload = asyncio.Event()
        self._ended_by: signal.Signals | None = None

    async def run(self) -> int:
        """Run it and return the exit code; then all processes and files are removed."""
        task = asyncio.current_task()
        assert task is not None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum, task)
        try:
            with ExitStack() as stack:
                return self._conclude(await self._run_parts(stack))
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
        return 128 + self._ended_by

    def _on_signal(self, signum: signal.Signals, task: asyncio.Task[object]) -> None:
        if signum == signal.SIGINT and self._is_working:
            self._is_working = False
            self._end_workload.set()
        elif self._ended_by is None:
            self._ended_by = signum
            with suppress(OSError):
                self._console.keep()
                self._console.line(" interrupted: stopping everything and removing it")
            self._cancel(task)

    def _cancel(self, task: asyncio.Task[object]) -> None:
        # Repeated, because before Python 3.12 `wait_for` may swallow a cancellation.
        if not task.done():
            task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_SECONDS, self._cancel, task)

    async def _run_parts(self, stack: ExitStack) -> list[str]:
        # Both raise where they are not installed, before anything is started.
        nats_server = NatsServer()
        stack.callback(nats_server.close)
        postgres = PostgresServer(18)
        stack.callback(postgres.close)
        directory = Path(tempfile.mkdtemp(prefix="tailrace-demo-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        dsn = await self._start_servers(nats_server, postgres)
        port = self._dashboard_port()
        connection = conninfo_to_dict(dsn)
        password = str(connection.pop("password"))
        programs = Programs(
            directory,
            {
                "DATABASE_URL": dsn,
                "PGPASSWORD": password,
                "NATS_URL": nats_server.url,
                # Short intervals, so that the dashboard changes in a short demonstration.
                "BRIDGE_WAL_CHECK_INTERVAL": "1s",
            },
        )
        bridge = await self._start_bridge(programs, port)
        stack.callback(bridge.kill)
        mirror_path = directory / "shop.db"
        replica = f"sqlite:///{mirror_path}"
        with self._console.step("starting the mirror") as step:
            mirror = programs.start("cdc", "mirror", "--all", "--into", replica)
            stack.callback(mirror.kill)
            step.done(
                command_line("cdc", "mirror", "--all", "--into", f"sqlite:///{mirror_path.name}")
            )
        workload = Workload(dsn)
        observer = Observer(dsn, port, mirror_path)
        async with StreamReader(nats_server.url) as stream:
            view = View(
                workload.committed,
                stream,
                observer,
                dashboard=f"http://127.0.0.1:{port}/",
                nats_url=nats_server.url,
                seconds=self._seconds,
            )
            await self._run_workload(workload, view, bridge, mirror)
            problems = await checks.check_stream(self._console, workload.committed, stream)
        unseen = await checks.wait_for_mirror(self._console, mirror, observer)
        problems += unseen or await checks.verify_mirror(
            self._console, programs, source=make_conninfo("", **connection), replica=replica
        )
        if self._spark:
            problems += await checks.check_lake(self._console, programs, dsn, directory)
        return problems + await self._stop(mirror, bridge)

    async def _start_servers(self, nats_server: NatsServer, postgres: PostgresServer) -> str:
        console = self._console
        console.line()
        console.line(
            f" {console.paint('bold', 'tailrace demo')}"
            "  real servers in a temporary directory, gone when this ends"
        )
        with console.step("starting NATS") as step:
            await in_thread(nats_server.start)
            version = nats_server.monitor("/varz")["version"]
            step.done(f"NATS {version} with JetStream on port {nats_server.port}")
        with console.step("starting PostgreSQL") as step:
            await in_thread(postgres.start)
            dsn = postgres.create_database(shop.DATABASE)
            step.done(f"PostgreSQL {postgres.version} on port {postgres.port}")
        with (
            console.step("creating the shop") as step,
            psycopg.connect(dsn, autocommit=True) as connection,
        ):
            rows = shop.set_up(connection)
            step.done(f"a shop of {len(shop.TABLES)} tables with {rows:,} rows")
        return dsn

    def _dashboard_port(self) -> int:
        if self._port == 0:
            return free_port()
        if port_is_free(self._port):
            return self._port
        other = free_port()
        mark = self._console.paint("yellow", "!")
        self._console.line(f" {mark} port {self._port} is taken; using {other}")
        return other

    async def _start_bridge(self, programs: Programs, port: int) -> GuardedProcess:
        arguments = ["--slot", shop.SLOT, "--pub", shop.PUBLICATION]
        arguments += ["--port", str(port)] if port != DEFAULT_PORT else []
        with self._console.step("starting the bridge") as step:
            bridge = programs.start("bridge", *arguments)
            deadline = time.monotonic() + READY_SECONDS
            while not await in_thread(partial(bridge_is_ready, port)):
                if not bridge.running:
                    raise bridge.failure("ended instead of becoming ready")
                if time.monotonic() > deadline:
                    raise bridge.failure(f"did not become ready in {READY_SECONDS:g} s")
                await asyncio.sleep(POLL_SECONDS)
            step.done(command_line("bridge", *arguments))
        return bridge

    async def _run_workload(
        self, workload: Workload, view: View, bridge: GuardedProcess, mirror: GuardedProcess
    ) -> None:
        """Run workload and view until the workload must end, then mark the end in the log."""
        if not self._console.live:
            self._console.line(f"   dashboard {view.dashboard}")
        self._console.line()
        self._is_working = True
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(workload.run())
                others = [
                    group.create_task(self._show(view)),
                    group.create_task(self._observe(view, bridge, mirror)),
                ]
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._end_workload.wait(), self._seconds)
                workload.stop()
                await work
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as group:
            # The first failure is the cause of the others.
            raise errors_of(group)[0] from None
        finally:
            self._is_working = False
        await workload.execute(END_MARK_STATEMENT)
        committed = workload.committed
        self._console.line(
            f" the shop is closed: {committed.total:,} changes in"
            f" {committed.transactions:,} transactions ({committed.rolled_back:,} more were rolled"
            " back)"
        )

    async def _show(self, view: View) -> None:
        try:
            while True:
                view.sample()
                if self._console.live:
                    self._console.draw(view.block(self._console))
                    await asyncio.sleep(FRAME_SECONDS)
                else:
                    await asyncio.sleep(LINE_SECONDS)
                    view.sample()
                    self._console.line(view.line())
        finally:
            self._console.keep()
            if self._console.live:
                self._console.line()

    async def _observe(self, view: View, bridge: GuardedProcess, mirror: GuardedProcess) -> None:
        needs_snapshots = self._spark
        while True:
            if not bridge.running:
                raise bridge.failure(f"ended with exit code {bridge.exit_code}")
            sequence = view.stream.last_sequence
            await in_thread(partial(view.observer.refresh, sequence))
            view.mirror_ended = not mirror.running
            if view.observer.mirror_rows and needs_snapshots:
                # Spark reads snapshots in Arrow's format. They are taken during the workload, so
                # that Spark also has changes to apply.
                needs_snapshots = False
                await view.stream.request_snapshots({"format": "arrow"})
            await asyncio.sleep(LOOK_SECONDS)

    async def _stop(self, mirror: GuardedProcess, bridge: GuardedProcess) -> list[str]:
        with self._console.step("stopping") as step:
            await interrupt(mirror)
            code = await interrupt(bridge)
            if code == 0:
                step.done("the bridge has stopped in order")
                return []
            step.failed("the bridge did not stop in order")
        return [f"the bridge ended with exit code {code}"]

    def _conclude(self, problems: list[str]) -> int:
        console = self._console
        console.line()
        if not problems:
            console.line(f" {console.paint('green', console.paint('bold', 'Everything agrees.'))}")
            return 0
        console.line(f" {console.paint('red', 'Not everything agrees:')}")
        for problem in problems:
            console.line(f"   {problem}")
        return 1


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function in a thread; a cancellation waits until it returns."""
    future = asyncio.get_running_loop().run_in_executor(None, function)
    try:
        return await asyncio.shield(future)
    finally:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
