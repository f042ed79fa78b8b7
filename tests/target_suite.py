"""What every target must do, whatever it stores rows in.

A test class for a target derives from TargetSuite and has a fixture `target` that gives a new,
empty one. Beside the protocol it needs `rows(table, schema)`: the rows that readers see.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.errors import TargetError
from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.mirror.writer import Writer
from consumer_sdk.targets.target import Lane, MirrorPosition
from consumer_sdk.wire.oids import FLOAT8, INT4, NUMERIC
from tests.mirror_model import (
    CREATED,
    ModelSource,
    ModelStream,
    column,
    normalized,
    table_schema,
)

if TYPE_CHECKING:
    from consumer_sdk.wire.column_types import TableSchema

T = ("public", "t")
FULL, BAG = ("public", "full_key"), ("sales", "Bag of Rows")


class Bench:
    """A source with these tables, or with three kinds of keys, mirrored into one target."""

    def __init__(self, target: Any, *schemas: TableSchema) -> None:
        self.stream = ModelStream()
        self.source = ModelSource(
            self.stream,
            [*schemas]
            or [
                table_schema("t"),
                table_schema("full_key", identity="full"),
                table_schema("Bag of Rows", schema="sales", identity="full", primary_key=()),
            ],
        )
        self.target = target
        self.writer = Writer(target)
        self.writer.open()
        for table in self.source.schemas:
            self.load(table)
        self.source.progress()
        self.follow()

    def load(self, table: tuple[str, str]) -> None:
        copy, rows = self.source.snapshot(table, self.source.lsn + 1, self.stream.last + 1)
        self.writer.start_load(copy)
        self.writer.load(copy, rows)
        self.writer.finish_load(copy)

    def follow(self) -> None:
        machine = HandOff(self.writer.read_state(), CREATED)
        self.writer.perform(machine.advance(self.stream.since(machine.start_sequence)))

    def commit(self) -> None:
        """Commit in the source, mirror it, and compare everything."""
        self.source.commit()
        self.follow()
        for table, rows in self.source.rows.items():
            assert normalized(self.target.rows(table[1], table[0])) == normalized(rows), table


def row(key: int, name: str | None = "n", body: str | None = "b") -> dict[str, Any]:
    return {"id": key, "name": name, "body": body}


class TargetSuite:
    """The claims; each test gets an empty target."""

    def test_every_change_finds_the_row_it_means(self, target: Any) -> None:
        bench = Bench(target)
        source = bench.source
        for key in range(1, 6):
            source.insert(T, row(key))
            source.insert(FULL, row(key, body=f"body {key}"))
        for _ in range(3):
            source.insert(BAG, row(1, name=None))
        source.insert(BAG, row(2))
        bench.commit()
        # A long run, then single changes; unchanged columns keep their value.
        for key in range(1, 6):
            source.update(T, row(key), row(key, name=f"name {key}"))
        source.update(T, row(2, name="name 2"), row(2, name="x"), unchanged=("body",))
        source.update(T, row(3, name="name 3"), row(30), unchanged=("body",))
        source.delete(T, row(1, name="name 1"))
        bench.commit()
        # Keys rotate as a deferrable primary key allows, bodies are not sent.
        before = [dict(each) for each in source.rows[FULL]]
        for each, other in zip(before, before[1:] + before[:1], strict=True):
            source.update(FULL, each, {**each, "id": other["id"]}, unchanged=("body",))
        bench.commit()
        # Two rows with one key for a moment; the newer one stays.
        older = next(each for each in source.rows[FULL] if each["id"] == 2)
        source.insert(FULL, row(2, body="newer"))
        source.delete(FULL, older)
        bench.commit()
        source.delete(BAG, row(1, name=None))
        source.update(BAG, row(1, name=None), row(1, name="named"))
        bench.commit()
        source.truncate(T)
        source.truncate(BAG)
        source.insert(T, row(7))
        bench.commit()
        bench.writer.close()

    def test_rows_are_found_by_the_identity_of_the_moment(self, target: Any) -> None:
        plain = tuple(replace(one, is_key=False) for one in table_schema("t").columns)
        bag = table_schema("bag", columns=plain, primary_key=())
        bench = Bench(target, bag, table_schema("t"))
        source, named = bench.source, ("public", "bag")
        for key in (1, 2):
            source.insert(named, row(key))
            source.insert(T, row(key, body=f"body {key}"))
        bench.commit()
        source.change_schema(replace(bag, schema_version=2, replica_identity="full"))
        source.delete(named, row(1))
        keyed = source.schemas[T]
        source.change_schema(replace(keyed, schema_version=2, replica_identity="full"))
        source.update(T, row(1, body="body 1"), row(2, body="body 1"))
        source.update(T, row(2, body="body 2"), row(1, body="body 2"))
        bench.commit()
        # Both in one batch: what came before is not written under what came after.
        source.delete(named, row(2))
        source.commit()
        source.change_schema(replace(bag, schema_version=3))
        source.insert(named, row(3))
        bench.commit()
        bench.writer.close()

    @pytest.mark.parametrize(
        ("type_oid", "data_type", "key", "same"),
        [
            (NUMERIC, "numeric", "1.0", "1.00"),
            (FLOAT8, "double precision", float("nan"), float("nan")),
        ],
    )
    def test_a_key_that_becomes_an_equal_one_is_no_other_row(
        self, target: Any, type_oid: int, data_type: str, key: Any, same: Any
    ) -> None:
        number = column("id", 1, type_oid, data_type=data_type, is_key=True)
        columns = (number, *table_schema("t").columns[1:])
        bench = Bench(target, table_schema("t", identity="full", columns=columns))
        bench.source.insert(T, row(key))
        bench.source.update(T, bench.source.rows[T][0], row(same, name="changed"))
        bench.source.commit()
        bench.follow()
        (found,) = bench.target.rows("t")
        assert (str(found["id"]).lower(), found["name"]) == (str(same), "changed")
        bench.writer.close()

    def test_keys_are_swapped_however_they_are_spelled(self, target: Any) -> None:
        number = column("id", 1, NUMERIC, data_type="numeric", is_key=True)
        columns = (number, *table_schema("t").columns[1:])
        bench = Bench(target, table_schema("t", identity="full", columns=columns))
        source = bench.source
        one, two = {**row(0), "id": "1.0"}, {**row(0, name="two"), "id": "2"}
        source.insert(T, one)
        source.insert(T, two)
        source.update(T, one, {**one, "id": "2.0"})
        source.update(T, two, {**two, "id": "1"})
        source.commit()
        bench.follow()
        found = sorted((str(each["id"]), each["name"]) for each in bench.target.rows("t"))
        assert found == [("1", "two"), ("2.0", "n")]
        bench.writer.close()

    def test_columns_are_added_and_dropped_with_the_rows_in_place(self, target: Any) -> None:
        bench = Bench(target)
        source = bench.source
        source.insert(T, row(1))
        bench.commit()
        first = source.schemas[T]
        wider = replace(
            first, schema_version=2, columns=(*first.columns, column("Extra %s", 4, INT4))
        )
        source.change_schema(wider, rows=[{**row(1), "Extra %s": None}])
        source.insert(T, {**row(2), "Extra %s": 5})
        bench.commit()
        narrower = replace(wider, schema_version=3, columns=(wider.columns[0], wider.columns[3]))
        kept = [{"id": 1, "Extra %s": None}, {"id": 2, "Extra %s": 5}]
        source.change_schema(narrower, rows=kept)
        source.update(T, kept[0], {"id": 1, "Extra %s": 6})
        bench.commit()
        bench.writer.close()

    def test_a_copy_built_anew_replaces_the_old_one_with_its_structure(self, target: Any) -> None:
        bench = Bench(target)
        source = bench.source
        source.insert(T, row(1))
        bench.commit()
        for version, columns in (
            (2, source.schemas[T].columns),
            (3, source.schemas[T].columns[:2]),
        ):
            source.schemas[T] = replace(source.schemas[T], schema_version=version, columns=columns)
            names = [each.name for each in columns]
            source.rows[T] = [{name: row(version)[name] for name in names}]
            source.history.append((source.lsn, {**source.rows}))
            bench.writer.plan([bench.writer.read_state().lane(Lane.LIVE)[T].plan_again()])
            bench.load(T)
            source.insert(T, {name: row(100 + version)[name] for name in names})
            bench.commit()
        bench.writer.close()

    def test_what_is_not_committed_never_happened(self, target: Any) -> None:
        bench = Bench(target)
        bench.source.insert(T, row(1))
        bench.commit()
        live = bench.writer.read_state().lane(Lane.LIVE)[T]
        before = bench.writer.read_state()
        bench.source.insert(T, row(2))
        (event,) = bench.source.events()
        target.begin()
        target.apply(live, [event])
        target.save_position(MirrorPosition("slot", 1, 9999, 0, 9999, CREATED))
        assert normalized(target.rows("t")) == [row(1)]
        target.rollback()
        assert bench.writer.read_state() == before
        assert normalized(target.rows("t")) == [row(1)]
        bench.writer.close()

    @pytest.mark.parametrize("operation", ["UPDATE", "DELETE"])
    def test_a_change_without_its_row_is_refused(self, operation: str, target: Any) -> None:
        bench = Bench(target)
        bench.source.insert(T, row(1))
        bench.commit()
        live = bench.writer.read_state().lane(Lane.LIVE)[T]
        bench.source.insert(T, row(2))
        (event,) = bench.source.events()
        event.operation = operation

        def change() -> None:
            bench.target.begin()
            bench.target.apply(live, [event])
            bench.target.commit()

        with pytest.raises(TargetError, match="rebuild"):
            change()
        bench.target.rollback()
        bench.writer.close()

    def test_changes_that_the_rows_hold_already_are_replayed(self, target: Any) -> None:
        bench = Bench(target)
        source, table = bench.source, FULL
        for key in range(1, 6):
            source.insert(T, row(key))
            source.insert(table, row(key))
        first = source.commit() + 1
        for named in (T, table):
            source.insert(named, row(6))
            source.update(named, row(1), row(1, name="x"), unchanged=("body",))
            source.update(named, row(2), row(2, name="y"))
            source.delete(named, row(3))
            source.insert(named, row(3, name="again"))
            source.delete(named, row(4))
            source.update(named, row(5), row(7, name="moved"))
            source.update(named, row(6), row(5))
        second = source.commit() + 1
        bench.writer.plan([c.plan_again() for c in bench.writer.read_state().copies])
        for named in source.schemas:
            # Each half of the keys at another point; of the bag, all of it.
            groups = [(first, {1, 3, 5, 7}), (second, {2, 4, 6})]
            copy, rows = (
                source.snapshot(named, first, 1)
                if named == BAG
                else source.pieces(named, groups, 1)
            )
            bench.writer.start_load(copy)
            bench.writer.load(copy, rows)
            bench.writer.finish_load(copy)
        source.truncate(T)
        source.insert(T, row(9))
        bench.commit()
        bench.writer.close()

    def test_a_row_that_lacks_a_value_is_completed(self, target: Any) -> None:
        bench = Bench(target, table_schema("t"))
        source = bench.source
        source.insert(T, row(9, body="wide"))
        source.insert(T, row(2))
        first = source.commit() + 1
        source.update(T, row(9, body="wide"), row(1, body="wide"), unchanged=("body",))
        second = source.commit() + 1
        bench.writer.plan([c.plan_again() for c in bench.writer.read_state().copies])
        copy, rows = source.pieces(T, [(first, {1, 2}), (second, {9})], 1)
        bench.writer.start_load(copy)
        bench.writer.load(copy, rows)
        bench.writer.finish_load(copy)
        source.progress()
        bench.follow()
        # The incomplete row is saved, so that another process can go on.
        machine = HandOff(bench.writer.read_state(), CREATED)
        (wanted,) = machine.wanted_rows()
        bench.writer.perform(machine.take_answer(source.answer(wanted, source.lsn)))
        source.progress()
        bench.writer.perform(machine.advance(source.stream.since(machine.start_sequence)))
        assert normalized(target.rows("t")) == normalized(source.rows[T])
        bench.writer.close()

    def test_names_that_look_like_a_statement_are_names(self, target: Any) -> None:
        columns = (column("id", 1, INT4, is_key=True, is_nullable=False), column("a VALUES (%s", 2))
        schema = table_schema("b VALUES c", columns=columns)
        source = ModelSource(ModelStream(), [schema])
        table = (schema.schema, schema.table)
        for key in range(100):
            source.insert(table, {"id": key, "a VALUES (%s": "v"})
        source.commit()
        writer = Writer(target)
        writer.open()
        copy, rows = source.snapshot(table, source.lsn + 1, source.stream.last + 1)
        writer.start_load(copy)
        writer.load(copy, rows)
        writer.finish_load(copy)
        source.progress()
        machine = HandOff(writer.read_state(), CREATED)
        writer.perform(machine.advance(source.stream.since(machine.start_sequence)))
        assert normalized(target.rows(table[1])) == normalized(source.rows[table])
        writer.close()
