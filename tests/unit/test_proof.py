"""Whether a stream continues at a sequence, and what deliveries prove of it."""

from __future__ import annotations

import pytest

from consumer_sdk.errors import GapError
from consumer_sdk.reading.demand import Delivered
from consumer_sdk.reading.proof import (
    Proof,
    Selection,
    StreamBreak,
    Trimming,
    find_break,
    require_continuation,
    require_same_stream,
)
from consumer_sdk.transport.api import Frame, StreamBounds

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


def delivered(*sequences: int, unproven_from: int | None = None) -> Delivered:
    frames = [Frame(sequence, b"s", None, b"") for sequence in sequences]
    return Delivered(frames, 0, len(frames) if unproven_from is None else unproven_from, True)


@pytest.fixture
def watched() -> Proof:
    """A reader that has taken everything up to 5, with a request open."""
    proof = Proof(Selection("s", ["cdc.>"], start_sequence=5))
    proof.begin(HELD)
    proof.take(5, next_unproven=False)
    return proof


def test_a_jump_while_a_request_is_open_proves_itself(watched: Proof) -> None:
    assert watched.unproven_after(delivered(6, 9, 12)) is None


def test_a_jump_that_had_to_wait_for_a_request_is_doubtful(watched: Proof) -> None:
    assert watched.unproven_after(delivered(6, 9, 10, 12, unproven_from=2)) == 10
    assert watched.unproven_after(delivered(6, 9, 10, 11, unproven_from=2)) is None
    watched.take(6, next_unproven=True)
    assert watched.unproven_after(delivered(8)) == 6
    with pytest.raises(GapError):
        watched.require_untrimmed(StreamBounds(8, 12, 100), 6)
    watched.require_untrimmed(StreamBounds(7, 12, 100), 6)


def test_a_start_that_was_trimmed_away_is_accepted_once() -> None:
    proof = Proof(Selection("s", ["cdc.>"], 1, trimming=Trimming.ALLOWED_BEFORE_FIRST))
    proof.begin(HELD)
    assert proof.unproven_after(delivered(5)) is None
    proof.take(5, next_unproven=True)
    assert proof.unproven_after(delivered(8)) == 5


def test_an_idle_reader_moves_past_what_it_did_not_select(watched: Proof) -> None:
    watched.pass_over(HELD, next_unproven=False)
    assert watched.next_sequence == 10
    watched.require_stream(StreamBounds(10, 9, 100))
    with pytest.raises(GapError, match="ends before"):
        watched.require_stream(StreamBounds(1, 0, 100))


def test_an_idle_reader_that_asked_for_nothing_must_still_find_what_follows(
    watched: Proof,
) -> None:
    with pytest.raises(GapError, match="trimmed or purged"):
        watched.pass_over(StreamBounds(8, 9, 100), next_unproven=True)
