"""Targets do what the mirror asks of them, or nothing at all; the same in each kind."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from consumer_sdk.errors import TargetError, UsageError
from consumer_sdk.mirror import MemoryTarget, open_target
from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.mirror.writer import Writer
from consumer_sdk.targets.postgres import PostgresTarget
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import CopyState, Lane, MirrorCopy, MirrorPosition
from consumer_sdk.wire.oids import FLOAT8, INT4, NUMERIC
from tests.mirror_model import (
    CREATED,
    ModelSource,
    ModelStream,
    column,
    normalized,
    table_schema,
)
from tests.property.test_handoff_properties import mirror_equals_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from consumer_sdk.targets.target import TableName
    from consumer_sdk.wire.column_types import TableSchema

KINDS = ["memory", "sqlite", "postgres"]
T = ("public", "t")
FULL, BAG = ("public", "full_key"), ("sales", "Bag of Rows")


@pytest.fixture
def make_target(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Any]:
    def make(kind: str) -> Any:
        if kind == "memory":
            return MemoryTarget()
        if kind == "sqlite":
            return SqliteTarget(tmp_path / "replica.db")
        return PostgresTarget(request.getfixturevalue("database").dsn)

    return make


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_finds_the_row_it_means(kind: str, make_target: Any) -> None:
    bench = Bench(make_target(kind))
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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_found_by_the_identity_of_the_moment(kind: str, make_target: Any) -> None:
    plain = tuple(replace(one, is_key=False) for one in table_schema("t").columns)
    bag = table_schema("bag", columns=plain, primary_key=())
    bench = Bench(make_target(kind), bag, table_schema("t"))
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("type_oid", "data_type", "key", "same"),
    [(NUMERIC, "numeric", "1.0", "1.00"), (FLOAT8, "double precision", float("nan"), float("nan"))],
)
def test_a_key_that_becomes_an_equal_one_is_no_other_row(
    kind: str, make_target: Any, type_oid: int, data_type: str, key: Any, same: Any
) -> None:
    number = column("id", 1, type_oid, data_type=data_type, is_key=True)
    columns = (number, *table_schema("t").columns[1:])
    bench = Bench(make_target(kind), table_schema("t", identity="full", columns=columns))
    bench.source.insert(T, row(key))
    bench.source.update(T, bench.source.rows[T][0], row(same, name="changed"))
    bench.source.commit()
    bench.follow()
    (found,) = bench.target.rows("t")
    assert (str(found["id"]).lower(), found["name"]) == (str(same), "changed")
    bench.writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_swapped_however_they_are_spelled(kind: str, make_target: Any) -> None:
    number = column("id", 1, NUMERIC, data_type="numeric", is_key=True)
    columns = (number, *table_schema("t").columns[1:])
    bench = Bench(make_target(kind), table_schema("t", identity="full", columns=columns))
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


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_added_and_dropped_with_the_rows_in_place(kind: str, make_target: Any) -> None:
    bench = Bench(make_target(kind))
    source = bench.source
    source.insert(T, row(1))
    bench.commit()
    first = source.schemas[T]
    wider = replace(first, schema_version=2, columns=(*first.columns, column("Extra %s", 4, INT4)))
    source.change_schema(wider, rows=[{**row(1), "Extra %s": None}])
    source.insert(T, {**row(2), "Extra %s": 5})
    bench.commit()
    narrower = replace(wider, schema_version=3, columns=(wider.columns[0], wider.columns[3]))
    kept = [{"id": 1, "Extra %s": None}, {"id": 2, "Extra %s": 5}]
    source.change_schema(narrower, rows=kept)
    source.update(T, kept[0], {"id": 1, "Extra %s": 6})
    bench.commit()
    bench.writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_built_anew_replaces_the_old_one_with_its_structure(
    kind: str, make_target: Any
) -> None:
    bench = Bench(make_target(kind))
    source = bench.source
    source.insert(T, row(1))
    bench.commit()
    for version, columns in ((2, source.schemas[T].columns), (3, source.schemas[T].columns[:2])):
        source.schemas[T] = replace(source.schemas[T], schema_version=version, columns=columns)
        names = [each.name for each in columns]
        source.rows[T] = [{name: row(version)[name] for name in names}]
        source.history.append((source.lsn, {**source.rows}))
        bench.writer.plan([bench.writer.read_state().lane(Lane.LIVE)[T].plan_again()])
        bench.load(T)
        source.insert(T, {name: row(100 + version)[name] for name in names})
        bench.commit()
    bench.writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_committed_never_happened(kind: str, make_target: Any) -> None:
    bench = Bench(make_target(kind))
    bench.source.insert(T, row(1))
    bench.commit()
    live = bench.writer.read_state().lane(Lane.LIVE)[T]
    before = bench.writer.read_state()
    bench.source.insert(T, row(2))
    (event,) = bench.source.events()
    target = bench.target
    target.begin()
    target.apply(live, [event])
    target.save_position(MirrorPosition("slot", 1, 9999, 0, 9999, CREATED))
    assert normalized(target.rows("t")) == [row(1)]
    target.rollback()
    assert bench.writer.read_state() == before
    assert normalized(target.rows("t")) == [row(1)]
    bench.writer.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["UPDATE", "DELETE"])
def test_a_change_without_its_row_is_refused(kind: str, operation: str, make_target: Any) -> None:
    bench = Bench(make_target(kind))
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

    with pytest.raises(TargetError, match="anew"):
        change()
    bench.target.rollback()
    bench.writer.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_an_insert_over_an_existing_row_is_refused(kind: str, make_target: Any) -> None:
    bench = Bench(make_target(kind))
    bench.source.insert(T, row(1))
    bench.commit()
    live = bench.writer.read_state().lane(Lane.LIVE)[T]
    bench.source.insert(T, row(5))
    bench.source.insert(T, row(1))
    bench.target.begin()
    with pytest.raises(TargetError, match="just inserted"):
        bench.target.apply(live, bench.source.events())
    bench.target.rollback()
    assert normalized(bench.target.rows("t")) == [row(1)]
    bench.writer.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_second_mirror_is_refused_while_the_first_writes(kind: str, make_target: Any) -> None:
    first, second = make_target(kind), make_target(kind)
    first.open()
    with pytest.raises(TargetError, match="another mirror"):
        second.open()
    first.close()
    second.open()
    second.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_table_that_is_not_ours_is_left_alone(
    kind: str, make_target: Any, database: Any, tmp_path: Path
) -> None:
    target = make_target(kind)
    if kind == "sqlite":
        with closing(sqlite3.connect(tmp_path / "replica.db")) as connection:
            connection.execute("CREATE TABLE T (precious)")
    else:
        database.execute("CREATE TABLE t (precious int)")
    with pytest.raises(TargetError, match="already has"):
        Bench(target)
    target.close()
    found = target.rows("T") if kind == "sqlite" else database.execute("SELECT precious FROM t")
    assert found == []


def test_a_reader_keeps_its_snapshot_while_a_postgres_table_is_replaced(
    make_target: Any, database: Any
) -> None:
    bench = Bench(make_target("postgres"))
    bench.source.insert(T, row(1))
    bench.commit()
    with database.connect(autocommit=True) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1 FROM pg_class LIMIT 1")
        bench.writer.plan([bench.writer.read_state().lane(Lane.LIVE)[T].plan_again()])
        bench.source.insert(T, row(2))
        bench.source.commit()
        bench.load(T)
        bench.source.progress()
        bench.follow()
        assert reader.execute("SELECT id FROM t").fetchall() == [(1,)]
    assert database.execute("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
    bench.writer.close()


def test_unwritable_targets_are_refused_in_one_line(database: Any, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="cannot be written"):
        open_target(f"sqlite:///{tmp_path}/no/such/place/replica.db").open()
    (tmp_path / "junk.db").write_bytes(b"this is not a database, it only looks like a file" * 50)
    with pytest.raises(TargetError, match="not a database"):
        open_target(f"sqlite:///{tmp_path}/junk.db").open()
    database.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
    with pytest.raises(TargetError, match="read-only"):
        open_target(database.dsn).open()
    with pytest.raises(TargetError, match="cannot be reached") as refused:
        open_target("postgresql://me:secret@127.0.0.1:1/nothing").open()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["", "mysql://x/y", "sqlite://relative.db", "sqlite:///", "x.db"])
def test_addresses_that_name_no_target_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected sqlite:///"):
        open_target(url)


@pytest.mark.parametrize("seed", range(8))
def test_postgres_mirror_equals_the_source_at_every_commit(database: Any, seed: int) -> None:
    mirror_equals_source(PostgresTarget(database.dsn), Random(seed))


def test_types_the_target_lacks_become_what_is_behind_them(database: Any) -> None:
    target = PostgresTarget(database.dsn)
    target.open()
    columns = (
        column("id", 1, INT4, is_key=True),
        column("mood", 2, 90001, data_type="mood"),
        column("amount", 3, 90002, data_type="shop.money_type", base_type_oid=1700),
        column("moods", 4, 90003, data_type="mood[]", element_oid=90001),
        column("codes", 5, 90004, data_type="shop.codes[]", element_oid=1043),
    )
    schema = table_schema("odd", columns=columns)
    stream = ModelStream()
    source = ModelSource(stream, [schema])
    copy, _ = source.snapshot(("public", "odd"), 1001, 1)
    target.begin()
    target.create(copy)
    target.promote([copy.become(CopyState.CATCHING_UP)])
    target.commit()
    target.close()
    with psycopg.connect(database.dsn) as connection:
        found = connection.execute(
            "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = 'odd'::regclass AND attnum > 0 ORDER BY attnum"
        ).fetchall()
    assert [kind for (kind,) in found] == [
        "integer", "text", "numeric", "text[]", "character varying[]",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_look_like_a_statement_are_names(kind: str, make_target: Any) -> None:
    columns = (column("id", 1, INT4, is_key=True, is_nullable=False), column("a VALUES (%s", 2))
    schema = table_schema("b VALUES c", columns=columns)
    source = ModelSource(ModelStream(), [schema])
    table = (schema.schema, schema.table)
    for key in range(100):
        source.insert(table, {"id": key, "a VALUES (%s": "v"})
    source.commit()
    target = make_target(kind)
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


@pytest.mark.parametrize(
    ("one", "other"),
    [(("public", "t"), ("public", "T")), (("a.b", "c"), ("a", "b.c"))],
)
@pytest.mark.parametrize("together", [True, False])
def test_sqlite_keeps_tables_apart_that_would_have_one_name(
    tmp_path: Path, one: TableName, other: TableName, together: bool
) -> None:
    schemas = [table_schema(table, schema=schema) for schema, table in (one, other)]
    target = SqliteTarget(tmp_path / "replica.db")
    if not together:
        bench = Bench(target, schemas[0])
        bench.source.insert(one, row(1))
        bench.commit()
        bench.writer.close()
    writer = Writer(target)
    writer.open()
    planned = [MirrorCopy(schema) for schema in schemas]
    with pytest.raises(TargetError, match=r"SQLite file .*(no room for both|already has)"):
        writer.plan(planned if together else planned[1:])
    # Case is a matter of ASCII there.
    writer.plan([MirrorCopy(table_schema(name)) for name in ("é", "É")])
    writer.close()
