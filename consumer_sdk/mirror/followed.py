"""What the hand-off knows of each source and each copy while it follows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from consumer_sdk.mirror.decisions import RepairNeeded
from consumer_sdk.targets.target import Lane, MirrorPosition

if TYPE_CHECKING:
    from consumer_sdk.targets.target import MirrorCopy, TableName
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event


@dataclass(slots=True, eq=False)
class FollowedCopy:
    """A copy in use. Changes up to commit LSN `floor` are in it from the start."""

    copy: MirrorCopy
    floor: int
    version: int
    notice: TableSchema | None = None


@dataclass(slots=True, eq=False)
class FollowedSource:
    """A source being followed: how far it has been read, and the transaction that is open."""

    name: str
    epoch: int
    position: MirrorPosition | None
    copies: dict[TableName, FollowedCopy] = field(default_factory=dict)
    following: bool = True
    """False while the source's tables wait for snapshots: its events are left for later."""
    barrier: int | None = None
    """The LSN up to which the log must be read before next copies may show."""
    held: bool = False
    closed_lsn: int = -1
    closed_seq: int = 0
    read_through: int = 0
    open_lsn: int = -1
    open_seq: int = -1
    pending: dict[FollowedCopy, list[Event]] = field(default_factory=dict)
    spilled: bool = False
    unsaved: bool = False
    altered: set[FollowedCopy] = field(default_factory=set)

    def tables(self) -> list[TableName]:
        """The tables in use."""
        return list(self.copies)

    def read_so_far(self, copy: FollowedCopy) -> int:
        """The stream sequence up to which everything has been read for a copy."""
        if copy.copy.lane is Lane.NEXT or self.position is None:
            return copy.copy.stream_seq
        return self.position.stream_seq

    def live_position(self, stream_created: int) -> MirrorPosition | None:
        """Where the live copies stand now; what is replayed for next copies does not move it."""
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

    Next copies wait until all of the source are loaded. A source with a live table that is being
    built anew waits with them: its other tables could not show the same transactions.
    """
    loaded = bool(coming) and all(copy.loaded for copy in coming.values())
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
    source.following = loaded or (bool(kept) and not replaced)
    if not source.following:
        return source
    for table, copy in kept.items():
        assert position is not None
        source.copies[table] = FollowedCopy(copy, position.commit_lsn, copy.schema.schema_version)
    if loaded:
        # A snapshot may be older than what already shows, also where every table has one.
        source.barrier = 0
        if position is not None and position.epoch == epoch:
            source.barrier = position.commit_lsn + 1
        source.held = bool(kept and replaced)
        for table, copy in coming.items():
            floor = max(copy.snapshot_lsn - 1, copy.applied_lsn)
            source.copies[table] = FollowedCopy(copy, floor, copy.schema.schema_version)
            source.barrier = max(source.barrier, copy.snapshot_lsn, copy.applied_lsn + 1)
    return source
