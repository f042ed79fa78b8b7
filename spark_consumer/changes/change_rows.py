"""The columns that a DataFrame of changes and its folded form have beside those of the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

COMMIT_LSN: Final = "_commit_lsn"
SEQ: Final = "_seq"
OPERATION: Final = "_operation"
OLD: Final = "_old"
UNCHANGED: Final = "_unchanged"

KEEP: Final = "_keep"
NET: Final = "_net"
GONE: Final = "_gone"

# Within one position a row first leaves its old key, then arrives at the new one.
STEP: Final = "_step"
LEAVES: Final = 0
ARRIVES: Final = 1


@dataclass(frozen=True)
class ChangeFacts:
    """What must be known of a set of changes to fold them with no more work than they need.

    `unchanged` names columns that some UPDATE left out, `moved_unchanged` those left out by one
    that changed the key; `moves` says whether any changed the key.
    """

    count: int = 0
    truncated_at: tuple[int, int] | None = None
    moves: bool = False
    unchanged: frozenset[str] = field(default_factory=frozenset)
    moved_unchanged: frozenset[str] = field(default_factory=frozenset)

    def __or__(self, other: ChangeFacts) -> ChangeFacts:
        """The facts of both sets together."""
        truncates = [at for at in (self.truncated_at, other.truncated_at) if at is not None]
        return ChangeFacts(
            count=self.count + other.count,
            truncated_at=max(truncates, default=None),
            moves=self.moves or other.moves,
            unchanged=self.unchanged | other.unchanged,
            moved_unchanged=self.moved_unchanged | other.moved_unchanged,
        )
