"""Whether a stream continues at a sequence is decided by what it holds and when it was created."""

from __future__ import annotations

import pytest

from consumer_sdk.errors import GapError
from consumer_sdk.reading.proof import (
    StreamBreak,
    find_break,
    require_continuation,
    require_same_stream,
)
from consumer_sdk.reading.stream import StreamBounds

HELD = StreamBounds(first=5, last=9, created=100)
EMPTY = StreamBounds(first=10, last=9, created=100)


@pytest.mark.parametrize(
    ("bounds", "next_sequence", "created", "expected"),
    [
        (HELD, 5, 100, None),
        (HELD, 10, 100, None),
        (HELD, 7, None, None),
        (HELD, 4, 100, StreamBreak.TRIMMED),
        (HELD, 11, 100, StreamBreak.ENDS_BEFORE),
        (HELD, 7, 101, StreamBreak.RECREATED),
        (HELD, 4, 101, StreamBreak.RECREATED),
        (EMPTY, 10, 100, None),
        (EMPTY, 9, 100, StreamBreak.TRIMMED),
        (EMPTY, 11, 100, StreamBreak.ENDS_BEFORE),
    ],
)
def test_a_stream_continues_where_it_holds_the_next_sequence_or_ends_before_it(
    bounds: StreamBounds, next_sequence: int, created: int | None, expected: StreamBreak | None
) -> None:
    assert find_break(bounds, next_sequence, created) is expected


def test_a_break_is_a_gap_that_names_what_was_wanted_and_what_is_there() -> None:
    with pytest.raises(GapError, match="trimmed or purged") as gap:
        require_continuation(HELD, 3, 100)
    assert (gap.value.wanted, gap.value.first_available) == (3, 5)


def test_only_another_stream_is_refused_where_the_sequence_does_not_matter() -> None:
    require_same_stream(HELD, 3, 100)
    with pytest.raises(GapError, match="recreated"):
        require_same_stream(HELD, 3, 101)
