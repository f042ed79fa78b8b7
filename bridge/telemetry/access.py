"""Who may read the pages of the HTTP port and who may stop the bridge; no I/O."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PROBES = ("/health", "/ready")
"""Paths that answer without a token: service managers cannot send one."""

_PROXY_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


class HttpRefusal(NamedTuple):
    """Why a request is refused, and its HTTP status."""

    status: int
    reason: str
    scheme: str = ""
    """The scheme of the login that would help, for `WWW-Authenticate`."""
    guessed: bool = False
    """Whether the client sent a wrong token, rather than none."""


@dataclass(frozen=True)
class Access:
    """The tokens of the port; `open` lets everyone read who can connect."""

    admin_token: str = field(default="", repr=False)
    read_token: str = field(default="", repr=False)
    open: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that allow reading."""
        return tuple(token for token in (self.admin_token, self.read_token) if token)

    def refuse_read(self, headers: Mapping[str, str], *, local: bool) -> HttpRefusal | None:
        """Why this client may not read a page, or None; `local` means bound to loopback alone."""
        if (
            headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
            and headers.get("Sec-Fetch-Mode") != "navigate"
        ):
            return HttpRefusal(403, "requests from other sites are refused")
        if local or self.open:
            return None
        if not self.tokens:
            return HttpRefusal(
                403,
                "without a token this address answers only /health and /ready; set "
                "BRIDGE_READ_TOKEN or BRIDGE_ADMIN_TOKEN, or allow everyone with --http-open",
            )
        return _refuse_login(headers, self.tokens, "Basic", "the token is needed, as bearer token "
                             "or as password of any user")  # fmt: skip

    def refuse_shutdown(self, headers: Mapping[str, str], peer: str | None) -> HttpRefusal | None:
        """Why this client may not stop the bridge, or None if it may."""
        foreign = refuse_foreign_page(headers)
        if foreign is not None:
            return HttpRefusal(403, foreign)
        if self.admin_token:
            # No password login: a browser would repeat it for a request of any other page.
            return _refuse_login(
                headers, (self.admin_token,), "Bearer", "a valid bearer token is needed"
            )
        if any(name in headers for name in _PROXY_HEADERS):
            return HttpRefusal(403, "without BRIDGE_ADMIN_TOKEN, not through a proxy")
        if peer is None or not is_loopback(peer):
            return HttpRefusal(403, "without BRIDGE_ADMIN_TOKEN, only from this machine")
        if not is_loopback(host_name(headers.get("Host", ""))):
            return HttpRefusal(403, "without BRIDGE_ADMIN_TOKEN, only for localhost")
        return None


def _refuse_login(
    headers: Mapping[str, str], tokens: Iterable[str], scheme: str, reason: str
) -> HttpRefusal | None:
    sent = _sent_token(headers.get("Authorization", ""), password=scheme == "Basic")
    # The comparison of digests takes the same time for every token of every length.
    digest = sha256(sent).digest()
    matches = [hmac.compare_digest(digest, sha256(one.encode()).digest()) for one in tokens]
    if any(matches):
        return None
    return HttpRefusal(401, reason, scheme, guessed=bool(sent))


def _sent_token(authorization: str, *, password: bool) -> bytes:
    """The token of an `Authorization` header; empty without one."""
    scheme, _, given = authorization.partition(" ")
    # aiohttp decodes invalid UTF-8 in a header to lone surrogates.
    token = given.strip().encode(errors="surrogateescape")
    if scheme.lower() == "bearer":
        return token
    if password and scheme.lower() == "basic":
        try:
            return base64.b64decode(token, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses; makes no DNS query."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def host_name(authority: str) -> str:
    """The host of a `Host` header, in lower case, without port and brackets; empty if malformed."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def refuse_foreign_host(headers: Mapping[str, str], *, local: bool) -> HttpRefusal | None:
    """Why a request is refused, or None: on a loopback address it must name a loopback host.

    An attacker's name may resolve to 127.0.0.1 in a browser (DNS rebinding).
    """
    if local and not is_loopback(host_name(headers.get("Host", ""))):
        return HttpRefusal(403, "this port answers only to requests for localhost")
    return None


def refuse_foreign_page(headers: Mapping[str, str]) -> str | None:
    """Why a request is refused as coming from a foreign web page, or None."""
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "requests from other sites are refused"
    origin = headers.get("Origin")
    if origin is None:
        return None
    try:
        netloc = urlsplit(origin).netloc
    except ValueError:
        netloc = ""
    if not netloc or netloc.lower() != headers.get("Host", "").lower():
        return "requests from other origins are refused"
    return None
