"""Where streaming resumes: slot, server and stream are compared after the fence is taken."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import nats.errors
from nats.js.errors import APIError

from bridge.errors import DataAtRiskError, Retryable
from bridge.events.resume import Resume
from bridge.jetstream.record import load_progress
from bridge.publish.continuity import Continuity, decide
from bridge.publish.fenced_stream import FencedStream
from bridge.publish.progress import Confirmation, ProgressLog, StoredUpTo
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.js.kv import KeyValue

    from bridge.config import Settings
    from bridge.jetstream.broker import Broker
    from bridge.jetstream.record import StreamRecord
    from bridge.postgres.connection import Server
    from bridge.postgres.slot import Slot
    from bridge.source import Source

log = logging.getLogger("bridge.streaming")


@dataclass(slots=True)
class StartFacts:
    """What earlier failed attempts to start have found; cleared once an attempt streams."""

    gap: str | None = None
    """Why continuity is lost, if reading the log has shown it."""
    gap_epoch: int = 0
    """The epoch that this gap ends; once the stream holds a later one, the gap is announced."""
    slot_created_at: int | None = None
    """The position of the slot if this bridge created it."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The source's record in the stream, and the decision how streaming continues."""

    server: Server
    slot_lsn: int
    slot_created_at: int | None
    """Position of the slot when this bridge created it, if it did."""
    stream: FencedStream
    record: StreamRecord
    continuity: Continuity

    @classmethod
    async def find(
        cls,
        broker: Broker,
        settings: Settings,
        slot: Slot,
        server: Server,
        is_foreign: Callable[[str], bool],
        facts: StartFacts,
    ) -> Self:
        """Take the fence, read the record and decide; the caller must close the stream.

        `is_foreign` tells whether a table belongs to another source; its messages are skipped.
        """
        slot_lsn = await slot.position()
        try:
            kept = await load_progress(broker.bridge, settings.slot)
        except (TimeoutError, nats.errors.Error, APIError) as error:
            raise Retryable(f"the record cannot be read: {error}") from error
        stream = await FencedStream.take(broker, settings, is_foreign)
        try:
            record = await stream.read(kept)
            continuity = decide(
                record,
                server,
                publication=settings.pub,
                slot_lsn=slot_lsn,
                stream_created_us=stream.state.created_us,
                stream_last_seq=stream.last_seq,
                tail_id=await stream.tail_id(record),
                is_new_slot=slot_lsn == facts.slot_created_at,
            )
        except BaseException:
            await stream.close()
            raise
        is_announced = record.epoch > facts.gap_epoch
        if facts.gap is not None and not is_announced and continuity.gap is None:
            continuity = Continuity(Resume(), gap=facts.gap)
        return cls(server, slot_lsn, facts.slot_created_at, stream, record, continuity)

    def choose_epoch(self, source: str, *, may_begin_new: bool) -> int:
        """The epoch to stream in; DataAtRiskError if a new one is needed but not permitted."""
        gap = self.continuity.gap
        if self.continuity.first:
            return int(time.time())
        if gap is None:
            return self.record.epoch
        if not may_begin_new:
            raise DataAtRiskError(
                f"continuity of source {source} is lost: {gap}; start with "
                "--on-gap=new-epoch to go on, consumers will bootstrap again"
            )
        event(log, "new epoch", level=logging.WARNING, reason=gap)
        return max(int(time.time()), self.record.epoch + 1)

    def confirmation(self, bucket: KeyValue, source: Source) -> Confirmation:
        """The confirmation at the start; the slot's position is confirmed."""
        stream, record = self.stream, self.record
        stored = StoredUpTo(stream.fence_seq, stream.fence_id)
        if self.continuity.continues:
            stored = replace(
                stored, commit_lsn=record.commit_lsn, next_seq=record.next_seq,
                next_ordinal=record.next_ordinal, ts=record.ts,
            )  # fmt: skip
        progress = ProgressLog(bucket, source, self.server, stream.state.created_us)
        return Confirmation(progress, stored, self.slot_lsn)

    @property
    def known_lsn(self) -> int:
        """Every change that ends at or before this is stored, or belongs to an earlier epoch."""
        if self.continuity.continues:
            return max(self.record.proven_lsn, self.slot_lsn)
        return self.slot_lsn

    @property
    def gap(self) -> dict[str, object] | None:
        """The gap to announce in the stream at the start, if there is one."""
        if self.continuity.gap is None:
            return None
        return {
            "reason": self.continuity.gap,
            "previous_epoch": self.record.epoch,
            "previous_lsn": self.record.recorded_lsn,
            "resumes_at": self.slot_lsn,
        }
