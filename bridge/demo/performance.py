"""The demonstration once its servers run: the bridge, the mirror, the open shop, the checks."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bridge.demo import checks, lake, shop
from bridge.demo.programs import Programs, stopped, typed
from bridge.demo.stream_watch import END_MARK_STATEMENT, StreamWatch
from bridge.demo.survey import Surveyor, bridge_is_ready
from bridge.demo.view import View
from bridge.demo.workload import Workload
from bridge.errors import BridgeError

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.demo.console import Console
    from bridge.embedded import GuardedProcess

DEFAULT_PORT: Final = 9090
READY_SECONDS: Final = 60.0
FRAME_SECONDS: Final = 0.2
LINE_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 0.5
CANCEL_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.05


@dataclass
class Performance:
    """Plays the demonstration on running servers.

    While the shop is open Ctrl-C closes it and the checks follow; at any other time it ends all.
    """

    console: Console
    directory: Path
    dsn: str
    nats_url: str
    http_port: int
    seconds: float | None
    spark: bool
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _shop_is_open: bool = False
    _ended_by: int | None = None

    async def run(self) -> int:
        """From the start of the bridge to the last check; the result is the exit code."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal, signum, task)
        try:
            with ExitStack() as stack:
                problems = await self._play(stack)
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            self.console.keep()
            self.console.line(" interrupted: stopping everything and removing it")
            return 128 + self._ended_by
        return self._conclude(problems)

    def _on_signal(self, signum: signal.Signals, task: asyncio.Task[object]) -> None:
        if signum == signal.SIGINT and self._shop_is_open:
            self._shop_is_open = False
            self._closing.set()
        elif self._ended_by is None:
            self._ended_by = signum
            self._end(task)

    def _end(self, task: asyncio.Task[object]) -> None:
        # Again, if need be: before Python 3.12 `wait_for` may swallow a cancellation.
        if not task.done():
            task.cancel()
            asyncio.get_running_loop().call_later(CANCEL_SECONDS, self._end, task)

    async def _play(self, stack: ExitStack) -> list[str]:
        connection = conninfo_to_dict(self.dsn)
        password = str(connection.pop("password"))
        programs = Programs(
            self.directory,
            {
                "DATABASE_URL": self.dsn,
                "PGPASSWORD": password,
                "NATS_URL": self.nats_url,
                # So often that the dashboard has something to show in a short demonstration.
                "BRIDGE_WAL_CHECK_INTERVAL": "1s",
            },
        )
        bridge = await self._start_bridge(stack, programs)
        mirror_path = self.directory / "shop.db"
        replica = f"sqlite:///{mirror_path}"
        with self.console.step("starting the mirror") as step:
            mirror = programs.start("cdc", "mirror", "--all", "--into", replica)
            stack.callback(mirror.kill)
            step.done(typed("cdc", "mirror", "--all", "--into", f"sqlite:///{mirror_path.name}"))
        workload = Workload(self.dsn)
        surveyor = Surveyor(self.dsn, self.http_port, mirror_path)
        stack.callback(surveyor.close)
        async with StreamWatch(self.nats_url) as stream:
            view = View(workload.ledger, stream, self._dashboard, self.nats_url, self.seconds)
            await self._keep_shop_open(workload, view, surveyor, bridge, mirror)
            await self._close_shop(workload)
            problems = await checks.check_stream(self.console, workload.ledger, stream)
        problems += await checks.check_mirror(
            self.console,
            programs,
            mirror,
            surveyor,
            source=make_conninfo("", **connection),
            replica=replica,
        )
        if self.spark:
            problems += await lake.check_lake(self.console, programs, self.dsn, self.directory)
        problems += await self._stop(mirror, bridge)
        return problems

    @property
    def _dashboard(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/"

    async def _start_bridge(self, stack: ExitStack, programs: Programs) -> GuardedProcess:
        arguments = ["--slot", shop.SLOT, "--pub", shop.PUBLICATION]
        arguments += ["--port", str(self.http_port)] if self.http_port != DEFAULT_PORT else []
        with self.console.step("starting the bridge") as step:
            bridge = programs.start("bridge", *arguments)
            stack.callback(bridge.kill)
            deadline = time.monotonic() + READY_SECONDS
            while not await asyncio.to_thread(bridge_is_ready, self.http_port):
                if not bridge.running:
                    raise bridge.failure("ended instead of becoming ready")
                if time.monotonic() > deadline:
                    raise bridge.failure(f"did not become ready in {READY_SECONDS:g} s")
                await asyncio.sleep(_POLL_SECONDS)
            step.done(typed("bridge", *arguments))
        return bridge

    async def _keep_shop_open(
        self,
        workload: Workload,
        view: View,
        surveyor: Surveyor,
        bridge: GuardedProcess,
        mirror: GuardedProcess,
    ) -> None:
        """Run the workload and the view until it is time to close or the bridge has ended."""
        if not self.console.live:
            self.console.line(f"   dashboard {self._dashboard}")
        self.console.line()
        self._shop_is_open = True
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(workload.run())
                others = [
                    group.create_task(self._show(view)),
                    group.create_task(self._look(view, surveyor, bridge, mirror)),
                ]
                await self._closing_time()
                workload.stop()
                await work
                for task in others:
                    task.cancel()
        except* BridgeError as errors:
            # What failed first is what matters.
            raise errors.exceptions[0] from None
        finally:
            self._shop_is_open = False

    async def _closing_time(self) -> None:
        try:
            await asyncio.wait_for(self._closing.wait(), self.seconds)
        except TimeoutError:
            pass

    async def _show(self, view: View) -> None:
        try:
            while True:
                view.sample()
                if self.console.live:
                    self.console.draw(view.block(self.console))
                    await asyncio.sleep(FRAME_SECONDS)
                else:
                    await asyncio.sleep(LINE_SECONDS)
                    view.sample()
                    self.console.line(view.line())
        finally:
            if self.console.live:
                self.console.keep()
                self.console.line()

    async def _look(
        self, view: View, surveyor: Surveyor, bridge: GuardedProcess, mirror: GuardedProcess
    ) -> None:
        lake_prepared = not self.spark
        while True:
            if not bridge.running:
                raise bridge.failure(f"ended with exit code {bridge.exit_code}")
            view.survey = await asyncio.to_thread(surveyor.look, view.stream.last_sequence)
            view.mirror_ended = not mirror.running
            if view.survey.mirror_rows and not lake_prepared:
                # Spark reads snapshots in Arrow's format. Taken now, while the shop is open, they
                # leave it changes to apply.
                lake_prepared = True
                await view.stream.request_snapshots({"format": "arrow"})
            await asyncio.sleep(LOOK_SECONDS)

    async def _close_shop(self, workload: Workload) -> None:
        async with await psycopg.AsyncConnection.connect(self.dsn, autocommit=True) as connection:
            await connection.execute(END_MARK_STATEMENT)
        ledger = workload.ledger
        self.console.line(
            f" the shop is closed: {ledger.total:,} changes in {ledger.transactions:,} transactions"
            f" ({ledger.rolled_back:,} more were rolled back)"
        )

    async def _stop(self, mirror: GuardedProcess, bridge: GuardedProcess) -> list[str]:
        problems = []
        with self.console.step("stopping") as step:
            await stopped(mirror)
            code = await stopped(bridge)
            if code == 0:
                step.done("the bridge has stopped in order")
            else:
                step.failed("the bridge did not stop in order")
                problems.append(f"the bridge ended with exit code {code}")
        return problems

    def _conclude(self, problems: list[str]) -> int:
        paint = self.console.paint
        self.console.line()
        if not problems:
            self.console.line(f" {paint('green', paint('bold', 'Everything agrees.'))}")
            return 0
        self.console.line(f" {paint('red', 'Not everything agrees:')}")
        for problem in problems:
            self.console.line(f"   {problem}")
        return 1
