"""PostgreSQL text to values, one module per kind of type; events and snapshots share them."""

from bridge.events.values.converter import ColumnType, Converter, RawList, RawText, Value, is_raw
from bridge.events.values.registry import converter_for

__all__ = [
    "ColumnType",
    "Converter",
    "RawList",
    "RawText",
    "Value",
    "converter_for",
    "is_raw",
]
