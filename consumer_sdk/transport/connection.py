"""HOT PATH: tapped messages straight out of the bytes that came from the socket.

nats-py's parser matches regular expressions, shifts a buffer and awaits a coroutine for every
message. Here a run of complete messages for taps is cut out of the received bytes in one loop;
everything else, and whatever is unusual, goes the parser's own way. `make bench reading` shows what
that gains.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from consumer_sdk.errors import AccessDenied, NotAvailable
from consumer_sdk.transport.server_address import KeptTls, TlsNotOffered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from consumer_sdk.transport.settings import NatsSettings

logger = logging.getLogger(__name__)

API_TIMEOUT_SECONDS = 5.0


class Tap(Protocol):
    """Takes one frame: subject, reply subject, payload, header block (None or empty if none)."""

    def __call__(
        self, subject: bytes, reply: bytes, payload: bytes, headers: bytes | None, /
    ) -> None: ...


class ApiError(Exception):
    """JetStream refused a request."""

    def __init__(self, code: int, error_code: int, description: str) -> None:
        super().__init__(f"JetStream: {description} ({error_code})")
        self.code = code
        self.error_code = error_code
        self.description = description


class NoJetStream(NotAvailable):
    """Nobody answers for JetStream at all."""

    def __init__(
        self,
        message: str = "JetStream is not enabled on this NATS, or not for this account; "
        "start nats-server with -js",
    ) -> None:
        super().__init__(message)


class LogConnection(KeptTls, NatsClient):
    """nats-py's client plus taps and JetStream calls as plain JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._taps: dict[int, Tap] = {}
        self._ps = FrameParser(self, self._taps)
        self._listeners: set[Callable[[], None]] = set()
        self.latest_error: Exception | None = None
        self.error_count = 0
        self.refused: asyncio.Future[Exception] | None = None

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        tap = self._taps.get(sid)
        if tap is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            tap(subject, reply, data, headers)

    async def close(self) -> None:
        """Close for good, also where the connection is lost at this very moment; idempotent."""
        try:
            await super().close()
        except OSError:
            # What was still to be sent cannot be; the rest of closing was left undone.
            self._pending.clear()
            self._pending_data_size = 0
            self._status = NatsClient.DISCONNECTED
            await super().close()

    async def tap(self, subject: str, sink: Tap) -> Subscription:
        """Subscribe so that `sink` gets every frame, in order, before anything is awaited."""

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
        """End a tap; frames still under way are dropped."""
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
        if _is_refusal(error) and self.refused is not None and not self.refused.done():
            self.refused.set_result(error)
        logger.debug("nats error", extra={"error": str(error)})

    async def api(
        self,
        subject: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float = API_TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        """Call JetStream's API; ApiError if it refuses, NotAvailable if it does not answer."""
        payload = b"" if body is None else json.dumps(body).encode()
        errors_before = self.error_count
        try:
            reply = await self.request(f"$JS.API.{subject}", payload, timeout=timeout)
            answer: dict[str, Any] = json.loads(reply.data)
        except nats.errors.NoRespondersError as error:
            raise NoJetStream from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            denied = str(self.latest_error)
            if self.error_count != errors_before and "permissions violation" in denied.lower():
                raise AccessDenied(f"NATS refuses: {denied.removeprefix('nats: ')}") from error
            raise NotAvailable(f"NATS does not answer: {self.explain(error)}") from error
        except ValueError as error:
            raise NotAvailable("JetStream's answer is not JSON") from error
        refusal = answer.get("error")
        if refusal:
            raise ApiError(
                int(refusal.get("code", 0)),
                int(refusal.get("err_code", 0)),
                str(refusal.get("description", "")),
            )
        return answer

    async def discard_consumer(self, stream: str, name: str) -> None:
        """Remove a consumer without waiting for it; the server does so itself a little later."""
        if self.is_connected:
            with suppress(nats.errors.Error, OSError):
                await self.publish(f"$JS.API.CONSUMER.DELETE.{stream}.{name}")

    def explain(self, error: Exception) -> str:
        """The most telling of the errors at hand, in one line."""
        telling = error
        if not self.is_connected and self.latest_error is not None:
            telling = self.latest_error
        text = " ".join((str(telling) or type(telling).__name__).split())
        return text.removeprefix("nats: ")


def _is_refusal(error: Exception) -> bool:
    return (
        isinstance(error, (nats.errors.AuthorizationError, TlsNotOffered))
        or "authorization" in str(error).lower()
    )


def _header_block(headers: Mapping[str, str] | None) -> bytes | None:
    if not headers:
        return None
    status = headers.get("Status", "")
    first = f"NATS/1.0 {status} {headers.get('Description', '')}".rstrip()
    lines = [f"{key}: {value}" for key, value in headers.items()]
    return ("\r\n".join([first, *lines]) + "\r\n\r\n").encode()


async def open_connection(settings: NatsSettings, timeout: float | None = 10.0) -> LogConnection:
    """Connect, then stay connected for ever.

    Waits for an absent server up to `timeout` seconds (None: for ever), then raises NotAvailable.
    Refused credentials raise AccessDenied at once.
    """
    connection = LogConnection()
    connection.refused = asyncio.get_running_loop().create_future()
    opening = asyncio.ensure_future(_connect(connection, settings))
    try:
        either: set[asyncio.Future[Any]] = {opening, connection.refused}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            connection.refused = None
            return connection
    except (nats.errors.Error, OSError, ValueError) as error:
        _raise_unusable(settings, error)
    finally:
        if not opening.done():
            opening.cancel()
            with suppress(asyncio.CancelledError, nats.errors.Error, OSError):
                await opening
            with suppress(nats.errors.Error, OSError):
                await connection.close()
    if connection.refused.done():
        _raise_unusable(settings, connection.refused.result())
    reason = connection.explain(connection.latest_error or TimeoutError("no answer"))
    raise NotAvailable(f"no NATS server at {settings.address} within {timeout:g} s: {reason}")


async def _connect(connection: LogConnection, settings: NatsSettings) -> None:
    await connection.connect(
        **settings.connect_options(),
        error_cb=connection.note_error,
        disconnected_cb=connection.note_change,
        reconnected_cb=connection.note_change,
        closed_cb=connection.note_change,
    )


def _raise_unusable(settings: NatsSettings, error: Exception) -> NoReturn:
    if isinstance(error, TlsNotOffered):
        raise AccessDenied(str(error)) from error
    raise AccessDenied(
        f"NATS at {settings.address} refuses the connection: {error}; check user, password, "
        "credentials and TLS files"
    ) from error


_CRLF: Final = b"\r\n"
_LONGEST_LINE: Final = 4096
_LARGE_BYTES: Final = 128 * 1024
"""A message larger than this that is not complete grows in the parser's own buffer."""


class FrameParser(Parser):
    """nats-py's parser with a short cut for messages to taps."""

    def __init__(self, nc: LogConnection, taps: dict[int, Tap]) -> None:
        super().__init__(nc)
        self._taps = taps

    async def parse(self, data: bytes = b"") -> None:
        """Take received bytes, as `Parser.parse` does."""
        taps = self._taps
        if not taps or self.state != AWAITING_CONTROL_LINE:
            await super().parse(data)
            return
        received = bytes(self.buf) + data if self.buf else data
        self.buf.clear()
        at = 0
        size = len(received)
        while at < size:
            line_end = received.find(_CRLF, at, at + _LONGEST_LINE)
            if line_end < 0:
                break
            # HMSG <subject> <sid> <reply> <header bytes> <all bytes>
            words = received[at:line_end].split(b" ")
            if len(words) != 6 or words[0] != b"HMSG":
                break
            try:
                tap = taps[int(words[2])]
                head = line_end + 2
                body = head + int(words[4])
                end = head + int(words[5])
            except (KeyError, ValueError):
                break
            if end + 2 > size:
                if end - head <= _LARGE_BYTES:
                    self.buf += received[at:]
                    return
                break
            tap(words[1], words[3], received[body:end], received[head:body])
            at = end + 2
        if at < size:
            await super().parse(received[at:])
