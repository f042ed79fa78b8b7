"""A stream as JetStream describes it: bounds, single messages, what a consumer would find."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from consumer_sdk.errors import NotAvailable
from consumer_sdk.transport.connection import ApiError

if TYPE_CHECKING:
    from consumer_sdk.transport.connection import LogConnection

STREAM_NOT_FOUND = 10059


class Frame(NamedTuple):
    """One stored message as it came: nothing of it is decoded but its sequence."""

    stream_seq: int
    subject: bytes
    headers: bytes | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class StreamBounds:
    """What a stream holds: [first, last], and when it was created, in microseconds since 1970.

    An empty stream has last = first - 1. `leader` names the server of a cluster that answered.
    """

    first: int
    last: int
    created: int
    leader: str = field(default="", compare=False)


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


async def stream_bounds(nc: LogConnection, stream: str) -> StreamBounds:
    """Ask the stream's leader; NotAvailable where there is no such stream."""
    try:
        info = await nc.api(f"STREAM.INFO.{stream}")
    except ApiError as error:
        if error.error_code == STREAM_NOT_FOUND:
            raise NotAvailable(
                f"there is no stream {stream} on this NATS; has a bridge run?"
            ) from (error)
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


async def get_message(nc: LogConnection, stream: str, request: dict[str, Any]) -> Frame | None:
    """One stored message as the leader has it, None if there is none or no such stream.

    `request` is JetStream's: {"last_by_subj": subject}, or {"seq": n, "next_by_subj": filter}.
    """
    try:
        answer = await nc.api(f"STREAM.MSG.GET.{stream}", request)
    except ApiError as error:
        if error.code == 404:
            return None
        raise NotAvailable(f"stream {stream}: {error}") from error
    message = answer["message"]
    return Frame(
        int(message["seq"]),
        str(message["subject"]).encode(),
        base64.b64decode(message.get("hdrs", "")) or None,
        base64.b64decode(message.get("data", "")),
    )


async def probe_consumer(nc: LogConnection, stream: str, start: dict[str, Any]) -> dict[str, Any]:
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
