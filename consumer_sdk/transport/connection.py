"""The NATS client of bridge and SDK: nats-py's, with enforced TLS, taps and JetStream calls."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import nats.errors
from nats.aio.client import Client as NatsClient

from consumer_sdk.errors import AccessDenied, NotAvailable
from consumer_sdk.transport.api import call_api
from consumer_sdk.transport.frame_parser import FrameParser
from consumer_sdk.transport.options import ServerAddress, TlsNotOffered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from urllib.parse import ParseResult

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from consumer_sdk.transport.frame_parser import Tap
    from consumer_sdk.transport.options import ConnectionOptions

logger = logging.getLogger(__name__)


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
    to a server that offers no TLS. `%40` in the password of an address means @.
    """

    def __init__(self) -> None:
        super().__init__()
        self._taps: dict[int, Tap] = {}
        self._ps = FrameParser(self, self._taps)
        self._listeners: set[Callable[[], None]] = set()
        self.latest_error: Exception | None = None
        self.error_count = 0
        self.refused: asyncio.Future[Exception] | None = None

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

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        tap = self._taps.get(sid)
        if tap is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            tap(subject, reply, data, headers)

    async def close(self) -> None:
        """Close for good, even if the connection is lost during the call; idempotent."""
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

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the connection was lost, came back or is closed."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.discard(listener)

    async def note_change(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    async def note_error(self, error: Exception) -> None:
        self.latest_error = error
        self.error_count += 1
        if is_refused(error) and self.refused is not None and not self.refused.done():
            self.refused.set_result(error)
        logger.debug("nats error", extra={"error": str(error)})

    async def api(
        self,
        subject: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Call JetStream's API; ApiError if it refuses, NotAvailable if it does not answer."""
        errors_before = self.error_count
        try:
            return await call_api(self, subject, body, timeout=timeout)
        except nats.errors.NoRespondersError as error:
            raise NoJetStream from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            if self.error_count != errors_before and is_forbidden(self.latest_error):
                raise AccessDenied(f"NATS refuses: {one_line(self.latest_error)}") from error
            raise NotAvailable(f"NATS does not answer: {self.explain(error)}") from error

    async def discard_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer without waiting; if this fails, the server deletes it later."""
        if self.is_connected:
            with suppress(nats.errors.Error, OSError):
                await self.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{name}")

    def explain(self, error: Exception) -> str:
        """The cause of a failure in one line: while disconnected, the connection's last error."""
        if not self.is_connected and self.latest_error is not None:
            return one_line(self.latest_error)
        return one_line(error)


def is_refused(error: Exception | None) -> bool:
    """Whether a server refuses the credentials, so that waiting does not help.

    nats-py has an error class for only one of the refusals. For the others there is just the text
    of the server's -ERR line, because the protocol has no codes.
    """
    if isinstance(error, (nats.errors.AuthorizationError, TlsNotOffered)):
        return True
    text = str(error).lower()
    if "timeout" in text:
        return False
    return any(word in text for word in ("authorization", "authentication", "nkey"))


def is_forbidden(error: Exception | None) -> bool:
    """Whether the account may not use a subject; only the text of the -ERR line shows this."""
    return "permissions violation" in str(error).lower()


def one_line(error: Exception | None) -> str:
    """The message of an error without nats-py's prefix, or its class if it has no message."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    text = " ".join((str(error) or type(error).__name__).split())
    return text.removeprefix("nats: ")


def _require_tls(server: ParseResult, info: dict[str, Any]) -> None:
    """Make nats-py start TLS after a server's INFO; TlsNotOffered if the server has no TLS."""
    if server.scheme == "wss":
        return
    if not info.get("tls_required") and not info.get("tls_available"):
        raise TlsNotOffered(server.netloc.rpartition("@")[2])
    info["tls_required"] = True


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
    if isinstance(error, TlsNotOffered):
        raise AccessDenied(str(error)) from error
    raise AccessDenied(
        f"NATS at {options.address} refuses the connection: {error}; check user, password, "
        "credentials and TLS files"
    ) from error
