"""The bridge as a service: it survives restarts of PostgreSQL and NATS, and stops in order.

`Service(settings).run()` starts up, runs one streaming session after another, and shuts down. A
streaming session begins when the bridge takes the slot and ends when it loses or releases it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors
from nats.js.errors import APIError

from bridge.errors import (
    BridgeError,
    BrokerError,
    DataAtRiskError,
    HistoryBroken,
    PublicationTooNew,
    Retryable,
    SettingsError,
    SourceError,
    TableTaken,
)
from bridge.jetstream.broker import open_broker
from bridge.jetstream.connection import (
    connect,
    connection_options,
    probe,
    server_version,
)
from bridge.jetstream.fence import Fenced
from bridge.jetstream.streams import api, stream_state
from bridge.postgres.connection import conninfo_of
from bridge.postgres.slot import SlotInUse
from bridge.publish.outage import OutageTooLong
from bridge.publish.resume_point import StartFacts
from bridge.start import open_streaming
from bridge.telemetry.access import Access
from bridge.telemetry.connections import Certificate
from bridge.telemetry.http import HttpServer
from bridge.telemetry.logs import MetricsLine
from bridge.telemetry.stats import ENDED_STATES, BridgeStats, State
from bridge.telemetry.wal_monitor import WalLimits, WalMonitor
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.calls import ApiCall, bridge_calls
from consumer_sdk.transport.cancellation import errors_of, restarted
from consumer_sdk.transport.holds import print_tasks_on_signal
from consumer_sdk.transport.logfmt import event
from consumer_sdk.transport.refusals import explain_refusal, is_forbidden, is_refused, one_line
from consumer_sdk.transport.version import __version__
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from bridge.config import Settings
    from bridge.streaming import Streaming

log = logging.getLogger("bridge.service")

TRANSIENT = (Retryable, TimeoutError, nats.errors.Error, APIError, ApiError, OSError)
STANDBY_SECONDS = 0.5
FIRST_BACKOFF_SECONDS = 0.25
LAST_BACKOFF_SECONDS = 5.0
REPAIR_SECONDS = 2.0
OUTAGE_POLL_SECONDS = 2.0
LOGIN_WARNING = "nats-login"

T = TypeVar("T")


class StopRequested(Exception):
    """The bridge was asked to stop while it waited for something."""


class Backoff:
    """Waits between attempts, longer each time; a request to stop ends the wait."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._seconds = FIRST_BACKOFF_SECONDS

    def reset(self) -> None:
        """An attempt has succeeded: the next wait is short again."""
        self._seconds = FIRST_BACKOFF_SECONDS

    async def wait(self, *, at_least: float = 0.0) -> None:
        """Wait, and double the next wait."""
        seconds = max(self._seconds, at_least)
        self._seconds = min(seconds * 2, LAST_BACKOFF_SECONDS)
        await self.pause(seconds)

    async def pause(self, seconds: float) -> None:
        """Wait for a fixed time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


class Service:
    """Runs one bridge until it is stopped or must not continue."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._conninfo = conninfo_of(settings)
        self._state = State.STARTING
        self._stop = asyncio.Event()
        self._stack = AsyncExitStack()
        self._backoff = Backoff(self._stop)
        self._streaming: Streaming | None = None
        """The current streaming session."""
        self._session_count = 0
        """How many streaming sessions have begun."""
        self._start_facts = StartFacts()
        self._denied: str | None = None
        """The last permissions violation that nats-server reported."""
        self.stats = BridgeStats()
        self.stats.source = settings.slot
        self.stats.publication = settings.pub
        self.stats.prefix = settings.prefix
        self.stats.bridge_version = __version__
        self._client: Any = None
        self._nats_connected = False

    async def run(self) -> None:
        """Run until a stop is requested; BridgeError if the bridge cannot continue."""
        self._handle_signals()
        # Objects that exist at the start live for ever; scanning them again costs time. Millions
        # of short-lived tuples follow, so collections are made rare.
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        try:
            await self._startup()
            await self._main_loop()
        except StopRequested:
            pass
        except BridgeError as error:
            self._enter(State.FAILED)
            self.stats.last_error = str(error)
            raise
        finally:
            await self._shutdown()

    def request_shutdown(self) -> None:
        """Stop in order: stop reading, drain, confirm, close. A second request exits at once."""
        if self._stop.is_set():
            event(log, "forced to stop", level=logging.WARNING)
            logging.shutdown()
            os._exit(130)
        event(log, "stopping")
        self._stop.set()
        if self._state is State.STREAMING and self._streaming is not None:
            self._enter(State.DRAINING)
            self._streaming.drain()

    def _enter(self, state: State) -> None:
        self._state = self.stats.state = state

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(NotImplementedError):
                loop.add_signal_handler(number, self.request_shutdown)
        print_tasks_on_signal()

    async def _startup(self) -> None:
        settings = self._settings
        http = HttpServer(
            self.stats,
            host=settings.host,
            port=settings.port,
            access=Access(settings.admin_token, settings.read_token, settings.http_open),
            certificate=_certificate(settings),
            request_shutdown=self.request_shutdown,
            stream_info=self._stream_info,
        )
        await http.start()
        self._stack.push_async_callback(http.stop)
        metrics = MetricsLine()
        self._in_background(lambda: metrics.run(self.stats, settings.metrics_interval))
        monitor = WalMonitor(
            self._conninfo,
            settings.slot,
            self.stats,
            WalLimits(settings.wal_warning, settings.wal_critical),
            interval=settings.wal_check_interval,
        )
        self._in_background(monitor.run)
        await self._connect_nats()

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.ensure_future(restarted(work))

        async def end() -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        self._stack.push_async_callback(end)

    async def _connect_nats(self) -> None:
        while True:
            try:
                await self._unless_stopped(probe(self._settings))
                break
            except Retryable as error:
                self._report_not_streaming(str(error))
                await self._backoff.wait()
        self._client = await self._unless_stopped(
            connect(
                self._settings,
                on_disconnect=self._on_nats_disconnect,
                on_reconnect=self._on_nats_reconnect,
                on_error=self._on_nats_error,
            )
        )
        self._stack.push_async_callback(self._client.close)
        self._backoff.reset()
        self._nats_connected = self.stats.nats_connected = True
        version = self.stats.nats_version = ".".join(map(str, server_version(self._client)))
        hosts = connection_options(self._settings).hosts
        event(log, "connected to nats", server=hosts, version=version)

    def _on_nats_disconnect(self) -> None:
        if self._streaming is not None:
            self._streaming.connection_lost()
        if self._nats_connected:
            self._nats_connected = self.stats.nats_connected = False
            if self._state not in ENDED_STATES:
                event(log, "nats disconnected", level=logging.WARNING)

    def _on_nats_error(self, error: Exception) -> None:
        event(log, "nats error", level=logging.DEBUG, reason=str(error))
        if is_forbidden(error):
            self._denied = one_line(error)
        elif is_refused(error):
            self._note_refusal(error)
        elif isinstance(error, (ConnectionRefusedError, TimeoutError)):
            # Nobody refuses the login any more: there is no server.
            self._forget_refusal()

    def _note_refusal(self, error: Exception) -> None:
        """Report a refused login, once until one is accepted.

        A connection that the server ends may be replaced at once, with other credentials.
        """
        is_kicked = self._client is not None and self._client.is_connected
        if not is_kicked and self.stats.nats_refused_at is None:
            self.stats.nats_refused_at = time.monotonic()
            reason = explain_refusal(error, connection_options(self._settings))
            self.stats.warn(LOGIN_WARNING, reason, "the bridge tries again until it works")
            self.stats.last_error = reason
            event(log, "nats refuses the login", level=logging.ERROR, reason=reason)

    def _forget_refusal(self) -> None:
        self.stats.nats_refused_at = None
        self.stats.clear_warning(LOGIN_WARNING)

    def _on_nats_reconnect(self) -> None:
        self._forget_refusal()
        self._nats_connected = self.stats.nats_connected = True
        self.stats.nats_reconnect_count += 1
        event(log, "nats reconnected")

    async def _main_loop(self) -> None:
        while not self._stop.is_set():
            try:
                await self._stream_once()
            except SlotInUse as error:
                if self._state is not State.STANDBY:
                    event(log, "standing by", reason=str(error))
                self._enter(State.STANDBY)
                await self._backoff.pause(STANDBY_SECONDS)
            except Fenced as error:
                event(log, "taken over", level=logging.WARNING, reason=str(error))
                self._enter(State.STANDBY)
                await self._backoff.pause(STANDBY_SECONDS)
            except OutageTooLong as error:
                self._report_not_streaming(f"nats away, replication connection closed: {error}")
                await self._wait_until_storable()
            except HistoryBroken as error:
                if self._settings.on_gap != "new-epoch":
                    raise
                self._start_facts.gap = str(error)
                self._start_facts.gap_epoch = self.stats.epoch
            except TRANSIENT as error:
                if self._denied is not None and not self._session_count:
                    raise BrokerError(
                        f"NATS permits too little: {self._denied}; "
                        "`bridge check` prints the permissions that the bridge needs"
                    ) from error
                self._report_not_streaming(str(error) or type(error).__name__)
                await self._backoff.wait()
            except (SourceError, BrokerError) as error:
                if isinstance(error, TableTaken | PublicationTooNew) or not self._session_count:
                    raise
                # It has streamed before: an operator may grant the right again, or repair it.
                self._report_not_streaming(str(error), level=logging.ERROR)
                await self._backoff.wait(at_least=REPAIR_SECONDS)

    async def _stream_once(self) -> None:
        """Run one streaming session, from taking the slot to losing or releasing it."""
        broker = await open_broker(self._client, self._settings)
        streaming = self._streaming = await self._unless_stopped(
            open_streaming(self._settings, self._conninfo, broker, self.stats, self._start_facts)
        )
        try:
            await self._unless_stopped(streaming.begin())
            self._note_streaming()
            if self._stop.is_set():
                streaming.drain()
            await streaming.run()
        except BaseExceptionGroup as group:
            raise _main_reason(group) from group
        finally:
            self._streaming = None
            self.stats.is_connected = False
            if self._state is State.STREAMING:
                self._enter(State.RECONNECTING)
            await streaming.close()

    def _note_streaming(self) -> None:
        self._enter(State.STREAMING)
        if self._session_count:
            self.stats.reconnect_count += 1
        self._session_count += 1
        self._start_facts = StartFacts()
        self._backoff.reset()
        self.stats.is_connected = True
        self.stats.last_error = None

    async def _wait_until_storable(self) -> None:
        """After a long outage: wait until the stream accepts messages, without PostgreSQL."""
        while not self._stop.is_set():
            await self._backoff.pause(OUTAGE_POLL_SECONDS)
            if not self._client.is_connected:
                continue
            try:
                state = await stream_state(self._client, self._settings.subjects.cdc_stream)
            except (ApiError, Retryable):
                continue
            # A missing stream does not reappear: the next start decides about continuity.
            if state is None or state.has_space:
                return

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work that may take long; a request to stop cancels it.

        A cancellation can get lost, see `stay_cancelled`: then the work is done after all, and
        what it has opened is the caller's to close.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.wait((task, stop))
        if task.cancelled() or task.exception() is not None:
            raise StopRequested
        return task.result()

    def _report_not_streaming(self, reason: str, level: int = logging.WARNING) -> None:
        self.stats.last_error = reason
        if self._state not in (State.STARTING, State.DRAINING):
            self._enter(State.RECONNECTING)
        event(log, "not streaming", level=level, reason=reason)

    async def _stream_info(self, name: str) -> dict[str, Any] | None:
        # The bridge may not ask for other streams.
        known = bridge_calls(self._settings.subjects)
        if name not in known or self._client is None or not self._client.is_connected:
            return None
        try:
            return await api(self._client, ApiCall.STREAM_INFO.of(name))
        except (ApiError, Retryable):
            return None

    async def _shutdown(self) -> None:
        stats = self.stats
        if self._state is not State.FAILED:
            self._enter(State.STOPPED)
        event(
            log, "stopped", events=stats.cdc_events_published,
            confirmed_lsn=format_lsn(stats.confirmed_lsn), uptime=int(stats.uptime_seconds),
        )  # fmt: skip
        await self._stack.aclose()


def _certificate(settings: Settings) -> Certificate | None:
    if settings.http_cert:
        return Certificate(settings.http_cert, settings.http_key)
    if settings.http_key:
        raise SettingsError(f"{settings.where('http_key')}: a key needs its --http-cert")
    return None


def _main_reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that decides how the bridge continues."""
    flat = errors_of(group)
    for kind in (DataAtRiskError, BridgeError, Fenced, OutageTooLong, Retryable, Exception):
        for error in flat:
            if isinstance(error, kind):
                return error
    return flat[0]
