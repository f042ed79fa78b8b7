"""Streams: created with safe defaults if missing; existing ones are never altered."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
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
from consumer_sdk.transport.calls import ApiCall
from consumer_sdk.transport.logfmt import event
from consumer_sdk.transport.refusals import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nats.aio.client import Client

    from bridge.config import Settings

logger = logging.getLogger(__name__)

LEAST_ROOM = 64 * 1024
NEARLY_FULL: Final = 0.8
MONITOR_TIMEOUT_SECONDS: Final = 5
# Of what may still be stored: the rest is for buckets, wide rows and whatever comes later.
CDC_SHARE: Final = 0.75
INIT_SHARE: Final = 0.125
LEAST_LEFT: Final = 0.5
INIT_BYTES: Final = 60 * 1024**3
"""The limit of INIT where neither the account nor the monitoring port shows one."""
LEAST_LIMIT: Final = 1024**2
# The server has less room than a stream reserves: in all, in the cluster, on any peer.
NO_ROOM: Final = (10047, 10023, 10005)


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

    @property
    def is_nearly_full(self) -> bool:
        """Whether the stream will soon refuse messages because of its size limit."""
        most: int = self.config.get("max_bytes", -1)
        is_refusing = self.config.get("discard") == "new"
        return is_refusing and most > 0 and self.held_bytes > most * NEARLY_FULL

    def has_room_for(self, size: int) -> bool:
        """False if the size limit of the stream refuses a message of this size."""
        most: int = self.config.get("max_bytes", -1)
        return self.config.get("discard") != "new" or most <= 0 or self.held_bytes + size <= most


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
        return message_of(await api(client, ApiCall.MESSAGE_GET.of(stream), request))
    except ApiError as error:
        if error.err_code == NO_MESSAGE_FOUND:
            return None
        raise


async def stream_state(client: Client, name: str) -> StreamState | None:
    """Read a stream's state from its leader; None if there is no such stream."""
    try:
        answer = await api(client, ApiCall.STREAM_INFO.of(name))
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
    client: Client, name: str, subjects: str, config: dict[str, Any], limit: SizeLimit
) -> StreamState:
    """Find or create the stream; an existing one must store our subjects."""
    try:
        state = await stream_state(client, name)
        if state is None:
            body = {"name": name, "subjects": [subjects], **config}
            return await _create(client, body, limit)
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


async def _create(client: Client, body: dict[str, Any], limit: SizeLimit) -> StreamState:
    """Create a stream; a limit that no one asked for is lowered until the server has room for it.

    A stream reserves its limit, and the room of a server is not visible to its clients. The steps
    are no round numbers, so that the reservation leaves room for other streams.
    """
    name, size = body["name"], limit.max_bytes
    while True:
        try:
            answer = await api(client, ApiCall.STREAM_CREATE.of(name), {**body, "max_bytes": size})
        except ApiError as error:
            if error.err_code not in NO_ROOM or size < 0 or not limit.is_derived:
                raise
            lower = size * 3 // 8
            size = lower if lower >= LEAST_LIMIT else NO_LIMIT.max_bytes
        else:
            event(logger, "stream created", stream=name, max_bytes=size, limit=limit.origin)
            return _state(answer)


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The size limit of a stream to be created, -1 for none, and where it comes from."""

    max_bytes: int
    origin: str
    is_derived: bool = True


NO_LIMIT: Final = SizeLimit(-1, "nothing")


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """The size limits of both streams."""

    cdc: SizeLimit
    init: SizeLimit


async def read_monitor(url: str) -> dict[str, Any]:
    """`/varz` of the server's monitoring port; OSError or ValueError if it is not one."""
    timeout = aiohttp.ClientTimeout(total=MONITOR_TIMEOUT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/varz") as answer,
        ):
            document: dict[str, Any] = await answer.json()
            return document
    except (TimeoutError, aiohttp.ClientError) as error:
        raise OSError(str(error) or type(error).__name__) from error


async def read_size_limits(client: Client, settings: Settings) -> SizeLimits:
    """The limits that missing streams would be created with now."""
    account = await api(client, ApiCall.ACCOUNT_INFO.of())
    varz = None
    if settings.nats_monitor and account_storage(account, settings.replicas) is None:
        try:
            varz = await read_monitor(settings.nats_monitor)
        except (OSError, ValueError):
            # `bridge check` reports this; the defaults are safe.
            varz = None
    return derive_size_limits(settings, account, varz)


@dataclass(frozen=True, slots=True)
class Storage:
    """What streams may hold, and what of it no other stream has taken or reserved."""

    total: int
    left: int
    owner: str


def account_storage(account: dict[str, Any], replicas: int) -> Storage | None:
    """The storage of an account, by its INFO; None if it has no limit."""
    tiers = account.get("tiers") or {}
    tier = tiers.get(f"R{replicas}")
    found = account if tier is None else tier
    total = int(found["limits"]["max_storage"])
    if total < 0 or (tiers and tier is None):
        return None
    left = total - max(int(found.get("reserved_storage") or 0), int(found["storage"]))
    # Without tiers, an account counts every replica.
    copies = replicas if tier is None else 1
    return Storage(total // copies, left // copies, "the account's storage")


def server_storage(varz: dict[str, Any]) -> Storage | None:
    """The storage of a server, by its monitoring port; None if it is not said."""
    jetstream = varz.get("jetstream") or {}
    total = int((jetstream.get("config") or {}).get("max_storage") or 0)
    stats = jetstream.get("stats") or {}
    used = max(int(stats.get("reserved_storage") or 0), int(stats.get("storage") or 0))
    return Storage(total, total - used, "the server's storage") if total > 0 else None


def derive_size_limits(
    settings: Settings, account: dict[str, Any], varz: dict[str, Any] | None
) -> SizeLimits:
    """The settings, else shares of the account's storage, else of the server's, else defaults.

    CDC has no default, and no share where others have reserved most of the storage: too small a
    limit stops the bridge, and too large a one limits nothing.
    """
    storage = account_storage(account, settings.replicas)
    if storage is None and varz is not None:
        storage = server_storage(varz)
    cdc, init = NO_LIMIT, SizeLimit(INIT_BYTES, "the default")
    if storage is not None:
        share = f"{INIT_SHARE:.1%} of what is left of {storage.owner}"
        init = SizeLimit(max(int(storage.left * INIT_SHARE), LEAST_LIMIT), share)
        if storage.left > storage.total * LEAST_LEFT:
            share = f"{CDC_SHARE:.0%} of what is left of {storage.owner}"
            cdc = SizeLimit(max(int(storage.left * CDC_SHARE), LEAST_LIMIT), share)
    most = int(account["limits"].get("storage_max_stream_bytes") or 0)
    if most > 0:
        cdc, init = (
            one if 0 < one.max_bytes <= most else SizeLimit(most, "the account's limit of a stream")
            for one in (cdc, init)
        )
    return SizeLimits(
        _explicit(settings, "cdc_max_bytes") or cdc, _explicit(settings, "init_max_bytes") or init
    )


def _explicit(settings: Settings, name: str) -> SizeLimit | None:
    """The limit that the operator has set, which may be none."""
    value = int(getattr(settings, name))
    if settings.origins.get(name, "default") == "default" and not value:
        return None
    return SizeLimit(value or NO_LIMIT.max_bytes, settings.where(name), is_derived=False)


def cdc_config(settings: Settings, version: tuple[int, int, int]) -> dict[str, Any]:
    """Configuration of a CDC stream that the bridge creates."""
    config: dict[str, Any] = {
        "retention": "limits",
        "storage": "file",
        # A full stream refuses changes, so the bridge waits and PostgreSQL keeps WAL. The other way
        # would remove changes before their age, whether or not they have been read.
        "discard": settings.cdc_discard,
        "max_age": int(settings.cdc_max_age * 1e9),
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
        # A snapshot that does not fit fails, and those that others are reading stay whole.
        "discard": "new",
        "max_age": int(settings.init_max_age * 1e9),
        "num_replicas": settings.replicas,
        "allow_direct": True,
    }
