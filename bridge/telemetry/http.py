"""The operator's HTTP port: health, status, metrics, shutdown and the dashboard page."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import re
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohttp import web

from bridge.errors import SettingsError
from bridge.telemetry.metrics import registry_for, render
from bridge.telemetry.status import History, is_alive, status_document
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from bridge.telemetry.stats import BridgeStats

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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


def refuse_foreign_host(bound_host: str, headers: Mapping[str, str]) -> str | None:
    """Why a request is refused, or None: on a loopback address it must name a loopback host."""
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
        # aiohttp decodes invalid UTF-8 in a header to lone surrogates.
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


log = logging.getLogger("bridge.http")

MAX_CONNECTIONS = 128
IDLE_TIMEOUT_SECONDS = 30.0
_STREAM_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f]{1,255}\Z")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class HttpServer:
    """Serves the stats on one port; only an authorised `POST /shutdown` changes anything."""

    def __init__(
        self,
        stats: BridgeStats,
        *,
        host: str = "127.0.0.1",
        port: int = 9090,
        admin_token: str | None = None,
        request_shutdown: Callable[[], None],
        stream_info: Callable[[str], Awaitable[dict[str, Any] | None]],
    ) -> None:
        self.host = host
        self.port = port
        self._stats = stats
        self._admin_token = admin_token
        self._request_shutdown = request_shutdown
        self._stream_info = stream_info
        self._registry = registry_for(stats)
        self._history = History(stats)
        self._page = files("bridge.telemetry").joinpath("dashboard/index.html").read_bytes()
        self._page_headers = _HEADERS | {"Content-Security-Policy": _policy(self._page.decode())}
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._sampling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen and set `port` to the bound port; SettingsError if that is not possible."""
        app = web.Application(middlewares=[self._guard], client_max_size=64 * 1024)
        app.router.add_get("/", self._get_page)
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/ready", self._get_ready)
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/history", self._get_history)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/streams/info", self._get_stream_info)
        app.router.add_post("/shutdown", self._post_shutdown)
        # aiohttp would log a traceback for every malformed request.
        quiet = logging.getLogger("bridge.http.malformed")
        quiet.setLevel(logging.CRITICAL + 1)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=quiet,
            keepalive_timeout=IDLE_TIMEOUT_SECONDS,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, self.host, self.port)
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise _cannot_listen(self.host, self.port, error) from error
        self.port = self._server.sockets[0].getsockname()[1]
        self._sampling = asyncio.create_task(self._history.run(), name="status-history")
        event(log, "http listening", host=self.host, port=self.port)

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        if self._sampling is not None:
            self._sampling.cancel()
            with suppress(asyncio.CancelledError):
                await self._sampling
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= MAX_CONNECTIONS:
            return _Refusal()
        return server()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        foreign = refuse_foreign_host(self.host, request.headers)
        if foreign is not None:
            return _json({"error": foreign}, status=403)
        try:
            return await handler(request)
        except web.HTTPException as answer:
            headers = {key: answer.headers[key] for key in ("Allow",) if key in answer.headers}
            return _json({"error": answer.reason.lower()}, status=answer.status, headers=headers)
        except Exception as error:  # noqa: BLE001 - a page must not harm the bridge
            event(
                log,
                "request failed",
                level=logging.ERROR,
                path=request.path,
                error=f"{type(error).__name__}: {error}",
            )
            return _json({"error": "internal error"}, status=500)

    async def _get_page(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._page, content_type="text/html", charset="utf-8", headers=self._page_headers
        )

    async def _get_health(self, _request: web.Request) -> web.Response:
        alive = is_alive(self._stats)
        document = {"status": "ok" if alive else "failed", "state": self._stats.state}
        return _json(document, status=200 if alive else 503)

    async def _get_ready(self, _request: web.Request) -> web.Response:
        stats = self._stats
        ready = stats.state == "streaming" and stats.nats_connected and stats.is_ready
        document = {"ready": ready, "state": stats.state}
        return _json(document, status=200 if ready else 503)

    async def _get_status(self, _request: web.Request) -> web.Response:
        return _json(status_document(self._stats, self._history.latest_document()))

    async def _get_history(self, _request: web.Request) -> web.Response:
        return _json(self._history.document())

    async def _get_metrics(self, _request: web.Request) -> web.Response:
        headers = _HEADERS | {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=render(self._registry), headers=headers)

    async def _get_stream_info(self, request: web.Request) -> web.Response:
        name = request.query.get("stream", "")
        if _STREAM_NAME.match(name) is None:
            return _json({"error": "name a stream: /streams/info?stream=CDC"}, status=400)
        try:
            document = await asyncio.wait_for(self._stream_info(name), timeout=5.0)
        except TimeoutError:
            return _json({"error": "no answer from NATS"}, status=504)
        if document is None:
            return _json({"error": f"no stream {name}"}, status=404)
        return _json(document)

    async def _post_shutdown(self, request: web.Request) -> web.Response:
        peername = request.transport.get_extra_info("peername") if request.transport else None
        peer = str(peername[0]) if isinstance(peername, tuple) else None
        refusal = refuse_shutdown(request.headers, peer, self._admin_token)
        if refusal is not None:
            status, reason = refusal
            event(log, "shutdown refused", level=logging.WARNING, peer=peer, reason=reason)
            headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
            return _json({"error": reason}, status=status, headers=headers)
        event(log, "shutdown requested", peer=peer)
        self._request_shutdown()
        return _json({"status": "shutting down"}, status=202)


class _Refusal(asyncio.Protocol):
    """Closes a connection beyond the limit, so that clients cannot use up file descriptors."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _json(
    document: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        text=json.dumps(document, default=str) + "\n",
        status=status,
        content_type="application/json",
        headers=_HEADERS | (headers or {}),
    )


def _policy(page: str) -> str:
    """A policy that allows only the page's own inline script and style, and its own host."""
    sources: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        sources[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(sources['script'])}; "
        f"style-src {' '.join(sources['style'])}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _cannot_listen(host: str, port: int, error: OSError | OverflowError) -> SettingsError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return SettingsError(
            f"port {port} on {host} is already in use; "
            "give another with --port, or 0 for any free one"
        )
    if number == errno.EACCES:
        return SettingsError(
            f"port {port} on {host} needs more rights; give one above 1023 with --port"
        )
    return SettingsError(
        f"cannot listen on {host}:{port} ({error}); set --host to an address of this machine"
    )
