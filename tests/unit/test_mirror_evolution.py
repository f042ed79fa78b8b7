"""Which schema changes are made in place: only those that leave every row as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from consumer_sdk.targets.evolution import Effect, compare, key_columns
from consumer_sdk.wire.oids import INT4, INT8, NUMERIC, TEXT, TIMESTAMP, VARCHAR
from tests.mirror_model import column, table_schema

OLD = table_schema("t")


def with_columns(*columns: Any, **changes: Any) -> Any:
    return replace(OLD, columns=columns, schema_version=2, **changes)


def added(**options: Any) -> Any:
    return with_columns(*OLD.columns, column("more", 4, **options))


def numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


@pytest.mark.parametrize(
    ("new", "effect"),
    [
        (replace(OLD, schema_version=9, timestamp=5), Effect.NONE),
        (replace(OLD, replica_identity="full"), Effect.NONE),
        (added(), Effect.ALTER),
        (with_columns(*OLD.columns[:2]), Effect.ALTER),
        (added(column_default="5"), Effect.REBUILD),
        (added(is_nullable=False), Effect.REBUILD),
        (added(backfilled=True), Effect.REBUILD),
        (added(backfilled=None), Effect.REBUILD),
        (replace(added(), filenode=8), Effect.REBUILD),
        (replace(added(), filenode=None), Effect.REBUILD),
        (with_columns(*OLD.columns[:2], column("renamed", 3)), Effect.REBUILD),
        (with_columns(OLD.columns[0], OLD.columns[2], OLD.columns[1]), Effect.REBUILD),
        (with_columns(*OLD.columns[:2], column("body", 3, INT4)), Effect.REBUILD),
        (replace(OLD, primary_key=("id", "name"), replica_identity="full"), Effect.REBUILD),
        (replace(OLD, replica_identity="nothing"), Effect.REBUILD),
    ],
)
def test_a_change_is_made_in_place_only_if_it_touches_no_row(new: Any, effect: Effect) -> None:
    assert compare(OLD, new).effect is effect


@pytest.mark.parametrize(
    ("old", "new", "effect"),
    [
        ((VARCHAR, 14), (VARCHAR, 24), Effect.ALTER),
        ((VARCHAR, 14), (VARCHAR, -1), Effect.ALTER),
        ((VARCHAR, 14), (TEXT, -1), Effect.ALTER),
        ((VARCHAR, 24), (VARCHAR, 14), Effect.REBUILD),
        ((TEXT, -1), (VARCHAR, 14), Effect.REBUILD),
        ((NUMERIC, numeric(10, 2)), (NUMERIC, numeric(12, 2)), Effect.ALTER),
        ((NUMERIC, numeric(10, 2)), (NUMERIC, -1), Effect.ALTER),
        ((NUMERIC, numeric(10, 2)), (NUMERIC, numeric(12, 3)), Effect.REBUILD),
        ((NUMERIC, -1), (NUMERIC, numeric(12, 3)), Effect.REBUILD),
        ((TIMESTAMP, 3), (TIMESTAMP, -1), Effect.ALTER),
        ((TIMESTAMP, 6), (TIMESTAMP, 3), Effect.REBUILD),
        # PostgreSQL rewrites the table, possibly by an expression of the user's.
        ((INT4, -1), (INT8, -1), Effect.REBUILD),
    ],
)
def test_a_type_is_widened_in_place_only_if_postgresql_rewrites_nothing(
    old: tuple[int, int], new: tuple[int, int], effect: Effect
) -> None:
    before = with_columns(OLD.columns[0], column("v", 2, old[0], type_modifier=old[1]))
    after = with_columns(OLD.columns[0], column("v", 2, new[0], type_modifier=new[1]))
    assert compare(before, after).effect is effect


def test_without_primary_key_under_full_identity_there_is_no_key() -> None:
    assert key_columns(OLD) == ("id",)
    assert key_columns(replace(OLD, replica_identity="full")) == ("id",)
    assert key_columns(replace(OLD, replica_identity="full", primary_key=())) == ()
    assert key_columns(replace(OLD, replica_identity="nothing")) == ()
