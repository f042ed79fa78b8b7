"""Writes rows to a Parquet file, with Arrow types for the columns."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Final

from consumer_sdk.commands.files import (
    create_temporary,
    mismatch,
    temporary_path,
    write_error,
)
from consumer_sdk.errors import UsageError
from consumer_sdk.wire.arrow_types import DECIMAL, arrow_type
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.jsonb import jsonb_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from consumer_sdk.snapshot.chunks import ArrowChunk, ChunkRows
    from consumer_sdk.wire.column_types import Column

    _Converter = Callable[[Any, bool], Any]
    """Takes a value, and whether it is the text of a JSON document."""

_NEEDS_PYARROW: Final = "writing Parquet needs pyarrow: pip install 'tailrace[arrow]'"


class ParquetFile:
    """Writes one row group for each chunk.

    A type without an exact counterpart becomes text. A value that the column's type cannot hold,
    such as an infinite timestamp, raises UsageError.
    """

    snapshot_format: str | None = "arrow"

    def __init__(self, path: Path) -> None:
        if find_spec("pyarrow") is None:
            raise UsageError(_NEEDS_PYARROW)
        self._path = path
        self._writer: Any = None
        self._file: IO[bytes] | None = None
        self._columns: list[tuple[str, Any, _Converter | None]] = []

    def prepare(self) -> None:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise UsageError(_NEEDS_PYARROW) from error

    def begin(self, columns: Sequence[Column]) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        self._columns = []
        for column in columns:
            kind = arrow_type(column.base_type_oid, column.element_oid, column.type_modifier)
            convert = _converter(column, decimal=kind.name == DECIMAL)
            self._columns.append((column.name, kind.build(pa), convert))
        self._schema = pa.schema([(name, kind) for name, kind, _ in self._columns])
        self._file = os.fdopen(create_temporary(self._path), "wb")
        try:
            self._writer = pa.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
        except OSError as error:
            raise write_error(self._path, error) from error

    def write(self, rows: ChunkRows) -> None:
        import pyarrow as pa

        arrays = []
        for name, kind, convert in self._columns:
            try:
                values = [row[name] for row in rows]
            except KeyError as error:
                raise mismatch(rows) from error
            try:
                if convert is not None:
                    values = [
                        None if value is None else convert(value, name in rows.raw(index))
                        for index, value in enumerate(values)
                    ]
                arrays.append(pa.array(values, type=kind))
            except (pa.ArrowException, *MISFITS) as error:
                raise UsageError(
                    f"column {name!r} holds a value that does not fit Parquet's {kind}; "
                    "write .jsonl or .csv instead"
                ) from error
        self._write(arrays)

    def write_arrow(self, chunk: ArrowChunk) -> bool:
        # A value that does not fit the column's type is not in the batch.
        if chunk.odd or chunk.batch.schema.names != self._schema.names:
            return False
        self._write(chunk.batch.columns)
        return True

    def _write(self, arrays: list[Any]) -> None:
        import pyarrow as pa

        try:
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        except OSError as error:
            raise write_error(self._path, error) from error

    def finish(self) -> None:
        assert self._file is not None
        try:
            self._writer.close()
            self._file.close()
            temporary_path(self._path).replace(self._path)
        except OSError as error:
            raise write_error(self._path, error) from error
        self._writer = self._file = None

    def abandon(self) -> None:
        if self._file is None:
            return
        # What is still buffered may not fit on the disk, and is not wanted.
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
        with suppress(OSError):
            self._file.close()
        self._writer = self._file = None
        temporary_path(self._path).unlink(missing_ok=True)


def _converter(column: Column, decimal: bool) -> _Converter | None:
    """Converts values of a column for Arrow; None if they need no conversion."""
    if column.family == "array":
        return _list_of(_scalar_converter(column.element_family or "other", decimal))
    return _scalar_converter(column.family, decimal)


def _scalar_converter(family: str, decimal: bool) -> _Converter | None:
    match family:
        case "date":
            return lambda text, _: date.fromisoformat(text)
        case "timestamp" | "timestamptz":
            return lambda text, _: datetime.fromisoformat(text)
        case "json" | "jsonb":
            return _document
        case "numeric" if decimal:
            return lambda text, _: Decimal(text)
    return None


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
