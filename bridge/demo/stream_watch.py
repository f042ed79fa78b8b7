"""What arrives in the CDC stream, seen as any reader of it would."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, Self

import nats
from nats.errors import Error as NatsError

from bridge.demo import shop
from bridge.errors import BrokerError
from consumer_sdk.wire import Event, Subjects, encode, read_events

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

CHANGES: Final = frozenset({"insert", "update", "delete", "truncate"})
REMEMBERED_EVENTS: Final = 12
REMEMBERED_LATENCIES: Final = 400

_END_MARK: Final = "shop-closed"
_POLL_SECONDS: Final = 0.05


class StreamWatch:
    """Follows the stream from its first message: counts, newest events, time since commit."""

    def __init__(self, nats_url: str) -> None:
        self.stored: Counter[str] = Counter()
        self.newest: deque[Event] = deque(maxlen=REMEMBERED_EVENTS)
        self.latencies: deque[float] = deque(maxlen=REMEMBERED_LATENCIES)
        self.last_sequence = 0
        self._url = nats_url
        self._subjects = Subjects()
        self._client: Client | None = None

    async def __aenter__(self) -> Self:
        try:
            self._client = await nats.connect(
                self._url, name="demo view", max_reconnect_attempts=-1, error_cb=_ignore
            )
            await self._client.jetstream().subscribe(
                self._subjects.cdc_all,
                stream=self._subjects.cdc_stream,
                cb=self._receive,
                ordered_consumer=True,
            )
        except (NatsError, OSError) as error:
            raise BrokerError(f"cannot read the CDC stream: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()

    async def request_snapshots(self, options: dict[str, str]) -> None:
        """Ask the bridge for snapshots of all tables, to be there when somebody wants them."""
        assert self._client is not None
        for token in shop.tokens():
            await self._client.publish(
                self._subjects.snapshot_request(token), encode(options, as_json=True)
            )

    async def counts(self) -> Counter[tuple[str, str]]:
        """How many events the server itself says it holds, by table and operation."""
        assert self._client is not None
        info = await self._client.jetstream().stream_info(
            self._subjects.cdc_stream, subjects_filter=self._subjects.cdc_all
        )
        found: Counter[tuple[str, str]] = Counter()
        for subject, count in (info.state.subjects or {}).items():
            change = self._subjects.split_change(subject)
            if change is not None and change[1] in CHANGES:
                found[change] = count
        return found

    async def holds_end_mark(self, timeout: float) -> bool:
        """Wait for the message that `END_MARK_STATEMENT` sends after the last change."""
        assert self._client is not None
        deadline = time.monotonic() + timeout
        subject = self._subjects.message(_END_MARK)
        while time.monotonic() < deadline:
            info = await self._client.jetstream().stream_info(
                self._subjects.cdc_stream, subjects_filter=subject
            )
            if (info.state.subjects or {}).get(subject):
                return True
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _receive(self, message: Msg) -> None:
        self.last_sequence = message.metadata.sequence.stream
        change = self._subjects.split_change(message.subject)
        if change is None or change[1] not in CHANGES:
            return
        events = read_events(message.headers, message.data)
        self.stored[change[0]] += len(events)
        self.newest.extend(events)
        self.latencies.append(max(0.0, time.time() - events[-1].ts / 1e6))


# Changes arrive in commit order: when this message is stored, so is everything before it.
END_MARK_STATEMENT: Final = f"SELECT pg_logical_emit_message(true, '{_END_MARK}', '{shop.SLOT}')"


async def _ignore(_error: Exception) -> None:
    """Losing the connection shows as a view that stands still; the client reconnects."""
