"""Decides at every start whether the source continues without a gap; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.events.resume import Resume
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from bridge.jetstream.record import StreamRecord
    from bridge.postgres.connection import Server


@dataclass(frozen=True, slots=True)
class Continuity:
    """The decision: the position to resume after, or the reason for a gap."""

    resume: Resume
    gap: str | None = None
    first: bool = False

    @property
    def continues(self) -> bool:
        """Whether streaming continues where the stream's record ends."""
        return self.gap is None and not self.first


def decide(
    record: StreamRecord,
    server: Server,
    *,
    publication: str,
    slot_lsn: int,
    stream_created_us: int,
    stream_last_seq: int,
    tail_id: str | None = None,
    is_new_slot: bool = False,
) -> Continuity:
    """Compare the record with slot, server and stream.

    If nothing is recorded, the first epoch begins at the slot's position. If the slot is at or
    before the record, streaming continues and skips what is recorded. Anything else is a gap.
    `tail_id` is the id of the message at the sequence where the stream ended according to the
    progress record; None if the stream no longer holds that message.
    """
    progress = record.progress
    if progress is None and not record.epoch:
        return Continuity(Resume(), first=True)
    recorded = record.recorded_lsn
    gap = None
    if progress is not None:
        gap = _compare_progress(progress, server, stream_created_us, stream_last_seq, recorded)
        changed = progress.get("publication") not in (None, publication)
        if gap is None and changed and slot_lsn < recorded:
            gap = (
                f"the publication changed from {progress['publication']!r} to {publication!r} "
                "while recorded changes were not yet confirmed"
            )
    if gap is None and slot_lsn > recorded:
        found = "the slot was gone and a new one" if is_new_slot else "the slot"
        gap = (
            f"{found} stands at {format_lsn(slot_lsn)}, "
            f"the stream records only up to {format_lsn(recorded)}"
        )
    if gap is None and server.flushed_lsn < recorded:
        gap = (
            f"PostgreSQL has written up to {format_lsn(server.flushed_lsn)}, "
            f"the stream records up to {format_lsn(recorded)} (restored from a backup?)"
        )
    if gap is None and progress is not None and tail_id is not None:
        ended = progress.get("stream_msg_id")
        if ended not in (None, tail_id):
            gap = f"message {progress['stream_seq']} of the CDC stream is not the one stored there"
    if gap is not None:
        return Continuity(Resume(), gap=gap)
    return Continuity(
        Resume(
            record.commit_lsn,
            record.next_seq,
            record.next_ordinal,
            record.ts,
            must_reappear=bool(record.commit_lsn) and slot_lsn <= record.commit_lsn,
            nothing_before=record.progress_lsn if "position" in (progress or {}) else 0,
        )
    )


def _compare_progress(
    progress: dict[str, object],
    server: Server,
    stream_created_us: int,
    stream_last_seq: int,
    recorded: int,
) -> str | None:
    if progress.get("system_id") not in (None, server.system_id):
        return f"another PostgreSQL system: {server.system_id}, was {progress['system_id']}"
    if progress.get("database") not in (None, server.database):
        return f"another database: {server.database!r}, was {progress['database']!r}"
    created = progress.get("stream_created")
    if created not in (None, stream_created_us):
        return "the CDC stream was deleted and created again"
    held = progress.get("stream_seq")
    if isinstance(held, int) and stream_last_seq < held:
        return f"the CDC stream ends at {stream_last_seq}, it had reached {held}"
    timeline = progress.get("timeline")
    if isinstance(timeline, int) and timeline != server.timeline:
        left = server.forks.get(timeline)
        if left is None:
            return f"timeline {server.timeline} does not descend from timeline {timeline}"
        if left < recorded:
            return (
                f"timeline {timeline} was left at {format_lsn(left)}, "
                f"the stream records up to {format_lsn(recorded)}"
            )
    return None
