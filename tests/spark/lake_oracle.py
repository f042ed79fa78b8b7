"""The oracle: a table of the lake, compared row by row with the source's own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from psycopg import sql

from consumer_sdk.wire.subjects import parse_table_name
from spark_consumer.lake.embedded import EmbeddedDeltaLake

if TYPE_CHECKING:
    from collections.abc import Callable

Rows = list[tuple[Any, ...]]


def lake_table(lake: Path, table: str, version: int | None = None) -> DeltaTable:
    """A table of the lake, at some version."""
    return DeltaTable(
        EmbeddedDeltaLake(str(lake)).table_root(*parse_table_name(table)), version=version
    )


def lake_rows(lake: Path, table: str, version: int | None = None) -> Rows:
    """Its rows, sorted, without the columns that the lake adds; deleted ones left out."""
    found = lake_table(lake, table, version).to_pyarrow_table()
    if "_deleted" in found.column_names:
        live = [not gone for gone in found["_deleted"].to_pylist()]
        found = found.filter(pa.array(live)).drop_columns(["_deleted"])
    if "_synced_at" in found.column_names:
        found = found.drop_columns(["_synced_at"])
    columns = [column.to_pylist() for column in found.columns]
    return sorted(zip(*columns, strict=True), key=repr) if columns else []


def source_rows(dsn: str, table: str, lake: Path) -> Rows:
    """The same rows in PostgreSQL, in the types that the lake has for them."""
    schema = pa.schema(lake_table(lake, table).schema().to_arrow())
    own = ("_deleted", "_synced_at")
    columns = [_expression(field) for field in schema if field.name not in own]
    query = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(columns), sql.Identifier(*parse_table_name(table))
    )
    with psycopg.connect(dsn, options="-c timezone=UTC -c extra_float_digits=1") as connection:
        rows = connection.execute(query).fetchall()
    return sorted((tuple(map(_plain, row)) for row in rows), key=repr)


def _expression(field: pa.Field) -> sql.Composable:
    name = sql.Identifier(field.name)
    if pa.types.is_string(field.type):
        # As the type prints itself; a cast to text would strip the blanks of char(n).
        return sql.SQL("CASE WHEN {0} IS NOT NULL THEN format('%s', {0}) END").format(name)
    if pa.types.is_float32(field.type):
        return sql.SQL("{}::float8").format(name)
    if pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type):
        return sql.SQL("{}::text[]").format(name)
    return name


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


def assert_same_rows(dsn: str, lake: Path, *tables: str) -> None:
    """Fail with the first differing rows unless lake and source hold the same."""
    for table in tables:
        mine, theirs = _spelled(lake_rows(lake, table)), _spelled(source_rows(dsn, table, lake))
        if mine != theirs:
            extra, missing = mine - theirs, theirs - mine
            shown = "\n".join(
                [f"lake:   {_short(row)}" for row in sorted(extra, key=repr)[:3]]
                + [f"source: {_short(row)}" for row in sorted(missing, key=repr)[:3]]
            )
            raise AssertionError(
                f"{table}: {extra.total()} rows only in the lake, "
                f"{missing.total()} only in the source\n{shown}"
            )


def same_rows(dsn: str, lake: Path, *tables: str) -> Callable[[], bool]:
    """Whether lake and source hold the same, to wait for while nobody writes to the source.

    They are compared only after a new commit: comparing takes the time that the job needs.
    """
    compared: list[str] = []

    def same() -> bool:
        nonlocal compared
        roots = [EmbeddedDeltaLake(str(lake)).table_root(*parse_table_name(one)) for one in tables]
        commits = [str(one) for root in roots for one in Path(root).glob("_delta_log/*.json")]
        if sorted(commits) == compared or not all(Path(root).exists() for root in roots):
            return False
        try:
            assert_same_rows(dsn, lake, *tables)
        except AssertionError:
            compared = sorted(commits)
            return False
        except (TableNotFoundError, psycopg.Error):
            # Not there yet, or without the newest column.
            return False
        return True

    return same


def _short(row: tuple[str, ...]) -> str:
    return " | ".join(value if len(value) < 40 else f"{value[:36]}…{len(value)}" for value in row)


def _spelled(rows: Rows) -> Counter[tuple[str, ...]]:
    return Counter(tuple(repr(_comparable(value)) for value in row) for row in rows)


def _comparable(value: Any) -> Any:
    if hasattr(value, "utcoffset") and value.utcoffset() is not None:
        return value.replace(tzinfo=None), "UTC"
    return value
