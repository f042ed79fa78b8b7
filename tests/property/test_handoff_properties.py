"""Random histories, snapshots at random points, crashes anywhere: the mirror equals the source."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.mirror.writer import Writer
from consumer_sdk.targets.memory import MemoryTarget
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import Lane, Target
from tests.mirror_model import CREATED, ModelSource, ModelStream, normalized, table_schema

TABLES = {
    "slot": [("public", "a"), ("public", "b"), ("public", "full")],
    "other": [("public", "c"), ("public", "bag")],
}
ALL = [table for tables in TABLES.values() for table in tables]
TEXTS = ["x", "y", "z", None]


def make_sources() -> tuple[ModelStream, dict[str, ModelSource]]:
    stream = ModelStream()
    sources = {}
    for name, tables in TABLES.items():
        schemas = []
        for _, table in tables:
            options: dict[str, Any] = {}
            if table == "full":
                options = {"identity": "full"}
            elif table == "bag":
                options = {"identity": "full", "primary_key": ()}
            schemas.append(table_schema(table, source=name, **options))
        sources[name] = ModelSource(stream, schemas, name=name)
    return stream, sources


def change(source: ModelSource, table: tuple[str, str], data: Random) -> None:
    rows = source.rows[table]
    keyed = table[1] != "bag"
    kinds = ["insert", "insert", "update", "update", "move", "delete"]
    if table[1] == "full":
        kinds.append("swap")
    kind = data.choice([*kinds, "truncate"])
    if kind == "truncate":
        if data.randint(0, 3) == 0:
            source.truncate(table)
        return
    if kind == "insert":
        row = {"id": data.randint(0, 5), "name": data.choice(TEXTS), "body": data.choice(TEXTS)}
        if not keyed or row["id"] not in {other["id"] for other in rows}:
            source.insert(table, row)
        return
    if not rows:
        return
    old = dict(data.choice(rows))
    if kind == "delete":
        source.delete(table, old)
    elif kind == "update":
        unchanged = data.choice([(), ("body",)])
        source.update(table, old, {**old, "name": data.choice(TEXTS)}, unchanged)
    elif kind == "move":
        key = data.randint(0, 5)
        if not keyed or key not in {other["id"] for other in rows}:
            unchanged = data.choice([(), ("body",)])
            source.update(table, old, {**old, "id": key}, unchanged)
    elif len(rows) > 1:
        # A deferrable key: every row takes the key of the next within one statement.
        before = [dict(row) for row in rows]
        for row, other in zip(before, before[1:] + before[:1], strict=True):
            source.update(table, row, {**row, "id": other["id"]}, ("body",))


def write_history(
    stream: ModelStream, sources: dict[str, ModelSource], data: Random, transactions: int
) -> None:
    """Transactions of both sources; their messages interleave in the stream."""
    under_way: dict[str, list[Any]] = {name: [] for name in sources}
    for _ in range(transactions):
        name = data.choice(sorted(sources))
        source = sources[name]
        for event in under_way[name]:
            stream.append(event)
        for _ in range(data.randint(1, 5)):
            change(source, data.choice(TABLES[name]), data)
        under_way[name] = source.events()
        for events in under_way.values():
            for _ in range(data.randint(0, len(events))):
                stream.append(events.pop(0))
        if data.randint(0, 5) == 0:
            for event in under_way[name]:
                stream.append(event)
            under_way[name] = []
            source.progress()
    for name, events in under_way.items():
        for event in events:
            stream.append(event)
        sources[name].progress()


def load_snapshots(
    writer: Writer, sources: dict[str, ModelSource], tables: list[Any], data: Random
) -> None:
    """Next copies as of random LSNs, with the earliest or a late enough start in the stream."""
    for name, source in sources.items():
        for table in tables:
            if table not in TABLES[name]:
                continue
            lsn = data.randint(1001, source.lsn + 1)
            after = [
                item.stream_seq
                for item in source.stream.stored
                if item.event.source == name and item.event.commit_lsn >= lsn
            ]
            latest = min(after, default=source.stream.last + 1)
            copy, rows = source.snapshot(table, lsn, data.randint(1, latest))
            writer.start_load(copy)
            writer.load(copy, rows)
            writer.finish_load(copy)
        # Taking a snapshot writes to the log, so that an idle source reports progress past it.
        source.progress()


def check_visible(target: Any, writer: Writer, sources: dict[str, ModelSource]) -> None:
    """Outside of a transaction every live table is as of its source's position."""
    if writer.in_transaction:
        return
    state = writer.read_state()
    for table, copy in state.lane(Lane.LIVE).items():
        position = state.positions[copy.source]
        expected = sources[copy.source].at(position.commit_lsn)[table]
        assert normalized(target.rows(table[1], table[0])) == normalized(expected), table


def follow(
    target: Any,
    writer: Writer,
    stream: ModelStream,
    sources: dict[str, ModelSource],
    tables: list[Any],
    data: Random,
) -> None:
    crashes = data.randint(0, 3)
    while True:
        machine = HandOff(writer.read_state(), CREATED, spill_events=data.choice([0, 2, 1000]))
        assert set(machine.tables()) == set(tables)
        rest = stream.since(machine.start_sequence, set(tables))
        crashed = False
        while rest and not crashed:
            size = data.randint(1, 12)
            batch, rest = rest[:size], rest[size:]
            writer.perform(machine.advance(batch))
            check_visible(target, writer, sources)
            crashed = crashes > 0 and data.randint(0, 4) == 0
        crashes -= 1
        if not crashed:
            return


def mirror_equals_source(target: Target, data: Random) -> None:
    stream, sources = make_sources()
    writer = Writer(target)
    writer.open()
    write_history(stream, sources, data, data.randint(1, 12))
    first = data.sample(ALL, data.randint(1, len(ALL)))
    load_snapshots(writer, sources, first, data)
    follow(target, writer, stream, sources, first, data)
    # More of everything, and more tables beside the live ones.
    write_history(stream, sources, data, data.randint(0, 6))
    more = [table for table in ALL if table not in first and data.random() < 0.5]
    load_snapshots(writer, sources, more, data)
    follow(target, writer, stream, sources, first + more, data)
    state = writer.read_state()
    assert set(state.lane(Lane.LIVE)) == {*first, *more}
    assert not state.lane(Lane.NEXT)
    for name, source in sources.items():
        for table in {*first, *more} & set(TABLES[name]):
            found = target.rows(table[1], table[0])  # type: ignore[attr-defined]
            assert normalized(found) == normalized(source.rows[table]), table
    writer.close()


@settings(max_examples=300, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_memory_mirror_equals_the_source_at_every_commit(seed: int) -> None:
    mirror_equals_source(MemoryTarget(), Random(seed))


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_sqlite_mirror_equals_the_source_at_every_commit(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        mirror_equals_source(SqliteTarget(Path(directory, "mirror.db")), Random(seed))
