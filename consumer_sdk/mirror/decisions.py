"""What the hand-off decides: actions on the target, or that tables need new copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from consumer_sdk.targets.target import MirrorCopy, MirrorPosition, SnapshotRow, TableName
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply these changes to a copy."""

    copy: MirrorCopy
    events: list[Event]


@dataclass(frozen=True, slots=True)
class ApplyAgain:
    """Apply these changes, which are below the exact LSN of a next copy."""

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


Action = Apply | ApplyAgain | Alter | Promote | Save


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Incomplete rows of a copy, by the text of their key, that the bridge must be asked for."""

    copy: MirrorCopy
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The rows with the wanted keys, as of `lsn`, by the text of their key."""

    wanted: WantedRows
    lsn: int
    rows: Mapping[str, SnapshotRow]


class RepairNeeded(Exception):
    """These tables need new copies, from snapshots taken at `snapshot_lsn` or later.

    If `at_one_point`, the snapshots must have one consistent point.
    """

    def __init__(
        self,
        reason: str,
        tables: Iterable[TableName],
        snapshot_lsn: int = 0,
        *,
        at_one_point: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tables = frozenset(tables)
        self.snapshot_lsn = snapshot_lsn
        self.at_one_point = at_one_point
