"""Pull consumer: stored messages without gaps, taken in batches, with bounded memory.

The consumer on the server is ephemeral and needs no acknowledgements: only this reader knows which
messages it has taken. So every failure (lost connection, jumping delivery numbers, missing
heartbeats, deleted consumer) is repaired in the same way: a new consumer starts after the last
message taken.
https://docs.nats.io/reference/reference-protocols/nats_api_reference
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import nats.errors

from consumer_sdk.errors import CdcError, GapError, NotAvailable
from consumer_sdk.reading.demand import Demand
from consumer_sdk.reading.proof import Proof, Selection, StreamBreak
from consumer_sdk.transport.api import (
    STREAM_NOT_FOUND,
    ApiError,
    Frame,
    StreamBounds,
    bounds_of,
    get_message,
    leader_of,
    no_stream,
)
from consumer_sdk.transport.calls import API, ApiCall, consumer_name
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.connection import NatsConnection, NoJetStream

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

INACTIVE_SECONDS = 60.0
RETRY_SECONDS = 0.5
STREAM_GONE_SECONDS = 5.0
WINDOW_MESSAGES = 4096
_NANOSECONDS = 1_000_000_000


class PullConsumer:
    """Takes the selected messages of a stream, each once and in order.

    Raises GapError if selected messages may have been trimmed undelivered and the selection does
    not allow that, or if the stream is gone or is not the expected one. After a lost connection it
    waits for NATS, at most `timeout` seconds if given.
    """

    def __init__(
        self,
        nc: NatsConnection,
        selection: Selection,
        *,
        window: int = WINDOW_MESSAGES,
        headers_only: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._nc = nc
        self._stream = selection.stream
        self._filters = tuple(selection.filters)
        self._headers_only = headers_only
        self._timeout = timeout
        self._proof = Proof(selection)
        self._demand = Demand(window)
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
        return self._proof.next_sequence

    @property
    def created(self) -> int | None:
        """Creation time of the stream in microseconds; None before the first consumer."""
        return self._proof.created

    @property
    def caught_up(self) -> bool:
        """Whether everything stored at the last check has been taken."""
        return self._caught_up and not self._demand.buffer

    async def take(self, limit: int, wait: float | None = None) -> list[Frame]:
        """Up to `limit` messages, as soon as there is one; [] only after `wait` seconds.

        Cancelling loses nothing: the next call returns what this one did not.
        """
        loop = asyncio.get_running_loop()
        deadline = None if wait is None else loop.time() + wait
        demand = self._demand
        while True:
            await stay_cancelled()
            if self._closed:
                raise NotAvailable("this reader is closed")
            if demand.failure is not None:
                await self._reopen()
            if demand.buffer:
                frames = await self._take_buffered(limit)
                if frames:
                    return frames
                continue
            await self._replenish(0)
            if demand.exhausted and demand.failure is None:
                await self._pass_over_others()
                continue
            if deadline is not None and loop.time() >= deadline:
                return []
            await demand.wait(deadline)

    async def is_through(self, end: int) -> bool:
        """Whether every message before `end` has been taken, according to the stream's leader.

        In a cluster the consumer may run on a server that lags, where nothing seems pending.
        """
        for subjects in self._filters:
            request = {"seq": self.next_sequence, "next_by_subj": subjects}
            try:
                frame = await get_message(self._nc, self._stream, request)
            except NotAvailable as error:
                self._demand.failure = str(error)
                return False
            if frame is not None and frame.stream_seq < end:
                return False
        return True

    async def close(self) -> None:
        """Delete the consumer on the server; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._nc.remove_listener(self._on_connection_change)
        self._demand.wake()
        await self._discard()

    def _on_connection_change(self) -> None:
        self._demand.fail("connection changed")

    async def _take_buffered(self, limit: int) -> list[Frame]:
        demand, proof = self._demand, self._proof
        delivered = demand.peek(limit, proof.through)
        frames = delivered.frames
        if not frames or not await self._is_proven(proof.unproven_after(delivered)):
            demand.drop()
            return []
        await self._replenish(len(frames))
        # Nothing is awaited from here on, so a cancelled call has taken nothing.
        demand.remove(len(frames), delivered.size)
        self._caught_up = delivered.is_newest
        next_unproven = not delivered.is_newest or demand.lacked_request
        proof.take(frames[-1].stream_seq, next_unproven=next_unproven)
        if demand.failure is not None:
            demand.drop()
        return frames

    async def _is_proven(self, unproven_after: int | None) -> bool:
        """Whether it is proven that nothing was trimmed undelivered; GapError if something may be.

        Returns False if the stream's bounds cannot be read now.
        """
        if unproven_after is None:
            return True
        try:
            bounds = await self._bounds()
        except NotAvailable as error:
            self._demand.failure = str(error)
            return False
        self._proof.require_untrimmed(bounds, unproven_after)
        return True

    async def _pass_over_others(self) -> None:
        """When idle, move past messages of other subjects, so that trimming them is not a gap."""
        demand = self._demand
        try:
            bounds = await self._bounds()
            info = await self._nc.api(ApiCall.CONSUMER_INFO.of(self._stream, self._consumer))
            # A server that lags behind the leader may count too few pending messages.
            through = leader_of(info) == bounds.leader or await self.is_through(bounds.last + 1)
        except (NotAvailable, ApiError) as error:
            demand.failure = str(error)
            return
        if demand.buffer or demand.failure is not None:
            return
        demand.exhausted = False
        pending = int(info["num_pending"]) or not through
        if pending or int(info["delivered"]["consumer_seq"]) != demand.taken:
            return
        self._proof.pass_over(bounds, next_unproven=demand.lacked_request)
        demand.unrequested_from = None
        self._caught_up = True

    async def _replenish(self, taking: int) -> None:
        request = self._demand.request(taking)
        if request is None:
            return
        subject = f"{API}.{ApiCall.CONSUMER_NEXT.of(self._stream, self._consumer)}"
        try:
            await self._nc.publish(subject, request, reply=self._inbox)
        except (nats.errors.Error, OSError) as error:
            self._demand.failure = str(error)

    # the consumer on the server

    async def _bounds(self) -> StreamBounds:
        try:
            info = await self._nc.api(ApiCall.STREAM_INFO.of(self._stream))
        except ApiError as error:
            raise NotAvailable(f"stream {self._stream}: {error}") from error
        bounds = bounds_of(info)
        self._proof.require_stream(bounds)
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
                if error.err_code == STREAM_NOT_FOUND:
                    if self.created is None:
                        raise no_stream(self._stream) from error
                    gone_since = gone_since or loop.time()
                    problem = GapError(StreamBreak.GONE.value, self.next_sequence, 0)
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
        await self._demand.pause(asyncio.get_running_loop().time() + RETRY_SECONDS)

    async def _open(self) -> None:
        await self._discard()
        if not self._nc.is_connected:
            raise NotAvailable(
                f"NATS is away: {self._nc.explain(ConnectionError('no connection'))}"
            )
        self._demand.failure = None
        try:
            await self._create_consumer()
        except BaseException:
            self._demand.failure = "not opened"
            raise

    async def _create_consumer(self) -> None:
        inbox = self._nc.new_inbox()
        try:
            self._subscription = await self._nc.tap(inbox, self._demand.on_frame)
        except (nats.errors.Error, OSError) as error:
            raise NotAvailable(f"NATS does not answer: {self._nc.explain(error)}") from error
        self._inbox = inbox
        name = consumer_name(self._nc.inbox_prefix)
        config = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.next_sequence,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subjects": list(self._filters),
            "inactive_threshold": int(INACTIVE_SECONDS * _NANOSECONDS),
            "mem_storage": True,
            "num_replicas": 1,
            "headers_only": self._headers_only,
        }
        answer = await self._nc.api(
            ApiCall.CONSUMER_CREATE.of(self._stream, name),
            {"stream_name": self._stream, "config": config},
        )
        self._consumer = name
        # Read after the consumer was created: what is trimmed from now on shows as a jump.
        self._proof.begin(await self._bounds())
        self._demand.begin(self._nc.max_payload)
        self._caught_up = int(answer.get("num_pending", 1)) == 0
        if self._opened_before:
            self.reopened += 1
        self._opened_before = True

    async def _discard(self) -> None:
        self._demand.drop()
        subscription, self._subscription = self._subscription, None
        consumer, self._consumer = self._consumer, ""
        if subscription is not None:
            await self._nc.untap(subscription)
        if consumer:
            await self._nc.discard_consumer(self._stream, consumer)
