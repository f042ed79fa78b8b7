"""Pairs the rows of two tables by key while both are read once, in whatever order they come.

Where both sides come in the same order, a pair is found as soon as it is read. Otherwise rows wait
for their counterparts: only a bounded number of them may wait, so that memory is bounded too.
"""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from consumer_sdk.verify.table_side import Row


class OrdersDiffer(Exception):
    """Too many rows of a side wait for their counterparts; look each of them up instead."""


class Pairing:
    """Finds the keys of rows that are on one side only, and reports those of rows that differ."""

    def __init__(
        self,
        key_of: Callable[[Row], str],
        on_different: Callable[[str], None],
        most_waiting: int,
    ) -> None:
        self._key_of = key_of
        self._on_different = on_different
        self._most_waiting = most_waiting
        self.rows = 0
        """How many rows the left side has."""
        self.left: dict[str, bytes] = {}
        """Rows without a counterpart so far, as digests by key."""
        self.right: dict[str, bytes] = {}
        self.twice_left: list[str] = []
        """Keys that a side holds more than once."""
        self.twice_right: list[str] = []

    def read(self, left: Iterable[list[Row]], right: Iterable[list[Row]]) -> None:
        """Read both sides to their ends; OrdersDiffer if that would take too much memory."""
        for mine, theirs in zip_longest(left, right, fillvalue=()):
            self.rows += len(mine)
            if not self.left and not self.right and mine == theirs:
                continue
            self._pair(mine, self.left, self.right, self.twice_left)
            self._pair(theirs, self.right, self.left, self.twice_right)
            if max(len(self.left), len(self.right)) > self._most_waiting:
                raise OrdersDiffer

    def _pair(
        self,
        rows: Iterable[Row],
        own: dict[str, bytes],
        others: dict[str, bytes],
        twice: list[str],
    ) -> None:
        for row in rows:
            key, digest = self._key_of(row), _digest(row)
            counterpart = others.pop(key, None)
            if counterpart is None:
                if key in own:
                    twice.append(key)
                own[key] = digest
            elif counterpart != digest:
                self._on_different(key)


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(json.dumps(row).encode(), digest_size=16).digest()
