"""Copies of large tables in groups of key ranges, each with an export of its own.

An export holds back vacuum, and is lost with its session. So a table that would take longer than
`--snapshot-export-limit` is copied in the order of its key, one group of ranges after the other.
What is stored of a finished group stays. Only the group under way is copied again after a restart,
a takeover or an outage, by a new attempt.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec

from bridge.errors import SnapshotError
from bridge.snapshot.coordinator.records import Group
from bridge.snapshot.keys import KeyRange
from bridge.snapshot.tables import PIECE_BYTES, Piece
from consumer_sdk.wire.checksums import sha256_hex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.snapshot.coordinator.jobs import ConsistentPoint, SnapshotJob
    from bridge.snapshot.coordinator.records import DivisionRecord
    from bridge.snapshot.coordinator.store import SnapshotStore
    from bridge.snapshot.keys import Key
    from bridge.snapshot.tables import HeapSize, TableDescription

DEFAULT_BYTES_PER_SECOND: Final = 10e6
"""A cautious guess, as long as nothing was measured."""
MEASURABLE_BYTES: Final = PIECE_BYTES
UNKNOWN_ROW_BYTES: Final = PIECE_BYTES // 1000
# A group gets no more pieces after this share of the limit, so that its last piece is in time too.
SHARE_OF_LIMIT: Final = 0.5
PIECES_PER_LIMIT: Final = 8
LONGEST_PIECE_SECONDS: Final = 10.0
MOST_PIECE_ROWS: Final = 2_000_000
MOST_GROWTH: Final = 4
# A worker may need so long to begin on a busy machine, whatever the limit.
LEAST_GROUP_SECONDS: Final = 30.0
MOST_DOUBLINGS: Final = 4
MOST_FAILURES: Final = 8
LONGEST_PAUSE_SECONDS: Final = 30.0


class GroupInterrupted(SnapshotError):
    """NATS was away, or the group took too long: another attempt may succeed."""


class CannotGoOn(SnapshotError):
    """What is stored of the snapshot is of no more use; a new request begins a new one."""


class CopySpeed:
    """How fast tables are copied here, in bytes of the table."""

    def __init__(self) -> None:
        self._bytes_per_second = DEFAULT_BYTES_PER_SECOND

    def note(self, sizes: Sequence[HeapSize], seconds: float) -> None:
        """Learn from a copy, unless it was too small to tell."""
        total = sum(size.total_bytes for size in sizes)
        if total >= MEASURABLE_BYTES:
            self._bytes_per_second = max(1.0, total / max(seconds, 0.001))

    def seconds(self, sizes: Sequence[HeapSize]) -> float:
        """How long a copy will take."""
        return sum(size.total_bytes for size in sizes) / self._bytes_per_second


@dataclass(slots=True)
class Attempt:
    """One attempt at a group, under one export."""

    point: ConsistentPoint
    next_start: Key | None
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    began_at: float = field(default_factory=time.monotonic)
    cutting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from the moment a worker is given a piece until it has reported where the piece ends."""
    cutter: int | None = None
    pieces: int = 0
    is_exhausted: bool = False
    given: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The size of each worker's piece, and when it was given."""


@dataclass(slots=True)
class Division:
    """The groups of one snapshot: those that are stored, and the attempt under way."""

    record: DivisionRecord
    limit: float
    least_rows: int
    piece_rows: int
    attempt: Attempt | None = None
    failures: int = 0
    """Attempts in a row that failed for another reason than NATS."""
    has_remains: bool = False
    """Whether INIT may hold chunks of an attempt that was not finished."""

    @property
    def number(self) -> int:
        """The number of the group under way, from 1."""
        return len(self.record.groups) + 1

    @property
    def seconds_left(self) -> float:
        """How long the export of this attempt may still be held."""
        assert self.attempt is not None
        doubled = 1 << min(self.failures, MOST_DOUBLINGS)
        longest = max(self.limit, LEAST_GROUP_SECONDS) * doubled
        return self.attempt.began_at + longest - time.monotonic()

    def begin(self, point: ConsistentPoint) -> None:
        """Begin an attempt at the next group."""
        self.attempt = Attempt(point, self.record.start)
        self.has_remains = True

    async def next_piece(self, description: TableDescription, worker: int) -> Piece | None:
        """The next piece for a worker; None if the group is over."""
        attempt = self.attempt
        assert attempt is not None
        self._learn(attempt, worker)
        await attempt.cutting.acquire()
        is_late = time.monotonic() - attempt.began_at >= self.limit * SHARE_OF_LIMIT
        if attempt.is_exhausted or (is_late and attempt.pieces):
            attempt.cutting.release()
            return None
        attempt.cutter = worker
        attempt.given[worker] = (self.piece_rows, time.monotonic())
        start = attempt.next_start
        keys = KeyRange(description.key, () if start is None else ((">=", start),))
        return Piece(None, keys=keys, rows=self.piece_rows)

    def note_cut(self, worker: int, end: Key | None) -> None:
        """The piece of this worker ends here; the next one starts here."""
        attempt = self.attempt
        assert attempt is not None
        attempt.next_start = end
        attempt.is_exhausted = end is None
        attempt.pieces += 1
        self._release(attempt, worker)

    def note_failed(self, worker: int) -> None:
        """The worker has given up; no other one may wait for it."""
        assert self.attempt is not None
        self.attempt.is_exhausted = True
        self._release(self.attempt, worker)

    def _release(self, attempt: Attempt, worker: int) -> None:
        if attempt.cutter == worker:
            attempt.cutter = None
            attempt.cutting.release()

    def _learn(self, attempt: Attempt, worker: int) -> None:
        """Make pieces of such a size that each takes a small part of the limit."""
        rows, began_at = attempt.given.pop(worker, (0, 0.0))
        if rows:
            seconds = max(time.monotonic() - began_at, 0.001)
            target = min(LONGEST_PIECE_SECONDS, self.limit / PIECES_PER_LIMIT)
            wanted = int(rows * min(target / seconds, MOST_GROWTH))
            self.piece_rows = max(self.least_rows, min(wanted, MOST_PIECE_ROWS))

    def shrink(self) -> None:
        """Use smaller pieces, after an attempt whose pieces took too long."""
        if self.attempt is not None and self.attempt.pieces:
            self.least_rows = self.piece_rows = max(1, self.piece_rows // 2)


def is_divisible(
    job: SnapshotJob, description: TableDescription, seconds: float, limit: float
) -> bool:
    """Whether a table is to be copied in groups, given how long one export would take."""
    options = job.options
    if not options.pieces or options.where is not None or not description.key or seconds <= limit:
        return False
    # Without its key, a reader could not tell which row a replayed change is about.
    copied = {column.name for column in description.columns}
    return copied.issuperset(column.name for column in description.key)


def divide(
    record: DivisionRecord, sizes: Sequence[HeapSize], limit: float, chunk_rows: int
) -> Division:
    """Begin, or go on with, a division; the first pieces are small."""
    rows = sum(size.rows_estimate for size in sizes)
    total = sum(size.total_bytes for size in sizes)
    row_bytes = max(total / rows, 1.0) if rows else UNKNOWN_ROW_BYTES
    least = max(1, min(chunk_rows, int(PIECE_BYTES / row_bytes)))
    return Division(record, limit, least, least)


def fingerprint(description: TableDescription) -> str:
    """Equal for equal descriptions, also in another process."""
    return sha256_hex(msgspec.json.encode(description))


class GroupKeeper:
    """Keeps stored chunks, record and job in step, group by group."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store

    async def prepare(self, job: SnapshotJob) -> None:
        """Remove what an unfinished attempt left, so that the next one can store its chunks.

        CannotGoOn if what is stored cannot be used any more, Overtaken if another bridge has it.
        """
        assert job.division is not None
        division = job.division
        record = division.record
        if record.groups:
            state = await self._store.cdc_now()
            if state is None or state.created_us != record.stream_created_us:
                raise CannotGoOn("the CDC stream was deleted or created again; ask again")
            if state.first_seq > record.cdc_seq:
                raise CannotGoOn(
                    "the CDC stream no longer holds the changes since the snapshot began; keep "
                    "them longer, or raise --snapshot-export-limit; ask again"
                )
        if not division.has_remains:
            return
        # Nothing may be removed from a snapshot that another bridge goes on with.
        await self._store.records.update(job)
        stored = await self._store.stored_chunks(job)
        kept = {number: digests for number, digests in stored.items() if number < record.next_chunk}
        if len(kept) != record.next_chunk or any(len(one) != 1 for one in kept.values()):
            raise CannotGoOn(
                f"the stream holds {len(kept)} of the {record.next_chunk} chunks that were stored; "
                "look at its limits and ask again"
            )
        job.reset_chunks({number: one[0] for number, one in kept.items()}, record.rows)
        await self._store.remove_chunks(job, sorted(stored.keys() - kept.keys()))
        await self._store.remove_objects(job, {group.attempt for group in record.groups})
        division.attempt = None
        division.has_remains = False

    async def finish(self, job: SnapshotJob) -> None:
        """Record the group that was copied; from now on its chunks stay."""
        assert job.division is not None
        division = job.division
        record, attempt = division.record, division.attempt
        assert attempt is not None
        if not job.is_copied or attempt.cutter is not None:
            raise SnapshotError("a snapshot worker ended before its group was copied")
        group = Group(attempt.point.snapshot_lsn, record.next_chunk, job.next_chunk, attempt.name)
        first = not record.groups
        division.record = replace(
            record,
            cdc_seq=attempt.point.cdc_seq if first else record.cdc_seq,
            stream_created_us=(
                attempt.point.stream_created_us if first else record.stream_created_us
            ),
            schema_version=job.schema_document["schema_version"],
            groups=(*record.groups, group),
            rows=job.rows,
            start=attempt.next_start,
            is_done=attempt.is_exhausted,
        )
        try:
            await self._store.records.update(job)
        except BaseException:
            division.record = record
            raise
        division.attempt = None
        division.has_remains = False
        division.failures = 0
        job.attempts = 0
