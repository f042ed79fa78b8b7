"""The workload's own books: every change it has committed, by table and operation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Changes counted when their commit has succeeded; tables are spelled as in subjects."""

    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    transactions: int = 0
    rolled_back: int = 0

    @property
    def total(self) -> int:
        """All changes."""
        return self.changes.total()

    def of_table(self, token: str) -> int:
        """All changes of one table."""
        return sum(count for (table, _), count in self.changes.items() if table == token)


def differences(made: Counter[tuple[str, str]], stored: Counter[tuple[str, str]]) -> list[str]:
    """One phrase for each table and operation whose counts are not the same."""
    return [
        f"{token} {operation}: {made[token, operation]:,} committed,"
        f" {stored[token, operation]:,} stored"
        for token, operation in sorted({*made, *stored})
        if made[token, operation] != stored[token, operation]
    ]
