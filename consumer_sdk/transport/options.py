"""How to connect to NATS: addresses, credentials, TLS."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import ParseResult, quote, unquote, urlsplit, urlunsplit

from consumer_sdk.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

Option = Literal["servers", "creds", "nkey", "tls"]

DEFAULT_PORT: Final = 4222
RECONNECT_WAIT_SECONDS: Final = 2
_SCHEMES: Final = ("nats", "tls", "ws", "wss")
_ENCRYPTED: Final = ("tls", "wss")
_VARIABLES: Final = {"creds": "NATS_CREDS", "nkey": "NATS_NKEY"}
_SEED: Final = re.compile(r"\A\s*(S[A-Z2-7]+)\s*\Z")
_CREDENTIALS: Final = re.compile(
    r"BEGIN NATS USER JWT-+\s+\S+\s+-+END NATS USER JWT-+.*"
    r"BEGIN USER NKEY SEED-+\s+(S[A-Z2-7]+)\s+-+END USER NKEY SEED",
    re.DOTALL,
)
_WRITE_ADDRESS: Final = "write it as nats://host:4222"
_ESCAPES: Final = "in a password write / as %2F, ? as %3F, # as %23 and @ as %40"


class BadOption(UsageError):
    """A connection option is not valid; `problem` never contains a secret."""

    def __init__(self, option: Option, problem: str) -> None:
        variable = _VARIABLES.get(option)
        super().__init__(f"{variable}: {problem}" if variable else problem)
        self.option = option
        self.problem = problem

    def __reduce__(self) -> tuple[Callable[..., BadOption], tuple[Option, str]]:
        return type(self), (self.option, self.problem)


class TlsNotOffered(ConnectionError):
    """TLS is configured, but the server does not offer it; nothing was sent."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"the server at {host} offers no TLS, and without it nothing is sent; "
            "enable TLS there, or write nats:// and unset NATS_CA, NATS_CERT and NATS_KEY"
        )


class ServerAddress(ParseResult):
    """An address whose user and password are percent-decoded (RFC 3986): `%40` means @."""

    @classmethod
    def of(cls, address: ParseResult) -> Self:
        """The same address with decoded user and password."""
        return cls(*address)

    @property
    def username(self) -> str | None:
        user = super().username
        return None if user is None else unquote(user)

    @property
    def password(self) -> str | None:
        password = super().password
        return None if password is None else unquote(password)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Servers, credentials and TLS files; the repr hides every secret."""

    servers: tuple[str, ...] = field(repr=False)
    name: str
    user: str = ""
    password: str = field(default="", repr=False)
    creds: str = ""
    nkey: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        for server in self.servers:
            require_address(server)

    @property
    def hosts(self) -> str:
        """Hosts and ports without credentials, for messages."""
        parts = (urlsplit(_with_scheme(server)) for server in self.servers)
        return ", ".join(f"{part.hostname}:{part.port or DEFAULT_PORT}" for part in parts)

    @property
    def address(self) -> str:
        """The servers' URLs without credentials, for messages."""
        return ",".join(without_secrets(server) for server in self.servers)

    def for_nats(self) -> dict[str, Any]:
        """Keyword arguments for nats-py; BadOption if a credentials or TLS file is not valid."""
        options: dict[str, Any] = {
            "servers": list(self.servers),
            "name": self.name,
            "reconnect_time_wait": RECONNECT_WAIT_SECONDS,
            "max_reconnect_attempts": -1,
            "connect_timeout": 5,
        }
        if self.creds:
            _require_seed("creds", self.creds, _CREDENTIALS)
            options["user_credentials"] = self.creds
        elif self.nkey:
            _require_seed("nkey", self.nkey, _SEED)
            options["nkeys_seed"] = self.nkey
        elif self.user:
            options["user"] = self.user
            options["password"] = self.password
        schemes = {urlsplit(server).scheme for server in self.servers}
        # With a TLS context, a connection never continues without TLS, see `NatsConnection`.
        if self.ca or self.cert or self.key or not schemes.isdisjoint(_ENCRYPTED):
            if "ws" in schemes:
                # WebSocket without TLS cannot change to it later.
                raise BadOption(
                    "servers", "not encrypted (ws://), but TLS is asked for; write wss://"
                )
            options["tls"] = self._tls_context()
        return options

    def _tls_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as error:
            raise BadOption(
                "tls",
                f"TLS files for NATS cannot be used: {error}; "
                "check NATS_CA, NATS_CERT and NATS_KEY",
            ) from error
        return context


def require_address(server: str) -> None:
    """Raise BadOption unless nats-py can use the address; it would retry any other without end.

    The error shows at most the scheme, because the rest may contain part of a password.
    """
    try:
        parts = urlsplit(_with_scheme(server))
        is_cut = "@" in parts.path + parts.query + parts.fragment
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_cut, is_whole = "@" in server, False
    if is_cut:
        raise BadOption("servers", f"not a NATS address; {_WRITE_ADDRESS}; {_ESCAPES}")
    if not is_whole:
        raise BadOption("servers", f"not a NATS address; {_WRITE_ADDRESS}")
    if parts.scheme not in _SCHEMES:
        raise BadOption(
            "servers",
            f"not a NATS address: it begins with {parts.scheme}://; {_WRITE_ADDRESS}; "
            f"{', '.join(_SCHEMES)} are known",
        )


def without_secrets(server: str) -> str:
    """An address without user and password."""
    try:
        parts = urlsplit(server)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))
    except ValueError:
        return quote(server.rpartition("@")[2], safe=":/[].")


def _with_scheme(server: str) -> str:
    return server if "//" in server else f"nats://{server}"


def _require_seed(option: Option, path: str, form: re.Pattern[str]) -> None:
    """Raise BadOption unless the file holds a key; the error never shows its content."""
    import nkeys

    try:
        match = form.search(Path(path).read_text(encoding="utf-8"))
        if match is None:
            raise ValueError
        nkeys.from_seed(match[1].encode())
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise BadOption(
            option,
            f"{path} does not hold a NATS key; "
            "make one with `nsc generate creds` or `nk -gen user`",
        ) from error
