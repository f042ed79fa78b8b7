"""JetStream's API: requests, their error, and the streams and messages in their answers."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from consumer_sdk.errors import NotAvailable
from consumer_sdk.transport.calls import API, ApiCall, consumer_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client

    from consumer_sdk.transport.connection import NatsConnection

API_TIMEOUT_SECONDS: Final = 5.0

# Names and numbers as in nats-server's errors.json.
STREAM_NOT_FOUND: Final = 10059
NO_MESSAGE_FOUND: Final = 10037
NOT_ENABLED: Final = (10039, 10076)
"""JetStream is not enabled for the account, or not at all."""
NOT_FOUND: Final = 404
UNAVAILABLE: Final = 503
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class ApiError(Exception):
    """JetStream refused a request; `code` is like an HTTP status, `err_code` is the exact cause."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


class Frame(NamedTuple):
    """One stored message; only its sequence is decoded."""

    stream_seq: int
    subject: bytes
    headers: bytes | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """The first and last sequence of a stream, and its creation time in microseconds since 1970.

    An empty stream has last = first - 1. In a cluster, `leader` is the server that leads the
    stream.
    """

    first: int
    last: int
    created: int
    leader: str = field(default="", compare=False)


async def call_api(
    client: Client,
    subject: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Make one request; ApiError if it is refused, an error of nats-py if no answer comes.

    Waits API_TIMEOUT_SECONDS for the answer, unless `timeout` says otherwise.
    """
    if timeout is None:
        timeout = API_TIMEOUT_SECONDS
    payload = b"" if body is None else json.dumps(body).encode()
    reply = await client.request(f"{API}.{subject}", payload, timeout=timeout)
    try:
        answer: dict[str, Any] = json.loads(reply.data)
    except ValueError as error:
        raise ApiError(0, 0, "the answer is not JSON") from error
    refusal = answer.get("error")
    if refusal:
        raise ApiError(
            int(refusal.get("code", 0)),
            int(refusal.get("err_code", 0)),
            str(refusal.get("description", "")),
        )
    return answer


def message_of(answer: Mapping[str, Any]) -> Frame:
    """The message in an answer of STREAM.MSG.GET."""
    message = answer["message"]
    return Frame(
        int(message["seq"]),
        str(message["subject"]).encode(),
        base64.b64decode(message.get("hdrs", "")) or None,
        base64.b64decode(message.get("data", "")),
    )


def parse_headers(block: bytes | None) -> dict[str, str] | None:
    """A NATS header block as a dictionary; of repeated names the last one is kept."""
    if not block:
        return None
    lines = block.decode("utf-8", "replace").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_time_us(text: str) -> int:
    """A server's RFC 3339 time as whole microseconds since 1970."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)


async def stream_bounds(nc: NatsConnection, stream: str) -> StreamBounds:
    """The bounds of a stream, from its leader; NotAvailable if there is no such stream."""
    try:
        info = await nc.api(ApiCall.STREAM_INFO.of(stream))
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            raise no_stream(stream) from error
        raise NotAvailable(f"stream {stream}: {error}") from error
    return bounds_of(info)


def no_stream(stream: str) -> NotAvailable:
    """The error for a stream that does not exist."""
    return NotAvailable(f"there is no stream {stream} on this NATS; has a bridge run?")


def bounds_of(info: dict[str, Any]) -> StreamBounds:
    """The bounds in JetStream's description of a stream."""
    state = info["state"]
    first, last = int(state["first_seq"]), int(state["last_seq"])
    if not state["messages"]:
        first = last + 1
    return StreamBounds(first, last, parse_time_us(info["created"]), leader_of(info))


def leader_of(info: dict[str, Any]) -> str:
    """The server that leads a stream or a consumer; empty outside a cluster."""
    return str((info.get("cluster") or {}).get("leader") or "")


async def get_message(nc: NatsConnection, stream: str, request: dict[str, Any]) -> Frame | None:
    """One stored message, from the leader; None if there is no such message or stream.

    `request` is JetStream's: {"last_by_subj": subject}, or {"seq": n, "next_by_subj": filter}.
    """
    try:
        answer = await nc.api(ApiCall.MESSAGE_GET.of(stream), request)
    except ApiError as error:
        if error.code == NOT_FOUND:
            return None
        raise NotAvailable(f"stream {stream}: {error}") from error
    return message_of(answer)


async def probe_consumer(nc: NatsConnection, stream: str, start: dict[str, Any]) -> dict[str, Any]:
    """Create a consumer that begins at `start`, delete it, and return its description.

    The description holds the consumer's sequence and the number of messages it would deliver.
    """
    name = consumer_name(nc.inbox_prefix)
    config = {
        **start,
        "name": name,
        "ack_policy": "none",
        "inactive_threshold": 5_000_000_000,
        "mem_storage": True,
        "num_replicas": 1,
    }
    try:
        info = await nc.api(
            ApiCall.CONSUMER_CREATE.of(stream, name), {"stream_name": stream, "config": config}
        )
    except ApiError as error:
        raise NotAvailable(f"stream {stream}: {error}") from error
    await nc.discard_consumer(stream, name)
    return info
