"""Who may ask the HTTP port for what.

A browser on the operator's own machine is the likeliest way in: a page from elsewhere can post a
form to 127.0.0.1, or point its own name at 127.0.0.1 (DNS rebinding). Both give themselves away by
`Origin`, `Sec-Fetch-Site` or `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses, without looking anything up."""
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


def refuse_foreign_host(bound_host: str, headers: Mapping[str, str]) -> str | None:
    """Why a request to a loopback-bound port is refused, or None: it must name a loopback host."""
    if is_loopback(bound_host) and not is_loopback(host_name(headers.get("Host", ""))):
        return "this port answers only to requests for localhost"
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


def refuse_shutdown(
    headers: Mapping[str, str], peer: str | None, admin_token: str | None
) -> tuple[int, str] | None:
    """Why this client may not stop the bridge, as (HTTP status, reason), or None if it may."""
    foreign = refuse_foreign_page(headers)
    if foreign is not None:
        return 403, foreign
    if admin_token:
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        # Bytes of a header that are no UTF-8 come as lone surrogates.
        sent = given.strip().encode(errors="surrogateescape")
        matches = hmac.compare_digest(sent, admin_token.encode())
        if scheme.lower() != "bearer" or not matches:
            return 401, "a valid bearer token is needed"
        return None
    if any(name in headers for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP")):
        return 403, "without BRIDGE_ADMIN_TOKEN, not through a proxy"
    if peer is None or not is_loopback(peer):
        return 403, "without BRIDGE_ADMIN_TOKEN, only from this machine"
    if not is_loopback(host_name(headers.get("Host", ""))):
        return 403, "without BRIDGE_ADMIN_TOKEN, only for localhost"
    return None
