"""What a mirror writes to: the `Target` protocol, and the state that the mirror saves there.

A target holds at most two copies of a table. Readers see the live copy. The next copy is built
beside it, invisible to readers, and replaces it when it has caught up. Everything done between
`begin` and `commit` becomes visible at once or not at all.

To write a target of your own, start from `memory.py`; tests/target_suite.py tests what it must do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from consumer_sdk.targets.incomplete import Incomplete
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event

TableName = tuple[str, str]
"""Schema and table, unquoted."""


class Lane(StrEnum):
    """Which of the two copies of a table."""

    LIVE = "live"
    NEXT = "next"


class CopyState(StrEnum):
    """The state of a copy; `MirrorCopy.become` allows the transitions in `TRANSITIONS`."""

    PLANNED = "planned"
    """A next copy that must be loaded; it may have no table yet."""
    LOADING = "loading"
    """A next copy that holds part of a snapshot."""
    CATCHING_UP = "catching up"
    """A next copy that holds a whole snapshot and follows the log; readers do not see it."""
    LIVE = "live"
    """Readers see it, and it follows the log."""
    RETIRED = "retired"
    """Readers see it. Its source no longer publishes the table, and its rows do not change."""

    @property
    def lane(self) -> Lane:
        """The lane of a copy in this state."""
        shown = self is CopyState.LIVE or self is CopyState.RETIRED
        return Lane.LIVE if shown else Lane.NEXT


TRANSITIONS: Final[Mapping[CopyState, frozenset[CopyState]]] = {
    CopyState.PLANNED: frozenset({CopyState.LOADING}),
    # Loading begins again with an empty table after an error or a crash.
    CopyState.LOADING: frozenset({CopyState.LOADING, CopyState.CATCHING_UP}),
    CopyState.CATCHING_UP: frozenset({CopyState.LIVE}),
    CopyState.LIVE: frozenset({CopyState.RETIRED}),
    CopyState.RETIRED: frozenset(),
}
"""The states that may follow each state. A copy ends when another replaces it: a next copy when a
new one is planned, a live copy when a next one is promoted."""


class InvalidTransition(Exception):
    """The state of a copy does not allow the new state: an error in the mirror."""


@dataclass(frozen=True, slots=True)
class MirrorPosition:
    """How far the live copies of one source's tables are complete.

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

    A copy that catches up holds the snapshot taken at `snapshot_lsn` of `epoch` and every
    transaction from there up to `applied_lsn`; the stream has been read for it up to `stream_seq`.
    Before that, `epoch` and `snapshot_lsn` name the oldest snapshot that may be loaded, and the
    other fields have no meaning.
    """

    schema: TableSchema
    state: CopyState = CopyState.PLANNED
    epoch: int = 0
    snapshot_id: str = ""
    snapshot_lsn: int = 0
    applied_lsn: int = 0
    stream_seq: int = 0
    stream_created: int = 0
    relation_id: int = 0
    """The table's OID in the source, 0 if not known yet; a table created again has another OID."""
    exact_lsn: int = 0
    """Of a snapshot of several consistent points, the largest: before every transaction below it is
    applied, the rows are those of no single moment. 0 if the snapshot has one point."""
    incomplete: Incomplete = field(default_factory=dict, hash=False)
    """Rows that lack values which nobody sent; a copy that has some is not shown."""

    @property
    def name(self) -> TableName:
        """Schema and table."""
        return self.schema.schema, self.schema.table

    @property
    def source(self) -> str:
        """The source that publishes the table."""
        return self.schema.source

    @property
    def lane(self) -> Lane:
        """LIVE if readers see it, NEXT while it is built."""
        return self.state.lane

    @property
    def retired(self) -> bool:
        """Whether it keeps its rows but no longer follows its source."""
        return self.state is CopyState.RETIRED

    @property
    def loaded(self) -> bool:
        """Whether it holds a whole snapshot."""
        return self.state not in (CopyState.PLANNED, CopyState.LOADING)

    def become(self, state: CopyState) -> MirrorCopy:
        """The copy in another state; InvalidTransition unless `TRANSITIONS` allows it."""
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"a copy that is {self.state} cannot become {state}")
        return replace(self, state=state)

    def plan_again(self, snapshot_lsn: int = 0) -> MirrorCopy:
        """A planned new copy of the table, from a snapshot taken at `snapshot_lsn` or later."""
        return MirrorCopy(self.schema, epoch=self.epoch, snapshot_lsn=snapshot_lsn)


@dataclass(slots=True)
class TargetState:
    """The state saved in a target."""

    positions: dict[str, MirrorPosition] = field(default_factory=dict)
    copies: list[MirrorCopy] = field(default_factory=list)

    def lane(self, lane: Lane) -> dict[TableName, MirrorCopy]:
        """The copies of one lane by table."""
        return {copy.name: copy for copy in self.copies if copy.lane is lane}


class SnapshotRow(NamedTuple):
    """A row of a snapshot; `raw` names JSON columns that hold the document as text."""

    data: dict[str, Any]
    raw: Sequence[str]


class Target(Protocol):
    """A database, or another store, into which tables are mirrored.

    One thread makes all calls but `interrupt`. `apply`, `replay`, `load`, `alter`, `create`,
    `drop`, `promote`, `save_position` and `save_copy` are called between `begin` and `commit` or
    `rollback`. After a crash the target holds the state of the last `commit`. A call that fails
    raises TargetError.
    """

    def open(self) -> None:
        """Open the target without changing it; TargetError if another mirror is writing to it."""
        ...

    def close(self) -> None:
        """Roll back what is not committed, and let other mirrors open the target."""
        ...

    def interrupt(self) -> None:
        """Make a call fail that waits, for example for a lock; any thread may call this."""
        ...

    def read_state(self) -> TargetState:
        """Positions and copies as saved."""
        ...

    def require_room(self, copies: Sequence[MirrorCopy]) -> None:
        """Raise TargetError if a table that no mirror made has the name of a copy's table."""
        ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def save_position(self, position: MirrorPosition) -> None:
        """Save the position of a source in place of an earlier one."""
        ...

    def save_copy(self, copy: MirrorCopy) -> None:
        """Save a copy in place of an earlier one of the same table and lane."""
        ...

    def create(self, copy: MirrorCopy) -> None:
        """Create an empty next copy in place of an earlier one, without saving it."""
        ...

    def drop(self, copy: MirrorCopy) -> None:
        """Drop a copy's table and its saved state."""
        ...

    def load(self, copy: MirrorCopy, rows: Sequence[SnapshotRow]) -> None:
        """Add rows of the snapshot to a next copy."""
        ...

    def apply(self, copy: MirrorCopy, events: Sequence[Event]) -> None:
        """Apply row changes and truncates of one table, in order.

        An UPDATE sets only the columns in `data`. A change that finds no row, or too many rows,
        raises TargetError.
        """
        ...

    def replay(self, copy: MirrorCopy, events: Sequence[Event]) -> None:
        """Apply changes below the exact LSN of a next copy, some of which its rows hold already.

        An INSERT, or an UPDATE that moves a row, replaces the row that has the new key; columns
        that a moving UPDATE does not send become null. An UPDATE or DELETE may find no row.
        """
        ...

    def alter(self, copy: MirrorCopy, schema: TableSchema) -> None:
        """Change the structure of a copy and keep its rows; added columns are null.

        Raises CannotAlter if that is not possible; the mirror then builds a new copy.
        """
        ...

    def promote(self, copies: Sequence[MirrorCopy]) -> None:
        """Replace live copies by next copies, all at once, and save these as live."""
        ...


class CannotAlter(Exception):
    """The target cannot change a table's structure in place."""
