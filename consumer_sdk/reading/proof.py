"""Whether a stream still continues where a reader stopped; no other module decides this.

`find_break` compares a sequence with the bounds of the stream. `Proof` serves a running reader: it
needs the bounds only where the deliveries do not prove that no message was trimmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from consumer_sdk.errors import GapError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.reading.demand import Delivered
    from consumer_sdk.transport.api import StreamBounds


class StreamBreak(Enum):
    """Why a stream does not continue at a sequence; the value is the reason that users read."""

    RECREATED = "the stream was recreated"
    ENDS_BEFORE = "the stream ends before it"
    TRIMMED = "it was trimmed or purged"
    GONE = "the stream is gone"


def find_break(
    bounds: StreamBounds, next_sequence: int, created: int | None = None
) -> StreamBreak | None:
    """Why a reader that starts at `next_sequence` would miss messages; None if it misses none.

    `created` is the creation time of the stream that the sequence belongs to; None accepts any
    stream.
    """
    if created is not None and bounds.created != created:
        return StreamBreak.RECREATED
    if bounds.last < next_sequence - 1:
        return StreamBreak.ENDS_BEFORE
    if bounds.first > next_sequence:
        return StreamBreak.TRIMMED
    return None


def require_same_stream(bounds: StreamBounds, next_sequence: int, created: int | None) -> None:
    """Raise GapError if the stream is not the one created at `created`; None accepts any."""
    if find_break(bounds, next_sequence, created) is StreamBreak.RECREATED:
        raise GapError(StreamBreak.RECREATED.value, next_sequence, bounds.first)


def require_continuation(
    bounds: StreamBounds, next_sequence: int, created: int | None = None
) -> None:
    """Raise GapError if `find_break` finds a break."""
    found = find_break(bounds, next_sequence, created)
    if found is not None:
        raise GapError(found.value, next_sequence, bounds.first)


class Trimming(Enum):
    """How a reader treats messages that were trimmed before they were delivered."""

    IS_A_GAP = "is a gap"
    ALLOWED_BEFORE_FIRST = "allowed before first"
    """The first message may be a later one than requested; after it, trimming is a gap."""
    ALLOWED = "allowed"
    """For buckets, which keep only the newest message of each subject."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages of a stream are read, and from where.

    `filters` are subjects that do not overlap. `created` is the creation time of the expected
    stream; None accepts any stream.
    """

    stream: str
    filters: Sequence[str]
    start_sequence: int = 1
    created: int | None = None
    trimming: Trimming = Trimming.IS_A_GAP


class Proof:
    """Proves for one reader that no message of its selection was trimmed undelivered.

    `through` is the sequence up to which every selected message has been taken. While a pull
    request is open and nothing is pending, a message is delivered as soon as it is stored: a jump
    of sequences then means that messages of other subjects lie between. At any other time the
    stream's first sequence must prove that nothing within the jump was trimmed.
    """

    def __init__(self, selection: Selection) -> None:
        self.through = max(selection.start_sequence, 1) - 1
        self.created = selection.created
        self._trimming = selection.trimming
        self._next_unproven = True

    @property
    def next_sequence(self) -> int:
        """Where to start again without missing or repeating anything taken so far."""
        return self.through + 1

    def begin(self, bounds: StreamBounds) -> None:
        """Start with a new consumer at `next_sequence`, created before `bounds` were read."""
        self.created = bounds.created
        self.require_untrimmed(bounds)
        self._next_unproven = True

    def require_stream(self, bounds: StreamBounds) -> None:
        """Raise GapError if the stream was recreated, or ends before what has been taken."""
        found = find_break(bounds, self.next_sequence, self.created)
        if found not in (None, StreamBreak.TRIMMED):
            raise GapError(found.value, self.next_sequence, bounds.first)

    def require_untrimmed(self, bounds: StreamBounds, through: int | None = None) -> None:
        """Raise GapError if a message after `through` may have been trimmed undelivered."""
        if self._trimming is Trimming.IS_A_GAP:
            wanted = self.next_sequence if through is None else through + 1
            require_continuation(bounds, wanted, self.created)

    def unproven_after(self, delivered: Delivered) -> int | None:
        """The sequence after which a message may have been trimmed undelivered, or None."""
        if self._trimming is not Trimming.IS_A_GAP:
            return None
        frames = delivered.frames
        start = 0 if self._next_unproven else delivered.unproven_from
        previous = frames[start - 1].stream_seq if start else self.through
        if frames[-1].stream_seq - previous == len(frames) - start:
            return None
        for frame in islice(frames, start, None):
            if frame.stream_seq != previous + 1:
                break
            previous = frame.stream_seq
        return previous

    def take(self, sequence: int, *, next_unproven: bool) -> None:
        """Set the last sequence taken, and whether the next message may be trimmed undelivered."""
        self.through = sequence
        self._next_unproven = next_unproven
        if self._trimming is Trimming.ALLOWED_BEFORE_FIRST:
            self._trimming = Trimming.IS_A_GAP

    def pass_over(self, bounds: StreamBounds, *, next_unproven: bool) -> None:
        """Move to the end of the stream, because no selected message is left before it.

        Trimming messages of other subjects is then not a gap. Raises GapError if a selected message
        may have been trimmed before.
        """
        if self._next_unproven or next_unproven:
            self.require_untrimmed(bounds)
        self.through = max(self.through, bounds.last)
        self._next_unproven = False
