"""Streams and buckets: created with safe defaults when missing, never altered when there."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import nats.errors
from nats.js.errors import NotFoundError, ServiceUnavailableError

from bridge.errors import BrokerError, Retryable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.client import JetStreamContext
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

    from bridge.config import Settings

API_TIMEOUT_SECONDS = 5
LEAST_ROOM = 64 * 1024
_STREAM_NOT_FOUND = 10059
NO_MESSAGE_FOUND = 10037
_NOT_ENABLED = (10039, 10076)
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class StreamState:
    """What the bridge needs to know of a stream; `created_us` identifies its incarnation."""

    name: str
    created_us: int
    first_seq: int
    last_seq: int
    config: dict[str, Any]
    did_create: bool = False
    held_bytes: int = 0
    held_messages: int = 0

    @property
    def has_room(self) -> bool:
        """False where the stream's own limits refuse more; an account's or a disk's do not show."""
        if self.config.get("discard") != "new":
            return True
        most_bytes: int = self.config.get("max_bytes", -1)
        most_messages: int = self.config.get("max_msgs", -1)
        if 0 < most_messages <= self.held_messages:
            return False
        return most_bytes <= 0 or most_bytes - self.held_bytes >= min(LEAST_ROOM, most_bytes // 10)


class ApiError(Exception):
    """JetStream answered with an error."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} ({code})")
        self.code = code
        self.description = description


async def api(client: Client, subject: str, body: Any = None) -> dict[str, Any]:
    """One request to the JetStream API."""
    payload = b"" if body is None else json.dumps(body).encode()
    try:
        reply = await client.request(f"$JS.API.{subject}", payload, timeout=API_TIMEOUT_SECONDS)
    except nats.errors.NoRespondersError as error:
        raise ApiError(10039, "JetStream is not enabled") from error
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise Retryable(
            f"JetStream does not answer: {str(error) or type(error).__name__}"
        ) from error
    answer: dict[str, Any] = json.loads(reply.data)
    problem = answer.get("error")
    if problem:
        code = problem.get("err_code", problem.get("code", 0))
        if problem.get("code") == _UNAVAILABLE and code not in _NOT_ENABLED:
            raise Retryable(f"JetStream is not available: {problem['description']}")
        raise ApiError(code, problem["description"])
    return answer


class StoredMessage(NamedTuple):
    """One message as STREAM.MSG.GET gives it."""

    seq: int
    headers: dict[str, str]
    data: bytes


def stored_message(answer: dict[str, Any]) -> StoredMessage:
    """Read the answer of STREAM.MSG.GET."""
    message = answer["message"]
    lines = base64.b64decode(message.get("hdrs", "")).decode(errors="replace").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    return StoredMessage(message["seq"], headers, base64.b64decode(message.get("data", "")))


def parse_created(text: str) -> int:
    """RFC 3339 with nanoseconds to microseconds since 1970."""
    head, _, zone = text.partition("Z") if text.endswith("Z") else (text, "", "")
    head, _, fraction = head.partition(".")
    digits = "".join(ch for ch in fraction[:9] if ch.isdigit())[:6].ljust(6, "0")
    whole = datetime.fromisoformat(head + "+00:00") if not zone else datetime.fromisoformat(text)
    return int(whole.timestamp()) * 1_000_000 + int(digits)


async def stream_state(client: Client, name: str) -> StreamState | None:
    """State of a stream as its leader has it; None where there is no such stream."""
    try:
        answer = await api(client, f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.code == _STREAM_NOT_FOUND:
            return None
        raise
    return _state(answer)


def _state(answer: dict[str, Any], *, did_create: bool = False) -> StreamState:
    state = answer["state"]
    return StreamState(
        answer["config"]["name"],
        parse_created(answer["created"]),
        state["first_seq"],
        state["last_seq"],
        answer["config"],
        did_create,
        state["bytes"],
        state["messages"],
    )


async def ensure_stream(
    client: Client, name: str, subjects: str, config: dict[str, Any]
) -> StreamState:
    """Find the stream, or create it; an existing one must hold our subjects."""
    try:
        state = await stream_state(client, name)
        if state is None:
            body = {"name": name, "subjects": [subjects], **config}
            return _state(await api(client, f"STREAM.CREATE.{name}", body), did_create=True)
    except ApiError as error:
        if error.code in _NOT_ENABLED:
            raise BrokerError(
                "NATS has no JetStream for this account; "
                "start nats-server with -js, or enable jetstream in the account"
            ) from error
        raise BrokerError(
            f"stream {name} cannot be created: {error}; `bridge check` looks at limits, "
            "overlapping subjects and permissions"
        ) from error
    if subjects not in state.config.get("subjects", []) and ">" not in state.config.get(
        "subjects", []
    ):
        raise BrokerError(
            f"stream {name} does not hold {subjects}; "
            f"add that subject to it, or choose another --prefix"
        )
    return state


def cdc_config(settings: Settings, version: tuple[int, int, int]) -> dict[str, Any]:
    """What a created CDC stream looks like."""
    config: dict[str, Any] = {
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": int(settings.cdc_max_age * 1e9),
        "max_bytes": settings.cdc_max_bytes or -1,
        "num_replicas": settings.replicas,
        "duplicate_window": int(settings.duplicate_window * 1e9),
        "allow_direct": True,
    }
    if settings.cdc_max_age and settings.duplicate_window > settings.cdc_max_age:
        config["duplicate_window"] = config["max_age"]
    if version >= (2, 14, 0):
        config["allow_batched"] = True
    return config


def init_config(settings: Settings) -> dict[str, Any]:
    """What a created INIT stream looks like."""
    return {
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": int(settings.init_max_age * 1e9),
        "max_bytes": settings.init_max_bytes or -1,
        "num_replicas": settings.replicas,
        "allow_direct": True,
    }


async def ensure_bucket(
    js: JetStreamContext, bucket: str, *, history: int, replicas: int
) -> KeyValue:
    """Find or create a KV bucket."""
    try:
        try:
            return await js.key_value(bucket)
        except NotFoundError:
            return await js.create_key_value(bucket=bucket, history=history, replicas=replicas)
    except (TimeoutError, nats.errors.TimeoutError, ServiceUnavailableError) as error:
        raise Retryable(f"bucket {bucket}: NATS does not answer") from error
    except nats.errors.Error as error:
        raise BrokerError(
            f"bucket {bucket} cannot be used: {error}; "
            "`bridge check` looks at permissions and limits"
        ) from error


async def ensure_objects(js: JetStreamContext, bucket: str, settings: Settings) -> ObjectStore:
    """Find or create the object store, whose contents outlive both streams."""
    try:
        try:
            return await js.object_store(bucket)
        except NotFoundError:
            ages = (settings.cdc_max_age, settings.init_max_age)
            ttl = max(ages) + 86400 if all(ages) else None
            return await js.create_object_store(bucket, ttl=ttl, replicas=settings.replicas)
    except (TimeoutError, nats.errors.TimeoutError, ServiceUnavailableError) as error:
        raise Retryable(f"object store {bucket}: NATS does not answer") from error
    except nats.errors.Error as error:
        raise BrokerError(
            f"object store {bucket} cannot be used: {error}; "
            "`bridge check` looks at permissions and limits"
        ) from error
