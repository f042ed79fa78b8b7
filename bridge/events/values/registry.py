"""Chooses the converter for a column's type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bridge.events.values import json, scalars
from bridge.events.values.array import array_converter
from consumer_sdk.wire import oids
from consumer_sdk.wire.column_types import family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.events.values.converter import ColumnType, Converter

_BY_FAMILY: Final[Mapping[str, Converter]] = {
    "bool": scalars.BOOL,
    "int": scalars.INTEGER,
    "float": scalars.FLOAT,
    "numeric": scalars.TEXT,
    "text": scalars.TEXT,
    "bytea": scalars.BYTEA,
    "timestamp": scalars.TIMESTAMP,
    "timestamptz": scalars.TIMESTAMPTZ,
    "date": scalars.TEXT,
    "time": scalars.TEXT,
    "timetz": scalars.TEXT,
    "interval": scalars.TEXT,
    "json": json.JSON,
    "jsonb": json.JSONB,
    "uuid": scalars.TEXT,
    "other": scalars.TEXT,
}


def converter_for(column_type: ColumnType, *, json_messages: bool = False) -> Converter:
    """The converter for a type; enums, ranges, composites and unknown types keep their text.

    With `json_messages`, a jsonb with an integer beyond 2^53 stays text: JSON messages carry such
    integers as text, and readers could not distinguish them from strings.
    """
    kind = family(column_type.base_oid, column_type.element_oid)
    if kind == "jsonb" and json_messages:
        return json.JSONB_FOR_JSON
    if kind != "array":
        return scalars.CHAR if column_type.base_oid == oids.CHAR else _BY_FAMILY[kind]
    element_oid = column_type.element_oid or oids.ARRAY_ELEMENTS[column_type.base_oid]
    delimiter = ";" if element_oid == oids.BOX else column_type.element_delimiter
    element = family(element_oid)
    if element in ("json", "jsonb"):
        # A name in `raw` covers the whole column, so either all elements are text or none.
        return array_converter(scalars.TEXT, delimiter, raw=True)
    if element_oid == oids.CHAR:
        return array_converter(scalars.CHAR, delimiter)
    return array_converter(scalars.TEXT if element == "array" else _BY_FAMILY[element], delimiter)
