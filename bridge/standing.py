"""What slot and stream say of each other when a session begins, and what follows from it."""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import APIError

from bridge.errors import DataAtRiskError, Retryable
from bridge.events.resume import Resume
from bridge.jetstream.fence import Fence, PublishRefused
from bridge.jetstream.readback import RecordReader
from bridge.jetstream.record import load_progress
from bridge.jetstream.streams import stream_state
from bridge.publish.continuity import Continuity, decide
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.jetstream.broker import Broker
    from bridge.jetstream.record import Record
    from bridge.jetstream.streams import StreamState
    from bridge.postgres.slot import Server, Slot
    from consumer_sdk.wire.subjects import Subjects

log = logging.getLogger("bridge.session")


@dataclass(frozen=True, slots=True)
class Standing:
    """What was found on both sides; the fence is taken."""

    server: Server
    slot_lsn: int
    stream: StreamState
    fence: Fence
    records: RecordReader
    record: Record

    async def decide(
        self, publication: str, *, slot_made_at: int | None, known_gap: str | None
    ) -> Continuity:
        """Whether history goes on, and after what; `known_gap` was met while reading before."""
        stream, ended_at = self.stream, (self.record.progress or {}).get("stream_seq")
        tail_id = None
        if isinstance(ended_at, int):
            tail_id = await self.records.message_id_at(ended_at)
        decision = decide(
            self.record,
            self.server,
            publication=publication,
            slot_lsn=self.slot_lsn,
            stream_created_us=stream.created_us,
            stream_last_seq=max(stream.last_seq, self.fence.sequence),
            tail_id=tail_id,
            is_new_slot=self.slot_lsn == slot_made_at,
        )
        if known_gap is not None and decision.gap is None:
            return Continuity(Resume(), gap=known_gap)
        return decision


async def look_around(
    broker: Broker,
    subjects: Subjects,
    slot: Slot,
    server: Server,
    is_foreign: Callable[[str], bool],
    *,
    source: str,
    as_json: bool,
) -> Standing:
    """Take the fence, and read what slot and stream say of each other.

    `is_foreign` knows the tables of other sources, whose messages tell nothing of this one.
    """
    slot_lsn = await slot.position()
    stream = await stream_state(broker.client, subjects.cdc_stream)
    if stream is None:
        raise Retryable(f"stream {subjects.cdc_stream} has gone; it is created again")
    instance = secrets.token_hex(8)
    fence = Fence(
        broker.client,
        stream=stream.name,
        subject=subjects.fence(source),
        source=source,
        instance=instance,
        as_json=as_json,
        batched=bool(stream.config.get("allow_batched")),
    )
    try:
        records = RecordReader(broker.client, subjects, source, is_foreign, broker.dictionaries)
        kept = await load_progress(broker.bridge, source)
        record = await records.read(await fence.take(), kept)
    except PublishRefused as error:
        raise Retryable(f"the CDC stream takes no messages: {error}") from error
    except (TimeoutError, nats.errors.Error, APIError) as error:
        raise Retryable(f"the record cannot be read: {error}") from error
    return Standing(server, slot_lsn, stream, fence, records, record)


def choose_epoch(source: str, record: Record, decision: Continuity, *, may_begin_anew: bool) -> int:
    """The epoch to go on with; DataAtRiskError where a new one would be needed and may not be."""
    if decision.first:
        return int(time.time())
    if decision.gap is None:
        return record.epoch
    if not may_begin_anew:
        raise DataAtRiskError(
            f"continuity of source {source} is lost: {decision.gap}; start with "
            "--on-gap=new-epoch to go on, consumers will bootstrap again"
        )
    event(log, "new epoch", level=logging.WARNING, reason=decision.gap)
    return max(int(time.time()), record.epoch + 1)
