"""Streams: created with safe defaults if missing; existing ones are never altered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import nats.errors

from bridge.errors import BrokerError, Retryable
from consumer_sdk.transport.api import (
    NO_MESSAGE_FOUND,
    NOT_ENABLED,
    STREAM_NOT_FOUND,
    UNAVAILABLE,
    ApiError,
    Frame,
    call_api,
    message_of,
    parse_time_us,
)
from consumer_sdk.transport.connection import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client

    from bridge.config import Settings

LEAST_ROOM = 64 * 1024


@dataclass(frozen=True, slots=True)
class StreamState:
    """State of a stream; `created_us` differs after the stream was deleted and created again."""

    name: str
    created_us: int
    first_seq: int
    last_seq: int
    config: dict[str, Any]
    held_bytes: int = 0
    held_messages: int = 0

    @property
    def has_space(self) -> bool:
        """False if the stream's own limits refuse more; account and disk limits are not visible."""
        if self.config.get("discard") != "new":
            return True
        most_bytes: int = self.config.get("max_bytes", -1)
        most_messages: int = self.config.get("max_msgs", -1)
        if 0 < most_messages <= self.held_messages:
            return False
        return most_bytes <= 0 or most_bytes - self.held_bytes >= min(LEAST_ROOM, most_bytes // 10)


async def api(
    client: Client, subject: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Send one request to the JetStream API; Retryable if waiting can help, else ApiError."""
    try:
        return await call_api(client, subject, body)
    except nats.errors.NoRespondersError as error:
        raise ApiError(UNAVAILABLE, NOT_ENABLED[0], "JetStream is not enabled") from error
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise Retryable(f"JetStream does not answer: {one_line(error)}") from error
    except ApiError as error:
        if error.code == UNAVAILABLE and error.err_code not in NOT_ENABLED:
            raise Retryable(f"JetStream is not available: {error.description}") from error
        raise


async def stored_message(client: Client, stream: str, request: Mapping[str, Any]) -> Frame | None:
    """Read one message from a stream's leader; None if there is none."""
    try:
        return message_of(await api(client, f"STREAM.MSG.GET.{stream}", request))
    except ApiError as error:
        if error.err_code == NO_MESSAGE_FOUND:
            return None
        raise


async def stream_state(client: Client, name: str) -> StreamState | None:
    """Read a stream's state from its leader; None if there is no such stream."""
    try:
        answer = await api(client, f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            return None
        raise
    return _state(answer)


def _state(answer: dict[str, Any]) -> StreamState:
    state = answer["state"]
    return StreamState(
        answer["config"]["name"],
        parse_time_us(answer["created"]),
        state["first_seq"],
        state["last_seq"],
        answer["config"],
        state["bytes"],
        state["messages"],
    )


async def ensure_stream(
    client: Client, name: str, subjects: str, config: dict[str, Any]
) -> StreamState:
    """Find or create the stream; an existing one must store our subjects."""
    try:
        state = await stream_state(client, name)
        if state is None:
            body = {"name": name, "subjects": [subjects], **config}
            return _state(await api(client, f"STREAM.CREATE.{name}", body))
    except ApiError as error:
        if error.err_code in NOT_ENABLED:
            raise BrokerError(
                "NATS has no JetStream for this account; "
                "start nats-server with -js, or enable jetstream in the account"
            ) from error
        raise BrokerError(
            f"stream {name} cannot be created: {error}; `bridge check` checks limits, "
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
    """Configuration of a CDC stream that the bridge creates."""
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
    """Configuration of an INIT stream that the bridge creates."""
    return {
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": int(settings.init_max_age * 1e9),
        "max_bytes": settings.init_max_bytes or -1,
        "num_replicas": settings.replicas,
        "allow_direct": True,
    }
