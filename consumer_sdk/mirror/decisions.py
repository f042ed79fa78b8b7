"""What the hand-off decides: actions on the target, or that tables need new copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from consumer_sdk.targets.target import MirrorCopy, MirrorPosition, TableName
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these changes to a copy."""

    copy: MirrorCopy
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Alter:
    """Change the structure of a copy to that of another schema version."""

    copy: MirrorCopy
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class Promote:
    """Replace live copies by next copies, all in one transaction."""

    copies: list[MirrorCopy]


@dataclass(frozen=True, slots=True)
class Save:
    """Save positions and copies, and commit all actions since the last Save."""

    positions: list[MirrorPosition]
    copies: list[MirrorCopy]


Action = Apply | Alter | Promote | Save


class RepairNeeded(Exception):
    """These tables need new copies, from snapshots taken at `snapshot_lsn` or later."""

    def __init__(self, reason: str, tables: Iterable[TableName], snapshot_lsn: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tables = frozenset(tables)
        self.snapshot_lsn = snapshot_lsn
