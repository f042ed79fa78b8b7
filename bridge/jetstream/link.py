"""The connection to NATS: made once, kept for ever."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client

from bridge.errors import BrokerError, Retryable, SettingsError
from consumer_sdk.transport.server_address import (
    KeptTls,
    TlsNotOffered,
    asks_for_tls,
    never_encrypted,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.config import Settings

RECONNECT_SECONDS = 2
SCHEMES = ("nats", "tls", "ws", "wss")
_SEED = re.compile(r"\A\s*(S[A-Z2-7]+)\s*\Z")
_CREDENTIALS = re.compile(
    r"BEGIN NATS USER JWT-+\s+\S+\s+-+END NATS USER JWT-+.*"
    r"BEGIN USER NKEY SEED-+\s+(S[A-Z2-7]+)\s+-+END USER NKEY SEED",
    re.DOTALL,
)


class NatsAway(nats.errors.OutboundBufferLimitError):
    """Nothing can be sent, because there is no connection."""

    def __str__(self) -> str:
        return "NATS is away"


class Link(KeptTls, Client):
    """A client without a buffer for what is sent while it reconnects, and which says so.

    nats-py calls that an exceeded buffer limit, which sends people looking for a buffer.
    """

    async def publish(self, *arguments: Any, **options: Any) -> None:
        try:
            await super().publish(*arguments, **options)
        except nats.errors.OutboundBufferLimitError as error:
            raise NatsAway from error


def servers_of(settings: Settings) -> list[str]:
    """The server URLs, credentials included."""
    is_part_given = any(settings.outranks(name, "nats_url") for name in ("nats_host", "nats_port"))
    if settings.nats_url and not is_part_given:
        urls = [part.strip() for part in settings.nats_url.split(",") if part.strip()]
        for url in urls or [""]:
            _require_address(url, settings.where("nats_url"))
        return urls
    host = settings.nats_host
    return [f"nats://{f'[{host}]' if ':' in host else host}:{settings.nats_port}"]


def _require_address(url: str, where: str) -> None:
    """Insist on what nats-py can connect to; it would try anything else for ever.

    Of a damaged URL nothing but the scheme is shown: the rest may be a password cut in two.
    """
    remedy = f"write it as nats://host:4222; {', '.join(SCHEMES)} are known"
    try:
        parts = urlsplit(_with_scheme(url))
        is_cut = "@" in parts.path + parts.query + parts.fragment
        is_whole = bool(parts.hostname) and parts.port != 0 and not is_cut
    except ValueError:
        is_whole = False
    if not is_whole:
        raise SettingsError(f"{where} is not a NATS address; {remedy}")
    if parts.scheme not in SCHEMES:
        raise SettingsError(
            f"{where} is not a NATS address: it begins with {parts.scheme}://; {remedy}"
        )


def _with_scheme(url: str) -> str:
    return url if "//" in url else f"nats://{url}"


def options_of(settings: Settings) -> dict[str, Any]:
    """Connection options of nats-py for these settings."""
    options: dict[str, Any] = {
        "servers": servers_of(settings),
        "name": f"tailrace {settings.slot}".strip(),
        "reconnect_time_wait": RECONNECT_SECONDS,
        "connect_timeout": 5,
        "ping_interval": 5,
        "max_outstanding_pings": 2,
        # No buffer that a reconnect would send late: what was not acknowledged is sent by us.
        "pending_size": -1,
    }
    if settings.nats_user:
        options["user"] = settings.nats_user
        options["password"] = settings.nats_password
    if settings.nats_creds:
        _require_seed(settings.nats_creds, settings.where("nats_creds"), _CREDENTIALS)
        options["user_credentials"] = settings.nats_creds
    if settings.nats_nkey:
        _require_seed(settings.nats_nkey, settings.where("nats_nkey"), _SEED)
        options["nkeys_seed"] = settings.nats_nkey
    servers = options["servers"]
    # A link with a context never goes on without TLS.
    if settings.nats_ca or settings.nats_cert or settings.nats_key or asks_for_tls(servers):
        if never_encrypted(servers):
            raise SettingsError("NATS_URL is not encrypted, but TLS is asked for; write wss://")
        try:
            context = ssl.create_default_context(cafile=settings.nats_ca or None)
            if settings.nats_cert:
                context.load_cert_chain(settings.nats_cert, settings.nats_key or None)
        except OSError as error:
            raise SettingsError(
                f"TLS files for NATS cannot be used: {error}; check NATS_CA, NATS_CERT and NATS_KEY"
            ) from error
        options["tls"] = context
    return options


def _require_seed(path: str, where: str, form: re.Pattern[str]) -> None:
    """Insist on a file that holds a key; what it holds instead is not shown."""
    import nkeys

    try:
        match = form.search(Path(path).read_text(encoding="utf-8"))
        if match is None:
            raise ValueError
        nkeys.from_seed(match[1].encode())
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise SettingsError(
            f"{where}: {path} does not hold a NATS key; "
            "make one with `nsc generate creds` or `nk -gen user`"
        ) from error


def shown_servers(settings: Settings) -> str:
    """Hosts and ports without credentials, for messages."""
    shown = []
    for url in servers_of(settings):
        parts = urlsplit(_with_scheme(url))
        shown.append(f"{parts.hostname}:{parts.port or 4222}")
    return ", ".join(shown)


async def open_link(**options: Any) -> Link:
    """Connect with options of nats-py."""
    client = Link()
    await client.connect(**options)
    return client


async def probe(settings: Settings) -> None:
    """Try to connect once: BrokerError for what must be repaired, Retryable for what may pass."""
    where = shown_servers(settings)
    seen: list[Exception] = []

    async def note(error: Exception) -> None:
        seen.append(error)

    try:
        client = await open_link(
            **options_of(settings), allow_reconnect=False, max_reconnect_attempts=1, error_cb=note
        )
    except TlsNotOffered as error:
        raise BrokerError(str(error)) from error
    except (TimeoutError, OSError, nats.errors.Error, ValueError) as error:
        for reason in (error, *seen):
            text = str(reason).lower()
            if "authorization" in text or "authentication" in text or "nkey" in text:
                raise BrokerError(
                    f"NATS at {where} refuses the credentials; "
                    "check NATS_BRIDGE_USER and NATS_BRIDGE_PASSWORD, NATS_CREDS or NATS_NKEY"
                ) from error
            if isinstance(reason, ssl.SSLError) or "certificate" in text:
                raise BrokerError(
                    f"TLS with NATS at {where} fails: {reason}; check NATS_CA"
                ) from error
        raise Retryable(f"cannot connect to NATS at {where}: {_causes(error, seen)}") from error
    await client.close()


def _causes(error: Exception, seen: list[Exception]) -> str:
    """Why no server took the connection: nats-py tells that to its callback only."""
    causes = seen if isinstance(error, nats.errors.NoServersError) and seen else [error]
    return "; ".join(dict.fromkeys(map(_one_line, causes)))


def _one_line(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    text = " ".join((str(error) or type(error).__name__).split())
    return text.removeprefix("nats: ")


async def connect(
    settings: Settings,
    *,
    on_disconnect: Callable[[], None],
    on_reconnect: Callable[[], None],
    on_error: Callable[[Exception], None],
) -> Client:
    """Connect for good; reconnects for ever by itself."""

    async def disconnected() -> None:
        on_disconnect()

    async def reconnected() -> None:
        on_reconnect()

    async def failed(error: Exception) -> None:
        on_error(error)

    return await open_link(
        **options_of(settings),
        allow_reconnect=True,
        max_reconnect_attempts=-1,
        disconnected_cb=disconnected,
        reconnected_cb=reconnected,
        error_cb=failed,
    )


def server_version(client: Client) -> tuple[int, int, int]:
    """Version of the connected server; zeros where it does not say."""
    version = client.connected_server_version
    return (version.major, version.minor, version.patch)
