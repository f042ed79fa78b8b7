"""Raw pull consumer: a gapless run of stored messages, taken in batches, with bounded memory.

The consumer on the server is ephemeral and acknowledges nothing: what has been taken is known here
alone, so every trouble (connection lost, delivery numbers that jump, heartbeats that stay away, a
consumer that is gone) is repaired the same way, by a new consumer after the last message taken.
https://docs.nats.io/reference/reference-protocols/nats_api_reference
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING

import nats.errors

from consumer_sdk.errors import CdcError, GapError, NotAvailable
from consumer_sdk.reading.deliveries import NEVER, Deliveries
from consumer_sdk.reading.stream import (
    STREAM_NOT_FOUND,
    Frame,
    StreamBounds,
    bounds_of,
    get_message,
    leader_of,
)
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.connection import ApiError, LogConnection, NoJetStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.subscription import Subscription

INACTIVE_SECONDS = 60.0
RETRY_SECONDS = 0.5
STREAM_GONE_SECONDS = 5.0
WINDOW_MESSAGES = 4096
_NANOSECONDS = 1_000_000_000


class PullConsumer:
    """Takes the messages of a stream from `start_sequence` on, each once and in order.

    `filters` are subjects that do not overlap. GapError is raised as soon as messages between
    `start_sequence` and the next one delivered may have been trimmed unseen, or when the stream is
    gone or is not the one created at `created`. With `lenient_start` the first message may be any
    later one; with `gapless=False` trimming is never an error, as for buckets that keep the newest
    of each subject. A lost connection is waited for, at most `timeout` seconds if given.
    """

    def __init__(
        self,
        nc: LogConnection,
        stream: str,
        *,
        filters: Sequence[str],
        start_sequence: int,
        created: int | None = None,
        lenient_start: bool = False,
        gapless: bool = True,
        headers_only: bool = False,
        window: int = WINDOW_MESSAGES,
        timeout: float | None = None,
    ) -> None:
        self._nc = nc
        self._stream = stream
        self._filters = tuple(filters)
        self._created = created
        self._gapless = gapless
        self._lenient = lenient_start or not gapless
        self._headers_only = headers_only
        self._window = window
        self._timeout = timeout
        self._safe = max(start_sequence, 1) - 1
        self._in = Deliveries()
        self._exposed = True
        self._caught_up = False
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._inbox = ""
        self._opened_before = False
        self._closed = False
        self.reopened = 0
        nc.add_listener(self._on_connection_change)

    @property
    def next_sequence(self) -> int:
        """Where to start again without missing or repeating anything taken so far."""
        return self._safe + 1

    @property
    def created(self) -> int | None:
        """Creation time of the stream, microseconds; None before it was first seen."""
        return self._created

    @property
    def caught_up(self) -> bool:
        """True when everything that was stored at the last look has been taken."""
        return self._caught_up and not self._in.buffer

    async def take(self, limit: int, wait: float | None = None) -> list[Frame]:
        """Up to `limit` messages, as soon as there is one; [] only after `wait` seconds.

        Cancelling loses nothing: what was not returned is returned by the next call.
        """
        loop = asyncio.get_running_loop()
        deadline = None if wait is None else loop.time() + wait
        while True:
            await stay_cancelled()
            if self._closed:
                raise NotAvailable("this reader is closed")
            if self._in.trouble is not None:
                await self._reopen()
            if self._in.buffer:
                frames = await self._take_buffered(limit)
                if frames:
                    return frames
                continue
            await self._replenish(0)
            if self._in.starved and self._in.trouble is None:
                await self._settle()
                continue
            if deadline is not None and loop.time() >= deadline:
                return []
            await self._in.wait(deadline)

    async def is_through(self, end: int) -> bool:
        """Whether nothing stored before `end` is still to be taken, as the stream's leader has it.

        In a cluster the consumer may live with a replica that lags, and see nothing pending there.
        """
        for subjects in self._filters:
            request = {"seq": self._safe + 1, "next_by_subj": subjects}
            try:
                frame = await get_message(self._nc, self._stream, request)
            except NotAvailable as error:
                self._in.trouble = str(error)
                return False
            if frame is not None and frame.stream_seq < end:
                return False
        return True

    async def close(self) -> None:
        """Give up the consumer; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._nc.remove_listener(self._on_connection_change)
        self._in.wake()
        await self._discard()

    def _on_connection_change(self) -> None:
        self._in.fail("connection changed")

    async def _take_buffered(self, limit: int) -> list[Frame]:
        deliveries = self._in
        frames: list[Frame] = []
        expected = deliveries.taken + 1
        previous = self._safe
        exposed = self._exposed or deliveries.starved
        unasked_from = deliveries.unasked_from
        jump_after: int | None = None
        pending = b"0"
        size = 0
        try:
            for subject, reply, payload, headers in islice(deliveries.buffer, limit):
                tokens = reply.split(b".")
                # $JS.ACK.<stream>.<consumer>.<tries>.<stream seq>.<consumer seq>.<time>.<pending>,
                # with <domain>.<account> before the stream on newer or leaf-node servers.
                at = 5 if len(tokens) == 9 else 7
                sequence = int(tokens[at])
                if int(tokens[at + 1]) != expected or sequence <= previous:
                    deliveries.trouble = "delivery numbers are not consecutive"
                    break
                pending = tokens[at + 3]
                if expected > unasked_from:
                    exposed = True
                expected += 1
                if sequence != previous + 1 and exposed and jump_after is None:
                    jump_after = previous
                exposed = exposed or pending != b"0"
                previous = sequence
                size += len(payload)
                frames.append(Frame(sequence, subject, headers, payload))
        except (ValueError, IndexError):
            deliveries.trouble = "a message in the inbox is not from JetStream"
        unproven = jump_after is not None and not self._lenient
        if not frames or (unproven and not await self._is_proven(jump_after or 0)):
            deliveries.drop()
            return []
        await self._replenish(len(frames))
        # Nothing is awaited from here on, so that a cancelled call has taken nothing.
        deliveries.remove(len(frames), size)
        self._safe = previous
        self._lenient = not self._gapless
        self._caught_up = pending == b"0"
        self._exposed = not self._caught_up or deliveries.taken >= deliveries.unasked_from
        if deliveries.trouble is not None:
            deliveries.drop()
        return frames

    async def _is_proven(self, taken: int) -> bool:
        """Prove that nothing after `taken` was trimmed before it could be delivered.

        GapError if it may have been; False if nobody can tell at the moment.
        """
        try:
            bounds = await self._bounds()
        except NotAvailable as error:
            self._in.trouble = str(error)
            return False
        if bounds.first > taken + 1:
            raise GapError("it was trimmed or purged", taken + 1, bounds.first)
        return True

    async def _settle(self) -> None:
        """When idle, move on past messages of other subjects, so that trimming them is no gap."""
        try:
            bounds = await self._bounds()
            info = await self._nc.api(f"CONSUMER.INFO.{self._stream}.{self._consumer}")
            # What another server counts as pending may be less than the leader has stored.
            through = leader_of(info) == bounds.leader or await self.is_through(bounds.last + 1)
        except (NotAvailable, ApiError) as error:
            self._in.trouble = str(error)
            return
        if self._in.buffer or self._in.trouble is not None:
            return
        self._in.starved = False
        self._exposed = self._exposed or self._in.taken >= self._in.unasked_from
        pending = int(info["num_pending"]) or not through
        if pending or int(info["delivered"]["consumer_seq"]) != self._in.taken:
            return
        if self._exposed and not self._lenient and bounds.first > self._safe + 1:
            raise GapError("it was trimmed or purged", self._safe + 1, bounds.first)
        self._safe = max(self._safe, bounds.last)
        self._exposed = False
        self._in.unasked_from = NEVER
        self._caught_up = True

    async def _replenish(self, taking: int) -> None:
        request = self._in.request(self._window, taking)
        if request is None:
            return
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        try:
            await self._nc.publish(subject, request, reply=self._inbox)
        except (nats.errors.Error, OSError) as error:
            self._in.trouble = str(error)

    # the consumer on the server

    async def _bounds(self) -> StreamBounds:
        try:
            info = await self._nc.api(f"STREAM.INFO.{self._stream}")
        except ApiError as error:
            raise NotAvailable(f"stream {self._stream}: {error}") from error
        bounds = bounds_of(info)
        wanted = self._safe + 1
        if self._created is not None and bounds.created != self._created:
            raise GapError("the stream was recreated", wanted, bounds.first)
        if bounds.last < self._safe:
            raise GapError("the stream ends before it", wanted, bounds.first)
        return bounds

    async def _reopen(self) -> None:
        loop = asyncio.get_running_loop()
        away_since = loop.time()
        gone_since: float | None = None
        while True:
            await stay_cancelled()
            try:
                await self._open()
            except ApiError as error:
                problem: CdcError = NotAvailable(f"stream {self._stream}: {error}")
                if error.error_code == STREAM_NOT_FOUND:
                    if not self._opened_before and self._created is None:
                        raise NotAvailable(
                            f"there is no stream {self._stream} on this NATS; has a bridge run?"
                        ) from error
                    gone_since = gone_since or loop.time()
                    problem = GapError("the stream is gone", self._safe + 1, 0)
                    if loop.time() - gone_since > STREAM_GONE_SECONDS:
                        raise problem from error
            except NoJetStream as error:
                if not self._opened_before and self._timeout is not None:
                    raise
                problem = error
            except NotAvailable as error:
                problem = error
            else:
                return
            if self._timeout is not None and loop.time() - away_since > self._timeout:
                raise problem
            await self._pause_while_away()

    async def _pause_while_away(self) -> None:
        if self._nc.is_closed:
            reason = self._nc.explain(self._nc.latest_error or ConnectionError("connection closed"))
            raise NotAvailable(f"the connection to NATS is closed: {reason}")
        await self._in.pause(asyncio.get_running_loop().time() + RETRY_SECONDS)

    async def _open(self) -> None:
        await self._discard()
        if not self._nc.is_connected:
            raise NotAvailable(
                f"NATS is away: {self._nc.explain(ConnectionError('no connection'))}"
            )
        self._in.trouble = None
        try:
            await self._create_consumer()
        except BaseException:
            self._in.trouble = "not opened"
            raise

    async def _create_consumer(self) -> None:
        inbox = self._nc.new_inbox()
        try:
            self._subscription = await self._nc.tap(inbox, self._in.on_frame)
        except (nats.errors.Error, OSError) as error:
            raise NotAvailable(f"NATS does not answer: {self._nc.explain(error)}") from error
        self._inbox = inbox
        config = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._safe + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subjects": list(self._filters),
            "inactive_threshold": int(INACTIVE_SECONDS * _NANOSECONDS),
            "mem_storage": True,
            "num_replicas": 1,
            "headers_only": self._headers_only,
        }
        answer = await self._nc.api(
            f"CONSUMER.CREATE.{self._stream}", {"stream_name": self._stream, "config": config}
        )
        self._consumer = str(answer["name"])
        # Looked at after the consumer exists: what is stored now can only be trimmed visibly.
        bounds = await self._bounds()
        self._created = bounds.created
        if bounds.first > self._safe + 1 and not self._lenient:
            raise GapError("it was trimmed or purged", self._safe + 1, bounds.first)
        self._in.begin(self._nc.max_payload)
        self._exposed = True
        self._caught_up = int(answer.get("num_pending", 1)) == 0
        self.reopened += self._opened_before
        self._opened_before = True

    async def _discard(self) -> None:
        self._in.drop()
        subscription, self._subscription = self._subscription, None
        consumer, self._consumer = self._consumer, ""
        if subscription is not None:
            await self._nc.untap(subscription)
        if consumer:
            await self._nc.discard_consumer(self._stream, consumer)
