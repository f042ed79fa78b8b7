"""JetStream's API: one call, one error, and what its answers say of streams and messages."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from consumer_sdk.errors import NotAvailable

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


class ApiError(Exception):
    """JetStream refused a request; `code` is like HTTP's, `err_code` says exactly what it was."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


class Frame(NamedTuple):
    """One stored message as it came: nothing of it is decoded but its sequence."""

    stream_seq: int
    subject: bytes
    headers: bytes | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """What a stream holds: [first, last], and when it was created, in microseconds since 1970.

    An empty stream has last = first - 1. `leader` names the server of a cluster that said so.
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
    timeout: float = API_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """One request: ApiError if JetStream refuses, an error of nats-py if it does not answer."""
    payload = b"" if body is None else json.dumps(body).encode()
    reply = await client.request(f"$JS.API.{subject}", payload, timeout=timeout)
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
    """A NATS header block as a dictionary; of repeated names the last counts."""
    if not block:
        return None
    lines = block.decode("utf-8", "replace").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_time_us(text: str) -> int:
    """A server's RFC 3339 time as microseconds since 1970, cut below that."""
    head, _, fraction = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(head + "+00:00").timestamp())
    return seconds * 1_000_000 + int((fraction + "000000")[:6])


async def stream_bounds(nc: NatsConnection, stream: str) -> StreamBounds:
    """Ask the stream's leader; NotAvailable where there is no such stream."""
    try:
        info = await nc.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            raise NotAvailable(
                f"there is no stream {stream} on this NATS; has a bridge run?"
            ) from error
        raise NotAvailable(f"stream {stream}: {error}") from error
    return bounds_of(info)


def bounds_of(info: dict[str, Any]) -> StreamBounds:
    """The bounds in JetStream's description of a stream."""
    state = info["state"]
    first, last = int(state["first_seq"]), int(state["last_seq"])
    if not state["messages"]:
        first = last + 1
    return StreamBounds(first, last, parse_time_us(info["created"]), leader_of(info))


def leader_of(info: dict[str, Any]) -> str:
    """The server that leads a stream or a consumer, empty outside of a cluster."""
    return str((info.get("cluster") or {}).get("leader") or "")


async def get_message(nc: NatsConnection, stream: str, request: dict[str, Any]) -> Frame | None:
    """One stored message as the leader has it, None if there is none or no such stream.

    `request` is JetStream's: {"last_by_subj": subject}, or {"seq": n, "next_by_subj": filter}.
    """
    try:
        answer = await nc.api(f"STREAM.MSG.GET.{stream}", request)
    except ApiError as error:
        if error.code == NOT_FOUND:
            return None
        raise NotAvailable(f"stream {stream}: {error}") from error
    return message_of(answer)


async def probe_consumer(nc: NatsConnection, stream: str, start: dict[str, Any]) -> dict[str, Any]:
    """What JetStream says of a consumer that begins at `start`, which is given up at once.

    It tells where the consumer stands and how much it would deliver, without reading anything.
    """
    config = {
        **start,
        "ack_policy": "none",
        "inactive_threshold": 5_000_000_000,
        "mem_storage": True,
        "num_replicas": 1,
    }
    try:
        info = await nc.api(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
    except ApiError as error:
        raise NotAvailable(f"stream {stream}: {error}") from error
    await nc.discard_consumer(stream, str(info["name"]))
    return info
