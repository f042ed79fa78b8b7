"""The state of each source and each copy that the hand-off follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from consumer_sdk.mirror.decisions import RepairNeeded
from consumer_sdk.targets.target import CopyState, Lane, MirrorPosition

if TYPE_CHECKING:
    from consumer_sdk.mirror.decisions import RowAnswer
    from consumer_sdk.targets.target import MirrorCopy, TableName
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event


class SourceState(Enum):
    """What the hand-off does with the events of a source."""

    WAITING = "waiting"
    """They are not applied yet, because tables of the source wait for their snapshots."""
    CATCHING_UP = "catching up"
    """They are applied and committed. Next copies are promoted when the log has been read up to
    `promote_lsn`."""
    REPLACING = "replacing"
    """They are applied, but committed only when next copies are promoted: some of these replace
    live copies, and the other live copies must not get ahead of those."""
    FOLLOWING = "following"
    """They are applied and committed; every copy is live."""


_FOLLOWING = SourceState.FOLLOWING


@dataclass(slots=True, eq=False)
class FollowedCopy:
    """A copy in use; when the hand-off started, it held every change up to commit LSN `floor`."""

    copy: MirrorCopy
    floor: int
    version: int
    announced: TableSchema | None = None
    """The last schema announced in the stream."""
    answer: RowAnswer | None = None
    """Values of incomplete rows, which are set when everything below its LSN has been read."""


@dataclass(slots=True, eq=False)
class FollowedSource:
    """How far a source has been read, and its open transaction."""

    name: str
    epoch: int
    position: MirrorPosition | None
    """The position saved in the target."""
    state: SourceState = SourceState.WAITING
    copies: dict[TableName, FollowedCopy] = field(default_factory=dict)
    promote_lsn: int = 0
    """Next copies are promoted when every transaction with a smaller commit LSN has been read."""
    closed_lsn: int = 0
    """Commit LSN of the last complete transaction; `closed_seq` is the `seq` of its end."""
    closed_seq: int = 0
    read_through: int = 0
    """The stream sequence up to which everything has been read."""
    open_lsn: int | None = None
    """Commit LSN of the open transaction; `open_seq` is the last `seq` read of it."""
    open_seq: int = -1
    pending: dict[FollowedCopy, list[Event]] = field(default_factory=dict)
    """Changes of the open transaction."""
    spilled: bool = False
    """Whether part of the open transaction has been written to the target."""
    unsaved: bool = False
    altered: set[FollowedCopy] = field(default_factory=set)
    """Live copies whose saved state is out of date."""

    @property
    def followed(self) -> bool:
        """Whether its events are applied."""
        return self.state is not SourceState.WAITING

    @property
    def has_next(self) -> bool:
        """Whether next copies wait to be promoted."""
        return self.state in (SourceState.CATCHING_UP, SourceState.REPLACING)

    def may_promote(self, lsn: int) -> bool:
        """Whether next copies can be promoted once everything below `lsn` has been read."""
        return self.state is not _FOLLOWING and lsn >= self.promote_lsn

    def tables(self) -> list[TableName]:
        """The tables in use."""
        return list(self.copies)

    def read_so_far(self, copy: FollowedCopy) -> int:
        """The stream sequence up to which everything has been read for a copy."""
        if copy.copy.lane is Lane.NEXT or self.position is None:
            return copy.copy.stream_seq
        return self.position.stream_seq

    def live_position(self, stream_created: int) -> MirrorPosition | None:
        """The position of the live copies; reading again for next copies does not move it back."""
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
    next_copies: dict[TableName, MirrorCopy],
) -> FollowedSource:
    """The state in which to follow a source, given its live and next copies in the target.

    Next copies wait until all next copies of the source are loaded. If one of them replaces a live
    copy, the whole source waits: otherwise its tables would show different transactions.
    """
    loaded = bool(next_copies) and all(
        copy.state is CopyState.CATCHING_UP for copy in next_copies.values()
    )
    replaced = live.keys() & next_copies.keys()
    kept = {} if position is None else {t: c for t, c in live.items() if t not in next_copies}
    epoch = position.epoch if position is not None and kept else 0
    if loaded:
        epoch = max(epoch, *(copy.epoch for copy in next_copies.values()))
        stale = [table for table, copy in next_copies.items() if copy.epoch < epoch]
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
        # A snapshot may be older than the live copies, even if every table has a new one.
        if position is not None and position.epoch == epoch:
            source.promote_lsn = position.commit_lsn + 1
        for table, copy in next_copies.items():
            floor = max(copy.snapshot_lsn - 1, copy.applied_lsn)
            source.copies[table] = FollowedCopy(copy, floor, copy.schema.schema_version)
            source.promote_lsn = max(
                source.promote_lsn, copy.snapshot_lsn, copy.exact_lsn, copy.applied_lsn + 1
            )
    return source
