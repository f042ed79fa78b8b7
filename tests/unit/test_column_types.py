from __future__ import annotations

import base64
import math
from dataclasses import replace
from typing import Any

import pytest

from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import Column, TableSchema, family, restore_json
from consumer_sdk.wire.errors import WireError, WireVersionError


def column(
    name: str = "c", type_oid: int = oids.TEXT, element_oid: int = 0, **fields: Any
) -> Column:
    document = {
        "name": name,
        "position": 1,
        "data_type": "whatever",
        "type_oid": type_oid,
        **({"element_oid": element_oid} if element_oid else {}),
        **fields,
    }
    return Column.from_document(document)


def table(*columns: Column, primary_key: tuple[str, ...] = (), identity: str = "default") -> Any:
    return TableSchema(
        source="orders_slot",
        epoch=1_765_000_000,
        table="orders",
        schema="public",
        timestamp=1_765_000_001_000_000,
        schema_version=3,
        lsn=2**63,
        primary_key=primary_key,
        replica_identity=identity,
        columns=columns,
    )


@pytest.mark.parametrize(
    ("base_oid", "element_oid", "name"),
    [
        (oids.BOOL, 0, "bool"),
        (oids.INT2, 0, "int"),
        (oids.OID, 0, "int"),
        (oids.FLOAT4, 0, "float"),
        (oids.NUMERIC, 0, "numeric"),
        (oids.BPCHAR, 0, "text"),
        (oids.NAME, oids.CHAR, "text"),
        (oids.BYTEA, 0, "bytea"),
        (oids.TIMETZ, 0, "timetz"),
        (oids.JSONB, 0, "jsonb"),
        (oids.UUID, 0, "uuid"),
        (1007, 0, "array"),
        (16_400, oids.INT4, "array"),
        (16_400, 0, "other"),
        (oids.POINT, oids.FLOAT8, "other"),
        (oids.INT2VECTOR, oids.INT2, "other"),
    ],
)
def test_types_fall_into_families(base_oid: int, element_oid: int, name: str) -> None:
    assert family(base_oid, element_oid) == name


def test_a_column_tells_the_family_behind_its_domain_and_of_its_elements() -> None:
    assert column(type_oid=16_400, base_type_oid=oids.INT8).family == "int"
    assert column(type_oid=16_400, base_type_oid=1016, element_oid=oids.INT8).family == "array"
    assert column(type_oid=1009).element_family == "text"
    assert column(type_oid=oids.TEXT).element_family is None


@pytest.mark.parametrize(
    ("modifier", "precision", "scale"),
    [
        (-1, None, None),
        (((10 << 16) | 2) + 4, 10, 2),
        (((1000 << 16) | 0) + 4, 1000, 0),
        (((5 << 16) | (-3 & 0x7FF)) + 4, 5, -3),
    ],
)
def test_numeric_modifiers_give_precision_and_scale(
    modifier: int, precision: int | None, scale: int | None
) -> None:
    for type_oid in (oids.NUMERIC, 1231):
        numeric = column(type_oid=type_oid, type_modifier=modifier)
        assert (numeric.numeric_precision, numeric.numeric_scale) == (precision, scale)


def test_a_modifier_of_another_type_is_no_precision() -> None:
    assert column(type_oid=oids.VARCHAR, type_modifier=68).numeric_precision is None


def test_schema_documents_round_trip() -> None:
    schema = table(
        column("id", oids.INT8, is_key=True, is_nullable=False),
        column("tags", 1009, column_default="'{}'::text[]"),
        primary_key=("id",),
    )
    assert TableSchema.from_document(schema.to_document()) == schema
    assert schema.column("tags") == schema.columns[1]
    assert schema.column("nope") is None


def test_unknown_fields_of_schema_documents_are_ignored() -> None:
    document = table(column()).to_document() | {"operation": "SCHEMA", "later": 1}
    document["columns"][0]["collation"] = "C"
    assert TableSchema.from_document(document) == table(column())


def test_columns_written_without_the_added_fields_are_understood() -> None:
    plain = column(type_oid=1007)
    assert (plain.base_type_oid, plain.element_oid) == (1007, oids.INT4)


def test_documents_of_a_newer_version_are_refused() -> None:
    with pytest.raises(WireVersionError):
        TableSchema.from_document(table(column()).to_document() | {"v": 2})


@pytest.mark.parametrize("damage", [{"columns": None}, {"columns": [1]}, {"lsn": "x"}])
def test_documents_that_are_no_schema_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        TableSchema.from_document(table(column()).to_document() | damage)
    with pytest.raises(WireError):
        TableSchema.from_document({"v": 1})


def test_row_key_is_what_events_can_identify_a_row_by() -> None:
    key, unique, other = (
        column("id", is_key=True),
        column("email", is_key=True),
        column("note", is_key=False),
    )
    plain = replace(key, is_key=False)
    assert table(key, other, primary_key=("id",)).row_key == ("id",)
    assert table(plain, unique, primary_key=("id",), identity="index").row_key == ("email",)
    assert table(key, unique, primary_key=("id",), identity="index").row_key == ("id",)
    assert table(key, other, primary_key=("id",), identity="full").row_key == ("id",)
    assert table(key, other, identity="full").row_key == ("id", "note")
    assert table(plain, other, primary_key=("id",), identity="nothing").row_key == ()
    assert table(plain, other).row_key == ()


@pytest.mark.parametrize(
    ("type_oid", "value", "restored"),
    [
        (oids.BYTEA, base64.b64encode(b"\x00\xff").decode(), b"\x00\xff"),
        (oids.INT8, "9223372036854775807", 2**63 - 1),
        (oids.INT8, 7, 7),
        (oids.FLOAT8, "-Infinity", -math.inf),
        (oids.FLOAT8, 3, 3.0),
        (oids.NUMERIC, "1.10", "1.10"),
        (oids.TEXT, "NaN", "NaN"),
        (oids.BOOL, True, True),
        (oids.JSONB, {"a": [1]}, {"a": [1]}),
        (oids.BYTEA, None, None),
        (1001, [["AA==", None]], [[b"\x00", None]]),
        (1016, ["9007199254740993", 1, None], [2**53 + 1, 1, None]),
        (1022, [1.5, "Infinity"], [1.5, math.inf]),
        (1007, "[2:3]={7,8}", "[2:3]={7,8}"),
    ],
)
def test_json_values_come_back_as_their_types(type_oid: int, value: Any, restored: Any) -> None:
    assert repr(restore_json(value, column(type_oid=type_oid))) == repr(restored)


@pytest.mark.parametrize(
    ("type_oid", "value"), [(oids.BYTEA, "*"), (oids.INT8, "x"), (oids.FLOAT8, "x"), (1001, [1])]
)
def test_json_values_that_do_not_fit_their_column_are_refused(type_oid: int, value: Any) -> None:
    with pytest.raises(WireError):
        restore_json(value, column(type_oid=type_oid))
