"""The consumer of the ring: batches into the stream, acknowledgements out of it.

After an error, a timeout or a reconnect nothing is assumed: the fence is renewed, so that
whatever is still under way fails, the record is read back, and publishing goes on right after it.
A stream that shows less than it has acknowledged is not written to any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bridge.errors import Retryable
from bridge.events.messages import ITEM_OVERHEAD, Item, MessageKind, OutgoingMessage
from bridge.jetstream.batches import FIRST_ERROR_CODE, Refusal
from bridge.jetstream.fence import Fenced, PublishRefused
from bridge.jetstream.record import is_counted, is_held
from bridge.publish.fenced_stream import StreamChanged
from bridge.publish.outage import ASK_CHECK, BRING_BACK, FREE_ROOM
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.holds import hold
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from bridge.jetstream.batches import Following
    from bridge.jetstream.record import StreamRecord
    from bridge.publish.fenced_stream import FencedStream
    from bridge.publish.outage import Outage
    from bridge.publish.preparation import Preparation
    from bridge.publish.progress import Confirmation
    from bridge.publish.reader import WalReader
    from bridge.publish.ring import Ring
    from bridge.telemetry.stats import BridgeStats

T = TypeVar("T")

log = logging.getLogger("bridge.publish")

IDLE_SECONDS = 1.0
KEEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one batch."""

    batch_events: int
    batch_bytes: int


@dataclass(frozen=True, slots=True)
class _Report:
    """A gap to write, or a wait to end, once everything up to a position is stored."""

    lsn: int
    gap: dict[str, object] | None
    written: asyncio.Future[None]


_TOKEN = attrgetter("token")
_EVENTS = attrgetter("events")
_KIND = attrgetter("kind")
_COUNTED_BY_SEQ = (MessageKind.CHANGE, MessageKind.COMMIT)
_END_LSN = attrgetter("end_lsn")


def _remedy(refusal: Refusal) -> str:
    """What an operator can do about it."""
    if refusal.full:
        return FREE_ROOM
    return ASK_CHECK if refusal.code >= FIRST_ERROR_CODE else BRING_BACK


def _is_plain(items: Sequence[Item]) -> bool:
    """Whether items are messages and nothing else."""
    return set(map(type, items)) == {OutgoingMessage}


class Publisher:
    """Publishes what the ring holds, and tells the confirmation what is stored."""

    def __init__(
        self,
        *,
        ring: Ring[Item],
        reader: WalReader,
        stream: FencedStream,
        confirmation: Confirmation,
        preparation: Preparation,
        outage: Outage,
        limits: Limits,
        stats: BridgeStats,
    ) -> None:
        self._ring = ring
        self._reader = reader
        self._stream = stream
        self._confirmation = confirmation
        self._preparation = preparation
        self._outage = outage
        self._limits = limits
        self._stats = stats
        self._last_keep = 0.0
        self._last_progress = 0.0
        self._batch_events = limits.batch_events
        self._reports: deque[_Report] = deque()
        self._ahead: list[Item] = []
        """The next batch, taken while the one before it was under way."""
        self._draining = False
        self._is_stuck = False
        """Whether nothing was stored since the stream was last read back."""
        self._doubt = False
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Publish until cancelled, or until `drain` finds nothing left."""
        while True:
            await stay_cancelled()
            if not self._is_pending:
                if self._draining:
                    return
                try:
                    async with asyncio.timeout(IDLE_SECONDS):
                        await self._ring.wait_for_items()
                except TimeoutError:
                    await self._rest()
                    continue
            items, self._ahead = self._ahead or self._take(), []
            await self._publish(items)
            await self._write_reports()
            if not self._is_pending:
                await self._idle()
            elif time.monotonic() - self._last_keep > KEEP_SECONDS:
                await self._keep_progress()

    @property
    def _is_pending(self) -> bool:
        """Whether anything waits to be published."""
        return bool(self._ahead) or len(self._ring) > 0

    def _take(self) -> list[Item]:
        # The ring counts what an item costs in memory, a batch what goes over the wire.
        allowance = self._batch_events * ITEM_OVERHEAD
        return self._ring.take(self._batch_events, self._limits.batch_bytes + allowance)

    def _following(self) -> Sequence[OutgoingMessage] | None:
        """The next batch, where nothing has to be done before it."""
        if any(report.gap for report in self._reports):
            return None
        if not self._ahead:
            self._ahead = self._take()
        return cast("Sequence[OutgoingMessage]", self._ahead) if _is_plain(self._ahead) else None

    def drain(self) -> None:
        """Let `run` end once the ring is empty."""
        self._draining = True

    def connection_lost(self) -> None:
        """Wait for no acknowledgement any more; what is stored is read back later."""
        self._doubt = True
        self._lost.set()
        self._stream.interrupt()

    async def _while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work; Retryable at once, not after its timeout, when the connection is lost."""
        self._lost.clear()
        task, lost = asyncio.ensure_future(work), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Retryable("the connection to NATS was lost")
        finally:
            lost.cancel()
            task.cancel()
            await asyncio.wait((task, lost))

    async def announce(self, lsn: int, source_lsn: int, gap: dict[str, object] | None) -> None:
        """Write the record of a start, with the gap that a new epoch begins with."""
        await self._record_progress(lsn, source_lsn, gap)

    async def _record_progress(
        self, lsn: int, source_lsn: int, gap: dict[str, object] | None = None
    ) -> None:
        document = self._confirmation.record(lsn, source_lsn, gap)
        await self._send([self._confirmation.message(document)])
        await self._keep(document)
        self._confirmation.note_recorded(lsn)

    async def report(self, lsn: int, gap: dict[str, object] | None) -> None:
        """Wait until everything up to `lsn` is stored, then write the gap, if there is one."""
        written = asyncio.get_running_loop().create_future()
        self._reports.append(_Report(lsn, gap, written))
        await written

    async def _write_reports(self) -> None:
        while self._reports and self._reports[0].lsn <= self._confirmation.lsn:
            report = self._reports[0]
            if report.gap is not None and self._ahead:
                # The batch ahead may be written already; the gap must come after it.
                return
            self._reports.popleft()
            if report.gap is not None:
                await self._record_progress(self._confirmation.lsn, 0, report.gap)
            if not report.written.done():
                report.written.set_result(None)

    async def _rest(self) -> None:
        """Nothing is pending: see whether NATS is connected, and record what the log tells."""
        if self._stream.is_connected:
            self._outage.reset()
            await self._idle()
            await self._write_reports()
        else:
            self._outage.note("NATS is not connected")

    async def finish(self) -> None:
        """Write the last progress record of an orderly stop."""
        await self._idle(force=True)

    async def _idle(self, *, force: bool = False) -> None:
        """Nothing is pending: record up to where the log holds nothing more for us."""
        now = time.monotonic()
        if not force and now - self._last_progress < IDLE_SECONDS:
            return
        self._stats.ring_depth = len(self._ring)
        lsn, source_lsn = self._reader.idle_lsn()
        if self._is_pending:
            return
        confirmation = self._confirmation
        if not confirmation.is_recorded(lsn):
            self._last_progress = now
            await self._record_progress(lsn, source_lsn)
            hold("after-ack-before-confirm")
            confirmation.confirm(lsn)
            self._stats.confirmed_lsn = confirmation.lsn
        elif not confirmation.is_kept:
            await self._keep_progress()

    async def _keep_progress(self) -> None:
        """Let KV know of events that are stored, so that it is never far behind the stream."""
        self._last_keep = time.monotonic()
        if not self._confirmation.is_kept:
            await self._keep(self._confirmation.record(self._confirmation.lsn))

    async def _keep(self, document: dict[str, Any]) -> None:
        with suppress(Retryable):
            await self._while_connected(self._confirmation.keep(document))

    async def _publish(self, items: Sequence[Item]) -> None:
        started = time.perf_counter_ns()
        if _is_plain(items):
            await self._send(cast("Sequence[OutgoingMessage]", items), self._following)
        else:
            await self._send(
                [await self._preparation.message(item) for item in items], self._following
            )
        self._stats.last_processing_time_us = (time.perf_counter_ns() - started) // 1000
        self._stats.ring_depth = len(self._ring)
        self._stats.ring_bytes = self._ring.bytes_held

    async def _send(
        self, chunk: Sequence[OutgoingMessage], following: Following | None = None
    ) -> None:
        """Store a chunk, however many attempts it takes; returns when all of it is stored.

        Where `following` is given, what it gave last is the next chunk to be sent.
        """
        while chunk:
            if self._doubt:
                chunk = await self._recover(Refusal(0, "the connection to NATS was lost"), chunk)
                continue
            outcome = await self._stream.send(chunk, following)
            if outcome.stored:
                self._acknowledged(chunk[: outcome.stored], outcome.last_seq)
                chunk = chunk[outcome.stored :]
            refusal = outcome.refusal
            if refusal is None:
                self._batch_events = min(self._batch_events * 2, self._limits.batch_events)
            elif refusal.interleaved:
                # Another source wrote in between: smaller batches meet it less often.
                self._batch_events = max(8, outcome.stored)
                chunk = await self._after_interleaved(refusal, chunk)
            else:
                chunk = await self._recover(refusal, chunk)

    async def _after_interleaved(
        self, refusal: Refusal, chunk: Sequence[OutgoingMessage]
    ) -> Sequence[OutgoingMessage]:
        """Go on after a message of another source, unless a stale bridge of ours wrote it."""
        following = next((item for item in chunk if is_counted(item)), None)
        if following is not None:
            try:
                if not await self._stream.holds(following):
                    return chunk
            except Retryable as error:
                refusal = Refusal(0, str(error))
        return await self._recover(refusal, chunk)

    def _acknowledged(self, items: Sequence[OutgoingMessage], last_seq: int) -> None:
        stats = self._stats
        self._is_stuck = False
        hold("after-ack-before-confirm")
        events = sum(map(_EVENTS, items))
        tokens = set(map(_TOKEN, items))
        if len(tokens) > 1:
            for item in items:
                if item.events and item.transaction is not None:
                    self._count(item.token, item.events, item.transaction.ts)
        elif events:
            latest = next(i.transaction for i in reversed(items) if i.events)
            assert latest is not None
            self._count(items[0].token, events, latest.ts)
        end_lsn = 0
        now = time.time()
        for item in filter(_END_LSN, items):
            assert item.end_lsn is not None
            assert item.transaction is not None
            end_lsn = item.end_lsn
            stats.transactions_published += 1
            stats.observe_latency(max(0.0, now - item.transaction.ts / 1e6))
        if events:
            stats.cdc_events_published += events
            stats.observe_batch(events)
        change = next((item for item in reversed(items) if item.kind in _COUNTED_BY_SEQ), None)
        logical = None
        if MessageKind.LOGICAL in map(_KIND, items):
            logical = next(i for i in reversed(items) if i.kind is MessageKind.LOGICAL)
        newest = [item for item in (change, logical) if item is not None]
        self._confirmation.acknowledge(newest, end_lsn)
        if last_seq:
            self._confirmation.note_end(last_seq, items[-1].msg_id.decode())
        if end_lsn:
            stats.confirmed_lsn = self._confirmation.lsn
        self._outage.end()

    def _count(self, token: str, rows: int, ts: int) -> None:
        """Count stored events of one table, or of one prefix of logical messages."""
        table = self._stats.table(token)
        table.events += rows
        table.last_ts = ts

    async def _recover(
        self, refusal: Refusal, chunk: Sequence[OutgoingMessage]
    ) -> Sequence[OutgoingMessage]:
        """Find out what the stream holds of a chunk, and return the rest of it."""
        event(log, "publishing interrupted", reason=refusal.text)
        # The stream may refuse for ever what it refuses twice.
        at_once = not refusal.full and not (refusal.code and self._is_stuck)
        while True:
            await stay_cancelled()
            if not at_once or not self._stream.is_connected:
                await self._outage.wait(refusal.text, _remedy(refusal))
            at_once = self._doubt = False
            try:
                record = await self._while_connected(self._read_back())
            except PublishRefused as error:
                refusal = Refusal(error.code, str(error))
            except StreamChanged:
                raise
            except Retryable as error:
                refusal = Refusal(0, str(error))
                at_once = self._doubt
                if not self._doubt:
                    await self._stream.require_unchanged()
            else:
                if not self._doubt:
                    break
        stored = 0
        for place, item in enumerate(chunk, start=1):
            # A schema message is outside the count: when what follows it is stored, so is it.
            if item.msg_id in record.newest_ids or (is_counted(item) and is_held(item, record)):
                stored = place
            elif is_counted(item):
                break
        self._is_stuck = True
        if stored:
            self._acknowledged(chunk[:stored], 0)
        self._confirmation.note_end(self._stream.fence_seq, self._stream.fence_id)
        event(log, "publishing resumed", stored=stored, again=len(chunk) - stored)
        return chunk[stored:]

    async def _read_back(self) -> StreamRecord:
        """Renew the fence and read what is stored; StreamChanged if it is less than it was."""
        known = self._confirmation.record(self._confirmation.lsn)
        record = await self._stream.read_back(known)
        if record.epoch != known["epoch"]:
            raise Fenced("another bridge has begun a new epoch")
        return record
