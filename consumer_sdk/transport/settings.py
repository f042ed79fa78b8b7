"""Where NATS is and how to log in: arguments first, then the environment, then defaults."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit, urlunsplit

from consumer_sdk.errors import UsageError
from consumer_sdk.transport.server_address import asks_for_tls, never_encrypted
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RECONNECT_WAIT_SECONDS = 2
_SCHEMES = ("nats", "tls", "ws", "wss")
_SEED = re.compile(r"\A\s*(S[A-Z2-7]+)\s*\Z")
_CREDENTIALS = re.compile(
    r"BEGIN NATS USER JWT-+\s+\S+\s+-+END NATS USER JWT-+.*"
    r"BEGIN USER NKEY SEED-+\s+(S[A-Z2-7]+)\s+-+END USER NKEY SEED",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class NatsSettings:
    """How to reach one deployment on NATS; its repr hides every secret."""

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
            _check_url(server)
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
        """Fill in from the environment whatever the arguments leave open.

        Reads NATS_URL (several separated by commas) or NATS_HOST and NATS_PORT,
        NATS_BRIDGE_USER, NATS_BRIDGE_PASSWORD, NATS_CREDS, NATS_NKEY, NATS_CA, NATS_CERT, NATS_KEY,
        BRIDGE_PREFIX, and where a deployment names its streams otherwise BRIDGE_CDC_STREAM and
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
        """The servers without user and password, fit for a log line."""
        return ",".join(_without_secrets(server) for server in self.servers)

    def connect_options(self) -> dict[str, Any]:
        """Keyword arguments for nats-py: reconnect for ever, 2 seconds apart."""
        options: dict[str, Any] = {
            "servers": list(self.servers),
            "name": self.name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_WAIT_SECONDS,
            "connect_timeout": 5,
            "ping_interval": 20,
            "flush_timeout": 10,
        }
        if self.creds:
            _require_seed("NATS_CREDS", self.creds, _CREDENTIALS)
            options["user_credentials"] = self.creds
        elif self.nkey:
            _require_seed("NATS_NKEY", self.nkey, _SEED)
            options["nkeys_seed"] = self.nkey
        elif self.user:
            options["user"] = self.user
            options["password"] = self.password or ""
        # A connection with a context never goes on without TLS, see `LogConnection`.
        if self.ca or self.cert or self.key or asks_for_tls(self.servers):
            options["tls"] = self._tls_context()
        return options

    def _tls_context(self) -> ssl.SSLContext:
        if never_encrypted(self.servers):
            raise UsageError(f"{self.address} is not encrypted, but TLS is asked for; write wss://")
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"TLS files for NATS cannot be used: {error}") from error
        return context


def _require_seed(variable: str, path: str, form: re.Pattern[str]) -> None:
    """Insist on a file that holds a key, which a server without logins would not ask for."""
    import nkeys

    try:
        match = form.search(Path(path).read_text(encoding="utf-8"))
        if match is None:
            raise ValueError
        nkeys.from_seed(match[1].encode())
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise UsageError(
            f"{variable}: {path} does not hold a NATS key; "
            "make one with `nsc generate creds` or `nk -gen user`"
        ) from error


def _from_host_and_port(env: Mapping[str, str]) -> str:
    host = env.get("NATS_HOST") or "127.0.0.1"
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"nats://{host}:{env.get('NATS_PORT') or '4222'}"


def _check_url(server: str) -> None:
    try:
        parts = urlsplit(server)
        is_cut = "@" in parts.path + parts.query + parts.fragment
        usable = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_cut, usable = "@" in server, False
    if is_cut:
        raise UsageError(
            "not a NATS address: in a password write / as %2F, ? as %3F, # as %23 and @ as %40"
        )
    if not usable:
        raise UsageError(
            f"not a NATS address: {_without_secrets(server)}; expected nats://host:4222"
        )


def _without_secrets(server: str) -> str:
    try:
        parts = urlsplit(server)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))
    except ValueError:
        return quote(server.rpartition("@")[2], safe=":/[].")
