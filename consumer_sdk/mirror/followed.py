"""What the hand-off knows of each source and each copy that it follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from consumer_sdk.mirror.decisions import RepairNeeded
from consumer_sdk.targets.target import CopyState, Lane, MirrorPosition

if TYPE_CHECKING:
    from consumer_sdk.targets.target import MirrorCopy, TableName
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event


class SourceState(Enum):
    """What is done with the events of a source."""

    WAITING = "waiting"
    """Left for later: tables of the source wait for their snapshots."""
    CATCHING_UP = "catching up"
    """Applied and committed; next copies show once the log has been read up to `show_lsn`."""
    REPLACING = "replacing"
    """Applied, but committed only once next copies show: some of them replace live copies, and
    the other live copies must not move ahead of these."""
    FOLLOWING = "following"
    """Applied and committed; every copy is live."""


_FOLLOWING = SourceState.FOLLOWING


@dataclass(slots=True, eq=False)
class FollowedCopy:
    """A copy in use; it held every change up to commit LSN `floor` when it was read."""

    copy: MirrorCopy
    floor: int
    version: int
    announced: TableSchema | None = None
    """The schema that the stream announced last."""


@dataclass(slots=True, eq=False)
class FollowedSource:
    """A source in the log: how far it has been read, and the transaction that is open."""

    name: str
    epoch: int
    position: MirrorPosition | None
    """The position that the target holds."""
    state: SourceState = SourceState.WAITING
    copies: dict[TableName, FollowedCopy] = field(default_factory=dict)
    show_lsn: int = 0
    """Next copies show when every transaction with a smaller commit LSN has been read."""
    closed_lsn: int = 0
    """Commit LSN and `seq` of the end of the last transaction read."""
    closed_seq: int = 0
    read_through: int = 0
    """The stream sequence up to which everything has been read."""
    open_lsn: int | None = None
    """Commit LSN of the transaction of which part has been read, and the `seq` read last."""
    open_seq: int = -1
    pending: dict[FollowedCopy, list[Event]] = field(default_factory=dict)
    """Changes of the open transaction."""
    spilled: bool = False
    """Whether part of the open transaction has been written to the target."""
    unsaved: bool = False
    altered: set[FollowedCopy] = field(default_factory=set)
    """Live copies that must be saved again."""

    @property
    def followed(self) -> bool:
        """Whether its events are applied now."""
        return self.state is not SourceState.WAITING

    @property
    def has_next(self) -> bool:
        """Whether next copies wait to be shown."""
        return self.state in (SourceState.CATCHING_UP, SourceState.REPLACING)

    def may_show(self, lsn: int) -> bool:
        """Whether next copies wait that may show when everything below `lsn` has been read."""
        return self.state is not _FOLLOWING and lsn >= self.show_lsn

    def tables(self) -> list[TableName]:
        """The tables in use."""
        return list(self.copies)

    def read_so_far(self, copy: FollowedCopy) -> int:
        """The stream sequence up to which everything has been read for a copy."""
        if copy.copy.lane is Lane.NEXT or self.position is None:
            return copy.copy.stream_seq
        return self.position.stream_seq

    def live_position(self, stream_created: int) -> MirrorPosition | None:
        """The position of the live copies now; what is read again for next copies leaves it."""
        if all(copy.copy.lane is Lane.NEXT for copy in self.copies.values()):
            return None
        lsn, seq, read = self.closed_lsn, self.closed_seq, self.read_through
        saved = self.position
        if saved is not None and saved.epoch == self.epoch:
            read = max(read, saved.stream_seq)
            if saved.commit_lsn >= lsn:
                lsn, seq = saved.commit_lsn, saved.seq
        return MirrorPosition(self.name, self.epoch, lsn, seq, read, stream_created)


def follow_source(
    name: str,
    position: MirrorPosition | None,
    live: dict[TableName, MirrorCopy],
    coming: dict[TableName, MirrorCopy],
) -> FollowedSource:
    """What to follow of a source, given its live and next copies in the target.

    Next copies wait until all next copies of the source are loaded. If one of them replaces a live
    copy, the whole source waits: its other tables could not show the same transactions.
    """
    loaded = bool(coming) and all(copy.state is CopyState.CATCHING_UP for copy in coming.values())
    replaced = live.keys() & coming.keys()
    kept = {} if position is None else {t: c for t, c in live.items() if t not in coming}
    epoch = position.epoch if position is not None and kept else 0
    if loaded:
        epoch = max(epoch, *(copy.epoch for copy in coming.values()))
        stale = [table for table, copy in coming.items() if copy.epoch < epoch]
        if kept and position is not None and position.epoch < epoch:
            stale += kept
        if stale:
            raise RepairNeeded(f"source {name} began a new epoch {epoch}", stale)
    source = FollowedSource(name, epoch, position)
    if loaded:
        source.state = SourceState.REPLACING if kept and replaced else SourceState.CATCHING_UP
    elif kept and not replaced:
        source.state = SourceState.FOLLOWING
    else:
        return source
    for table, copy in kept.items():
        assert position is not None
        source.copies[table] = FollowedCopy(copy, position.commit_lsn, copy.schema.schema_version)
    if loaded:
        # A snapshot may be older than what shows already, even if every table has one.
        if position is not None and position.epoch == epoch:
            source.show_lsn = position.commit_lsn + 1
        for table, copy in coming.items():
            floor = max(copy.snapshot_lsn - 1, copy.applied_lsn)
            source.copies[table] = FollowedCopy(copy, floor, copy.schema.schema_version)
            source.show_lsn = max(source.show_lsn, copy.snapshot_lsn, copy.applied_lsn + 1)
    return source
