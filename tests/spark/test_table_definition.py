"""How a table's columns in the lake follow its schema versions."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import TableSchema
from spark_consumer.errors import SchemaChangeError, UnsuitableTableError
from spark_consumer.lake.table_definition import (
    TableDefinition,
    TableOptions,
    define,
    evolve,
    lake_columns,
)

Spec = dict[str, Any]


def schema(*columns: tuple[str, int] | tuple[str, int, Spec], **fields: Any) -> TableSchema:
    described = []
    for position, (name, oid, *more) in enumerate(columns, start=1):
        spec = more[0] if more else {}
        described.append(
            {
                "name": name,
                "position": position,
                "data_type": "type",
                "type_oid": oid,
                "is_key": name == "id",
                "backfilled": False,
                **spec,
            }
        )
    document = {
        "v": 1,
        "source": "slot",
        "epoch": 1,
        "table": "users",
        "schema": "public",
        "timestamp": 0,
        "schema_version": 1,
        "lsn": 1,
        "primary_key": ["id"],
        "replica_identity": "default",
        "filenode": 7,
        "columns": described,
    }
    return TableSchema.from_document({**document, **fields})


ID = ("id", oids.INT8)
NAME = ("name", oids.TEXT)
AT = ("at", oids.TIMESTAMP)


def types(definition: TableDefinition) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in definition.columns}


def test_a_table_without_key_and_without_full_identity_is_refused_with_the_remedy() -> None:
    keyless = schema(("id", oids.INT8, {"is_key": False}), primary_key=[])
    with pytest.raises(UnsuitableTableError, match="ALTER TABLE users REPLICA IDENTITY FULL"):
        define(keyless)


def test_a_table_without_key_under_full_identity_is_a_bag() -> None:
    definition = define(schema(ID, NAME, primary_key=[], replica_identity="full"))
    assert definition.is_bag
    assert definition.identity == ("id", "name")


def test_columns_that_the_lake_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(UnsuitableTableError, match="'name' and 'NAME'"):
        define(schema(ID, NAME, ("NAME", oids.TEXT)))
    with pytest.raises(UnsuitableTableError, match="_deleted"):
        define(schema(ID, ("_deleted", oids.BOOL)))


def test_text_of_unrepresentable_values_has_a_column_beside() -> None:
    definition = define(schema(ID, NAME, AT), "text")
    assert list(types(definition)) == ["id", "name", "at", "at__text"]


def test_own_columns_come_last() -> None:
    definition = define(schema(ID, NAME))
    columns = lake_columns(definition, TableOptions(soft_deletes=True, synced_at=True))
    assert columns.names == ["id", "name", "_deleted", "_synced_at"]


def test_an_added_column_is_added_and_a_dropped_one_stays() -> None:
    before, after = schema(ID, NAME), schema(ID, ("age", oids.INT4), schema_version=2)
    added = evolve(define(before), before, schema(ID, NAME, ("age", oids.INT4)))
    assert (added.change, list(types(added.definition))) == ("add", ["id", "name", "age"])
    dropped = evolve(added.definition, schema(ID, NAME, ("age", oids.INT4)), after)
    assert (dropped.change, list(types(dropped.definition))) == ("none", ["id", "name", "age"])


def test_a_wider_type_that_leaves_the_rows_alone_rewrites() -> None:
    before = schema(ID, ("n", oids.NUMERIC, {"type_modifier": 4 + (10 << 16) + 2}))
    after = schema(ID, ("n", oids.NUMERIC, {"type_modifier": 4 + (12 << 16) + 2}))
    wider = evolve(define(before), before, after)
    assert (wider.change, types(wider.definition)["n"]) == ("rewrite", pa.decimal128(12, 2))


@pytest.mark.parametrize("oid", [oids.INT2, oids.INT8])
def test_a_type_for_which_the_rows_are_converted_needs_a_new_bootstrap(oid: int) -> None:
    before = schema(ID, ("n", oids.INT4))
    found = evolve(define(before), before, schema(ID, ("n", oid)))
    assert (found.change, found.reason) == ("rebuild", "the type of column n changed")


@pytest.mark.parametrize(
    "spec", [{"column_default": "5"}, {"is_nullable": False}, {"backfilled": True}]
)
def test_a_column_whose_value_in_old_rows_is_unknown_needs_a_new_bootstrap(spec: Spec) -> None:
    before = schema(ID)
    found = evolve(define(before), before, schema(ID, ("n", oids.INT4, spec)))
    assert found.change == "rebuild"
    assert "the new column n" in found.reason


def test_a_column_that_comes_back_needs_a_new_bootstrap() -> None:
    before, without = schema(ID, NAME), schema(ID)
    dropped = evolve(define(before), before, without)
    found = evolve(dropped.definition, without, before)
    assert (found.change, found.reason) == ("rebuild", "column name was dropped and added again")


def test_columns_in_another_order_need_a_new_bootstrap() -> None:
    before, after = schema(ID, NAME, ("b", oids.TEXT)), schema(ID, ("b", oids.TEXT), NAME)
    assert evolve(define(before), before, after).change == "rebuild"


@pytest.mark.parametrize("name", ["_deleted", "at__text"])
def test_a_new_column_does_not_take_the_place_of_one_of_the_lakes_own(name: str) -> None:
    before, after = schema(ID, AT), schema(ID, AT, (name, oids.TEXT))
    with pytest.raises(UnsuitableTableError, match=name):
        evolve(define(before, "text"), before, after, "text")


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (schema(ID, ("name", oids.INT4)), "column name changed from string to type"),
        (schema(ID, ("label", oids.TEXT)), "name was replaced by label"),
        (schema(ID, NAME, primary_key=["name"], replica_identity="full"), r"its key is now \(name"),
    ],
)
def test_other_changes_stop_with_the_remedy(after: TableSchema, what: str) -> None:
    before = schema(ID, NAME)
    with pytest.raises(SchemaChangeError, match=f"table users .*{what}.*--rebootstrap"):
        evolve(define(before), before, after)
