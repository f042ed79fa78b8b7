"""The bridge as a service: wires the stages, survives restarts of both sides, stops in order.

`Service(settings).run()` tells the story: start up, stream one session after another, shut down.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import nats.errors
from nats.js.errors import APIError

from bridge.errors import (
    BridgeError,
    BrokerError,
    DataAtRiskError,
    HistoryBroken,
    Retryable,
    SourceError,
    TableTaken,
    UnknownToLog,
)
from bridge.jetstream import link
from bridge.jetstream.broker import open_broker
from bridge.jetstream.fence import Fenced
from bridge.jetstream.streams import ApiError, api, stream_state
from bridge.postgres.connection import conninfo_of
from bridge.postgres.slot import SlotInUse
from bridge.publish.patience import PatienceEnded
from bridge.session import Session
from bridge.telemetry.http import HttpServer
from bridge.telemetry.logs import MetricsLine
from bridge.telemetry.stats import BridgeStats
from bridge.telemetry.wal_monitor import WalMonitor
from consumer_sdk.transport.logfmt import event
from consumer_sdk.transport.version import __version__
from consumer_sdk.wire.lsn import format_lsn

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bridge.config import Settings

log = logging.getLogger("bridge.service")

TRANSIENT = (Retryable, TimeoutError, nats.errors.Error, APIError, ApiError, OSError)
STANDBY_SECONDS = 0.5
FIRST_BACKOFF_SECONDS = 0.25
LAST_BACKOFF_SECONDS = 5.0


class Service:
    """Runs one bridge until it is stopped or must not go on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._conninfo = conninfo_of(settings)
        self._stop = asyncio.Event()
        self._stack = AsyncExitStack()
        self._opened: Session | None = None
        self._session: Session | None = None
        self._has_streamed = False
        self._forbidden = ""
        self._known_gap: str | None = None
        self._slot_made_at: int | None = None
        self.stats = BridgeStats()
        self.stats.source = settings.slot
        self.stats.publication = settings.pub
        self.stats.prefix = settings.prefix
        self.stats.bridge_version = __version__
        self._client: Any = None

    async def run(self) -> None:
        """The whole life of the bridge; BridgeError tells why it could not go on."""
        self._handle_signals()
        # Millions of short-lived tuples pass through; what was there at start never goes away.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        try:
            await self._startup()
            await self._main_loop()
        except BridgeError as error:
            self.stats.state = "failed"
            self.stats.last_error = str(error)
            raise
        finally:
            await self._shutdown()

    def request_shutdown(self) -> None:
        """Stop in good order: stop reading, drain, confirm, close. A second request forces."""
        if self._stop.is_set():
            event(log, "forced to stop", level=logging.WARNING)
            logging.shutdown()
            os._exit(130)
        event(log, "stopping")
        self._stop.set()
        if self._session is not None:
            self.stats.state = "draining"
            self._session.drain()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):
                loop.add_signal_handler(number, self.request_shutdown)

    async def _startup(self) -> None:
        settings = self._settings
        http = HttpServer(
            self.stats,
            host=settings.host,
            port=settings.port,
            admin_token=settings.admin_token or None,
            request_shutdown=self.request_shutdown,
            stream_info=self._stream_info,
        )
        await http.start()
        self._stack.push_async_callback(http.stop)
        self._in_background(MetricsLine().run(self.stats, settings.metrics_interval))
        monitor = WalMonitor(
            self._conninfo, settings.slot, self.stats, settings.wal_check_interval,
            settings.wal_warning, settings.wal_critical,
        )  # fmt: skip
        self._in_background(monitor.run())
        await self._connect_nats()

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)

        async def end() -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        self._stack.push_async_callback(end)

    async def _connect_nats(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stop.is_set():
            try:
                await self._unless_stopped(link.probe(self._settings))
                break
            except Retryable as error:
                self._note(str(error), level=logging.WARNING)
                backoff = await self._pause(backoff)
        if self._stop.is_set():
            return
        self._client = await link.connect(
            self._settings,
            on_disconnect=self._on_nats_disconnect,
            on_reconnect=self._on_nats_reconnect,
            on_error=self._on_nats_error,
        )
        self._stack.push_async_callback(self._client.close)
        self.stats.nats_connected = True
        self.stats.nats_version = ".".join(map(str, link.server_version(self._client)))
        event(log, "connected to nats", server=link.shown_servers(self._settings),
              version=self.stats.nats_version)  # fmt: skip

    def _on_nats_disconnect(self) -> None:
        if self._opened is not None:
            self._opened.connection_lost()
        if self.stats.nats_connected:
            self.stats.nats_connected = False
            if self.stats.state in ("stopped", "failed"):
                return
            event(log, "nats disconnected", level=logging.WARNING)

    def _on_nats_error(self, error: Exception) -> None:
        event(log, "nats error", level=logging.DEBUG, reason=str(error))
        if "permissions violation" in str(error).lower():
            self._forbidden = str(error).removeprefix("nats: ")

    def _on_nats_reconnect(self) -> None:
        self.stats.nats_connected = True
        self.stats.nats_reconnect_count += 1
        event(log, "nats reconnected")

    async def _main_loop(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stop.is_set():
            try:
                await self._stream_once()
                backoff = FIRST_BACKOFF_SECONDS
            except SlotInUse as error:
                if self.stats.state != "standby":
                    event(log, "standing by", reason=str(error))
                self.stats.state = "standby"
                await self._pause(STANDBY_SECONDS)
            except Fenced as error:
                event(log, "taken over", level=logging.WARNING, reason=str(error))
                self.stats.state = "standby"
                await self._pause(STANDBY_SECONDS)
            except PatienceEnded as error:
                self._note(f"nats away, replication connection closed: {error}")
                await self._wait_until_storable()
            except HistoryBroken as error:
                if self._settings.on_gap != "new-epoch":
                    raise
                self._known_gap = str(error)
            except TRANSIENT as error:
                if self._forbidden and not self._has_streamed:
                    raise BrokerError(
                        f"NATS permits too little: {self._forbidden}; "
                        "`bridge check` prints the permissions that the bridge needs"
                    ) from error
                self._note(str(error) or type(error).__name__, level=logging.WARNING)
                if self._streamed_now:
                    backoff = FIRST_BACKOFF_SECONDS
                backoff = await self._pause(backoff)
            except (SourceError, BrokerError) as error:
                if isinstance(error, TableTaken | UnknownToLog) or not self._has_streamed:
                    raise
                # It worked before: revoked rights or a stream in repair can come back.
                self._note(str(error), level=logging.ERROR)
                backoff = await self._pause(max(backoff, 2.0))

    _streamed_now = False

    async def _stream_once(self) -> None:
        self._streamed_now = False
        session = Session(
            self._settings,
            self._conninfo,
            await open_broker(self._client, self._settings),
            self.stats,
            self._known_gap,
            self._slot_made_at,
        )
        self._opened = session
        orderly = False
        try:
            if not await self._unless_stopped(session.open()):
                return
            self._known_gap = None
            if self._has_streamed:
                self.stats.reconnect_count += 1
            self._has_streamed = self._streamed_now = True
            self._session = session
            self.stats.is_connected = True
            self.stats.state = "streaming"
            self.stats.last_error = None
            if self._stop.is_set():
                session.drain()
            await session.run()
            orderly = True
        except BaseExceptionGroup as group:
            raise _main_reason(group) from group
        finally:
            # Until it streams: a slot that the first try made is still new to the second.
            self._slot_made_at = None if self._streamed_now else session.slot_made_at
            self._session = self._opened = None
            self.stats.is_connected = False
            if self.stats.state == "streaming":
                self.stats.state = "reconnecting"
            await session.close(orderly=orderly)

    async def _wait_until_storable(self) -> None:
        """After a long absence: wait for NATS, and for room in the stream, without PostgreSQL."""
        while not self._stop.is_set():
            await self._pause(2.0)
            if not self._client.is_connected:
                continue
            try:
                state = await stream_state(self._client, self._settings.subjects.cdc_stream)
            except (ApiError, Retryable):
                continue
            # Without a stream there is something to decide, not something to wait for.
            if state is None or state.has_room:
                return

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do the work, which may wait for others; False if it was cancelled by a stop."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.wait((task, stop))

    async def _pause(self, seconds: float) -> float:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return min(seconds * 2, LAST_BACKOFF_SECONDS)

    def _note(self, reason: str, level: int = logging.WARNING) -> None:
        self.stats.last_error = reason
        if self.stats.state not in ("starting", "draining"):
            self.stats.state = "reconnecting"
        event(log, "not streaming", level=level, reason=reason)

    async def _stream_info(self, name: str) -> dict[str, Any] | None:
        if self._client is None or not self._client.is_connected:
            return None
        if not name or any(ch in name for ch in " .*>/\\\t\r\n"):
            return None
        try:
            return await api(self._client, f"STREAM.INFO.{name}")
        except (ApiError, Retryable):
            return None

    async def _shutdown(self) -> None:
        stats = self.stats
        if stats.state != "failed":
            stats.state = "stopped"
        event(
            log, "stopped", events=stats.cdc_events_published,
            confirmed_lsn=format_lsn(stats.confirmed_lsn), uptime=int(stats.uptime_seconds),
        )  # fmt: skip
        await self._stack.aclose()


def _main_reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of a group that decides what to do next."""
    flat: list[BaseException] = []

    def collect(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                collect(inner)
        else:
            flat.append(error)

    collect(group)
    for kind in (DataAtRiskError, BridgeError, Fenced, PatienceEnded, Retryable, Exception):
        for error in flat:
            if isinstance(error, kind):
                return error
    return flat[0]
