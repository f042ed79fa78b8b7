"""The settings for NATS, from arguments, then the environment, then defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from consumer_sdk.errors import UsageError
from consumer_sdk.transport.options import (
    DEFAULT_PORT,
    ConnectionOptions,
    require_address,
)
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """How to reach one deployment on NATS; the repr hides every secret."""

    servers: tuple[str, ...] = field(default=("nats://127.0.0.1:4222",), repr=False)
    prefix: str = ""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    creds: str | None = None
    nkey: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    name: str = "tailrace-sdk"
    cdc_stream: str = ""
    init_stream: str = ""

    def __post_init__(self) -> None:
        if not self.servers:
            raise UsageError("no NATS server is given; set NATS_URL or pass its address")
        for server in self.servers:
            require_address(server)
        try:
            self.subjects()
        except WireError as error:
            raise UsageError(str(error)) from error
        for what, path in (("NATS_CREDS", self.creds), ("NATS_NKEY", self.nkey),
                           ("NATS_CA", self.ca), ("NATS_CERT", self.cert),
                           ("NATS_KEY", self.key)):  # fmt: skip
            if path is not None and not Path(path).is_file():
                raise UsageError(f"{what}: no such file: {path}")

    @classmethod
    def resolve(
        cls,
        servers: str | Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> NatsSettings:
        """Read from the environment what the arguments do not give.

        Reads NATS_URL (several separated by commas) or NATS_HOST and NATS_PORT,
        NATS_BRIDGE_USER, NATS_BRIDGE_PASSWORD, NATS_CREDS, NATS_NKEY, NATS_CA, NATS_CERT, NATS_KEY,
        BRIDGE_PREFIX, and for a deployment whose streams have other names BRIDGE_CDC_STREAM and
        BRIDGE_INIT_STREAM.
        """
        env = os.environ if environment is None else environment
        if servers is None:
            servers = env.get("NATS_URL") or _from_host_and_port(env)
        if isinstance(servers, str):
            servers = [part.strip() for part in servers.split(",") if part.strip()]
        return cls(
            servers=tuple(server if "://" in server else f"nats://{server}" for server in servers),
            prefix=env.get("BRIDGE_PREFIX", "") if prefix is None else prefix,
            user=env.get("NATS_BRIDGE_USER") or None,
            password=env.get("NATS_BRIDGE_PASSWORD") or None,
            creds=env.get("NATS_CREDS") or None,
            nkey=env.get("NATS_NKEY") or None,
            ca=env.get("NATS_CA") or None,
            cert=env.get("NATS_CERT") or None,
            key=env.get("NATS_KEY") or None,
            name=name or "tailrace-sdk",
            cdc_stream=env.get("BRIDGE_CDC_STREAM", ""),
            init_stream=env.get("BRIDGE_INIT_STREAM", ""),
        )

    def subjects(self) -> Subjects:
        """All names of the deployment on NATS."""
        names = Subjects(self.prefix)
        names.cdc_stream = self.cdc_stream or names.cdc_stream
        names.init_stream = self.init_stream or names.init_stream
        return names

    @property
    def address(self) -> str:
        """The servers' URLs without user and password, for log lines."""
        return self.connection().address

    def connection(self) -> ConnectionOptions:
        """The options for the connection."""
        return ConnectionOptions(
            servers=self.servers,
            name=self.name,
            user=self.user or "",
            password=self.password or "",
            creds=self.creds or "",
            nkey=self.nkey or "",
            ca=self.ca or "",
            cert=self.cert or "",
            key=self.key or "",
        )


def _from_host_and_port(env: Mapping[str, str]) -> str:
    host = env.get("NATS_HOST") or "127.0.0.1"
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"nats://{host}:{env.get('NATS_PORT') or DEFAULT_PORT}"
