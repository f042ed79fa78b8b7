"""The base of the embedded servers: starting on a free port, stopping, suspending, removing."""

from __future__ import annotations

import shutil
import signal
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from bridge.embedded.guarded_process import (
    LOOPBACK,
    GuardedProcess,
    ServerError,
    free_port,
    poll_until,
    port_is_free,
)

if TYPE_CHECKING:
    from pathlib import Path

PORT_ATTEMPTS = 5


class EmbeddedServer(ABC):
    """A server process on a loopback port.

    It keeps port and data over `stop`, `kill` and `restart`. `close` deletes a temporary directory
    and keeps a given one.
    """

    stop_signal: ClassVar[signal.Signals]
    """Ends the server in order."""

    discard_signal: ClassVar[signal.Signals]
    """Ends a server whose data is thrown away."""

    def __init__(
        self, title: str, directory: Path, log_name: str, *, temporary: bool, port: int | None
    ) -> None:
        self.title = title
        self.host = LOOPBACK
        self.port = port or free_port()
        self.directory = directory
        self.log_path = directory / log_name
        self._temporary = temporary
        # A port that clients know must not change.
        self._port_is_known = port is not None
        self._process: GuardedProcess | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether the server process is alive."""
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None or not self._process.running:
            raise ServerError(f"{self.title} is not running")
        return self._process.pid

    def start(self, timeout: float = 60) -> None:
        """Start the server; return when it is ready for clients."""
        if not self.running:
            self.launch()
            self.wait_until_ready(timeout)

    def launch(self) -> None:
        """Start the server without waiting, as members of a cluster have to."""
        if not self.running:
            self._process = self._start_process()

    def wait_until_ready(self, timeout: float = 60) -> None:
        """Return when the server is ready for clients; raise with its log if it fails to."""
        for _ in range(PORT_ATTEMPTS):
            process = self._launched()
            poll_until(lambda: not self.running or self._is_ready(), timeout)
            if process.running and self._is_ready():
                self._port_is_known = True
                return
            if process.running:
                process.kill()
                raise process.failure(f"did not become ready in {timeout:g} s")
            # Another program may have had the port for a moment: free now does not mean free then.
            if self._port_is_known and all(port_is_free(port) for port in self._ports()):
                break
            self._change_ports()
            self.launch()
        raise self._launched().failure("ended instead of becoming ready")

    def stop(self, timeout: float = 30) -> None:
        """Shut down in order; raise if it takes longer."""
        self._stop_by(self.stop_signal, timeout)

    def kill(self) -> None:
        """SIGKILL the server and its children, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def restart(self, timeout: float = 30) -> None:
        """Stop in order and start again on the same port, with the same data."""
        self.stop(timeout)
        self.start()

    def freeze(self) -> None:
        """Suspend every process of the server: it keeps its connections but does not answer."""
        if self._process is not None:
            self._process.signal_tree(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume a suspended server."""
        if self._process is not None:
            self._process.signal_tree(signal.SIGCONT)

    def close(self) -> None:
        """Stop the server, by force if necessary; delete a temporary directory."""
        if self._process is not None:
            self.thaw()
            self._process.send_signal(self.discard_signal if self._temporary else self.stop_signal)
            if not self._process.wait(20):
                self._process.kill()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    @abstractmethod
    def _start_process(self) -> GuardedProcess:
        """Write the configuration and start the program."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether the running server accepts clients."""

    def _ports(self) -> tuple[int, ...]:
        return (self.port,)

    def _change_ports(self) -> None:
        if not self._port_is_known:
            self.port = free_port()

    def _stop_by(self, signum: signal.Signals, timeout: float) -> None:
        if self._process is None:
            return
        self._process.send_signal(signum)
        if not self._process.wait(timeout):
            raise ServerError(f"{self.title} did not shut down in {timeout:g} s")

    def _launched(self) -> GuardedProcess:
        if self._process is None:
            raise ServerError(f"{self.title} has not been started")
        return self._process

    @property
    def _removed_if_orphaned(self) -> Path | None:
        return self.directory if self._temporary else None
