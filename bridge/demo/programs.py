"""The commands that the demonstration runs, exactly as a user would type them."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from typing import TYPE_CHECKING, Final

from bridge.embedded import GuardedProcess, ServerError
from consumer_sdk.transport.child_processes import child_environment
from consumer_sdk.transport.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# Java must leave no files in the system's temporary directory, and must not spend more time on
# compiling than on its little work.
_JAVA_OPTIONS: Final = ("-XX:-UsePerfData", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_SPARK_SETTINGS: Final = "spark.ui.enabled false\n"
POLL_SECONDS: Final = 0.1


class Programs:
    """Starts commands that find PostgreSQL and NATS through their environment.

    Their output goes to files in `directory`, which is deleted even if this process is killed.
    """

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self._directory = directory
        scratch = directory / "tmp"
        scratch.mkdir(mode=0o700, exist_ok=True)
        write_private(scratch / "spark-defaults.conf", _SPARK_SETTINGS)
        # Settings of the user for a real database must not affect the demonstration.
        self._environment = {
            **child_environment("JAVA_"),
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            "TMPDIR": str(scratch),
            "SPARK_CONF_DIR": str(scratch),
            "SPARK_LOCAL_DIRS": str(scratch),
            "JAVA_TOOL_OPTIONS": " ".join([f"-Djava.io.tmpdir={scratch}", *_JAVA_OPTIONS]),
            **variables,
        }

    def start(self, program: str, *arguments: str) -> GuardedProcess:
        """Start one of our commands."""
        scripts = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        script = shutil.which(program, path=scripts)
        if script is None:
            raise ServerError(
                f"the command {program} is not on the PATH; run: pip install tailrace"
            )
        return self._start(program, [script, *arguments])

    def start_module(self, module: str, *arguments: str) -> GuardedProcess:
        """Start a Python module as a program."""
        return self._start(module, [sys.executable, "-P", "-m", module, *arguments])

    def _start(self, name: str, command: Sequence[str]) -> GuardedProcess:
        number = sum(1 for _ in self._directory.glob("*.log"))
        return GuardedProcess(
            name,
            command,
            log_path=self._directory / f"{number}-{name}.log",
            stop_signal=signal.SIGKILL,
            environment=self._environment,
            remove_if_orphaned=self._directory,
        )


async def wait_for_end(
    process: GuardedProcess, timeout: float, meanwhile: Callable[[], None] = lambda: None
) -> int | None:
    """Wait for the end of a process; its exit code, None if it still runs after `timeout`."""
    deadline = time.monotonic() + timeout
    while (code := process.exit_code) is None and time.monotonic() < deadline:
        meanwhile()
        await asyncio.sleep(POLL_SECONDS)
    return code


async def complete(
    process: GuardedProcess, timeout: float, meanwhile: Callable[[], None]
) -> str | None:
    """Run a command to its end; None if it succeeded, else a sentence about the failure."""
    code = await wait_for_end(process, timeout, meanwhile)
    if code is None:
        process.kill()
        return f"{process.name} did not end in {timeout:g} s"
    return None if code == 0 else exit_report(process)


def exit_report(process: GuardedProcess) -> str:
    """Exit code and last line of a process that has ended."""
    printed = [line for line in output(process) if line.strip()]
    last = printed[-1] if printed else "it printed nothing"
    return f"{process.name} ended with exit code {process.exit_code}: {last}"


async def interrupt(process: GuardedProcess, timeout: float = 15) -> int | None:
    """End a process as Ctrl-C does; its exit code, None if it had to be killed."""
    process.send_signal(signal.SIGINT)
    code = await wait_for_end(process, timeout)
    if code is None:
        process.kill()
    return code


def output(process: GuardedProcess) -> list[str]:
    """The lines that a process has printed so far."""
    return process.log_path.read_text(errors="replace").splitlines()


def command_line(program: str, *arguments: str) -> str:
    """The command as a user would type it."""
    return shlex.join([program, *arguments])
