"""Rows of two tables are paired by key, in whatever order they come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer_sdk.verify.pairing import OrdersDiffer, Pairing

Rows = list[tuple[str | None, ...]]


def key_of(row: tuple[str | None, ...]) -> str:
    return str(row[0])


def sliced(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def paired(left: Rows, right: Rows, size: int = 3, most: int = 1000) -> tuple[Pairing, list[str]]:
    different: list[str] = []
    pairing = Pairing(key_of, different.append, most)
    pairing.read(sliced(left, size), sliced(right, size))
    return pairing, different


tables = st.dictionaries(st.integers(0, 30).map(str), st.sampled_from(["a", "b", None]))


@given(tables, tables, st.randoms(use_true_random=False))
def test_every_difference_is_found_whatever_the_orders(left, right, random) -> None:
    mine, theirs = list(left.items()), list(right.items())
    random.shuffle(mine)
    random.shuffle(theirs)
    pairing, different = paired(mine, theirs)
    assert set(pairing.left) == left.keys() - right.keys()
    assert set(pairing.right) == right.keys() - left.keys()
    assert sorted(different) == sorted(
        key for key in left.keys() & right.keys() if left[key] != right[key]
    )
    assert (pairing.rows, pairing.twice_left, pairing.twice_right) == (len(left), [], [])


def test_null_and_the_word_null_differ() -> None:
    assert paired([("1", None)], [("1", "null")])[1] == ["1"]


def test_a_key_that_a_side_holds_twice_is_a_difference() -> None:
    pairing, different = paired([("1", "a"), ("2", "a")], [("1", "a"), ("2", "a"), ("2", "a")])
    assert (list(pairing.right), different) == (["2"], [])
    pairing, _ = paired([("3", "a")], [("2", "a"), ("2", "a"), ("3", "a")])
    assert (list(pairing.right), pairing.twice_right) == (["2"], ["2"])


def test_only_a_bounded_number_of_rows_may_wait() -> None:
    rows: Rows = [(str(number), "v") for number in range(100)]
    pairing, different = paired(rows, rows, most=0)
    assert (pairing.rows, different) == (100, [])
    pairing, _ = paired(rows[1:], rows, most=3)
    assert list(pairing.right) == ["0"]
    with pytest.raises(OrdersDiffer):
        paired(rows, rows[::-1], most=20)
