"""The hand-off from snapshots to changes, and the following of changes, as a pure state machine.

It takes events in stream order and returns actions on the target. The rules:

- A change is applied to a copy iff its commit LSN is at least the copy's snapshot LSN and larger
  than the last one that the copy has applied.
- The next copies of a source are promoted together, when the log has been read past the largest of
  their snapshot LSNs and past the position of the live copies. All tables then hold the same
  transactions.
- A snapshot of several consistent points is exact only at the largest of them. Changes below that
  are replayed, although the copy may hold some of them already. Rows that then lack values are
  asked for, and the copy is not promoted before it has them (`consumer_sdk/targets/incomplete.py`).
- A commit never splits a transaction. Several transactions may share one commit. A transaction too
  large for memory is written in parts, and committed when it is complete.
- While a next copy waits to replace a live one, the other live copies of the source stay at their
  position until the promotion.

A break in the history raises `RepairNeeded`. The hand-off cannot be used afterwards; a new one
starts from the state of the target. HOT PATH: `advance` handles every event.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from consumer_sdk.mirror.decisions import (
    Alter,
    Apply,
    ApplyAgain,
    Promote,
    RepairNeeded,
    Save,
    WantedRows,
)
from consumer_sdk.mirror.followed import SourceState, follow_source
from consumer_sdk.reading.progress import gap_of
from consumer_sdk.targets import incomplete
from consumer_sdk.targets.evolution import Effect, compare
from consumer_sdk.targets.target import CopyState, Lane
from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.mirror.decisions import Action, RowAnswer
    from consumer_sdk.mirror.followed import FollowedCopy, FollowedSource
    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.targets.target import MirrorCopy, MirrorPosition, TableName, TargetState
    from consumer_sdk.wire.envelope import Event

SPILL_EVENTS = 2000
# The bridge takes at most 1,000 keys; the rows of an answer are held in memory.
MOST_WANTED_ROWS = 200
# They are saved with every commit. Beyond this number, a snapshot at one point costs less.
MOST_INCOMPLETE_ROWS = 10_000
_UNCOUNTED = frozenset({"SCHEMA", "PROGRESS", "MESSAGE"})


class _Owner(NamedTuple):
    """The source that publishes a table, and the sequence up to which the table has been read."""

    source: str
    read_through: int


class HandOff:
    """Decides what to do with every event of a stream, starting from the state of a target.

    With `discover`, `discovered` collects the names of tables that the target does not have.
    """

    def __init__(
        self,
        state: TargetState,
        stream_created: int,
        *,
        discover: bool = False,
        spill_events: int = SPILL_EVENTS,
    ) -> None:
        self.discovered: set[TableName] = set()
        self.events_applied = 0
        self.stream_created = stream_created
        self._discover = discover
        self._spill_events = spill_events
        self._sources: dict[str, FollowedSource] = {}
        self._owners: dict[TableName, _Owner | None] = {}
        self._queue: dict[FollowedCopy, list[Event]] = {}
        self._actions: list[Action] = []
        copies = [copy for copy in state.copies if not copy.retired]
        live = {copy.name: copy for copy in copies if copy.lane is Lane.LIVE}
        next_copies = state.lane(Lane.NEXT)
        for name in sorted({copy.source for copy in copies}):
            own_next = {table: copy for table, copy in next_copies.items() if copy.source == name}
            # If another source now publishes a table, its next copy replaces the live copy.
            others = next_copies.keys() - own_next.keys()
            own_live = {
                t: copy for t, copy in live.items() if copy.source == name and t not in others
            }
            source = follow_source(name, state.positions.get(name), own_live, own_next)
            self._sources[name] = source
            for table, copy in source.copies.items():
                self._owners[table] = _Owner(name, source.read_so_far(copy))
        for table, planned in next_copies.items():
            # The source of a next copy may differ from that of the live copy, and is known only
            # when the next copy is loaded.
            loaded = planned.loaded
            self._owners[table] = _Owner(planned.source, planned.stream_seq) if loaded else None

    @property
    def following(self) -> bool:
        """Whether there is any source to follow now."""
        return any(source.followed for source in self._sources.values())

    @property
    def is_open(self) -> bool:
        """Whether part of a transaction has been read, but not its end."""
        return any(source.open_lsn is not None for source in self._sources.values())

    def sources(self) -> list[str]:
        """The sources being followed."""
        return [name for name, source in self._sources.items() if source.followed]

    @property
    def waiting_for(self) -> dict[str, tuple[int, int]]:
        """Epoch and LSN up to which the log must be read, for each source with next copies."""
        return {
            source.name: (source.epoch, source.promote_lsn)
            for source in self._sources.values()
            if source.has_next
        }

    @property
    def start_sequence(self) -> int:
        """The first stream sequence not yet read for every copy in use."""
        return 1 + min(
            source.read_so_far(copy)
            for source in self._sources.values()
            if source.followed
            for copy in source.copies.values()
        )

    def tables(self) -> list[TableName]:
        """The tables whose changes are wanted."""
        return sorted(
            {
                table
                for source in self._sources.values()
                if source.followed
                for table in source.copies
            }
        )

    def advance(self, batch: Sequence[Stored]) -> list[Action]:
        """Take the next events; returns the actions to perform, in order."""
        sources = self._sources
        waiting = SourceState.WAITING
        index, count = 0, len(batch)
        while index < count:
            item = batch[index]
            index += 1
            event = item.event
            source = sources.get(event.source)
            if source is None or source.state is waiting:
                self._unfollowed(event, item.stream_seq)
                continue
            changes = self._take_event(source, event, item.stream_seq)
            if changes is not None:
                index = self._take_run(source, changes, batch, index)
        return self._finish()

    def _take_event(
        self, source: FollowedSource, event: Event, stream_seq: int
    ) -> list[Event] | None:
        """Take one event of a source that is followed.

        Returns the pending changes that it was added to, if its transaction goes on.
        """
        if event.epoch != source.epoch:
            if event.epoch > source.epoch:
                raise RepairNeeded(
                    f"source {source.name} began a new epoch {event.epoch}", source.tables()
                )
            return None
        operation = event.operation
        if operation in _UNCOUNTED:
            self._take_uncounted(source, event, stream_seq)
            return None
        lsn = event.commit_lsn
        if lsn != source.open_lsn:
            if lsn <= source.closed_lsn:
                return None
            self._open(source, lsn, stream_seq)
        if event.seq <= source.open_seq:
            return None
        source.open_seq = event.seq
        changes: list[Event] | None = None
        if operation != "COMMIT":
            copy = source.copies.get((event.schema, event.table))
            if copy is None:
                self._unfollowed(event, stream_seq)
            elif lsn > copy.floor:
                if event.schema_version != copy.version:
                    self._evolve(source, copy, event.schema_version, lsn)
                if event.relation_id != copy.copy.relation_id:
                    self._set_relation_id(source, copy, event.relation_id, lsn)
                changes = source.pending.setdefault(copy, [])
                changes.append(event)
        if event.last or operation == "COMMIT":
            self._close(source, stream_seq)
            return None
        return changes

    def _take_run(
        self, source: FollowedSource, changes: list[Event], batch: Sequence[Stored], index: int
    ) -> int:
        """Add the run of events from index `index` on that are like the one just added.

        They have the same transaction, table, operation and version, so they need none of its
        checks again. Returns the index of the first event that differs.
        """
        first = changes[-1]
        lsn, operation, relation_id = first.commit_lsn, first.operation, first.relation_id
        table, schema, version = first.table, first.schema, first.schema_version
        name, epoch = first.source, first.epoch
        for item in islice(batch, index, None):
            event = item.event
            if (
                event.commit_lsn != lsn
                or event.table != table
                or event.operation != operation
                or event.relation_id != relation_id
                or event.schema_version != version
                or event.schema != schema
                or event.source != name
                or event.epoch != epoch
            ):
                break
            index += 1
            if event.seq > source.open_seq:
                source.open_seq = event.seq
                changes.append(event)
                if event.last:
                    self._close(source, item.stream_seq)
                    break
        return index

    def read_through(self, stream_seq: int) -> list[Action]:
        """Take notice that everything of the wanted tables up to `stream_seq` has been read."""
        for source in self._sources.values():
            if source.followed and source.open_lsn is None and stream_seq > source.read_through:
                source.read_through = stream_seq
                source.unsaved = True
        return self._finish()

    def passed(self, name: str, lsn: int, stream_seq: int) -> list[Action]:
        """Take notice that every transaction of a source with a commit LSN below `lsn` was read."""
        source = self._sources.get(name)
        if source is not None and source.followed and source.open_lsn is None:
            self._reach(source, lsn, stream_seq)
        return self._finish()

    def wanted_rows(self) -> list[WantedRows]:
        """Incomplete rows of copies that are exact otherwise, and for which no answer has come."""
        return [
            WantedRows(copy.copy, frozenset(islice(copy.copy.incomplete, MOST_WANTED_ROWS)))
            for source in self._sources.values()
            if source.has_next
            for copy in source.copies.values()
            if copy.copy.incomplete
            and copy.answer is None
            and max(source.closed_lsn, copy.floor) + 1 >= copy.copy.exact_lsn
        ]

    def take_answer(self, answer: RowAnswer) -> list[Action]:
        """Take the values of incomplete rows; they are set once everything below it is read."""
        wanted = answer.wanted.copy
        source = self._sources[wanted.source]
        copy = source.copies[wanted.name]
        if source.has_next and copy.copy.incomplete:
            copy.answer = answer
            source.promote_lsn = max(source.promote_lsn, answer.lsn)
            if source.open_lsn is None:
                self._reach(source, source.closed_lsn + 1, source.read_through)
        return self._finish()

    # transactions

    def _open(self, source: FollowedSource, lsn: int, stream_seq: int) -> None:
        if source.open_lsn is not None:
            raise RepairNeeded(
                f"transaction {format_lsn(source.open_lsn)} of source {source.name} has no end",
                source.tables(),
            )
        if source.may_promote(lsn):
            self._complete_and_promote(source, lsn, stream_seq - 1)
        source.open_lsn = lsn
        source.open_seq = -1

    def _close(self, source: FollowedSource, stream_seq: int) -> None:
        lsn = source.open_lsn
        assert lsn is not None, "no transaction is open"
        self._take_pending(source)
        source.spilled = False
        source.open_lsn = None
        source.closed_lsn = lsn
        source.closed_seq = source.open_seq
        source.read_through = stream_seq
        source.unsaved = True
        if source.may_promote(lsn + 1):
            self._complete_and_promote(source, lsn + 1, stream_seq)

    def _reach(self, source: FollowedSource, lsn: int, stream_seq: int) -> None:
        if lsn - 1 > source.closed_lsn:
            source.closed_lsn = lsn - 1
            source.closed_seq = 0
            source.read_through = max(source.read_through, stream_seq)
            source.unsaved = True
        if source.may_promote(lsn):
            self._complete_and_promote(source, lsn, stream_seq)

    def _complete_and_promote(self, source: FollowedSource, lsn: int, stream_seq: int) -> None:
        """Complete rows from answers, then make next copies live unless rows are incomplete.

        Every transaction below `lsn` is applied, and no other.
        """
        self._flush()
        for copy in source.copies.values():
            if copy.answer is not None:
                self._complete(copy, copy.answer)
                source.unsaved = True
        if not any(copy.copy.incomplete for copy in source.copies.values()):
            self._promote(source, lsn, stream_seq)

    def _complete(self, copy: FollowedCopy, answer: RowAnswer) -> None:
        copy.answer = None
        try:
            events, left = incomplete.complete(
                copy.copy, answer.lsn, answer.wanted.keys, answer.rows
            )
        except incomplete.RowNotFound as error:
            raise RepairNeeded(str(error), [copy.copy.name]) from error
        if events:
            self._actions.append(Apply(copy.copy, events))
        copy.copy = replace(copy.copy, incomplete=left)

    def _promote(self, source: FollowedSource, lsn: int, stream_seq: int) -> None:
        """Make next copies live; every transaction below `lsn` is applied, and no other."""
        next_copies = [copy for copy in source.copies.values() if copy.copy.lane is Lane.NEXT]
        for copy in next_copies:
            copy.copy = replace(copy.copy, exact_lsn=0)
        self._actions.append(Promote([copy.copy for copy in next_copies]))
        for copy in next_copies:
            copy.copy = copy.copy.become(CopyState.LIVE)
        source.state = SourceState.FOLLOWING
        source.closed_lsn = max(source.closed_lsn, lsn - 1)
        source.read_through = max(source.read_through, stream_seq)
        source.unsaved = True

    def _take_pending(self, source: FollowedSource) -> None:
        queue = self._queue
        for copy, changes in source.pending.items():
            waiting = queue.get(copy)
            if waiting is None:
                queue[copy] = changes
            else:
                waiting += changes
        source.pending.clear()

    def _flush(self) -> None:
        for copy, events in self._queue.items():
            self.events_applied += len(events)
            if copy.copy.exact_lsn:
                self._flush_inexact(copy, events)
            else:
                self._actions.append(Apply(copy.copy, events))
        self._queue = {}

    def _flush_inexact(self, copy: FollowedCopy, events: list[Event]) -> None:
        """Write changes to a copy of a snapshot of several points, and note incomplete rows."""
        exact_lsn = copy.copy.exact_lsn
        count = sum(event.commit_lsn < exact_lsn for event in events)
        if count:
            self._actions.append(ApplyAgain(copy.copy, events[:count]))
        if count < len(events):
            self._actions.append(Apply(copy.copy, events[count:]))
        rows = incomplete.follow(copy.copy.incomplete, events, copy.copy.schema, exact_lsn)
        if len(rows) > MOST_INCOMPLETE_ROWS:
            raise RepairNeeded(
                f"more than {MOST_INCOMPLETE_ROWS} rows changed their key while it was copied",
                [copy.copy.name],
                at_one_point=True,
            )
        copy.copy = replace(copy.copy, incomplete=rows)

    def _finish(self) -> list[Action]:
        for source in self._sources.values():
            if sum(map(len, source.pending.values())) > self._spill_events:
                self._spill(source)
        self._flush()
        if not any(map(_holds_commit, self._sources.values())):
            self._commit()
        actions, self._actions = self._actions, []
        return actions

    def _spill(self, source: FollowedSource) -> None:
        self._take_pending(source)
        source.spilled = True

    def _commit(self) -> None:
        positions: list[MirrorPosition] = []
        copies: list[MirrorCopy] = []
        for source in self._sources.values():
            if not source.unsaved:
                continue
            source.unsaved = False
            position = source.live_position(self.stream_created)
            if position is not None and position != source.position:
                source.position = position
                positions.append(position)
            for copy in source.copies.values():
                if copy.copy.state is CopyState.CATCHING_UP:
                    copy.copy = replace(
                        copy.copy,
                        applied_lsn=max(copy.copy.applied_lsn, source.closed_lsn),
                        stream_seq=max(copy.copy.stream_seq, source.read_through),
                    )
                elif copy not in source.altered:
                    continue
                copies.append(copy.copy)
            source.altered.clear()
        if positions or copies or self._actions:
            self._actions.append(Save(positions, copies))

    # what is not a change

    def _take_uncounted(self, source: FollowedSource, event: Event, stream_seq: int) -> None:
        if event.operation == "SCHEMA" and event.document is not None:
            schema = TableSchema.from_document(event.document)
            copy = source.copies.get((schema.schema, schema.table))
            if copy is not None:
                copy.announced = schema
            else:
                self._unfollowed(event, stream_seq)
        elif event.operation == "PROGRESS" and event.document is not None:
            self._progress(source, event, stream_seq)

    def _progress(self, source: FollowedSource, event: Event, stream_seq: int) -> None:
        gap = gap_of(event.document or {})
        if gap is not None:
            broken = [
                name
                for name, copy in source.copies.items()
                if gap.concerns(*name) and copy.copy.snapshot_lsn <= event.commit_lsn
            ]
            if broken:
                raise RepairNeeded(
                    f"source {source.name} announced a gap: {gap.reason}",
                    broken,
                    event.commit_lsn + 1,
                )
        if source.open_lsn is None:
            self._reach(source, event.commit_lsn, stream_seq)

    def _unfollowed(self, event: Event, stream_seq: int) -> None:
        """Handle an event of a table or source that is not followed."""
        name = (event.schema, event.table)
        if not event.table:
            return
        if name in self._owners:
            owner = self._owners[name]
            if (
                owner is not None
                and owner.source != event.source
                and stream_seq > owner.read_through
            ):
                raise RepairNeeded(f"source {event.source} publishes it now", [name])
        elif self._discover:
            self.discovered.add(name)

    def _set_relation_id(
        self, source: FollowedSource, copy: FollowedCopy, relation_id: int, lsn: int
    ) -> None:
        if copy.copy.relation_id:
            raise RepairNeeded("it was dropped and created again", [copy.copy.name], lsn + 1)
        copy.copy = replace(copy.copy, relation_id=relation_id)
        source.altered.add(copy)
        source.unsaved = True

    def _evolve(self, source: FollowedSource, copy: FollowedCopy, version: int, lsn: int) -> None:
        """Bring a copy to the schema version of the next change."""
        announced = copy.announced
        if announced is None or announced.schema_version != version:
            raise RepairNeeded(
                f"rows of schema version {version} came without that schema",
                [copy.copy.name],
                lsn + 1,
            )
        evolution = compare(copy.copy.schema, announced)
        if evolution.effect is Effect.REBUILD:
            raise RepairNeeded(evolution.reason, [copy.copy.name], lsn + 1)
        # Earlier changes must be written before the structure changes; both share one commit.
        self._spill(source)
        self._flush()
        if lsn < copy.copy.exact_lsn or copy.copy.incomplete:
            raise RepairNeeded(
                "its structure changed before its snapshot was exact", [copy.copy.name], lsn + 1
            )
        if evolution.effect is Effect.ALTER:
            self._actions.append(Alter(copy.copy, announced))
        copy.copy = replace(copy.copy, schema=announced)
        copy.version = version
        source.altered.add(copy)
        source.unsaved = True


def _holds_commit(source: FollowedSource) -> bool:
    """Whether a commit now would show part of a transaction, or tables at different positions."""
    return source.spilled or source.state is SourceState.REPLACING
