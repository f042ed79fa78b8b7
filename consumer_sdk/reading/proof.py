"""Whether a stream still continues where a reader stopped: the only place that decides it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from consumer_sdk.errors import GapError

if TYPE_CHECKING:
    from consumer_sdk.reading.stream import StreamBounds


class StreamBreak(Enum):
    """Why a stream does not continue at a sequence; the value is the reason that users read."""

    RECREATED = "the stream was recreated"
    ENDS_BEFORE = "the stream ends before it"
    TRIMMED = "it was trimmed or purged"


def find_break(
    bounds: StreamBounds, next_sequence: int, created: int | None = None
) -> StreamBreak | None:
    """Why a reader of everything from `next_sequence` on would miss messages; None if it would not.

    `created` is the creation time of the stream in which the sequence was counted; None accepts any
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
    """Raise GapError where `find_break` finds one."""
    found = find_break(bounds, next_sequence, created)
    if found is not None:
        raise GapError(found.value, next_sequence, bounds.first)
