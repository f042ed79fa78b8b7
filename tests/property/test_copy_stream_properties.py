"""Cutting COPY into rows, for any rows and any pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridge.postgres.copy_stream import FrameSplitter
from tests.unit.test_copy_stream import conversation

rows_of_copy = st.lists(st.binary(max_size=40).map(lambda row: row.replace(b"\n", b"d")))


@given(rows_of_copy, st.lists(st.integers(min_value=1, max_value=50), min_size=1))
def test_any_rows_survive_any_cuts(rows: list[bytes], steps: list[int]) -> None:
    data = conversation(rows)
    splitter = FrameSplitter()
    found: list[bytes] = []
    position = turn = 0
    while position < len(data):
        step = steps[turn % len(steps)]
        found += splitter.feed(data[position : position + step])
        position += step
        turn += 1
    assert found == rows
    assert splitter.finished
