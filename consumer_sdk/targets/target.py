"""What a mirror writes to: the `Target` protocol and the state it keeps there.

A target holds at most two copies of a table. The live copy is what readers see. The next copy is
built beside it, unseen, and replaces it when it has caught up. Both belong to the target's
transactions: whatever is done between `begin` and `commit` shows at once or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event

TableName = tuple[str, str]
"""Schema and table, unquoted."""


class Lane(StrEnum):
    """Which of the two copies of a table."""

    LIVE = "live"
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class MirrorPosition:
    """Up to where the live copies of one source's tables are complete.

    Every transaction of the epoch with a commit LSN up to `commit_lsn` is applied, and everything
    stored in the stream created at `stream_created` up to `stream_seq` has been read.
    """

    source: str
    epoch: int
    commit_lsn: int
    seq: int
    stream_seq: int
    stream_created: int


@dataclass(frozen=True, slots=True)
class MirrorCopy:
    """One copy of a table in the target.

    A next copy holds the snapshot taken at `snapshot_lsn` of `epoch` and every transaction from
    there up to `applied_lsn`; the stream has been read for it up to `stream_seq`. Until it is
    `loaded`, `snapshot_lsn` is the oldest snapshot that will do, and the rest means nothing. A live
    copy that is not `loaded` is retired.
    """

    schema: TableSchema
    lane: Lane
    epoch: int = 0
    snapshot_id: str = ""
    snapshot_lsn: int = 0
    loaded: bool = False
    applied_lsn: int = 0
    stream_seq: int = 0
    stream_created: int = 0
    relation_id: int = 0
    """What the source calls the table by; 0 before the first change, another for another table."""

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return self.schema.schema, self.schema.table

    @property
    def source(self) -> str:
        """The source that publishes the table."""
        return self.schema.source

    @property
    def retired(self) -> bool:
        """Whether it keeps its rows, but follows its source no longer."""
        return self.lane is Lane.LIVE and not self.loaded


@dataclass(slots=True)
class TargetState:
    """What a target remembers."""

    positions: dict[str, MirrorPosition] = field(default_factory=dict)
    copies: list[MirrorCopy] = field(default_factory=list)

    def lane(self, lane: Lane) -> dict[TableName, MirrorCopy]:
        """The copies of one lane by table."""
        return {copy.name: copy for copy in self.copies if copy.lane is lane}


class SnapshotRow(NamedTuple):
    """A row of a snapshot; `raw` names json columns that are PostgreSQL's text."""

    data: dict[str, Any]
    raw: Sequence[str]


class Target(Protocol):
    """A place to mirror tables into.

    All calls but `interrupt` come from one thread, one after another. `apply`, `load`, `alter`,
    `create`, `drop`, `promote`, `save_position`, `save_copy` come between `begin` and `commit` or
    `rollback`; after a crash the target is as of the last `commit`. Trouble is reported as
    TargetError.
    """

    def open(self) -> None:
        """Get ready; refuse if another mirror already writes here. Nothing is changed yet."""
        ...

    def close(self) -> None:
        """Give up what is not committed, and let another mirror in."""
        ...

    def interrupt(self) -> None:
        """Let a call that waits for others, as for a lock, fail; from another thread, any time."""
        ...

    def read_state(self) -> TargetState:
        """Positions and copies as saved."""
        ...

    def require_room(self, copies: Sequence[MirrorCopy]) -> None:
        """Refuse, before anything is changed, if a table of somebody else stands in the way."""
        ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def save_position(self, position: MirrorPosition) -> None:
        """Remember the position of its source in place of an earlier one."""
        ...

    def save_copy(self, copy: MirrorCopy) -> None:
        """Remember a copy in place of an earlier one of the same table and lane."""
        ...

    def create(self, copy: MirrorCopy) -> None:
        """Make an empty next copy in place of an earlier one, without remembering it."""
        ...

    def drop(self, copy: MirrorCopy) -> None:
        """Remove a copy and forget it."""
        ...

    def load(self, copy: MirrorCopy, rows: Sequence[SnapshotRow]) -> None:
        """Add rows of the snapshot to a next copy."""
        ...

    def apply(self, copy: MirrorCopy, events: Sequence[Event]) -> None:
        """Make row changes and truncates of one table, in order.

        An UPDATE sets only the columns in `data`. A change that finds no row, or more than it
        should, raises TargetError.
        """
        ...

    def alter(self, copy: MirrorCopy, schema: TableSchema) -> None:
        """Give a copy another structure, rows kept: added columns are null, dropped ones gone.

        Raises CannotAlter where that is not possible; the copy is then built anew.
        """
        ...

    def promote(self, copies: Sequence[MirrorCopy]) -> None:
        """Let next copies take the place of the live ones, all together, and remember them so."""
        ...


class CannotAlter(Exception):
    """The target cannot change a table's structure in place."""
