"""The meta of a snapshot of several consistent points, and the rows that such a copy lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.errors import CorruptData
from consumer_sdk.mirror.decisions import ApplyAgain, Promote, RepairNeeded
from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.mirror.writer import Writer
from consumer_sdk.snapshot.snapshot import SnapshotMeta, SnapshotPiece
from consumer_sdk.targets import incomplete
from consumer_sdk.targets.incomplete import Missing, key_text, key_values, takes_pieces
from consumer_sdk.targets.memory import MemoryTarget
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import CopyState, MirrorCopy
from consumer_sdk.wire.oids import BYTEA, FLOAT8, INT4, INT8, JSONB
from tests.mirror_model import (
    CREATED,
    ModelSource,
    ModelStream,
    column,
    normalized,
    table_schema,
)

if TYPE_CHECKING:
    from pathlib import Path

T = ("public", "t")
META: dict[str, Any] = {
    "snapshot_id": "s", "source": "shop", "epoch": 1, "table": "t", "schema": "public", "lsn": 100,
    "timestamp": 1, "batch_count": 4, "row_count": 40, "schema_version": 1, "columns": [],
    "options": {}, "format": "msgpack", "stream": "CDC", "stream_created": 1, "cdc_seq": 1,
    "checksum": "",
}  # fmt: skip


def piece(lsn: int, first: int, last: int) -> dict[str, Any]:
    return {"lsn": lsn, "chunks": [first, last]}


# the meta


def test_every_chunk_has_the_point_of_its_piece() -> None:
    pieces = [piece(100, 0, 0), piece(300, 1, 2), piece(200, 3, 3)]
    meta = SnapshotMeta.from_document({**META, "exact_lsn": 300, "pieces": pieces})
    assert meta.pieces[1] == SnapshotPiece(300, 1, 2)
    assert [meta.lsn_of(chunk) for chunk in range(4)] == [100, 300, 300, 200]
    assert (meta.snapshot_lsn, meta.exact_lsn) == (100, 300)


def test_a_meta_of_one_point_has_no_pieces() -> None:
    meta = SnapshotMeta.from_document(META)
    assert (meta.pieces, meta.exact_lsn, meta.lsn_of(3)) == ((), 0, 100)


def test_a_group_without_rows_has_a_point_and_no_chunks() -> None:
    changes = {"exact_lsn": 400, "pieces": [piece(200, 0, 3)]}
    meta = SnapshotMeta.from_document({**META, **changes})
    assert (meta.snapshot_lsn, meta.exact_lsn, meta.lsn_of(0)) == (100, 400, 200)
    empty = {**META, "batch_count": 0, "exact_lsn": 400, "pieces": []}
    assert SnapshotMeta.from_document(empty).exact_lsn == 400


GOOD = [piece(100, 0, 1), piece(200, 2, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"pieces": GOOD},
        {"exact_lsn": 200},
        {"exact_lsn": 99, "pieces": GOOD},
        {"exact_lsn": 150, "pieces": GOOD},
        {"exact_lsn": -1, "pieces": GOOD},
        {"exact_lsn": 200, "pieces": {}},
        {"exact_lsn": 200, "pieces": [5]},
        {"exact_lsn": 200, "pieces": []},
        {"exact_lsn": 200, "pieces": [piece(99, 0, 3)]},
        {"exact_lsn": 200, "pieces": [{"lsn": 100}]},
        {"exact_lsn": 200, "pieces": [{"lsn": 100, "chunks": [0]}]},
        {"exact_lsn": 200, "pieces": [{"lsn": 100, "chunks": ["0", "3"]}]},
        {"exact_lsn": 200, "pieces": [piece(100, 0, 1)]},
        {"exact_lsn": 200, "pieces": [piece(100, 0, 1), piece(200, 3, 3)]},
        {"exact_lsn": 200, "pieces": [piece(100, 0, 2), piece(200, 2, 3)]},
        {"exact_lsn": 200, "pieces": [piece(100, 1, 3)]},
        {"exact_lsn": 200, "pieces": [piece(100, 0, 3), piece(200, 4, 3)]},
        {"exact_lsn": 200, "pieces": [piece(100, 0, 4)]},
    ],
)
def test_pieces_that_do_not_have_every_chunk_and_point_are_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptData, match="damaged snapshot meta"):
        SnapshotMeta.from_document({**META, **changes})


# which tables


def test_rows_must_be_found_by_their_key_alone() -> None:
    keyed = table_schema("t")
    assert takes_pieces(keyed)
    assert takes_pieces(replace(keyed, replica_identity="full"))
    assert not takes_pieces(replace(keyed, replica_identity="full", primary_key_deferrable=True))
    assert not takes_pieces(table_schema("t", primary_key=(), identity="full"))
    assert not takes_pieces(table_schema("t", identity="nothing"))
    document = (column("id", 1, JSONB, is_key=True), column("body", 2))
    assert not takes_pieces(table_schema("t", columns=document))


def test_a_key_is_restored_from_its_text() -> None:
    types = {"a": INT8, "b": BYTEA, "c": FLOAT8}
    columns = tuple(
        column(name, n, oid, is_key=True) for n, (name, oid) in enumerate(types.items(), start=1)
    )
    schema = table_schema("t", columns=columns, primary_key=tuple(types))
    row = {"a": 2**60, "b": b"\xff", "c": float("inf"), "d": "x"}
    assert key_values(schema, key_text(schema.row_key, row)) == [2**60, b"\xff", float("inf")]


# the hand-off


def row(key: int, name: str = "n", body: str | None = "b") -> dict[str, Any]:
    return {"id": key, "name": name, "body": body}


class Bench:
    """A table of which keys below 5 are copied first, the others later."""

    def __init__(self) -> None:
        self.source = ModelSource(ModelStream(), [table_schema("t")])
        self.target = MemoryTarget()
        self.writer = Writer(self.target)
        self.writer.open()

    def load(self, first: int, second: int) -> HandOff:
        groups = [(first, set(range(5))), (second, set(range(5, 100)))]
        copy, rows = self.source.pieces(T, groups, 1)
        self.writer.start_load(copy)
        self.writer.load(copy, rows)
        self.writer.finish_load(copy)
        return HandOff(self.writer.read_state(), CREATED)

    def follow(self, machine: HandOff) -> list[Any]:
        actions = machine.advance(self.source.stream.since(1))
        self.writer.perform(actions)
        return actions


def test_a_value_of_the_row_that_took_the_key_later_is_not_used() -> None:
    bench = Bench()
    source = bench.source
    source.insert(T, row(9, body="of nine"))
    source.insert(T, row(8))
    first = source.commit() + 1
    source.update(T, row(9, body="of nine"), row(1, body="of nine"), unchanged=("body",))
    source.commit()
    source.insert(T, row(9, body="of another"))
    source.delete(T, row(8))
    machine = bench.load(first, source.commit() + 1)
    source.progress()
    actions = bench.follow(machine)
    assert any(isinstance(action, ApplyAgain) for action in actions)
    assert not any(isinstance(action, Promote) for action in actions)
    assert bench.target.tables() == []
    (wanted,) = machine.wanted_rows()
    assert wanted.keys == {"[1]"}
    bench.writer.perform(machine.take_answer(source.answer(wanted, source.lsn)))
    assert normalized(bench.target.rows("t")) == normalized(source.rows[T])
    (copy,) = bench.writer.read_state().copies
    assert (copy.state, copy.exact_lsn, copy.incomplete) == (CopyState.LIVE, 0, {})


@pytest.mark.parametrize("how", ["delete", "update", "move", "truncate"])
def test_a_row_that_a_later_event_settles_is_not_asked_for(how: str) -> None:
    bench = Bench()
    source = bench.source
    source.insert(T, row(9))
    first = source.commit() + 1
    source.update(T, row(9), row(1), unchanged=("body",))
    second = source.commit() + 1
    if how == "delete":
        source.delete(T, row(1))
    elif how == "update":
        source.update(T, row(1), row(1, body="sent"))
    elif how == "move":
        source.update(T, row(1), row(2, body="sent"))
    else:
        source.truncate(T)
    source.commit()
    source.progress()
    machine = bench.load(first, second)
    bench.follow(machine)
    assert machine.wanted_rows() == []
    assert normalized(bench.target.rows("t")) == normalized(source.rows[T])


def test_an_answer_without_the_row_rebuilds_the_table() -> None:
    bench = Bench()
    source = bench.source
    source.insert(T, row(9))
    first = source.commit() + 1
    source.update(T, row(9), row(1), unchanged=("body",))
    machine = bench.load(first, source.commit() + 1)
    source.progress()
    bench.follow(machine)
    (wanted,) = machine.wanted_rows()
    answer = replace(source.answer(wanted, source.lsn), rows={})
    with pytest.raises(RepairNeeded, match="does not have a row"):
        machine.take_answer(answer)


def test_a_new_structure_before_the_exact_point_rebuilds_the_table() -> None:
    bench = Bench()
    source = bench.source
    source.insert(T, row(9))
    first = source.commit() + 1
    wider = (*source.schemas[T].columns, column("extra", 4, INT4))
    old = source.schemas[T]
    source.change_schema(replace(old, schema_version=2, columns=wider))
    source.update(T, row(9), row(9, name="x") | {"extra": 1})
    second = source.commit() + 1
    source.schemas[T] = old
    machine = bench.load(first, second)
    with pytest.raises(RepairNeeded, match="before its snapshot was exact"):
        bench.follow(machine)


def test_too_many_incomplete_rows_mean_a_snapshot_at_one_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("consumer_sdk.mirror.handoff.MOST_INCOMPLETE_ROWS", 2)
    bench = Bench()
    source = bench.source
    for key in (10, 11, 12):
        source.insert(T, row(key))
    first = source.commit() + 1
    for key in (10, 11, 12):
        source.update(T, row(key), row(key - 10), unchanged=("body",))
    machine = bench.load(first, source.commit() + 1)
    with pytest.raises(RepairNeeded, match="changed their key") as needed:
        bench.follow(machine)
    assert needed.value.at_one_point


def test_what_a_copy_lacks_is_saved_with_it(tmp_path: Path) -> None:
    copy = MirrorCopy(
        table_schema("t"),
        CopyState.CATCHING_UP,
        exact_lsn=2**63 - 1,
        incomplete={"[1]": Missing(frozenset({"body", "name"}), 7)},
    )
    target = SqliteTarget(tmp_path / "m.db")
    target.open()
    target.begin()
    target.save_copy(copy)
    target.commit()
    assert target.read_state().copies == [copy]
    target.close()


def test_a_value_of_the_old_row_is_not_missing() -> None:
    source = ModelSource(ModelStream(), [table_schema("t", identity="full")])
    source.insert(T, row(9))
    source.update(T, row(9), row(1), unchanged=("body",))
    events = source.events()
    assert incomplete.follow({}, events, source.schemas[T], source.lsn + 1) == {}
