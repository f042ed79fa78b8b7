"""What changes in a publication without the log telling, and what is none of that."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from bridge.postgres.coverage import Covered
from bridge.schemas.coverage import unlogged_changes

if TYPE_CHECKING:
    from collections.abc import Collection

USERS = Covered(
    "public", "users", 7, "iudt", 16384, altered=[50, 5], named=[40, 10],
    entries=[9], row_filter="(id > 1)", columns="1 2", toast=70, attached={"1": 60},
)  # fmt: skip
TOLD = 777
ROOT = Covered("public", "part", 7, "iudt", 16390, leaves={"1": 1, "2": 20})


@dataclass
class Known:
    """What a test knows of partitions."""

    filled: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()

    async def is_filled(self, leaves: Collection[str], parts: Collection[str]) -> bool:
        assert set(leaves) <= set(parts) or not parts
        return not self.filled.isdisjoint(leaves)

    async def is_copied(self, before: Covered, leaf: str) -> bool:
        assert leaf in before.leaves or leaf not in self.copied
        return leaf in self.copied

    def has_truncated(self, token: str, xid: int) -> bool:
        return (token, xid) == ("t", TOLD)


def changes(
    before: Covered, now: Covered, filled: Collection[str] = (), copied: Collection[str] = ()
) -> str | None:
    known = Known(frozenset(filled), frozenset(copied))
    return asyncio.run(unlogged_changes({"t": before}, {"t": now}, known)).get("t")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"publication": 8}, "dropped and created again"),
        ({"relation_id": 1}, "another table"),
        ({"operations": "iud"}, "other operations"),
        ({"row_filter": None}, "row filter"),
        ({"columns": "1 2 3"}, "list of columns"),
        ({"entries": [10]}, "out of the publication"),
        ({"altered": [51, 5]}, "options were set"),
        ({"named": [41, 10]}, "another name"),
        ({"toast": 71}, "was rewritten"),
        ({"attached": {"1": 61}}, "detached for a while"),
    ],
)
def test_what_moves_rows_unseen_is_a_change(change: dict[str, object], reason: str) -> None:
    assert reason in (changes(USERS, replace(USERS, **change)) or "")


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [9, 10]},
        # Another owner, or partitions published as their root.
        {"altered": [51, 6]},
        {"named": [41, 11]},
        {"toast": 0},
        {"attached": {"1": 60, "2": 61}},
    ],
)
def test_what_moves_no_rows_is_no_change(change: dict[str, object]) -> None:
    assert changes(USERS, replace(USERS, **change)) is None
    assert changes(replace(USERS, **change), USERS) is None


def test_a_table_that_is_back_is_a_change_and_a_new_one_is_none() -> None:
    assert "out of the publication" in (changes(replace(USERS, is_gone=True), USERS) or "")

    assert asyncio.run(unlogged_changes({}, {"t": USERS}, Known())) == {}


def test_another_publication_is_judged_by_what_it_covers() -> None:
    before = replace(USERS, publication=0)
    assert changes(before, replace(USERS, entries=[77])) is None
    assert "row filter" in (changes(before, replace(USERS, entries=[77], row_filter=None)) or "")


@pytest.mark.parametrize(
    ("leaves", "filled", "copied", "reason"),
    [
        ({"1": 1}, (), (), "detached or dropped"),
        ({"1": 1, "2": 21}, (), (), "truncated or rewritten"),
        ({"1": 1, "2": 21}, (), ("2",), None),
        ({"1": 11, "2": 21}, (), ("2",), "truncated or rewritten"),
        ({"1": 1, "2": 20, "3": 3}, ("3",), (), "attached"),
        ({"1": 1, "2": 20, "3": 3}, (), (), None),
        # The new one is no longer in the file it was created with.
        ({"1": 1, "2": 20, "3": 33}, (), (), "truncated or rewritten"),
        ({"1": 1, "2": 20}, ("1", "2"), (), None),
    ],
)
def test_partitions_that_bring_or_take_rows_are_a_change(
    leaves: dict[str, int], filled: tuple[str, ...], copied: tuple[str, ...], reason: str | None
) -> None:
    found = changes(ROOT, replace(ROOT, leaves=leaves), filled, copied)
    assert (reason in found) if reason and found else found is reason


def test_a_truncate_that_the_log_tells_of_is_no_change() -> None:
    emptied = {"1": 11, "2": 21, "3": 31}
    told = replace(ROOT, leaves=emptied, changed_by=dict.fromkeys(emptied, TOLD))
    assert changes(ROOT, told) is None
    mixed = replace(ROOT, leaves=emptied, changed_by={"1": TOLD, "2": TOLD + 1, "3": TOLD})
    assert "truncated" in (changes(ROOT, mixed) or "")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ([2, 50, 60], "dropped and added again"),
        ([1, 51, 61], "was rewritten"),
        # VACUUM FULL or TRUNCATE, and a default or a statistics target that was set.
        ([1, 50, 61], None),
        ([1, 51, 60], None),
    ],
)
def test_columns_of_the_same_description_are_told_apart(
    shape: list[int], reason: str | None
) -> None:
    before, now = replace(USERS, shapes={"7": [1, 50, 60]}), replace(USERS, shapes={"7": shape})
    found = changes(before, now)
    assert (reason in found) if reason and found else found is reason
    assert changes(USERS, now) is None
    # Nor does a look at the table without the column hide it.
    between = replace(USERS, shapes={"8": [3, 50, 60]})
    assert changes(before, between) is None
    between.remember(before)
    assert changes(between, now) == found


def test_what_is_remembered_is_read_as_it_was() -> None:
    shaped = replace(USERS, shapes={"-7": [1, -2, 3], "8": [4, 5, 6]})
    for covered in (USERS, ROOT, shaped, replace(USERS, is_gone=True, schema_version=4)):
        document = json.loads(json.dumps({**covered.document, "of a later version": 1}))
        assert Covered.from_document(document) == covered
