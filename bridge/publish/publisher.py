"""The consumer of the ring: publishes batches and processes their acknowledgements.

After an error, a timeout or a reconnect the publisher does not know which messages are stored. It
renews the fence, so that messages still in flight are refused. Then it reads the record back and
continues with the first message that is not stored. It stops writing to a stream that no longer
holds a message it has acknowledged.
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
from bridge.jetstream.record import has_position, is_recorded
from bridge.publish.fenced_stream import StreamChanged
from bridge.publish.outage import FREE_SPACE, RESTORE_NATS, RUN_CHECK
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.holds import hold
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from bridge.jetstream.batches import NextBatch
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
    """A gap to write once everything up to a position is stored; without a gap, only the wait."""

    lsn: int
    gap: dict[str, object] | None
    written: asyncio.Future[None]


_TOKEN = attrgetter("token")
_EVENTS = attrgetter("events")
_KIND = attrgetter("kind")
_COUNTED_BY_SEQ = (MessageKind.CHANGE, MessageKind.COMMIT)
_END_LSN = attrgetter("end_lsn")


def _remedy(refusal: Refusal) -> str:
    """What the operator can do about a refusal."""
    if refusal.full:
        return FREE_SPACE
    if refusal.code is None or refusal.code < FIRST_ERROR_CODE:
        return RESTORE_NATS
    return RUN_CHECK


def _is_plain(items: Sequence[Item]) -> bool:
    """Whether all items are messages, so that nothing must be stored before them."""
    return set(map(type, items)) == {OutgoingMessage}


class Publisher:
    """Publishes the items of the ring and updates the confirmation when they are stored."""

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
        self._published_items = 0
        self._last_keep = 0.0
        self._last_progress = 0.0
        self._batch_events = limits.batch_events
        self._reports: deque[_Report] = deque()
        self._ahead: list[Item] = []
        """The next batch, taken from the ring while the batch before it was in flight."""
        self._draining = False
        self._is_stuck = False
        """Whether nothing was stored since the stream was last read back."""
        self._must_read_back = False
        """Whether the connection was lost, so that it is not known which messages are stored."""
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
                    await self._on_idle_timeout()
                    continue
            items, self._ahead = self._ahead or self._take(), []
            await self._publish(items)
            await self._write_reports()
            if not self._is_pending:
                await self._record_idle_position()
            elif time.monotonic() - self._last_keep > KEEP_SECONDS:
                await self._keep_progress()

    @property
    def _is_pending(self) -> bool:
        """Whether anything waits to be published."""
        return bool(self._ahead) or len(self._ring) > 0

    def _take(self) -> list[Item]:
        # The ring counts the memory of an item, a batch only its bytes on the wire.
        allowance = self._batch_events * ITEM_OVERHEAD
        return self._ring.take(self._batch_events, self._limits.batch_bytes + allowance)

    def _next_batch(self) -> Sequence[OutgoingMessage] | None:
        """The next batch; None if something must be stored or written before it."""
        if any(report.gap for report in self._reports):
            return None
        if not self._ahead:
            self._ahead = self._take()
        return cast("Sequence[OutgoingMessage]", self._ahead) if _is_plain(self._ahead) else None

    def drain(self) -> None:
        """Let `run` end once the ring is empty."""
        self._draining = True

    def connection_lost(self) -> None:
        """Stop waiting for acknowledgements; the record is read back after the reconnect."""
        self._must_read_back = True
        self._lost.set()
        self._stream.interrupt()

    async def _while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work; raise Retryable as soon as the connection is lost, before any timeout."""
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
        """Write the progress record of a start, with the gap if a new epoch begins."""
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
                # The next batch may already be in flight; the gap must come after it.
                return
            self._reports.popleft()
            if report.gap is not None:
                await self._record_progress(self._confirmation.lsn, 0, report.gap)
            if not report.written.done():
                report.written.set_result(None)

    async def _on_idle_timeout(self) -> None:
        """Nothing was pending for a while: check the connection and write what is due."""
        if self._stream.is_connected:
            self._outage.reset()
            await self._record_idle_position()
            await self._write_reports()
        else:
            self._outage.note("NATS is not connected")

    async def finish(self) -> None:
        """Write the last progress record of an orderly stop."""
        await self._record_idle_position(force=True)

    async def _record_idle_position(self, *, force: bool = False) -> None:
        """Nothing is pending: record the position that the log reached without a new change."""
        now = time.monotonic()
        if not force and now - self._last_progress < IDLE_SECONDS:
            return
        self._stats.ring_depth = len(self._ring)
        lsn, source_lsn = self._reader.idle_lsn, self._reader.received_lsn
        if self._is_pending:
            return
        confirmation = self._confirmation
        if lsn is not None and not confirmation.is_recorded(lsn):
            self._last_progress = now
            await self._record_progress(lsn, source_lsn)
            hold("after-ack-before-confirm")
            confirmation.confirm(lsn)
            self._stats.confirmed_lsn = confirmation.lsn
        elif not confirmation.is_kept:
            await self._keep_progress()

    async def _keep_progress(self) -> None:
        """Keep the confirmed position in KV, so that KV is never far behind the stream."""
        self._last_keep = time.monotonic()
        if not self._confirmation.is_kept:
            await self._keep(self._confirmation.record(self._confirmation.lsn))

    async def _keep(self, document: dict[str, Any]) -> None:
        with suppress(Retryable):
            await self._while_connected(self._confirmation.keep(document))

    async def _publish(self, items: Sequence[Item]) -> None:
        received_ns = self._reader.received_ns(self._published_items + 1)
        if _is_plain(items):
            await self._send(cast("Sequence[OutgoingMessage]", items), self._next_batch)
        else:
            await self._send(
                [await self._preparation.message(item) for item in items], self._next_batch
            )
        self._published_items += len(items)
        self._stats.last_processing_time_us = (time.perf_counter_ns() - received_ns) // 1000
        self._stats.ring_depth = len(self._ring)
        self._stats.ring_bytes = self._ring.bytes_held

    async def _send(
        self, chunk: Sequence[OutgoingMessage], next_batch: NextBatch | None = None
    ) -> None:
        """Send a chunk again and again until all of it is stored.

        If `next_batch` is given, the batch that it returned last must be sent next.
        """
        while chunk:
            if self._must_read_back:
                chunk = await self._recover(Refusal("the connection to NATS was lost"), chunk)
                continue
            outcome = await self._stream.send(chunk, next_batch)
            if outcome.stored:
                self._acknowledged(chunk[: outcome.stored], outcome.last_seq)
                chunk = chunk[outcome.stored :]
            refusal = outcome.refusal
            if refusal is None:
                self._batch_events = min(self._batch_events * 2, self._limits.batch_events)
            elif refusal.interleaved:
                # Smaller batches are interleaved with messages of another source less often.
                self._batch_events = max(8, outcome.stored)
                chunk = await self._after_interleaved(refusal, chunk)
            else:
                chunk = await self._recover(refusal, chunk)

    async def _after_interleaved(
        self, refusal: Refusal, chunk: Sequence[OutgoingMessage]
    ) -> Sequence[OutgoingMessage]:
        """Continue after a message of another source, but recover if a stale bridge wrote it."""
        first = next((item for item in chunk if has_position(item)), None)
        if first is not None:
            try:
                if not await self._stream.holds(first):
                    return chunk
            except Retryable as error:
                refusal = Refusal(str(error))
        return await self._recover(refusal, chunk)

    def _acknowledged(self, items: Sequence[OutgoingMessage], last_seq: int | None) -> None:
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
        if last_seq is not None:
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
        """Find out which messages of a chunk are stored, and return the others."""
        event(log, "publishing interrupted", reason=refusal.text)
        # A stream that refuses a message twice may refuse it for ever: wait before the next try.
        at_once = not refusal.full and not (refusal.code is not None and self._is_stuck)
        while True:
            await stay_cancelled()
            if not at_once or not self._stream.is_connected:
                await self._outage.wait(refusal.text, _remedy(refusal))
            at_once = self._must_read_back = False
            try:
                record = await self._while_connected(self._read_back())
            except PublishRefused as error:
                refusal = Refusal(str(error), error.code)
            except StreamChanged:
                raise
            except Retryable as error:
                refusal = Refusal(str(error))
                at_once = self._must_read_back
                if not self._must_read_back:
                    await self._stream.require_unchanged()
            else:
                if not self._must_read_back:
                    break
        stored = 0
        for place, item in enumerate(chunk, start=1):
            # A schema message has no position; it is stored if a message after it is stored.
            if item.msg_id in record.newest_ids or (
                has_position(item) and is_recorded(item, record)
            ):
                stored = place
            elif has_position(item):
                break
        self._is_stuck = True
        if stored:
            self._acknowledged(chunk[:stored], None)
        self._confirmation.note_end(self._stream.fence_seq, self._stream.fence_id)
        event(log, "publishing resumed", stored=stored, again=len(chunk) - stored)
        return chunk[stored:]

    async def _read_back(self) -> StreamRecord:
        """Renew the fence and read the record; StreamChanged if an acknowledged message is gone."""
        known = self._confirmation.record(self._confirmation.lsn)
        record = await self._stream.read_back(known)
        if record.epoch != known["epoch"]:
            raise Fenced("another bridge has begun a new epoch")
        return record
