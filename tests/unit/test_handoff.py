"""The hand-off rule by rule; `tests/property/test_handoff_properties.py` has the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_event

from consumer_sdk.mirror.decisions import Alter, Apply, Promote, RepairNeeded, Save
from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.mirror.writer import Writer
from consumer_sdk.reading.decoder import Stored
from consumer_sdk.targets.memory import MemoryTarget
from consumer_sdk.targets.target import (
    TRANSITIONS,
    CopyState,
    InvalidTransition,
    Lane,
    MirrorCopy,
    MirrorPosition,
    TargetState,
)
from tests.mirror_model import (
    CREATED,
    ModelSource,
    ModelStream,
    column,
    normalized,
    table_schema,
)

A, B = ("public", "a"), ("public", "b")


def row(key: int, name: str = "n", body: str = "b") -> dict[str, Any]:
    return {"id": key, "name": name, "body": body}


class Bench:
    """A source with tables a and b, and a mirror of both in memory."""

    def __init__(self, *tables: tuple[str, str]) -> None:
        self.stream = ModelStream()
        self.source = ModelSource(self.stream, [table_schema("a"), table_schema("b")])
        self.target = MemoryTarget()
        self.writer = Writer(self.target)
        self.writer.open()
        for table in tables or (A, B):
            self.load(table)
        self.source.progress()
        self.machine = self.restart()

    def load(self, table: tuple[str, str]) -> None:
        copy, rows = self.source.snapshot(table, self.source.lsn + 1, self.stream.last + 1)
        self.writer.start_load(copy)
        self.writer.load(copy, rows)
        self.writer.finish_load(copy)

    def restart(self) -> HandOff:
        machine = HandOff(self.writer.read_state(), CREATED)
        self.machine = machine
        self.seen = machine.start_sequence - 1
        self.follow()
        return machine

    def follow(self) -> list[Any]:
        """Give the machine everything it has not seen; returns what it decided."""
        actions = self.machine.advance(self.stream.since(self.seen + 1))
        self.seen = self.stream.last
        self.writer.perform(actions)
        return actions

    def shown(self, table: tuple[str, str]) -> list[dict[str, Any]]:
        return normalized(self.target.rows(table[1], table[0]))


def kinds(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_tables_show_only_after_the_log_has_passed_the_largest_snapshot() -> None:
    stream = ModelStream()
    source = ModelSource(stream, [table_schema("a"), table_schema("b")])
    target = MemoryTarget()
    writer = Writer(target)
    writer.open()
    source.insert(A, row(1))
    source.insert(B, row(1))
    first = source.commit()
    source.insert(A, row(2))
    source.insert(B, row(2))
    second = source.commit()
    for table, lsn in ((A, first), (B, second + 1)):
        copy, rows = source.snapshot(table, lsn, 1)
        writer.start_load(copy)
        writer.load(copy, rows)
        writer.finish_load(copy)
    machine = HandOff(writer.read_state(), CREATED)
    assert machine.start_sequence == 1
    end = next(i.stream_seq for i in stream.stored if i.event.last and i.event.commit_lsn == second)
    for item in stream.stored:
        writer.perform(machine.advance([item]))
        assert bool(target.tables()) == (item.stream_seq >= end)
    assert normalized(target.rows("a")) == normalized(target.rows("b")) == [row(1), row(2)]


def test_the_first_end_closes_a_transaction_and_later_ends_change_nothing() -> None:
    bench = Bench()
    bench.source.insert(A, row(1))
    bench.source.insert(B, row(1))
    lsn = bench.source.commit()
    first_end = next(item for item in bench.stream.stored if item.event.last)
    only_a = [i for i in bench.stream.since(bench.seen + 1) if i.event.table == "a"]
    assert [item.event.operation for item in only_a] == ["INSERT", "COMMIT"]
    commit = bench.machine.advance(bench.stream.since(bench.seen + 1))[-1]
    assert isinstance(commit, Save)
    assert commit.positions[0].commit_lsn == lsn
    assert commit.positions[0].stream_seq >= first_end.stream_seq
    assert bench.machine.advance([only_a[-1]]) == []


def test_repeated_events_are_dropped() -> None:
    bench = Bench()
    bench.source.insert(A, row(1))
    bench.source.insert(A, row(2))
    bench.source.commit()
    items = bench.stream.since(bench.seen + 1)
    doubled = [item for item in items for _ in range(2)]
    actions = bench.machine.advance(doubled + items)
    assert sum(len(a.events) for a in actions if isinstance(a, Apply)) == 2


def test_nothing_is_committed_in_the_middle_of_a_transaction() -> None:
    bench = Bench()
    bench.machine = HandOff(bench.writer.read_state(), CREATED, spill_events=2)
    for key in range(5):
        bench.source.insert(A, row(key))
    bench.source.commit()
    items = bench.stream.since(bench.machine.start_sequence)
    bench.writer.perform(bench.machine.advance(items[:-1]))
    assert bench.writer.in_transaction
    assert bench.machine.is_open
    assert bench.shown(A) == []
    bench.writer.perform(bench.machine.advance(items[-1:]))
    assert not bench.writer.in_transaction
    assert len(bench.shown(A)) == 5


def test_a_transaction_without_an_end_is_a_break() -> None:
    bench = Bench()
    bench.source.insert(A, row(1))
    bench.source.insert(A, row(2))
    bench.source.commit()
    bench.source.insert(A, row(3))
    bench.source.commit()
    items = bench.stream.since(bench.seen + 1)
    with pytest.raises(RepairNeeded, match="has no end") as broken:
        bench.machine.advance([items[0], items[2]])
    assert broken.value.tables == {A, B}


def test_a_missing_end_is_noticed_by_a_like_change_of_the_next_transaction() -> None:
    bench = Bench()
    bench.source.insert(A, row(1))
    bench.source.insert(A, row(2))
    first = bench.source.events()
    bench.source.insert(A, row(3))
    bench.source.insert(A, row(4))
    second = bench.source.events()
    for event in (first[0], second[1]):
        bench.stream.append(event)
    with pytest.raises(RepairNeeded, match="has no end"):
        bench.follow()


def test_events_of_an_earlier_epoch_are_dropped_and_a_new_epoch_is_a_break() -> None:
    bench = Bench()
    bench.source.insert(A, row(1))
    bench.source.commit()
    (item,) = bench.stream.since(bench.seen + 1)
    assert bench.machine.advance([Stored(99, replace_event(item.event, epoch=0))]) == []
    with pytest.raises(RepairNeeded, match="new epoch 2") as broken:
        bench.machine.advance([Stored(100, replace_event(item.event, epoch=2))])
    assert broken.value.tables == {A, B}


def test_progress_of_a_new_epoch_is_a_break_without_any_change() -> None:
    bench = Bench()
    bench.source.epoch = 2
    bench.source.progress()
    with pytest.raises(RepairNeeded, match="new epoch"):
        bench.follow()


def test_an_announced_gap_breaks_tables_with_older_snapshots() -> None:
    bench = Bench()
    bench.source.progress(gap={"reason": "rows moved unseen"})
    with pytest.raises(RepairNeeded, match="announced a gap") as broken:
        bench.follow()
    assert broken.value.tables == {A, B}
    assert broken.value.snapshot_lsn == bench.source.lsn + 1
    for table in (A, B):
        bench.load(table)
    bench.source.progress()
    bench.restart()
    assert not bench.machine.waiting_for


def test_changes_of_an_idle_table_are_read_through_without_moving_the_position() -> None:
    bench = Bench()
    before = bench.writer.read_state().positions["slot"]
    bench.writer.perform(bench.machine.read_through(before.stream_seq + 500))
    after = bench.writer.read_state().positions["slot"]
    assert (after.commit_lsn, after.stream_seq) == (before.commit_lsn, before.stream_seq + 500)
    assert bench.machine.read_through(before.stream_seq + 500) == []


def test_knowing_that_the_log_is_past_the_snapshot_is_enough_to_show_it() -> None:
    stream = ModelStream()
    source = ModelSource(stream, [table_schema("a")])
    writer = Writer(MemoryTarget())
    writer.open()
    copy, _ = source.snapshot(A, 5000, 1)
    writer.start_load(copy)
    writer.finish_load(copy)
    machine = HandOff(writer.read_state(), CREATED)
    assert machine.waiting_for == {"slot": (1, 5000)}
    assert "Promote" not in kinds(machine.passed("slot", 4999, 3))
    assert kinds(machine.passed("slot", 5000, 3)) == ["Promote", "Save"]
    assert machine.waiting_for == {}


def test_other_tables_are_held_while_one_is_built_anew() -> None:
    bench = Bench()
    bench.source.insert(A, row(1))
    bench.source.insert(B, row(1))
    bench.source.commit()
    bench.follow()
    state = bench.writer.read_state()
    bench.writer.plan([state.lane(Lane.LIVE)[A].plan_again()])
    assert not HandOff(bench.writer.read_state(), CREATED).following
    ends = []
    for key in (2, 3):
        bench.source.insert(A, row(key))
        bench.source.insert(B, row(key))
        bench.source.commit()
        ends.append(bench.stream.last)
    bench.load(A)
    machine = HandOff(bench.writer.read_state(), CREATED)
    assert machine.start_sequence == state.positions["slot"].stream_seq + 1
    items = bench.stream.since(machine.start_sequence)
    actions = machine.advance([item for item in items if item.stream_seq <= ends[0]])
    bench.writer.perform(actions)
    assert kinds(actions) == ["Apply"]
    assert bench.shown(A) == bench.shown(B) == [row(1)]
    bench.writer.perform(machine.advance([i for i in items if i.stream_seq > ends[0]]))
    assert bench.shown(A) == bench.shown(B) == [row(1), row(2), row(3)]


def test_a_wider_schema_is_applied_in_its_place_between_changes() -> None:
    bench = Bench()
    old = bench.source.schemas[A]
    wider = replace(
        old, schema_version=2, columns=(*old.columns, column("more", 4)), filenode=old.filenode
    )
    bench.source.insert(A, row(1))
    bench.source.change_schema(wider, rows=[{**row(1), "more": None}])
    bench.source.insert(A, {**row(2), "more": "x"})
    bench.source.commit()
    actions = bench.follow()
    assert kinds(actions) == ["Apply", "Alter", "Apply", "Save"]
    assert isinstance(actions[1], Alter)
    assert actions[1].schema == wider
    assert bench.shown(A) == normalized([{**row(1), "more": None}, {**row(2), "more": "x"}])
    assert bench.writer.read_state().lane(Lane.LIVE)[A].schema == wider
    bench.source.delete(A, {**row(1), "more": None})
    bench.source.commit()
    bench.restart()
    assert bench.shown(A) == [{**row(2), "more": "x"}]


def test_a_schema_that_rewrites_rows_is_a_break_once_a_row_needs_it() -> None:
    bench = Bench()
    old = bench.source.schemas[A]
    changed = replace(
        old,
        schema_version=2,
        columns=(*old.columns, column("more", 4, column_default="5", backfilled=True)),
    )
    bench.source.change_schema(changed)
    bench.source.insert(B, row(1))
    bench.source.commit()
    bench.follow()
    assert len(bench.shown(B)) == 1
    bench.source.insert(A, {**row(2), "more": "x"})
    bench.source.commit()
    with pytest.raises(RepairNeeded, match="new column more") as broken:
        bench.follow()
    assert broken.value.tables == {A}


def test_schemas_from_before_the_snapshot_are_ignored() -> None:
    stream = ModelStream()
    source = ModelSource(stream, [table_schema("a")])
    old = source.schemas[A]
    source.insert(A, row(1))
    source.commit()
    narrow = replace(old, schema_version=2, columns=old.columns[:2])
    source.change_schema(narrow, rows=[{"id": 1, "name": "n"}])
    source.insert(A, {"id": 2, "name": "n"})
    source.commit()
    source.change_schema(replace(old, schema_version=3), rows=[row(1), row(2)])
    source.insert(A, row(3))
    lsn = source.commit()
    writer = Writer(target := MemoryTarget())
    writer.open()
    copy, rows = source.snapshot(A, lsn + 1, 1)
    writer.start_load(copy)
    writer.load(copy, rows)
    writer.finish_load(copy)
    machine = HandOff(writer.read_state(), CREATED)
    source.insert(A, row(4))
    source.commit()
    writer.perform(machine.advance(stream.stored))
    assert normalized(target.rows("a")) == [row(1), row(2), row(3), row(4)]


def test_a_table_that_was_created_again_is_a_break() -> None:
    bench = Bench()
    bench.source.insert(A, row(1))
    bench.source.commit()
    bench.follow()
    bench.source.insert(A, row(1))
    bench.source.commit()
    (item,) = bench.stream.since(bench.seen + 1)
    with pytest.raises(RepairNeeded, match="created again"):
        bench.machine.advance([Stored(item.stream_seq, replace_event(item.event, relation_id=77))])


def test_a_table_that_another_source_publishes_now_is_a_break() -> None:
    bench = Bench()
    bench.restart()
    bench.source.insert(A, row(1))
    bench.source.commit()
    (item,) = bench.stream.since(bench.seen + 1)
    early = Stored(1, replace_event(item.event, source="other"))
    assert bench.machine.advance([early]) == []
    with pytest.raises(RepairNeeded, match="other publishes it now") as broken:
        bench.machine.advance([Stored(item.stream_seq, replace_event(item.event, source="other"))])
    assert broken.value.tables == {A}


def test_unknown_tables_are_discovered_only_when_asked_for() -> None:
    bench = Bench(A)
    bench.source.insert(B, row(1))
    bench.source.commit()
    bench.follow()
    assert bench.machine.discovered == set()
    machine = HandOff(bench.writer.read_state(), CREATED, discover=True)
    machine.advance(bench.stream.stored[-1:])
    assert machine.discovered == {B}


def test_copies_of_different_epochs_are_not_shown_together() -> None:
    position = MirrorPosition("slot", 1, 100, 0, 10, CREATED)
    live = MirrorCopy(table_schema("a"), CopyState.LIVE, epoch=1)
    coming = MirrorCopy(table_schema("b"), CopyState.CATCHING_UP, epoch=2, snapshot_lsn=50)
    with pytest.raises(RepairNeeded, match="new epoch 2") as broken:
        HandOff(TargetState({"slot": position}, [live, coming]), CREATED)
    assert broken.value.tables == {A}


def test_promotion_and_position_belong_to_one_commit() -> None:
    bench = Bench()
    state = bench.writer.read_state()
    bench.writer.plan([state.lane(Lane.LIVE)[table].plan_again() for table in (A, B)])
    bench.load(A)
    bench.load(B)
    bench.source.insert(A, row(1))
    lsn = bench.source.commit()
    machine = HandOff(bench.writer.read_state(), CREATED)
    actions = machine.advance(bench.stream.since(machine.start_sequence))
    assert kinds(actions) == ["Promote", "Apply", "Save"]
    promote, _, commit = actions
    assert isinstance(promote, Promote)
    assert isinstance(commit, Save)
    assert {copy.name for copy in promote.copies} == {A, B}
    assert [position.commit_lsn for position in commit.positions] == [lsn]


def test_tables_built_anew_from_an_older_snapshot_do_not_go_back() -> None:
    bench = Bench()
    source, writer = bench.source, bench.writer
    older = [source.snapshot(table, source.lsn + 1, bench.stream.last + 1) for table in (A, B)]
    for key in range(1, 4):
        source.insert(A, row(key))
        source.commit()
    bench.follow()
    before = bench.shown(A)
    writer.plan(copy.plan_again() for copy, _ in older)
    for copy, rows in older:
        writer.start_load(copy)
        writer.load(copy, rows)
        writer.finish_load(copy)
    # Every step could be the last one before a crash.
    for steps in range(1, 5):
        machine = HandOff(writer.read_state(), CREATED)
        for item in bench.stream.since(machine.start_sequence)[:steps]:
            writer.perform(machine.advance([item]))
            assert bench.shown(A) == before
    assert not writer.read_state().lane(Lane.NEXT)


def test_a_changed_structure_shows_with_its_transaction() -> None:
    bench = Bench()
    first = bench.source.schemas[A]
    wider = replace(first, schema_version=2, columns=(*first.columns, column("extra", 4)))
    bench.source.change_schema(wider)
    for key in (1, 2):
        bench.source.insert(A, {**row(key), "extra": "e"})
    bench.source.commit()
    *most, last = bench.stream.since(bench.seen + 1)
    bench.writer.perform(bench.machine.advance(most))
    assert bench.writer.in_transaction
    bench.writer.perform(bench.machine.advance([last]))
    assert not bench.writer.in_transaction
    assert len(bench.shown(A)) == 2


def test_a_table_that_another_source_publishes_is_announced_once() -> None:
    bench = Bench()
    other = ModelSource(bench.stream, [table_schema("a", source="other")], name="other")
    other.insert(A, row(1))
    other.commit()
    with pytest.raises(RepairNeeded, match="source other publishes it now"):
        bench.follow()
    planned = MirrorCopy(other.schemas[A])
    bench.writer.plan([planned])
    bench.restart()
    assert bench.machine.tables() == [B]
    copy, _ = other.snapshot(A, other.lsn + 1, bench.stream.last + 1)
    bench.writer.start_load(copy)
    bench.writer.finish_load(copy)
    bench.restart()
    assert bench.machine.tables() == [A, B]


@pytest.mark.parametrize("state", CopyState)
@pytest.mark.parametrize("wanted", CopyState)
def test_a_copy_becomes_only_what_its_state_allows(state: CopyState, wanted: CopyState) -> None:
    copy = MirrorCopy(table_schema("a"), state)
    if wanted in TRANSITIONS[state]:
        assert copy.become(wanted).state is wanted
    else:
        with pytest.raises(InvalidTransition, match=f"is {state} cannot become {wanted}"):
            copy.become(wanted)


def test_a_copy_goes_from_plan_to_retirement_and_never_back() -> None:
    copy = MirrorCopy(table_schema("a"))
    lanes = [copy.lane]
    for state in (CopyState.LOADING, CopyState.CATCHING_UP, CopyState.LIVE, CopyState.RETIRED):
        copy = copy.become(state)
        lanes.append(copy.lane)
    assert lanes == [Lane.NEXT, Lane.NEXT, Lane.NEXT, Lane.LIVE, Lane.LIVE]
    order = list(CopyState)
    for state, following in TRANSITIONS.items():
        assert all(order.index(one) >= order.index(state) for one in following)
