"""The operator's HTTP port: health, status, metrics, shutdown and the dashboard page.

`access.py` says who may read and who may stop the bridge, `connections.py` limits connections.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import logging
import re
import time
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

from bridge.errors import SettingsError
from bridge.telemetry.access import PROBES, Access, HttpRefusal, is_loopback, refuse_foreign_host
from bridge.telemetry.connections import (
    IDLE_SECONDS,
    Certificate,
    Connections,
    enlarge_queue,
)
from bridge.telemetry.metrics import registry_for, render
from bridge.telemetry.status import History, is_alive, status_document
from consumer_sdk.transport.cancellation import restarted
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bridge.telemetry.stats import BridgeStats

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


log = logging.getLogger("bridge.http")

WRONG_TOKEN_SECONDS = 0.5
"""How long the answer to a wrong token takes, against guessing."""
REFUSALS_LOGGED_SECONDS = 10.0
"""How often refused requests are logged, against a flood of log lines."""
_STREAM_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f]{1,255}\Z")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "tailrace",
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
        access: Access | None = None,
        certificate: Certificate | None = None,
        request_shutdown: Callable[[], None],
        stream_info: Callable[[str], Awaitable[dict[str, Any] | None]],
    ) -> None:
        self.host = host
        self.port = port
        self._stats = stats
        self._access = access or Access()
        self._certificate = certificate
        self._local = is_loopback(host)
        self._request_shutdown = request_shutdown
        self._stream_info = stream_info
        self._registry = registry_for(stats)
        self._history = History(stats)
        self._page = files("bridge.telemetry").joinpath("dashboard/index.html").read_bytes()
        self._page_headers = _HEADERS | {"Content-Security-Policy": _policy(self._page.decode())}
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._refusals = 0
        self._refusals_logged_at = -REFUSALS_LOGGED_SECONDS

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
            keepalive_timeout=IDLE_SECONDS,
            lingering_time=1.0,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server, self._certificate)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connections.accept, self.host, self.port)
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise _cannot_listen(self.host, self.port, error) from error
        enlarge_queue(self._server)
        names = [bound.getsockname() for bound in self._server.sockets]
        self.port = names[0][1]
        # A name such as localhost may stand for any address.
        self._local = all(is_loopback(name[0]) for name in names)
        self._tasks = [
            asyncio.create_task(restarted(self._history.run), name="status-history"),
            asyncio.create_task(restarted(self._close_overdue), name="http-deadlines"),
        ]
        self._log_listening()

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._connections is not None:
            self._connections.close_all()

    def _log_listening(self) -> None:
        access = self._access
        readers = "local" if self._local else "all" if access.open else "token"
        if readers == "token" and not access.tokens:
            readers = "none"
        event(
            log, "http listening", host=self.host, port=self.port,
            tls=self._certificate is not None, readers=readers,
        )  # fmt: skip
        if readers == "none":
            event(
                log, "http pages closed", level=logging.WARNING,
                reason="without a token only /health and /ready answer on this address",
                remedy="set BRIDGE_READ_TOKEN or BRIDGE_ADMIN_TOKEN; --http-open allows everyone",
            )  # fmt: skip

    async def _close_overdue(self) -> None:
        assert self._connections is not None
        while True:
            await asyncio.sleep(1.0)
            self._connections.close_overdue()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._connections is not None:
            self._connections.note_request(request.protocol)
        refusal = refuse_foreign_host(request.headers, local=self._local)
        if refusal is None and request.path not in (*PROBES, "/shutdown"):
            refusal = self._access.refuse_read(request.headers, local=self._local)
        if refusal is not None:
            return await self._refuse(request, refusal)
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
        if not ready and stats.waiting is not None:
            # Anybody may ask, so the details are only in /status.
            document["waiting_for"] = stats.waiting.step
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
        peer = _peer(request)
        refusal = self._access.refuse_shutdown(request.headers, peer)
        if refusal is not None:
            return await self._refuse(request, refusal)
        event(log, "shutdown requested", peer=peer)
        self._request_shutdown()
        return _json({"status": "shutting down"}, status=202)

    async def _refuse(self, request: web.Request, refusal: HttpRefusal) -> web.Response:
        self._refusals += 1
        now = time.monotonic()
        if now - self._refusals_logged_at >= REFUSALS_LOGGED_SECONDS:
            event(
                log, "request refused", level=logging.WARNING, peer=_peer(request),
                method=request.method, reason=refusal.reason, refused=self._refusals,
            )  # fmt: skip
            self._refusals, self._refusals_logged_at = 0, now
        if refusal.guessed:
            await asyncio.sleep(WRONG_TOKEN_SECONDS)
        headers = {}
        if refusal.scheme:
            headers["WWW-Authenticate"] = f'{refusal.scheme} realm="tailrace"'
        return _json({"error": refusal.reason}, status=refusal.status, headers=headers)


def _peer(request: web.Request) -> str | None:
    name = request.transport.get_extra_info("peername") if request.transport else None
    return str(name[0]) if isinstance(name, tuple) else None


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
