"""The lake by itself: positions that go with the rows, and what happens behind our back."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.table import TableMerger

from spark_consumer.errors import LakeConflictError, LakeError, MissingRowError
from spark_consumer.lake.delta_log import DeltaLog
from spark_consumer.lake.embedded import EmbeddedDeltaLake
from spark_consumer.lake.lake_table import LakePosition, MergePlan
from spark_consumer.lake.parquet_files import DataFile, ParquetWriter

COLUMNS = pa.schema(
    [("id", pa.int64()), ('Odd "Col".', pa.string()), ("tags", pa.list_(pa.string()))]
)
START = LakePosition("slot", 100, 7, 10, 500, 501, 1)
PLAN = MergePlan(
    key=("id",),
    columns={"id": "c0", 'Odd "Col".': "c1", "tags": "c2"},
    keepable={"tags": "keep"},
    deleted="gone",
)


def files(root: str, *rows: tuple[Any, ...], columns: pa.Schema = COLUMNS) -> list[DataFile]:
    writer = ParquetWriter(root, "load-test", columns)
    arrays = [
        pa.array(values, field.type)
        for values, field in zip(zip(*rows, strict=True), columns, strict=True)
    ]
    writer.write(pa.RecordBatch.from_arrays(arrays, schema=columns))
    writer.finish()
    return writer.files


@pytest.fixture
def lake(tmp_path: Path) -> EmbeddedDeltaLake:
    return EmbeddedDeltaLake(str(tmp_path))


@pytest.fixture
def table(lake: EmbeddedDeltaLake) -> DeltaLog:
    """Three rows at the first position."""
    root = lake.table_root("public", "users")
    rows = files(root, (1, "a", ["x"]), (2, "b", None), (3, "c", []))
    return lake.create("public", "users", rows, COLUMNS, START).log


def rows_of(table: DeltaLog) -> list[tuple[Any, ...]]:
    found = DeltaTable(table.root).to_pyarrow_table()
    columns = [column.to_pylist() for column in found.columns]
    return sorted(zip(*columns, strict=True))


def staged(*rows: tuple[Any, ...]) -> Any:
    names = ("c0", "c1", "c2", "keep", "gone")
    kinds = (pa.int64(), pa.string(), pa.list_(pa.string()), pa.bool_(), pa.bool_())
    columns = list(zip(*rows, strict=True)) if rows else [[]] * len(names)
    arrays = [pa.array(list(values), kind) for values, kind in zip(columns, kinds, strict=True)]
    return pa.Table.from_arrays(arrays, names).to_reader()


def merge(table: DeltaLog, rows: Sequence[tuple[Any, ...]], there: LakePosition) -> None:
    table.merge(staged(*rows), len(rows), PLAN, there)


def test_the_first_commit_holds_the_rows_and_the_position(
    lake: EmbeddedDeltaLake, table: DeltaLog
) -> None:
    assert rows_of(table) == [(1, "a", ["x"]), (2, "b", None), (3, "c", [])]
    found = lake.find("public", "users")
    assert found is not None
    assert found.position("slot") == START
    assert found.position("other") is None
    assert found.columns == COLUMNS
    assert found.version == 0


def test_a_merge_updates_keeps_deletes_and_inserts_in_one_commit(table: DeltaLog) -> None:
    there = START.moved_to(20, 600, 2)
    rows = (
        (1, "A", None, True, False),
        (2, None, None, False, True),
        (4, "d", ["y"], False, False),
        (5, None, None, False, True),
    )
    merge(table, rows, there)
    assert rows_of(table) == [(1, "A", ["x"]), (3, "c", []), (4, "d", ["y"])]
    assert table.version == 1
    assert table.position("slot") == there


def test_a_merge_that_changes_nothing_still_moves_the_position(table: DeltaLog) -> None:
    there = START.moved_to(20, 600)
    merge(table, [(9, None, None, False, True)], there)
    assert table.position("slot") == there
    merge(table, [], there.moved_to(30, 0))
    assert table.position("slot") == there.moved_to(30, 0)


def test_an_incomplete_row_is_updated_but_never_inserted(table: DeltaLog) -> None:
    there = START.moved_to(20, 600)
    plan = replace(PLAN, incomplete="keep")
    table.merge(staged((1, "A", None, True, False), (4, "d", [], False, False)), 2, plan, there)
    rows = [(1, "A", ["x"]), (2, "b", None), (3, "c", []), (4, "d", [])]
    assert rows_of(table) == rows
    with pytest.raises(MissingRowError, match=r"table users lacks a row .* --rebootstrap"):
        table.merge(
            staged((2, "B", None, True, False), (9, "secret", None, True, False)),
            2,
            plan,
            there.moved_to(30, 0),
        )
    assert rows_of(table) == rows
    assert table.position("slot") == there


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(["a", "b"]),
        pa.array([0.5, 1.5]),
        pa.array([b"a", b"b"]),
        pa.array([1, 2], pa.timestamp("us", tz="UTC")),
    ],
    ids=lambda array: str(array.type),
)
def test_a_key_of_any_type_tells_incomplete_rows(lake: EmbeddedDeltaLake, ids: pa.Array) -> None:
    columns = pa.schema([("id", ids.type), ("body", pa.string())])
    root = lake.table_root("public", "users")
    present = files(root, (ids[0].as_py(), "x"), columns=columns)
    log = lake.create("public", "users", present, columns, START).log
    plan = MergePlan(("id",), {"id": "c0", "body": "c1"}, {"body": "keep"}, None, "keep")
    rows = pa.table({"c0": ids, "c1": pa.nulls(2, pa.string()), "keep": [True, True]})
    log.merge(rows.slice(0, 1).to_reader(), 1, plan, START.moved_to(20, 0))
    with pytest.raises(MissingRowError):
        log.merge(rows.to_reader(), 2, plan, START.moved_to(30, 0))
    assert [row[1] for row in rows_of(log)] == ["x"]


def test_a_merge_of_fewer_rows_than_were_staged_is_not_done(table: DeltaLog) -> None:
    before = rows_of(table)
    for count in (2, 0):
        with pytest.raises(LakeError, match=rf"{count} rows were staged .* but 1 reached"):
            table.merge(staged((4, "d", None, False, False)), count, PLAN, START.moved_to(20, 600))
    assert rows_of(table) == before
    assert table.position("slot") == START
    merge(table, [(4, "d", None, False, False)], START.moved_to(20, 600))
    assert len(rows_of(table)) == 4


def test_a_merge_that_took_fewer_rows_than_it_was_given_is_undone(
    lake: EmbeddedDeltaLake, table: DeltaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = TableMerger.execute

    def tell_less(merger: TableMerger) -> dict[str, Any]:
        metrics = execute(merger)
        return {**metrics, "num_source_rows": metrics["num_source_rows"] - 1}

    before = rows_of(table)
    with monkeypatch.context() as patched:
        patched.setattr(TableMerger, "execute", tell_less)
        with pytest.raises(LakeError, match=r"1 rows were staged .* but 0 reached"):
            merge(table, [(4, "d", None, False, False)], START.moved_to(20, 600))
    assert rows_of(table) == before
    found = lake.find("public", "users")
    assert found is not None
    found.require_unchanged()
    assert found.position("slot") == START
    merge(found.log, [(4, "d", None, False, False)], START.moved_to(20, 600))
    assert len(rows_of(table)) == 4


def test_a_key_of_zero_takes_the_sign_of_the_newest(lake: EmbeddedDeltaLake) -> None:
    columns = pa.schema([("id", pa.float64()), ("body", pa.string())])
    root = lake.table_root("public", "users")
    rows = files(root, (0.0, "a"), (math.nan, "b"), columns=columns)
    log = lake.create("public", "users", rows, columns, START).log
    plan = MergePlan(("id",), {"id": "c0", "body": "c1"}, {}, None)
    new = pa.table({"c0": [-0.0, math.nan], "c1": ["A", "B"]})
    log.merge(new.to_reader(), 2, plan, START.moved_to(20, 0))
    assert sorted(map(repr, rows_of(log))) == ["(-0.0, 'A')", "(nan, 'B')"]


def test_positions_never_move_backwards() -> None:
    assert START.moved_to(5, 5) == START
    assert START.moved_to(50, 5) == replace(START, stream_seq=50)


def test_files_are_exchanged_and_the_rest_stays(table: DeltaLog) -> None:
    (old,) = table.data_files()
    table.exchange((), files(table.root, (7, "g", None)), START.moved_to(11, 0))
    table.exchange([old], files(table.root, (3, "c", [])), START.moved_to(12, 0))
    assert rows_of(table) == [(3, "c", []), (7, "g", None)]
    assert table.position("slot") == START.moved_to(12, 0)


def test_the_whole_table_is_replaced_with_other_columns(table: DeltaLog) -> None:
    wider = pa.schema([("id", pa.decimal128(20, 0)), ("new", pa.int32())])
    table.replace(files(table.root, (1, 5), columns=wider), wider, START.moved_to(15, 0))
    assert table.columns == wider
    assert [row[1] for row in rows_of(table)] == [5]
    there = START.moved_to(15, 0, START.schema_version + 1)
    table.add_columns([pa.field("later", pa.timestamp("us"))], there)
    assert table.columns.names == ["id", "new", "later"]
    assert table.position("slot") == there


def test_the_position_survives_compaction_and_log_checkpoints(table: DeltaLog) -> None:
    for sequence in range(11, 41):
        table.exchange((), files(table.root, (sequence, "x", None)), START.moved_to(sequence, 0))
    table.maintain()
    raw = DeltaTable(table.root)
    assert len(raw.file_uris()) < 10
    raw.create_checkpoint()
    raw.cleanup_metadata()
    assert DeltaLog(table.root, "users").position("slot") == START.moved_to(40, 0)


def test_the_first_batch_of_a_short_run_compacts_what_others_have_left(
    lake: EmbeddedDeltaLake, table: DeltaLog
) -> None:
    written = [file for n in range(11, 41) for file in files(table.root, (n, "x", None))]
    table.exchange((), written, START.moved_to(40, 0))
    found = lake.find("public", "users")
    assert found is not None
    found.maintain()
    assert len(found.log.data_files()) < 10
    assert len(rows_of(found.log)) == 33


def test_a_vacuum_now_and_then_takes_what_no_version_needs(
    lake: EmbeddedDeltaLake, table: DeltaLog
) -> None:
    long_ago = time.time() - 30 * 86_400
    left_over = Path(table.root, files(table.root, (9, "left over", None))[0].path)
    fresh = Path(table.root, files(table.root, (9, "under way", None))[0].path)
    os.utime(left_over, (long_ago, long_ago))
    table.maintain()
    assert left_over.exists()
    os.utime(Path(table.root, "_vacuumed"), (long_ago, long_ago))
    found = lake.find("public", "users")
    assert found is not None
    found.maintain()
    assert not left_over.exists()
    assert fresh.exists()
    assert rows_of(found.log) == [(1, "a", ["x"]), (2, "b", None), (3, "c", [])]
    assert found.position("slot") == START
    version = found.version
    again = lake.find("public", "users")
    assert again is not None
    again.maintain()
    assert again.version == version
    again.require_unchanged()


def restore(table: DeltaTable) -> None:
    table.restore(0)


def overwrite(table: DeltaTable) -> None:
    write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="overwrite")


def append(table: DeltaTable) -> None:
    write_deltalake(table, table.to_pyarrow_table().slice(0, 1), mode="append")


def delete(table: DeltaTable) -> None:
    table.delete("id < 9")


def update(table: DeltaTable) -> None:
    table.update({"id": "8"}, predicate="id = 1")


def other_columns(table: DeltaTable) -> None:
    rows = table.to_pyarrow_table().drop_columns(["tags"])
    write_deltalake(table, rows, mode="overwrite", schema_mode="overwrite")


def restore_and_compact(table: DeltaTable) -> None:
    table.restore(0)
    table.optimize.compact()


def required_column(table: DeltaTable) -> None:
    """As a writer does that says only what it must."""
    schema = json.loads(table.schema().to_json())
    schema["fields"] = schema["fields"][:-1]
    log = Path(table.table_uri.removeprefix("file://"), "_delta_log")
    (log / f"{table.version() + 1:020}.json").write_text(
        json.dumps(
            {
                "metaData": {
                    "id": str(table.metadata().id),
                    "format": {"provider": "parquet", "options": {}},
                    "schemaString": json.dumps(schema),
                    "partitionColumns": [],
                    "configuration": {},
                }
            }
        )
        + "\n"
    )


CHANGES = (
    restore,
    overwrite,
    append,
    delete,
    update,
    other_columns,
    restore_and_compact,
    required_column,
)


def compact(table: DeltaTable) -> None:
    table.optimize.compact()


def vacuum(table: DeltaTable) -> None:
    table.vacuum(dry_run=False)


def comment(table: DeltaTable) -> None:
    table.alter.set_table_description("All of them.")
    table.alter.set_column_metadata("id", {"comment": "the number"})


def rename(table: DeltaTable) -> None:
    table.alter.set_table_name("people")


def set_property(table: DeltaTable) -> None:
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})


def checkpoint(table: DeltaTable) -> None:
    table.create_checkpoint()
    table.cleanup_metadata()


def restore_back(table: DeltaTable) -> None:
    version = table.version()
    table.restore(0)
    table.restore(version)


def compact_and_restore_back(table: DeltaTable) -> None:
    table.optimize.compact()
    restore_back(table)


HARMLESS = (
    compact,
    vacuum,
    comment,
    rename,
    set_property,
    checkpoint,
    restore_back,
    compact_and_restore_back,
)
MOMENTS = ("lake-before-commit", "lake-after-commit")
Foreign = Callable[[DeltaTable], None]


@pytest.fixture
def second(table: DeltaLog) -> DeltaLog:
    """The table after another commit of the job, in more files than a compaction leaves alone."""
    written = [file for n in range(11, 41) for file in files(table.root, (n, "x", None))]
    table.exchange((), written, START.moved_to(11, 0))
    return table


@pytest.fixture
def at_moment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, DeltaLog, Foreign], None]:
    """Let another writer do something once, while the job is at some point of a commit."""

    def plan(moment: str, table: DeltaLog, work: Foreign) -> None:
        done: list[str] = []

        def meanwhile(point: str) -> None:
            if point == moment and not done:
                done.append(point)
                work(DeltaTable(table.root))

        monkeypatch.setattr("spark_consumer.lake.delta_log.hold", meanwhile)

    return plan


def work_of_the_job(table: DeltaLog) -> dict[str, Callable[[], None]]:
    """Everything that the job commits, by name."""
    there = START.moved_to(12, 0)

    def vacuum_only() -> None:
        table.maintain()
        long_ago = time.time() - 30 * 86_400
        os.utime(Path(table.root, "_vacuumed"), (long_ago, long_ago))
        again = DeltaLog(table.root, "users")
        again.require_unchanged()
        again.maintain()

    return {
        "exchange": lambda: table.exchange((), files(table.root, (7, "g", None)), there),
        "advance": lambda: table.advance(there),
        "merge": lambda: merge(table, [(7, "g", None, False, False)], there),
        "empty merge": lambda: merge(table, [], there),
        "replace": lambda: table.replace(files(table.root, (7, "g", None)), COLUMNS, there),
        "add columns": lambda: table.add_columns([pa.field("later", pa.int32())], there),
        "compaction": table.maintain,
        "vacuum": vacuum_only,
    }


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_others_is_noticed(
    lake: EmbeddedDeltaLake, second: DeltaLog, change: Foreign
) -> None:
    second.require_unchanged()
    change(DeltaTable(second.root))
    with pytest.raises(LakeError, match=r"users was changed by another writer \(version 2"):
        second.require_unchanged()
    found = lake.find("public", "users")
    assert found is not None
    with pytest.raises(LakeError, match=r"restore it to version 1, .* --rebootstrap"):
        found.require_unchanged()
    with pytest.raises(LakeError, match="changed by another writer"):
        found.log.advance(START.moved_to(12, 0))
    found.load(files(second.root, (9, "new", None)), COLUMNS, START.moved_to(12, 0))
    assert rows_of(found.log) == [(9, "new", None)]
    found.require_unchanged()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", [restore, append, delete, required_column])
def test_no_moment_hides_a_change_by_others(
    lake: EmbeddedDeltaLake,
    second: DeltaLog,
    at_moment: Callable[[str, DeltaLog, Foreign], None],
    moment: str,
    change: Foreign,
) -> None:
    version = second.version
    for name in work_of_the_job(second):
        found = lake.find("public", "users")
        assert found is not None
        found.require_unchanged()
        at_moment(moment, second, change)
        with pytest.raises((LakeError, LakeConflictError)) as stopped:
            work_of_the_job(found.log)[name]()
        if isinstance(stopped.value, LakeConflictError):
            # The job tries again, and begins with a look at the table.
            again = lake.find("public", "users")
            assert again is not None
            with pytest.raises(LakeError, match="changed by another writer"):
                again.require_unchanged()
        else:
            assert "changed by another writer" in str(stopped.value), name
        # As an operator may do it, with rows and position of the same version.
        shutil.rmtree(second.root)
        rows = files(second.root, (1, "a", ["x"]), (2, "b", None), (3, "c", []))
        lake.create("public", "users", rows, COLUMNS, START)
        written = [file for n in range(11, 41) for file in files(second.root, (n, "x", None))]
        DeltaLog(second.root, "users").exchange((), written, START.moved_to(11, 0))
        assert DeltaTable(second.root).version() == version


@pytest.mark.parametrize("work", HARMLESS)
def test_what_leaves_the_rows_as_they_are_is_no_change(
    lake: EmbeddedDeltaLake, second: DeltaLog, work: Foreign
) -> None:
    rows = rows_of(second)
    work(DeltaTable(second.root))
    second.require_unchanged()
    second.advance(START.moved_to(12, 0))
    work(DeltaTable(second.root))
    found = lake.find("public", "users")
    assert found is not None
    found.require_unchanged()
    assert found.position("slot") == START.moved_to(12, 0)
    there = START.moved_to(13, 0)
    merge(found.log, [(7, "g", None, False, False)], there)
    assert rows_of(found.log) == sorted([*rows, (7, "g", None)])


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_leaves_the_rows_as_they_are_may_happen_at_any_moment(
    lake: EmbeddedDeltaLake,
    second: DeltaLog,
    at_moment: Callable[[str, DeltaLog, Foreign], None],
    moment: str,
) -> None:
    for name in work_of_the_job(second):
        found = lake.find("public", "users")
        assert found is not None
        found.require_unchanged()
        at_moment(moment, second, comment)
        with suppress(LakeConflictError):
            work_of_the_job(found.log)[name]()
    found = lake.find("public", "users")
    assert found is not None
    found.require_unchanged()


def test_a_commit_that_was_cleaned_up_unseen_stops_the_job(second: DeltaLog) -> None:
    compact(DeltaTable(second.root))
    comment(DeltaTable(second.root))
    raw = DeltaTable(second.root)
    raw.create_checkpoint()
    Path(second.root, "_delta_log", f"{2:020}.json").unlink()
    with pytest.raises(LakeError, match=r"users was changed by another writer \(version 2"):
        second.require_unchanged()


def test_tables_of_earlier_releases_are_recognised(
    lake: EmbeddedDeltaLake, second: DeltaLog
) -> None:
    for commit in Path(second.root, "_delta_log").glob("*.json"):
        lines = commit.read_text().splitlines(keepends=True)
        commit.write_text("".join(line for line in lines if "tailrace/table:" not in line))
    found = lake.find("public", "users")
    assert found is not None
    found.require_unchanged()
    comment(DeltaTable(second.root))
    again = lake.find("public", "users")
    assert again is not None
    again.require_unchanged()
    restore(DeltaTable(second.root))
    with pytest.raises(LakeError, match=r"\(version 4, RESTORE\).* restore it to version 3"):
        again.require_unchanged()
    DeltaTable(second.root).restore(3)
    again.require_unchanged()


def test_a_table_moved_to_the_place_of_another_is_not_taken_for_it(
    lake: EmbeddedDeltaLake, table: DeltaLog
) -> None:
    shutil.move(table.root, lake.table_root("public", "people"))
    with pytest.raises(LakeError, match=r"holds another table \(users\), not people"):
        lake.find("public", "people")


def test_files_optimized_by_others_meanwhile_are_never_left_beside_new_ones(
    table: DeltaLog,
) -> None:
    table.exchange((), files(table.root, (4, "d", None)), START.moved_to(11, 0))
    (old, *_) = table.data_files()
    DeltaTable(table.root).optimize.compact()
    new = files(table.root, (7, "g", None))
    there = START.moved_to(12, 0)
    for write in (
        lambda: table.exchange([old], new, there),
        lambda: table.replace(new, COLUMNS, there),
        lambda: table.exchange((), new, there),
        lambda: merge(table, [(1, "z", None, False, False)], there),
        lambda: table.add_columns([pa.field("later", pa.int32())], there),
    ):
        with pytest.raises(LakeConflictError, match="users is being written by another process"):
            write()
    assert [row[0] for row in rows_of(table)] == [1, 2, 3, 4]
    table.require_unchanged()
    table.replace(new, COLUMNS, there)
    assert rows_of(table) == [(7, "g", None)]


def test_another_table_in_the_place_is_left_alone(lake: EmbeddedDeltaLake) -> None:
    root = lake.table_root("public", "users")
    write_deltalake(root, pa.table({"x": [1]}))
    with pytest.raises(LakeError, match="holds another table"):
        lake.find("public", "users")


def test_other_files_in_the_place_are_left_alone(lake: EmbeddedDeltaLake, tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "notes.txt").write_text("mine")
    with pytest.raises(LakeError, match=r"notes\.txt"):
        lake.find("public", "users")


def test_leftovers_of_a_killed_load_are_not_adopted(lake: EmbeddedDeltaLake) -> None:
    root = lake.table_root("public", "users")
    files(root, (1, "left over", None))
    assert lake.find("public", "users") is None
    # So the first commit stands before it gets its name.
    log = Path(root, "_delta_log")
    log.mkdir()
    (log / "00000000000000000000.json#1").touch()
    assert lake.find("public", "users") is None
    table = lake.create("public", "users", files(root, (2, "b", None)), COLUMNS, START)
    assert rows_of(table.log) == [(2, "b", None)]


def test_odd_names_have_directories_of_their_own(lake: EmbeddedDeltaLake) -> None:
    roots = {
        lake.table_root(*name)
        for name in (("public", "a.b"), ("a", "b"), ("public", "a=b"), ("public", "A b"))
    }
    assert len(roots) == 4
    assert not any("=" in root for root in roots)


def test_data_files_tell_their_bounds(table: DeltaLog) -> None:
    (added,) = DeltaTable(table.root).get_add_actions(flatten=True).to_struct_array().to_pylist()
    assert (added["num_records"], added["min.id"], added["max.id"]) == (3, 1, 3)
    assert added["null_count.id"] == 0
