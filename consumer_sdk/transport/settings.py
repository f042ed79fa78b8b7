"""The settings for NATS, from arguments, then the environment, then defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from consumer_sdk.errors import UsageError
from consumer_sdk.transport.calls import (
    DEFAULT_INBOX_PREFIX,
    INBOX_PREFIX_FORM,
    is_inbox_prefix,
)
from consumer_sdk.transport.options import DEFAULT_PORT, ConnectionOptions
from consumer_sdk.transport.passwords import parse_command
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class NatsSettings(ConnectionOptions):
    """How to reach one deployment on NATS: the options of the connection, and the names there."""

    servers: tuple[str, ...] = field(default=("nats://127.0.0.1:4222",), repr=False)
    name: str = "tailrace-sdk"
    prefix: str = ""
    cdc_stream: str = ""
    init_stream: str = ""

    def __post_init__(self) -> None:
        if not self.servers:
            raise UsageError("no NATS server is given; set NATS_URL or pass its address")
        # Not super(): a dataclass with slots is not the class that the compiler has seen.
        ConnectionOptions.__post_init__(self)
        try:
            self.subjects()
        except WireError as error:
            raise UsageError(str(error)) from error
        if not is_inbox_prefix(self.inbox_prefix):
            raise UsageError(f"NATS_INBOX_PREFIX: {self.inbox_prefix!r} {INBOX_PREFIX_FORM}")
        given = {
            "NATS_BRIDGE_PASSWORD": self.password,
            "NATS_PASSWORD_FILE": self.password_file,
            "NATS_PASSWORD_COMMAND": self.password_command,
        }
        names = [name for name, value in given.items() if value]
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} are both given; keep one")
        for what, path in (("NATS_CREDS", self.creds), ("NATS_NKEY", self.nkey),
                           ("NATS_CA", self.ca), ("NATS_CERT", self.cert),
                           ("NATS_KEY", self.key),
                           ("NATS_PASSWORD_FILE", self.password_file)):  # fmt: skip
            if path and not Path(path).is_file():
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
        NATS_BRIDGE_USER, NATS_BRIDGE_PASSWORD or NATS_PASSWORD_FILE or NATS_PASSWORD_COMMAND,
        NATS_CREDS, NATS_NKEY, NATS_CA, NATS_CERT, NATS_KEY, NATS_TLS_FIRST, NATS_INBOX_PREFIX,
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
            user=env.get("NATS_BRIDGE_USER", ""),
            password=env.get("NATS_BRIDGE_PASSWORD", ""),
            creds=env.get("NATS_CREDS", ""),
            nkey=env.get("NATS_NKEY", ""),
            ca=env.get("NATS_CA", ""),
            cert=env.get("NATS_CERT", ""),
            key=env.get("NATS_KEY", ""),
            inbox_prefix=env.get("NATS_INBOX_PREFIX") or DEFAULT_INBOX_PREFIX,
            name=name or "tailrace-sdk",
            cdc_stream=env.get("BRIDGE_CDC_STREAM", ""),
            init_stream=env.get("BRIDGE_INIT_STREAM", ""),
            password_file=env.get("NATS_PASSWORD_FILE", ""),
            password_command=_command(env.get("NATS_PASSWORD_COMMAND", "")),
            tls_first=_yes_or_no("NATS_TLS_FIRST", env.get("NATS_TLS_FIRST", "")),
        )

    def subjects(self) -> Subjects:
        """All names of the deployment on NATS."""
        names = Subjects(self.prefix)
        names.cdc_stream = self.cdc_stream or names.cdc_stream
        names.init_stream = self.init_stream or names.init_stream
        return names


def _from_host_and_port(env: Mapping[str, str]) -> str:
    host = env.get("NATS_HOST") or "127.0.0.1"
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"nats://{host}:{env.get('NATS_PORT') or DEFAULT_PORT}"


def _command(text: str) -> tuple[str, ...]:
    try:
        return parse_command(text)
    except ValueError as error:
        raise UsageError("NATS_PASSWORD_COMMAND is not a command: a quote is not closed") from error


def _yes_or_no(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise UsageError(f"{name}: {text!r} is not yes or no")
    return word in ("1", "true", "yes", "on")
