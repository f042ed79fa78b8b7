"""Snapshots of several consistent points: random histories, groups and crashes; the mirror shows a
table only when it is exact, and then equals the source at every commit.

Keys are few, so that rows are deleted, inserted again, moved and swapped between groups all the
time, often without their TOASTed values.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.mirror.writer import Writer
from consumer_sdk.targets.memory import MemoryTarget
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import Lane
from tests.mirror_model import CREATED, ModelSource, ModelStream, Row, normalized, table_schema

if TYPE_CHECKING:
    from consumer_sdk.mirror.decisions import WantedRows

KEYED, FULL, WHOLE = ("public", "keyed"), ("public", "full"), ("public", "whole")
TABLES = [KEYED, FULL, WHOLE]
KEYS = range(6)
SPARE = 99
TOASTED = [(), ("body",), ("name",), ("body", "name")]


class Values:
    """Every value is new, so that a value of the wrong row or time shows."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> str:
        self._count += 1
        return f"v{self._count}"


def change(source: ModelSource, table: tuple[str, str], data: Random, value: Values) -> None:
    rows = source.rows[table]
    taken = {row["id"] for row in rows}
    free = [key for key in KEYS if key not in taken]
    kind = data.choice(["insert", "insert", "update", "move", "move", "delete", "swap", "truncate"])
    if kind == "truncate":
        if data.randint(0, 7) == 0:
            source.truncate(table)
    elif kind == "insert":
        if free:
            source.insert(table, {"id": data.choice(free), "name": value(), "body": value()})
    elif rows:
        row = dict(data.choice(rows))
        if kind == "delete":
            source.delete(table, row)
        elif kind == "update":
            unchanged = data.choice(TOASTED)
            source.update(table, row, {**row, "name": value(), "body": value()}, unchanged)
        elif kind == "move" and free:
            move(source, table, row, data.choice(free), data, value)
        elif kind == "swap" and len(rows) > 1:
            one, other = (dict(each) for each in data.sample(rows, 2))
            parked = move(source, table, one, SPARE, data, value)
            move(source, table, other, one["id"], data, value)
            move(source, table, parked, other["id"], data, value)


def write_history(source: ModelSource, data: Random, value: Values, transactions: int) -> None:
    for _ in range(transactions):
        for _ in range(data.randint(1, 4)):
            change(source, data.choice([KEYED, KEYED, KEYED, FULL, WHOLE]), data, value)
        source.commit()


def move(
    source: ModelSource, table: tuple[str, str], row: Row, key: int, data: Random, value: Values
) -> Row:
    """Change a row's key, and perhaps its values, and leave others out of the event."""
    unchanged = data.choice(TOASTED)
    new = (
        {**row, "id": key}
        if data.random() < 0.5
        else {"id": key, "name": value(), "body": row["body"]}
    )
    source.update(table, row, new, unchanged)
    return next(dict(each) for each in source.rows[table] if each["id"] == key)


def load(writer: Writer, source: ModelSource, data: Random) -> int:
    """Load every table, two of them from groups of key ranges at random points."""
    exact = 0
    for table in TABLES:
        count = 1 if table is WHOLE else data.randint(2, 4)
        points = [data.randint(1001, source.lsn + 1) for _ in range(count)]
        after = [
            item.stream_seq for item in source.stream.stored if item.event.commit_lsn >= min(points)
        ]
        cdc_seq = data.randint(1, min(after, default=source.stream.last + 1))
        if table is WHOLE:
            copy, rows = source.snapshot(table, points[0], cdc_seq)
        else:
            owners = {key: data.randrange(count) for key in (*KEYS, SPARE)}
            groups = [
                (lsn, {key for key, owner in owners.items() if owner == index})
                for index, lsn in enumerate(points)
            ]
            copy, rows = source.pieces(table, groups, cdc_seq)
        exact = max(exact, *points)
        writer.start_load(copy)
        for row in data.sample(rows, len(rows)):
            writer.load(copy, [row])
        writer.finish_load(copy)
    return exact


class Asked:
    """Requests for rows, each answered as of some LSN after it was made, at some later time."""

    def __init__(self, source: ModelSource, data: Random, seen: Counter[str]) -> None:
        self._source = source
        self._seen = seen
        self._data = data
        self._waiting: dict[tuple[str, str], tuple[WantedRows, int]] = {}

    def step(self, machine: HandOff, read_lsn: int, *, now: bool) -> list[Any]:
        for wanted in machine.wanted_rows():
            if wanted.copy.name not in self._waiting:
                lsn = self._data.randint(min(read_lsn, self._source.lsn) + 1, self._source.lsn + 1)
                self._waiting[wanted.copy.name] = (wanted, lsn)
        actions: list[Any] = []
        for name, (wanted, lsn) in list(self._waiting.items()):
            if now or self._data.random() < 0.5:
                del self._waiting[name]
                self._seen["answers"] += 1
                actions += machine.take_answer(self._source.answer(wanted, lsn))
        return actions


def check(target: Any, writer: Writer, source: ModelSource, exact: int) -> None:
    if writer.in_transaction:
        return
    state = writer.read_state()
    for table in state.lane(Lane.LIVE):
        position = state.positions[source.name]
        assert position.commit_lsn + 1 >= exact, "shown before it is exact"
        expected = source.at(position.commit_lsn)[table]
        assert normalized(target.rows(table[1], table[0])) == normalized(expected), table


def follow(
    target: Any, writer: Writer, source: ModelSource, exact: int, data: Random
) -> Counter[str]:
    seen: Counter[str] = Counter()
    crashes = data.randint(0, 3)
    while True:
        machine = HandOff(writer.read_state(), CREATED, spill_events=data.choice([0, 2, 1000]))
        asked = Asked(source, data, seen)
        rest = source.stream.since(machine.start_sequence, set(TABLES))
        crashed, read_lsn = False, 0
        while rest and not crashed:
            size = data.randint(1, 10)
            batch, rest = rest[:size], rest[size:]
            writer.perform(machine.advance(batch))
            read_lsn = max(read_lsn, batch[-1].event.commit_lsn)
            check(target, writer, source, exact)
            if not writer.in_transaction:
                seen["incomplete"] += any(c.incomplete for c in writer.read_state().copies)
            if not machine.is_open:
                writer.perform(asked.step(machine, read_lsn, now=False))
                check(target, writer, source, exact)
            crashed = crashes > 0 and data.randint(0, 4) == 0
        crashes -= 1
        if crashed:
            continue
        while machine.waiting_for:
            writer.perform(asked.step(machine, source.lsn, now=True))
            writer.perform(machine.passed(source.name, source.lsn + 1, source.stream.last))
            seen["rounds at the end"] += 1
            assert seen["rounds at the end"] < 50
        return seen


def mirror_equals_source(target: Any, data: Random) -> Counter[str]:
    source = ModelSource(
        ModelStream(),
        [table_schema(t[1], identity="full" if t is FULL else "default") for t in TABLES],
    )
    value = Values()
    writer = Writer(target)
    writer.open()
    write_history(source, data, value, data.randint(2, 25))
    exact = load(writer, source, data)
    write_history(source, data, value, data.randint(0, 25))
    source.progress()
    seen = follow(target, writer, source, exact, data)
    check(target, writer, source, exact)
    state = writer.read_state()
    assert set(state.lane(Lane.LIVE)) == set(TABLES)
    assert not state.lane(Lane.NEXT)
    for table in TABLES:
        assert normalized(target.rows(table[1])) == normalized(source.rows[table]), table
    writer.close()
    return seen


@settings(max_examples=500, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_a_table_of_several_points_shows_first_when_it_is_exact(seed: int) -> None:
    mirror_equals_source(MemoryTarget(), Random(seed))


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_a_sqlite_table_of_several_points_shows_first_when_it_is_exact(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        mirror_equals_source(SqliteTarget(Path(directory, "mirror.db")), Random(seed))


def test_these_histories_leave_rows_incomplete_and_complete_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += mirror_equals_source(MemoryTarget(), Random(seed))
    assert seen["incomplete"] > 20
    assert seen["answers"] > 20
