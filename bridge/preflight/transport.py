"""Checks how the bridge reaches both servers: encryption, and passwords of the examples."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bridge.jetstream.connection import connection_options
from bridge.postgres.connection import conninfo_of, conninfo_parts
from bridge.preflight.findings import Finding, warning
from bridge.telemetry.access import is_loopback
from consumer_sdk.transport.passwords import PasswordUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bridge.config import Settings
    from bridge.preflight.findings import Side
    from consumer_sdk.transport.passwords import PasswordSource

EXAMPLE = "change-me"
_ENCRYPTED = ("tls", "wss")


def check_transport(settings: Settings) -> list[Finding]:
    """Findings about the settings alone; no server is asked."""
    return [*_postgres(settings), *_nats(settings), *_examples(settings)]


def _postgres(settings: Settings) -> Iterator[Finding]:
    parts = conninfo_parts(conninfo_of(settings))
    remote = [host for host in str(parts.get("host") or "").split(",") if _is_remote(host)]
    if not remote:
        return
    mode = str(parts.get("sslmode") or "")
    if not mode:
        mode = "verify-full" if parts.get("sslrootcert") == "system" else "prefer"
    fix = "set PGSSLMODE=verify-full and PGSSLROOTCERT to the file of its CA, or to system"
    if mode in ("disable", "allow", "prefer"):
        yield warning(
            "postgres",
            "pg-tls",
            f"sslmode is {mode}: the connection to {', '.join(remote)} may not be encrypted",
            "whoever is on the way can read the password or impersonate the server, and read "
            "every row",
            fix,
        )
    elif mode != "verify-full":
        yield warning(
            "postgres",
            "pg-sslmode",
            f"sslmode is {mode}, which is less than verify-full, for {', '.join(remote)}",
            "the connection is encrypted, but another server can pretend to be this one",
            fix,
        )


def _nats(settings: Settings) -> Iterator[Finding]:
    login = connection_options(settings)
    if login.ca or login.cert or login.key or login.tls_first:
        return
    urls = [urlsplit(server) for server in login.servers]
    plain = [url for url in urls if url.scheme not in _ENCRYPTED and _is_remote(url.hostname or "")]
    if not plain:
        return
    sends_password = bool(login.user) or any(url.username for url in plain)
    is_signed = bool(login.creds or login.nkey)
    what = "the password and " if sends_password and not is_signed else ""
    hosts = ", ".join(str(url.hostname) for url in plain)
    yield warning(
        "nats",
        "nats-tls",
        f"{what}every row travel to {hosts} in plain text"
        if what
        else f"every row travels to {hosts} in plain text",
        "whoever is on the way can read them" + (", and log in with the password" if what else ""),
        "set up tls in nats-server.conf, and write NATS_URL as tls://host:4222, with NATS_CA for "
        "a CA of your own",
    )


def _examples(settings: Settings) -> Iterator[Finding]:
    conninfo, login = conninfo_of(settings), connection_options(settings)
    urls = [urlsplit(server) for server in login.servers]
    found: list[tuple[Side, str, str]] = []
    if EXAMPLE in (conninfo_parts(conninfo).get("password"), _current(conninfo.password)):
        found.append(("postgres", "the password for PostgreSQL", "ALTER ROLE … PASSWORD '…';"))
    given = [url.password or url.username for url in urls]
    if EXAMPLE in (_current(login.password_source), *given):
        found.append(("nats", "the password for NATS", "in nats-server.conf: password: …"))
    if settings.admin_token == EXAMPLE:
        found.append(("nats", "BRIDGE_ADMIN_TOKEN", "openssl rand -hex 32"))
    for side, what, fix in found:
        yield warning(
            side,
            "example-password",
            f"{what} is {EXAMPLE}, as in the examples",
            "everybody knows it",
            f"{fix}\n# and set it here as well",
        )


def _current(source: PasswordSource) -> str:
    """The password of this moment; empty if there is none, which the checks of the servers say."""
    try:
        return source.read()
    except PasswordUnavailable:
        return ""


def _is_remote(host: str) -> bool:
    """Whether a connection leaves this machine; a socket file and an empty name do not."""
    host = host.strip()
    return bool(host) and not host.startswith(("/", "@")) and not is_loopback(host)
