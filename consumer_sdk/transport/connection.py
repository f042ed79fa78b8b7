"""The NATS client of bridge and SDK: nats-py's, with enforced TLS, taps and JetStream calls."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

import nats.errors
from nats.aio.client import Client as NatsClient

from consumer_sdk.errors import AccessDenied, NotAvailable
from consumer_sdk.transport.api import ApiError, call_api, parse_headers
from consumer_sdk.transport.calls import API, ApiCall
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.frame_parser import FrameParser, PacedParser
from consumer_sdk.transport.options import (
    ServerAddress,
    TlsNotOffered,
    tls_error,
)
from consumer_sdk.transport.refusals import explain_refusal, is_forbidden, is_refused, one_line

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from urllib.parse import ParseResult

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from consumer_sdk.transport.frame_parser import Tap
    from consumer_sdk.transport.options import ConnectionOptions

logger = logging.getLogger(__name__)

# The protocol reports a violation only as text, in which nats-py lowers the case.
_DENIED_SUBSCRIPTION: Final = re.compile(r'permissions violation for subscription to "([^"]+)"')
_LONGEST_RESTORE_SECONDS: Final = 10.0
_CONTROL = b"NATS/1.0 100"
_STALLED = "Nats-Consumer-Stalled"
# Between accounts, the server replaces the subject by one of its own.
_FLOW_CONTROL = (b"$JS.FC.", b"_R_.")


class NoJetStream(NotAvailable):
    """JetStream is not enabled."""

    def __init__(
        self,
        message: str = "JetStream is not enabled on this NATS, or not for this account; "
        "start nats-server with -js",
    ) -> None:
        super().__init__(message)


class NatsAway(nats.errors.OutboundBufferLimitError):
    """Nothing can be sent while there is no connection."""

    def __str__(self) -> str:
        return "NATS is away"


class NatsConnection(NatsClient):
    """nats-py's client plus taps and JetStream calls as plain JSON.

    If TLS is configured, nothing is sent without it; nats-py would send the password in plain text
    to a server that offers no TLS. `%40` in the password of an address means @. Whatever ends the
    connection, the client connects again, and reads password, keys and certificates anew for it.
    """

    def __init__(self, *, is_paced: bool = False) -> None:
        """With `is_paced`, messages are read so slowly that other connections come first."""
        super().__init__()
        self._taps: dict[int, Tap] = {}
        self._ps = (PacedParser if is_paced else FrameParser)(self, self._taps)
        self._listeners: set[Callable[[], None]] = set()
        self.latest_error: Exception | None = None
        self.refused: asyncio.Future[Exception] | None = None
        self._login: ConnectionOptions | None = None
        self._user_jwt = ""
        self._seed = ""
        self._is_refusal_logged = False
        self._is_ending = False
        """Whether our own code has closed the client."""
        self._permitted: set[tuple[str, ...]] = set()
        """Which calls of JetStream's API, on which streams, have been answered."""
        self._denied: set[str] = set()
        """Subjects, in lower case, that the server does not let the client subscribe to."""
        self._denied_again: set[str] = set()
        """Those of them that it has denied since they were last repeated."""
        self._restoring: asyncio.Task[None] | None = None

    async def connect(self, *arguments: Any, **options: Any) -> None:
        """Connect as nats-py does; `login` says where password, keys and certificates are."""
        self._login = options.pop("login", None)
        self._is_ending = False
        await super().connect(*arguments, **options)

    def _setup_nkeys_connect(self) -> None:
        # nats-py reads the files in the event loop, and waits for ever for the rest of an
        # incomplete credentials file. It keeps the public key of the first seed.
        if self._login is None:
            super()._setup_nkeys_connect()
            return
        self._signature_cb = self._sign
        if self._login.creds:
            self._user_jwt_cb = lambda: bytearray(self._user_jwt.encode())

    def _sign(self, nonce: str) -> bytes:
        import nkeys

        return base64.b64encode(nkeys.from_seed(self._seed.encode()).sign(nonce.encode()))

    def _read_login(self) -> None:
        """Read what may have changed since the last connection; blocks."""
        login = self._login
        if login is None:
            return
        if login.creds:
            self._user_jwt, self._seed = login.read_creds()
        elif login.nkey:
            import nkeys

            self._seed = login.read_nkey()
            self._public_nkey = nkeys.from_seed(self._seed.encode()).public_key.decode()
        elif login.password_source.changes:
            self.options["password"] = login.password_source.read()
        if self.options.get("tls") is not None:
            self.options["tls"] = login.tls_context()

    async def _connect_to_server(self, s: Any) -> None:
        # nats-py can lose a cancellation, and would then try again without end.
        await stay_cancelled()
        # Before the connection is made: the server waits only two seconds for the login.
        await asyncio.to_thread(self._read_login)
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
            if not self.is_connected:
                # nats-py takes a connection that the server has closed for an open one.
                raise nats.errors.Error("nats: the server closed the connection during the login")
        except (OSError, nats.errors.Error, TimeoutError) as error:
            self._abandon()
            reason = self._transport_error() or self._ungreeted(error) or error
            login = self._login
            if login is not None and is_refused(reason):
                login.password_source.refuse(str(self.options.get("password")))
            raise reason from None
        except Exception as error:
            # nats-py would end its attempts to reconnect.
            self._abandon()
            raise nats.errors.Error(f"nats: {type(error).__name__} during the login") from error

    def _abandon(self) -> None:
        """End what belongs to a connection that did not come about."""
        for task in (self._reading_task, self._ping_interval_task, self._flusher_task):
            if task is not None:
                task.cancel()
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]

    def _ungreeted(self, error: Exception) -> Exception | None:
        """The error of a server that sends no INFO, if TLS first would make it speak."""
        is_silent = not self._server_info or "INFO" in str(error)
        if is_silent and self.options.get("tls") and not self.options["tls_handshake_first"]:
            return nats.errors.Error(
                "nats: the server says nothing; if it waits for TLS, set NATS_TLS_FIRST=yes"
            )
        return None

    def _transport_error(self) -> ssl.SSLError | None:
        """The alert with which the server ended TLS; a write may have failed before it was read."""
        reader = getattr(self._transport, "_io_reader", None)
        return None if reader is None else tls_error(reader.exception())

    async def _process_err(self, err_msg: str) -> None:
        # nats-py closes the client for good, also when only the credentials must be read again.
        if not self.options.get("allow_reconnect"):
            await super()._process_err(err_msg)
            return
        text = err_msg.strip().strip("'")
        error = nats.errors.Error(f"nats: {text}")
        if is_forbidden(error):
            # Only after this error the server keeps the connection.
            denied = _DENIED_SUBSCRIPTION.search(text)
            if denied is None or self._note_denied(denied[1]):
                self._err = error
                await self._error_cb(error)
            return
        self._err = error
        await self._error_cb(error)
        await self._process_op_err(error)

    # whatever ends the connection, another one follows

    async def _attempt_reconnect(self) -> None:
        while not self._is_ending:
            try:
                await super()._attempt_reconnect()
            except Exception as error:
                # This task would end, and nobody would connect again.
                logger.exception("reconnecting failed")
                self._err = error
                self._status = NatsClient.RECONNECTING
                await asyncio.sleep(self.options["reconnect_time_wait"])
            else:
                break

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        # nats-py closes the client by itself after errors that it takes for final.
        is_lasting = self.options.get("allow_reconnect") and status == NatsClient.CLOSED
        if self._is_ending or self.is_draining or not is_lasting:
            await super()._close(status, do_cbs)
        elif self.is_connected:
            await self._process_op_err(self._err or nats.errors.ConnectionClosedError())
        elif not self.is_reconnecting:
            await super()._close(status, do_cbs)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _read_loop(self) -> None:
        await super()._read_loop()
        await self._replace_if_idle(self._reading_task)

    async def _flusher(self) -> None:
        await super()._flusher()
        await self._replace_if_idle(self._flusher_task)

    async def _ping_interval(self) -> None:
        try:
            await super()._ping_interval()
        except (OSError, nats.errors.Error) as error:
            logger.debug("ping failed", extra={"error": str(error)})
        await self._replace_if_idle(self._ping_interval_task)

    async def _replace_if_idle(self, ended: asyncio.Task[None] | None) -> None:
        """Reconnect if a task of the open connection has ended, which nats-py does not notice."""
        current = asyncio.current_task()
        if current is None or current is not ended or current.cancelling():
            return
        if self.is_connected and not self._is_ending:
            await self._process_op_err(nats.errors.Error("nats: the connection was given up"))

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            # The flush that waited for it was given up; nats-py would stop reading.
            self._pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    def _note_denied(self, subject: str) -> bool:
        """Subscribe again until the server permits it; returns whether the denial is a new one."""
        self._denied_again.add(subject)
        is_new = subject not in self._denied
        self._denied.add(subject)
        if self._restoring is None or self._restoring.done():
            self._restoring = asyncio.get_running_loop().create_task(self._restore_subscriptions())
        return is_new

    async def _restore_subscriptions(self) -> None:
        """Repeat what the server has denied: permissions that were taken away may come back."""
        pause = float(self.options["reconnect_time_wait"])
        while self._denied and not self._is_ending:
            await stay_cancelled()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_RESTORE_SECONDS)
            if not self.is_connected:
                continue
            self._denied_again = set()
            try:
                for subscription in tuple(self._subs.values()):
                    if subscription.subject.lower() in self._denied:
                        # The server ignores a subscription that it has already.
                        await self._send_subscribe(subscription)
                # The server denies them again before it answers this.
                await self.flush()
            except (nats.errors.Error, OSError):
                continue
            self._denied = self._denied_again

    def _setup_server_pool(self, connect_url: list[str]) -> None:
        super()._setup_server_pool(connect_url)
        for server in self._server_pool:
            server.uri = ServerAddress.of(server.uri)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # The first INFO comes before anything is sent; nats-py reads `tls_required` after this.
        server = self._current_server
        if initial_connection and self.options.get("tls") is not None and server is not None:
            _require_tls(server.uri, info)
        await super()._process_info(info, initial_connection)

    async def publish(self, *arguments: Any, **options: Any) -> None:
        """Publish; raises NatsAway without a connection, where nats-py reports a full buffer."""
        try:
            await super().publish(*arguments, **options)
        except nats.errors.OutboundBufferLimitError as error:
            raise NatsAway from error

    async def flush(self, timeout: int = 10) -> None:
        """Return when the server has handled everything sent before, subscriptions included."""
        # nats-py writes its PING to the socket ahead of what waits to be sent.
        if self.is_connected and self._pending and self._transport is not None:
            self._transport.writelines(self._pending)
            self._pending = []
            self._pending_data_size = 0
        await super().flush(timeout)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        tap = self._taps.get(sid)
        if tap is not None:
            tap(subject, reply, data, headers)
        elif not _is_forged_control(reply, headers):
            await super()._process_msg(sid, subject, reply, data, headers)

    async def close(self) -> None:
        """Close for good, even if the connection is lost during the call; idempotent."""
        self._is_ending = True
        if self._restoring is not None:
            self._restoring.cancel()
        if self._flush_queue is None:
            # It was never connected, where nats-py fails.
            return
        try:
            await super().close()
        except OSError:
            # Pending data cannot be sent any more. Drop it, and close again to finish the work.
            self._pending.clear()
            self._pending_data_size = 0
            self._status = NatsClient.DISCONNECTED
            await super().close()

    async def tap(self, subject: str, sink: Tap) -> Subscription:
        """Subscribe so that `sink` is called with every frame, in order; nothing is awaited."""

        async def deliver(message: Msg) -> None:
            sink(
                message.subject.encode(),
                message.reply.encode(),
                message.data,
                _header_block(message.headers),
            )

        subscription = await self.subscribe(
            subject, cb=deliver, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self._taps[subscription._id] = sink
        return subscription

    async def untap(self, subscription: Subscription) -> None:
        """End a tap; frames that arrive later are dropped."""
        self._taps.pop(subscription._id, None)
        with suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()

    @property
    def inbox_prefix(self) -> str:
        """What the subjects of this connection's inboxes begin with."""
        return self._inbox_prefix.decode()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the connection was lost, came back or is closed."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    async def note_change(self) -> None:
        if self.is_connected:
            self._is_refusal_logged = False
        for listener in tuple(self._listeners):
            listener()

    async def note_error(self, error: Exception) -> None:
        self.latest_error = error
        if is_refused(error):
            if self.refused is not None:
                if not self.refused.done():
                    self.refused.set_result(error)
            # A connection that the server ends may be replaced at once, with other credentials.
            elif not (self.is_connected or self._is_refusal_logged or self._login is None):
                self._is_refusal_logged = True
                reason = explain_refusal(error, self._login)
                logger.error("%s; trying again until it works", reason)
        logger.debug("nats error", extra={"error": str(error)})

    async def api(
        self,
        subject: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Call JetStream's API; ApiError if it refuses, NotAvailable if it does not answer.

        AccessDenied if the account may not make such a call; NotAvailable if it could before.
        """
        error_before = self.latest_error
        kind = tuple(subject.split(".")[:3])
        try:
            answer = await call_api(self, subject, body, timeout=timeout)
        except ApiError:
            self._permitted.add(kind)
            raise
        except nats.errors.NoRespondersError as error:
            raise NoJetStream from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            if self.latest_error is not error_before and is_forbidden(self.latest_error):
                denial = NotAvailable if kind in self._permitted else AccessDenied
                raise denial(f"NATS refuses: {one_line(self.latest_error)}") from error
            raise NotAvailable(f"NATS does not answer: {self.explain(error)}") from error
        self._permitted.add(kind)
        return answer

    async def discard_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer without waiting; if this fails, the server deletes it later."""
        if self.is_connected:
            with suppress(nats.errors.Error, OSError):
                await self.publish(f"{API}.{ApiCall.CONSUMER_DELETE.of(stream, name)}")

    def explain(self, error: Exception) -> str:
        """The cause of a failure in one line: while disconnected, the connection's last error."""
        if not self.is_connected and self.latest_error is not None:
            return one_line(self.latest_error)
        return one_line(error)


def _require_tls(server: ParseResult, info: dict[str, Any]) -> None:
    """Make nats-py start TLS after a server's INFO; TlsNotOffered if the server has no TLS."""
    if server.scheme == "wss":
        return
    if not info.get("tls_required") and not info.get("tls_available"):
        raise TlsNotOffered(server.netloc.rpartition("@")[2])
    info["tls_required"] = True


def _is_forged_control(reply: bytes, headers: bytes | None) -> bool:
    """Whether nats-py would answer a message with one to a subject that is not flow control's.

    It publishes to the reply subject of a flow control message, and to the subject in a header of a
    heartbeat. Whoever can write to an inbox would choose where this program publishes.
    """
    if not headers or not headers.startswith(_CONTROL):
        return False
    stalled = (parse_headers(headers) or {}).get(_STALLED, "").encode()
    return any(one and not one.startswith(_FLOW_CONTROL) for one in (reply, stalled))


def _header_block(headers: Mapping[str, str] | None) -> bytes | None:
    if not headers:
        return None
    status = headers.get("Status", "")
    first = f"NATS/1.0 {status} {headers.get('Description', '')}".rstrip()
    lines = [f"{key}: {value}" for key, value in headers.items()]
    return ("\r\n".join([first, *lines]) + "\r\n\r\n").encode()


async def open_connection(
    options: ConnectionOptions, timeout: float | None = 10.0
) -> NatsConnection:
    """Connect; a connection lost later is restored without a time limit.

    Waits up to `timeout` seconds for a server (None: without a limit), then raises NotAvailable.
    Refused credentials raise AccessDenied at once.
    """
    connection = NatsConnection()
    connection.refused = asyncio.get_running_loop().create_future()
    opening = asyncio.ensure_future(_connect(connection, options))
    try:
        either: set[asyncio.Future[Any]] = {opening, connection.refused}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            connection.refused = None
            return connection
    except (nats.errors.Error, OSError, ValueError) as error:
        _raise_unusable(options, error)
    finally:
        if not opening.done():
            opening.cancel()
            with suppress(asyncio.CancelledError, nats.errors.Error, OSError):
                await opening
            with suppress(nats.errors.Error, OSError):
                await connection.close()
    if connection.refused.done():
        _raise_unusable(options, connection.refused.result())
    reason = connection.explain(connection.latest_error or TimeoutError("no answer"))
    raise NotAvailable(f"no NATS server at {options.address} within {timeout:g} s: {reason}")


async def _connect(connection: NatsConnection, options: ConnectionOptions) -> None:
    await connection.connect(
        **options.for_nats(),
        ping_interval=20,
        flush_timeout=10,
        error_cb=connection.note_error,
        disconnected_cb=connection.note_change,
        reconnected_cb=connection.note_change,
        closed_cb=connection.note_change,
    )


def _raise_unusable(options: ConnectionOptions, error: Exception) -> NoReturn:
    if is_refused(error):
        raise AccessDenied(explain_refusal(error, options)) from error
    raise AccessDenied(
        f"NATS at {options.address} refuses the connection: {error}; check user, password, "
        "credentials and TLS files"
    ) from error
