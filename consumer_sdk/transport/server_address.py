"""Addresses of NATS servers, as NATS_URL holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from urllib.parse import ParseResult, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENCRYPTED = ("tls", "wss")


class ServerAddress(ParseResult):
    """An address whose user and password are read as RFC 3986 writes them: `%40` is an @."""

    @classmethod
    def of(cls, address: ParseResult) -> Self:
        """The same address."""
        return cls(*address)

    @property
    def username(self) -> str | None:
        user = super().username
        return None if user is None else unquote(user)

    @property
    def password(self) -> str | None:
        password = super().password
        return None if password is None else unquote(password)


def asks_for_tls(servers: Iterable[str]) -> bool:
    """Whether one of the servers is to be reached by TLS alone."""
    return any(urlsplit(server).scheme in _ENCRYPTED for server in servers)


def never_encrypted(servers: Iterable[str]) -> bool:
    """Whether one of the servers speaks WebSocket without TLS, which cannot be added later."""
    return any(urlsplit(server).scheme == "ws" for server in servers)


class TlsNotOffered(ConnectionError):
    """TLS is asked for, and the server has none; nothing was sent to it."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"the server at {host} offers no TLS, and without it nothing is sent; "
            "enable TLS there, or write nats:// and unset NATS_CA, NATS_CERT and NATS_KEY"
        )


def require_tls(server: ParseResult, info: dict[str, Any]) -> None:
    """Have the client go on with TLS after a server's INFO; TlsNotOffered where it cannot."""
    if server.scheme == "wss":
        return
    if not info.get("tls_required") and not info.get("tls_available"):
        raise TlsNotOffered(server.netloc.rpartition("@")[2])
    info["tls_required"] = True


class KeptTls:
    """Put before nats-py's client: TLS is kept once asked for, `%40` in a password is an @.

    nats-py itself takes what the server offers: without TLS it would send the password as it is.
    """

    options: dict[str, Any]
    _current_server: Any
    _server_pool: list[Any]

    def _setup_server_pool(self, connect_url: list[str]) -> None:
        super()._setup_server_pool(connect_url)  # type: ignore[misc]
        for server in self._server_pool:
            server.uri = ServerAddress.of(server.uri)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # The first INFO comes before anything is sent; nats-py looks at `tls_required` afterwards.
        server = self._current_server
        if initial_connection and self.options.get("tls") is not None and server is not None:
            require_tls(server.uri, info)
        await super()._process_info(info, initial_connection)  # type: ignore[misc]
