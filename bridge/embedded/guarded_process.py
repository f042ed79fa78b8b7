"""A server process that ends with its owner, and the local ports it listens on."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bridge.embedded import guardian
from bridge.errors import BridgeError
from consumer_sdk.transport.child_processes import child_environment
from consumer_sdk.transport.private_files import open_private

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence

    from bridge.embedded.account import Account

LOOPBACK: Final = "127.0.0.1"

# Below the range of ports for outgoing connections on Linux and macOS. A client that reconnects
# while the server is away can then neither occupy the server's port nor connect to itself.
PORT_RANGE: Final = range(12_000, 32_000)

POLL_SECONDS: Final = 0.01


class ServerError(BridgeError):
    """An embedded server cannot be started or stopped; the message says why and what to do."""

    exit_code = 3


class GuardedProcess:
    """One program started under a guardian; it is stopped when this process ends in any way.

    Its output goes to the log file. Servers get an environment of a few plain variables unless
    another one is given.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log_path: Path,
        stop_signal: signal.Signals,
        account: Account | None = None,
        environment: Mapping[str, str] | None = None,
        remove_if_orphaned: Path | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        plain = {
            "HOME": str(log_path.parent),
            "LC_ALL": "C",
            "PATH": os.environ.get("PATH", os.defpath),
            "TZ": "UTC",
        }
        job = {
            "command": [str(part) for part in command],
            "environment": dict(environment if environment is not None else plain),
            "uid": account.uid if account else None,
            "gid": account.gid if account else None,
            "stop_signal": int(stop_signal),
            "grace": 10.0,
            "remove": str(remove_if_orphaned) if remove_if_orphaned else None,
        }
        try:
            log_descriptor = open_private(log_path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise ServerError(f"{log_path} cannot be written: {error.strerror}") from error
        with os.fdopen(log_descriptor, "ab") as log:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
            )
        assert self._guardian.stdin is not None
        assert self._guardian.stdout is not None
        self._guardian.stdin.write(json.dumps(job).encode() + b"\n")
        self._guardian.stdin.flush()
        with self._guardian.stdout as report:
            line = report.readline()
        if not line.strip():
            self.wait(5)
            raise self.failure("could not be started")
        self.pid = int(line)

    @property
    def running(self) -> bool:
        """Whether the server has not ended yet."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the ended server, 128 + N if signal N ended it; None while it runs."""
        code = self._guardian.poll()
        if code is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
        return code

    def send_signal(self, signum: signal.Signals) -> None:
        """Signal the server itself."""
        if self.running:
            guardian.signal_process(self.pid, signum)

    def signal_tree(self, signum: signal.Signals) -> None:
        """Signal the server and its children."""
        if self.running:
            for pid in (self.pid, *guardian.children(self.pid)):
                guardian.signal_process(pid, signum)

    def wait(self, timeout: float) -> bool:
        """Wait for the server's end; False if it still runs after `timeout`."""
        try:
            self._guardian.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return not self.running

    def kill(self) -> None:
        """SIGKILL the server and its children; return when none of them is left."""
        if not self.running:
            return
        tree = guardian.kill_tree(self.pid)
        self.wait(10)
        poll_until(lambda: not any(process_alive(pid) for pid in tree), timeout=10)

    def failure(self, what: str) -> ServerError:
        """Describe a failure with the last lines of the server's log."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-15:]
        return ServerError(
            "\n  ".join([f"{self.name} {what}; its log {self.log_path} ends:", *lines])
        )


def process_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self/stat").exists()
    return state not in "ZX"


def poll_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait for a condition of another process; False if it does not hold after `timeout`."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def free_port() -> int:
    """A free loopback port outside the range of outgoing connections."""
    for _ in range(1000):
        port = random.choice(PORT_RANGE)
        if port_is_free(port):
            return port
    raise ServerError(f"no free port between {PORT_RANGE.start} and {PORT_RANGE.stop}")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
