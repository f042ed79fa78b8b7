"""How to connect to NATS: addresses, credentials, TLS and its failures in words."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import ParseResult, unquote, urlsplit

from consumer_sdk.errors import UsageError
from consumer_sdk.transport.calls import DEFAULT_INBOX_PREFIX
from consumer_sdk.transport.passwords import PasswordSource

if TYPE_CHECKING:
    from collections.abc import Callable

Option = Literal["servers", "creds", "nkey", "tls", "password_file"]

DEFAULT_PORT: Final = 4222
RECONNECT_WAIT_SECONDS: Final = 2
_SCHEMES: Final = ("nats", "tls", "ws", "wss")
_ENCRYPTED: Final = ("tls", "wss")
_WEBSOCKET: Final = ("ws", "wss")
_VARIABLES: Final = {
    "creds": "NATS_CREDS",
    "nkey": "NATS_NKEY",
    "password_file": "NATS_PASSWORD_FILE or NATS_PASSWORD_COMMAND",
}
_SEED: Final = re.compile(r"\A\s*(?P<seed>S[A-Z2-7]+)\s*\Z")
_CREDENTIALS: Final = re.compile(
    r"BEGIN NATS USER JWT-+\s+(?P<jwt>\S+)\s+-+END NATS USER JWT-+.*"
    r"BEGIN USER NKEY SEED-+\s+(?P<seed>S[A-Z2-7]+)\s+-+END USER NKEY SEED",
    re.DOTALL,
)
_WRITE_ADDRESS: Final = "write it as nats://host:4222"
_ESCAPES: Final = "in a password write / as %2F, ? as %3F, # as %23 and @ as %40"

# https://docs.openssl.org/3.0/man3/X509_STORE_CTX_get_error/
_NOT_YET_VALID: Final = 9
_HAS_EXPIRED: Final = 10
_REVOKED: Final = 23
_UNKNOWN_ISSUER: Final = frozenset({2, 18, 19, 20, 21, 24})
_OTHER_HOST: Final = frozenset({62, 64})

# What a server says of the client's certificate, RFC 8446 section 6.2, as OpenSSL names it.
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "it demands one, and none was sent",
    "HANDSHAKE_FAILURE": "it may demand one",
    "CERTIFICATE_EXPIRED": "it has expired",
    "CERTIFICATE_REVOKED": "it is revoked",
    "UNKNOWN_CA": "its CA is unknown there",
    "BAD_CERTIFICATE": "it is missing, or not valid there",
    "CERTIFICATE_UNKNOWN": "it is not valid there",
    "UNSUPPORTED_CERTIFICATE": "it is of a kind that is not valid there",
}


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
    inbox_prefix: str = DEFAULT_INBOX_PREFIX
    password_file: str = ""
    password_command: tuple[str, ...] = ()
    tls_first: bool = False
    """Whether TLS begins before the server's INFO."""

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

    @property
    def password_source(self) -> PasswordSource:
        """Where the password comes from."""
        return PasswordSource(self.password, self.password_file, self.password_command)

    def for_nats(self) -> dict[str, Any]:
        """Arguments of `NatsConnection.connect`; BadOption if a key or TLS file is not valid."""
        options: dict[str, Any] = {
            "login": self,
            "servers": list(self.servers),
            "name": self.name,
            "reconnect_time_wait": RECONNECT_WAIT_SECONDS,
            "max_reconnect_attempts": -1,
            "connect_timeout": 5,
            "inbox_prefix": self.inbox_prefix,
        }
        if self.creds:
            self.read_creds()
            options["user_credentials"] = self.creds
        elif self.nkey:
            self.read_nkey()
            options["nkeys_seed"] = self.nkey
        elif self.password_source.changes:
            # The connection reads the password itself, for every attempt.
            options["user"] = self._password_user()
            options["password"] = ""
        elif self.user:
            options["user"] = self.user
            options["password"] = self.password
        schemes = {urlsplit(server).scheme for server in self.servers}
        # With a TLS context, a connection never continues without TLS, see `NatsConnection`.
        asks_for_tls = self.ca or self.cert or self.key or self.tls_first
        if asks_for_tls or not schemes.isdisjoint(_ENCRYPTED):
            if "ws" in schemes:
                # WebSocket without TLS cannot change to it later.
                raise BadOption(
                    "servers", "not encrypted (ws://), but TLS is asked for; write wss://"
                )
            options["tls"] = self.tls_context()
            options["tls_handshake_first"] = self.tls_first and schemes.isdisjoint(_WEBSOCKET)
        return options

    def read_creds(self) -> tuple[str, str]:
        """The user JWT and the seed in the credentials file; BadOption if it holds none."""
        match = _require_seed("creds", self.creds, _CREDENTIALS)
        return match["jwt"], match["seed"]

    def read_nkey(self) -> str:
        """The seed in the nkey file; BadOption if it holds none."""
        return _require_seed("nkey", self.nkey, _SEED)["seed"]

    def _password_user(self) -> str:
        """The user whose password comes from a file or a command."""
        parts = [urlsplit(_with_scheme(server)) for server in self.servers]
        if self.password or any(part.password for part in parts):
            raise BadOption("password_file", "a password is given as well; keep one of the two")
        users = [self.user, *(unquote(part.username or "") for part in parts)]
        user = next(filter(None, users), "")
        if not user:
            raise BadOption("password_file", "the user is missing; set NATS_BRIDGE_USER")
        return user

    def tls_context(self) -> ssl.SSLContext:
        """A context with the certificates as the files hold them now."""
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
    """An address without user, password and parameters, for messages.

    The password ends at the last @, even if it has characters that should have been escaped.
    """
    scheme, between, rest = server.partition("://")
    if not between:
        scheme, rest = "", server
    if re.search("[?#].*@", rest):
        # Either the password or a parameter contains what follows.
        return f"{scheme}{between}…"
    host = re.split("[?#]", rest.rpartition("@")[2], maxsplit=1)[0]
    return f"{scheme}{between}{host}"


def _with_scheme(server: str) -> str:
    return server if "//" in server else f"nats://{server}"


def _require_seed(option: Option, path: str, form: re.Pattern[str]) -> re.Match[str]:
    """The parts of a key file; BadOption if it holds no key, which never shows its content."""
    import nkeys

    try:
        match = form.search(Path(path).read_text(encoding="utf-8"))
        if match is None:
            raise ValueError
        nkeys.from_seed(match["seed"].encode())
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise BadOption(
            option,
            f"{path} does not hold a NATS key; "
            "make one with `nsc generate creds` or `nk -gen user`",
        ) from error
    return match


def tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error that caused this error, if one did."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, ssl.SSLError):
            return error
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None


def certificate_problem(error: ssl.SSLCertVerificationError) -> str:
    """Why the certificate of a server is refused: expired, another host, or an unknown CA."""
    code = error.verify_code
    if code == _HAS_EXPIRED:
        return "it has expired"
    if code == _NOT_YET_VALID:
        return "it is not valid yet; compare the clocks"
    if code == _REVOKED:
        return "it is revoked"
    if code in _OTHER_HOST:
        return f"it is for another host ({error.verify_message.rstrip('.')})"
    if code in _UNKNOWN_ISSUER:
        return f"it is not signed by a trusted CA ({error.verify_message})"
    return error.verify_message


def client_certificate_problem(error: ssl.SSLError) -> str | None:
    """Why the server refuses the client's certificate; None if it does not say so."""
    reason = error.reason or ""
    if "ALERT" not in reason:
        return None
    return next((text for name, text in _ALERTS.items() if reason.endswith(name)), None)
