"""The coordinator's worker processes: started, kept idle for a while, ended."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from bridge.errors import SnapshotError
from bridge.snapshot.messages import (
    Alive,
    Ping,
    Pong,
    Report,
    WorkerFailed,
    decode_report,
    encode,
    unexpected,
)
from consumer_sdk.transport.cancellation import uninterrupted
from consumer_sdk.transport.child_processes import LIBPQ_VARIABLES, child_environment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bridge.snapshot.messages import Command

    Expected = TypeVar("Expected", bound=Report)

LAUNCHER: Final = "consumer_sdk.launch"
MODULE: Final = "bridge.snapshot.worker.process"
LONGEST_LINE_BYTES: Final = 1024 * 1024
IDLE_SECONDS: Final = 20.0
# A worker sends Alive every few seconds. The time without a message is counted in steps, so that a
# pause of the whole machine counts as one step only.
SILENCE_STEP_SECONDS: Final = 5.0
SILENCE_STEPS: Final = 12


class WorkerProcess:
    """One worker process; it has always ended when `end` returns."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self._process = process

    @classmethod
    async def start(cls, number: int) -> WorkerProcess:
        """Start a worker that waits for its task."""
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                LAUNCHER,
                MODULE,
                env=child_environment(*LIBPQ_VARIABLES),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE_BYTES,
            )
        )
        try:
            return cls(number, await asyncio.shield(starting))
        except asyncio.CancelledError:
            # A partly started process must not outlive a cancelled start.
            await cls(number, await starting).end()
            raise

    async def answers(self) -> bool:
        """Whether an idle worker still works; the event loop may not know yet that it died."""
        await self.send(Ping())
        try:
            await self.expect(Pong)
        except SnapshotError:
            return False
        return True

    async def send(self, command: Command) -> None:
        """Send a command; if the worker is dead, `receive` raises the error."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(encode(command))
            await self._process.stdin.drain()

    async def receive(self) -> Report:
        """Wait for the next report; SnapshotError if the worker has failed, hangs or has ended."""
        while True:
            line = await self._next_line()
            # A worker that dies can leave an incomplete line.
            if not line.endswith(b"\n"):
                raise SnapshotError(f"a snapshot worker ended: {await self._reason()}")
            report = decode_report(line)
            if isinstance(report, WorkerFailed):
                raise SnapshotError(report.error)
            if not isinstance(report, Alive):
                return report

    async def expect(self, kind: type[Expected]) -> Expected:
        """The next report, which must be of this kind."""
        report = await self.receive()
        if not isinstance(report, kind):
            raise unexpected(report)
        return report

    async def _next_line(self) -> bytes:
        assert self._process.stdout is not None
        reading = asyncio.ensure_future(self._process.stdout.readline())
        try:
            for _ in range(SILENCE_STEPS):
                done, _pending = await asyncio.wait((reading,), timeout=SILENCE_STEP_SECONDS)
                if done:
                    return reading.result()
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
        raise SnapshotError(
            f"a snapshot worker (process {self._process.pid}) has given no sign of life for "
            f"{SILENCE_STEPS * SILENCE_STEP_SECONDS:g} s; it was ended"
        )

    async def end(self) -> None:
        """Kill the worker if it still runs, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.stdin.close()
        with suppress(OSError):
            await self._process.stdin.wait_closed()
        # Its last output must be read: otherwise the pipe keeps the transport open.
        await self._process.stdout.read()
        await self._process.wait()

    async def _reason(self) -> str:
        code = await self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit status {code}"


class WorkerPool:
    """Starts workers and keeps idle ones for a while, because starting one costs a second."""

    def __init__(self) -> None:
        self._idle: list[WorkerProcess] = []
        self._expiry: asyncio.Task[None] | None = None
        self._expires_at = 0.0

    @asynccontextmanager
    async def borrow(self, size: int) -> AsyncIterator[list[WorkerProcess]]:
        """Lend idle workers to the body; they are ended if the body raises."""
        workers: list[WorkerProcess] = []
        try:
            for number in range(size):
                workers.append(await self._take(number))  # noqa: PERF401 - ended if one fails
            yield workers
        except BaseException:
            await _end(workers)
            raise
        self._idle += workers
        self._expire_idle_later()

    async def close(self) -> None:
        """End the idle workers."""
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        idle, self._idle = self._idle, []
        await _end(idle)

    async def _take(self, number: int) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            try:
                has_answered = await worker.answers()
            except BaseException:
                await _end([worker])
                raise
            if has_answered:
                worker.number = number
                return worker
            await worker.end()
        try:
            return await WorkerProcess.start(number)
        except OSError as error:
            raise SnapshotError(f"cannot start a snapshot worker: {error}") from error

    def _expire_idle_later(self) -> None:
        self._expires_at = time.monotonic() + IDLE_SECONDS
        if self._expiry is None or self._expiry.done():
            self._expiry = asyncio.create_task(self._expire(), name="snapshot workers")

    async def _expire(self) -> None:
        while self._idle:
            remaining = self._expires_at - time.monotonic()
            if remaining > 0:
                await asyncio.sleep(remaining)
                continue
            idle, self._idle = self._idle, []
            await _end(idle)


async def _end(workers: list[WorkerProcess]) -> None:
    await uninterrupted(asyncio.gather(*(worker.end() for worker in workers)))
