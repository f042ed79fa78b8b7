"""Writes many frames of the NATS protocol at once.

This is the only module of the bridge that uses a private part of nats-py: its transport.
`FrameWriter.create` tries the transport on the open connection; if that fails, the public API is
used.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import Retryable
from consumer_sdk.transport.calls import API, ApiCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from bridge.events.messages import OutgoingMessage

SELF_TEST_SECONDS = 2.0


class PublishFrame(NamedTuple):
    """A message as it is written to the server."""

    subject: bytes
    reply: bytes
    headers: bytes
    """Complete header lines, without the status line."""
    payload: bytes


def encode_frames(frames: Sequence[PublishFrame]) -> bytes:
    """Encode frames as HPUB; the status line and the closing line take 12 bytes."""
    return b"".join(
        [
            b"HPUB %b %b %d %d\r\nNATS/1.0\r\n%b\r\n%b\r\n"
            % (
                subject, reply, len(headers) + 12, len(headers) + 12 + len(payload),
                headers, payload,
            )
            for subject, reply, headers, payload in frames
        ]
    )  # fmt: skip


def encode_numbered(
    items: Iterable[OutgoingMessage], reply: bytes, tail: bytes, start: int
) -> bytes:
    """Encode messages as HPUB, each with its number between the parts of the reply subject."""
    return b"".join(
        [
            b"HPUB %b %b%d%b %d %d\r\nNATS/1.0\r\nNats-Msg-Id: %b\r\n%b\r\n%b\r\n"
            % (
                item.subject, reply, place, tail,
                (size := len(msg_id := item.msg_id) + len(lines := item.headers) + 27),
                size + len(payload := item.payload), msg_id, lines, payload,
            )
            for place, item in enumerate(items, start)
        ]
    )  # fmt: skip


class FrameWriter:
    """Writes frames to a connection; with `direct`, they bypass nats-py's buffer."""

    def __init__(self, client: Client, *, direct: bool) -> None:
        self._client = client
        self.direct = direct

    @classmethod
    async def create(cls, client: Client, stream: str) -> FrameWriter:
        """Write directly if JetStream answers a request for `stream` sent over the transport."""
        writer = cls(client, direct=True)
        if not await writer._works(stream):
            writer.direct = False
        return writer

    async def _works(self, stream: str) -> bool:
        # A request that the bridge's permissions include; publishing to an inbox is not one.
        request = f"{API}.{ApiCall.STREAM_INFO.of(stream)}".encode()
        inbox = self._client.new_inbox()
        arrived: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        async def take(message: Msg) -> None:
            if not arrived.done():
                arrived.set_result(message)

        subscription = await self._client.subscribe(inbox, cb=take)
        try:
            await self._client.flush()
            frame = PublishFrame(request, inbox.encode(), b"Tailrace-Try: 1\r\n", b"")
            await self.write([frame])
            message = await asyncio.wait_for(arrived, SELF_TEST_SECONDS)
        except (AttributeError, TypeError, TimeoutError, Retryable):
            return False
        finally:
            await subscription.unsubscribe()
        # A server that did not get the request reports that there are no responders.
        return message.data.startswith(b"{")

    async def write(self, frames: Sequence[PublishFrame]) -> None:
        """Write all frames to the connection, in order; Retryable if it is down."""
        if not self._client.is_connected:
            raise Retryable("NATS is not connected")
        try:
            if self.direct:
                await self._write(encode_frames(frames))
            else:
                for frame in frames:
                    await self._client.publish(
                        frame.subject.decode(),
                        frame.payload,
                        reply=frame.reply.decode(),
                        headers=_as_map(frame.headers),
                    )
        except (OSError, RuntimeError) as error:
            raise Retryable(f"writing to NATS failed: {error}") from error

    async def write_encoded(self, data: bytes) -> None:
        """Write encoded frames to the connection; only with `direct`."""
        if not self._client.is_connected:
            raise Retryable("NATS is not connected")
        try:
            await self._write(data)
        except (OSError, RuntimeError) as error:
            raise Retryable(f"writing to NATS failed: {error}") from error

    def write_at_once(self, data: bytes) -> bool:
        """Write encoded frames without waiting (see `drain`); False if the connection is down."""
        transport = self._client._transport
        if transport is None or not self._client.is_connected:
            return False
        transport.write(data)
        return True

    async def drain(self) -> None:
        """Wait until the connection's write buffer has space."""
        await self.write_encoded(b"")

    async def _write(self, data: bytes) -> None:
        transport = self._client._transport
        if transport is None:
            raise Retryable("NATS is not connected")
        if data:
            transport.write(data)
        await transport.drain()  # type: ignore[no-untyped-call]


def _as_map(headers: bytes) -> dict[str, str]:
    lines = headers.decode().split("\r\n")
    return dict(line.split(": ", 1) for line in lines if line)
