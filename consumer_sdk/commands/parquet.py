"""Rows into a Parquet file with the columns' own types."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from consumer_sdk.commands.files import part_of, refused, unfit
from consumer_sdk.errors import UsageError
from consumer_sdk.wire import oids
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.jsonb import jsonb_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from consumer_sdk.snapshot.chunks import ChunkRows
    from consumer_sdk.wire.column_types import Column

    _Converter = Callable[[Any, bool], Any]
    """Of a value, and whether it is the text of a JSON document."""

_LARGEST_PRECISION = 38


class ParquetFile:
    """Writes one row group for each chunk.

    Whatever has no exact counterpart is text. A value that a typed column cannot hold, such as an
    infinite timestamp, raises UsageError rather than being changed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise UsageError(
                "writing Parquet needs pyarrow: pip install 'tailrace[arrow]'"
            ) from error
        self._parquet = pyarrow.parquet
        self._path = path
        self._writer: Any = None
        self._columns: list[tuple[str, Any, _Converter | None]] = []

    def begin(self, columns: Sequence[Column]) -> None:
        import pyarrow as pa

        self._columns = [(column.name, *_arrow(column)) for column in columns]
        self._schema = pa.schema([(name, kind) for name, kind, _ in self._columns])
        try:
            self._writer = self._parquet.ParquetWriter(
                part_of(self._path), self._schema, compression="zstd"
            )
        except OSError as error:
            raise refused(self._path, error) from error

    def write(self, rows: ChunkRows) -> None:
        import pyarrow as pa

        arrays = []
        for name, kind, convert in self._columns:
            try:
                values = [row[name] for row in rows]
            except KeyError as error:
                raise unfit(rows) from error
            try:
                if convert is not None:
                    values = [
                        None if value is None else convert(value, name in rows.raw(index))
                        for index, value in enumerate(values)
                    ]
                arrays.append(pa.array(values, type=kind))
            except (pa.ArrowException, *MISFITS) as error:
                raise UsageError(
                    f"column {name!r} holds a value that Parquet's {kind} cannot; "
                    "write .jsonl or .csv instead"
                ) from error
        try:
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        except OSError as error:
            raise refused(self._path, error) from error

    def finish(self) -> None:
        try:
            self._writer.close()
            part_of(self._path).replace(self._path)
        except OSError as error:
            raise refused(self._path, error) from error
        self._writer = None

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            part_of(self._path).unlink(missing_ok=True)


def _arrow(column: Column) -> tuple[Any, _Converter | None]:
    """Arrow type of a column, and how a value of the wire becomes one of it."""
    import pyarrow as pa

    if column.family == "array":
        kind, convert = _scalar(column, column.element_family or "other", column.element_oid)
        return pa.list_(kind), _list_of(convert)
    return _scalar(column, column.family, column.base_type_oid)


def _scalar(column: Column, family: str, oid: int) -> tuple[Any, _Converter | None]:
    import pyarrow as pa

    match family:
        case "bool":
            return pa.bool_(), None
        case "int":
            return {oids.INT2: pa.int16(), oids.INT4: pa.int32()}.get(oid, pa.int64()), None
        case "float":
            return (pa.float32() if oid == oids.FLOAT4 else pa.float64()), None
        case "bytea":
            return pa.binary(), None
        case "date":
            return pa.date32(), lambda text, _: date.fromisoformat(text)
        case "timestamp":
            return pa.timestamp("us"), lambda text, _: datetime.fromisoformat(text)
        case "timestamptz":
            return pa.timestamp("us", tz="UTC"), lambda text, _: datetime.fromisoformat(text)
        case "json" | "jsonb":
            return pa.string(), _document
        case "numeric":
            digits, scale = column.numeric_precision, column.numeric_scale
            if digits is None or scale is None or digits > _LARGEST_PRECISION:
                return pa.string(), None
            if 0 <= scale <= digits > 0:
                return pa.decimal128(digits, scale), lambda text, _: Decimal(text)
    return pa.string(), None


def _list_of(convert: _Converter | None) -> _Converter:
    def apply(value: Any, is_text: bool) -> Any:
        if not isinstance(value, list) or any(isinstance(item, list) for item in value):
            raise TypeError("not an array of one dimension")
        if convert is None:
            return value
        return [None if item is None else convert(item, is_text) for item in value]

    return apply


def _document(value: Any, is_text: bool) -> str:
    return str(value) if is_text else jsonb_text(value)
