"""The commands that the demonstration runs beside itself, exactly as a user would type them."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import bridge
from bridge.embedded import GuardedProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# What the user has set for a real database must not lead a command of the demonstration there.
_CONFIGURING: Final = ("BRIDGE_", "PG", "POSTGRES_", "NATS_", "DATABASE_URL", "SPARK_")
# A Java that leaves nothing in the system's temporary directory and does not spend longer on
# compiling than on the little it has to do.
_JAVA_OPTIONS: Final = ("-XX:-UsePerfData", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
# Nobody looks at Spark's own pages in the minute that it runs.
_SPARK_SETTINGS: Final = "spark.ui.enabled false\n"
_POLL_SECONDS: Final = 0.1

ENTRY_POINTS: Final = {
    "bridge": "bridge",
    "cdc": "cdc",
    "spark-consumer": "spark_consumer",
}


class Programs:
    """Starts commands that find PostgreSQL and NATS through their environment.

    Their output goes to files in `directory`, which is deleted should this process be killed.
    """

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self._directory = directory
        scratch = directory / "tmp"
        scratch.mkdir(exist_ok=True)
        (scratch / "spark-defaults.conf").write_text(_SPARK_SETTINGS)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(_CONFIGURING)
        }
        # Packages may lie in a directory that only this process has on its path.
        roots = [str(Path(bridge.__file__).parents[1]), kept.get("PYTHONPATH", "")]
        self._environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join(filter(None, roots)),
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
        script = Path(sys.executable).with_name(program)
        if script.is_file():
            return self._start(program, [str(script), *arguments])
        start = f"from bridge.launch import commands; commands.{ENTRY_POINTS[program]}()"
        return self.start_python(program, "-c", start, *arguments)

    def start_python(self, name: str, *arguments: str) -> GuardedProcess:
        """Start this Python interpreter."""
        return self._start(name, [sys.executable, *arguments])

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


async def ended(
    process: GuardedProcess, timeout: float, meanwhile: Callable[[], None] | None = None
) -> int | None:
    """Wait for the end of a process; its exit code, None if it still runs after `timeout`."""
    deadline = time.monotonic() + timeout
    while (code := process.exit_code) is None:
        if time.monotonic() > deadline:
            return None
        if meanwhile is not None:
            meanwhile()
        await asyncio.sleep(_POLL_SECONDS)
    return code


async def completed(
    process: GuardedProcess, timeout: float, meanwhile: Callable[[], None]
) -> str | None:
    """Let a command run to its end; None if it succeeded, else a phrase that says what it said."""
    code = await ended(process, timeout, meanwhile)
    if code == 0:
        return None
    if code is None:
        process.kill()
        return f"{process.name} did not end in {timeout:g} s"
    said = [line for line in output(process) if line.strip()]
    return f"{process.name} ended with exit code {code}: {said[-1] if said else 'without a word'}"


async def stopped(process: GuardedProcess, timeout: float = 15) -> int | None:
    """Ask a process to end as Ctrl-C does and wait for it; None if it had to be killed."""
    process.send_signal(signal.SIGINT)
    code = await ended(process, timeout)
    if code is None:
        process.kill()
    return code


def output(process: GuardedProcess) -> list[str]:
    """What a process has printed so far, by lines."""
    return process.log_path.read_text(errors="replace").splitlines()


def typed(program: str, *arguments: str) -> str:
    """The command as one would type it."""
    return shlex.join([program, *arguments])
