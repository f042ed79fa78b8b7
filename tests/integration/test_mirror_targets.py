"""Targets do what the mirror asks of them, or nothing at all; the same in each kind."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from consumer_sdk.errors import TargetError, UsageError
from consumer_sdk.mirror import MemoryTarget, open_target
from consumer_sdk.mirror.writer import Writer
from consumer_sdk.targets.postgres import PostgresTarget
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import CopyState, Lane, MirrorCopy
from consumer_sdk.wire.oids import INT4
from tests.mirror_model import (
    ModelSource,
    ModelStream,
    column,
    normalized,
    table_schema,
)
from tests.property.test_handoff_properties import mirror_equals_source
from tests.property.test_piece_properties import (
    mirror_equals_source as mirror_of_pieces_equals_source,
)
from tests.target_suite import Bench, T, TargetSuite, row

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from consumer_sdk.targets.target import TableName


@pytest.fixture
def make_target(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Any]:
    def make(kind: str) -> Any:
        if kind == "sqlite":
            return SqliteTarget(tmp_path / "replica.db")
        return PostgresTarget(request.getfixturevalue("database").dsn)

    return make


class TestMemory(TargetSuite):
    @pytest.fixture
    def target(self) -> Any:
        return MemoryTarget()


class TestSqlite(TargetSuite):
    @pytest.fixture
    def target(self, make_target: Any) -> Any:
        return make_target("sqlite")


class TestPostgres(TargetSuite):
    @pytest.fixture
    def target(self, make_target: Any) -> Any:
        return make_target("postgres")


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


@pytest.mark.parametrize("seed", range(4))
def test_a_postgres_table_of_several_points_shows_first_when_it_is_exact(
    database: Any, seed: int
) -> None:
    mirror_of_pieces_equals_source(PostgresTarget(database.dsn), Random(seed))


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
    with pytest.raises(TargetError, match=r"SQLite file .*(cannot hold both|already has)"):
        writer.plan(planned if together else planned[1:])
    # Case is a matter of ASCII there.
    writer.plan([MirrorCopy(table_schema(name)) for name in ("é", "É")])
    writer.close()
