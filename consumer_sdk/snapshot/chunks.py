"""Decodes the chunks of a snapshot, in any format, into rows."""

from __future__ import annotations

import math
import re
import struct
from contextlib import contextmanager
from datetime import date, datetime
from decimal import ROUND_UP, Context
from typing import TYPE_CHECKING, Any, NamedTuple

from consumer_sdk.errors import CorruptData, VersionTooNew
from consumer_sdk.snapshot.arrow import read_arrow
from consumer_sdk.transport.api import parse_headers
from consumer_sdk.wire.column_types import Column, restore_json
from consumer_sdk.wire.envelope import ARROW, CONTENT_TYPE, JSON, MOST_CHUNK_ROWS, MSGPACK
from consumer_sdk.wire.errors import MISFITS, WireError, WireVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from decimal import Decimal

    from consumer_sdk.reading.references import References
    from consumer_sdk.snapshot.snapshot import SnapshotMeta
    from consumer_sdk.transport.api import Frame

Row = dict[str, Any]
_REFERENCE = "$ref"
_ROW_NUMBER = re.compile(r"[0-9]{1,9}\Z")


class ChunkRows(list[Row]):
    """The rows of one chunk, and which of their JSON columns hold the document as text."""

    __slots__ = ("number", "raw_columns", "raw_rows")

    def __init__(
        self,
        rows: list[Row],
        number: int,
        raw_columns: tuple[str, ...] = (),
        raw_rows: dict[int, tuple[str, ...]] | None = None,
    ) -> None:
        super().__init__(rows)
        self.number = number
        self.raw_columns = raw_columns
        self.raw_rows = raw_rows or {}

    def raw(self, index: int) -> tuple[str, ...]:
        """Columns of one row whose value is the text of a JSON document, not the document."""
        own = self.raw_rows.get(index)
        return self.raw_columns if own is None else (*self.raw_columns, *own)


class StoredChunk(NamedTuple):
    """A chunk as stored in INIT; its payload matches the sha256 in its header."""

    number: int
    sha256: str
    frame: Frame


class ArrowChunk(NamedTuple):
    """The record batch of an Arrow chunk as published.

    `odd` holds the values that do not fit the column's Arrow type, by column and row.
    """

    number: int
    batch: Any
    odd: dict[str, dict[str, Any]]


class ChunkReader:
    """Decodes the chunks of one snapshot; a damaged chunk raises CorruptData."""

    def __init__(self, references: References, meta: SnapshotMeta) -> None:
        self._references = references
        self._meta = meta
        self._columns = [Column.from_document(one) for one in meta.columns]

    async def rows(self, number: int, frame: Frame) -> ChunkRows:
        """The rows of a stored chunk, including rows stored as objects."""
        return self.to_rows(await self.read(number, frame))

    def to_rows(self, chunk: ChunkRows | ArrowChunk) -> ChunkRows:
        """The rows of a chunk as it was written."""
        if isinstance(chunk, ChunkRows):
            return chunk
        with _naming_chunk(chunk.number):
            return self._rows_of(chunk)

    async def read(self, number: int, frame: Frame) -> ChunkRows | ArrowChunk:
        """A stored chunk as it was written: rows, or an Arrow record batch."""
        with _naming_chunk(number):
            return await self._read(number, parse_headers(frame.headers) or {}, frame.payload)

    async def _read(
        self, number: int, headers: dict[str, str], payload: bytes
    ) -> ChunkRows | ArrowChunk:
        references = self._references
        content_type = headers.get(CONTENT_TYPE) or MSGPACK
        if content_type == ARROW:
            return self._arrow(number, await references.plain_payload(headers, payload))
        document = await references.document(headers, payload)
        self._check(number, document)
        reference = document.get("ref")
        if isinstance(reference, dict):
            return self._arrow(number, await references.fetch_object(reference))
        rows = document.get("data")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise WireError("damaged message: data is not a list of rows")
        if len(rows) > MOST_CHUNK_ROWS:
            raise WireError(f"damaged message: more than {MOST_CHUNK_ROWS} rows")
        referring = [
            index
            for index, row in enumerate(rows)
            if _REFERENCE in row and len(row) == 1 and isinstance(row[_REFERENCE], dict)
        ]
        references.check_references([rows[index][_REFERENCE] for index in referring])
        for index in referring:
            rows[index] = await references.row(rows[index][_REFERENCE], content_type)
        chunk = ChunkRows(rows, number, _raw_columns(document), _raw_rows(document))
        if content_type == JSON:
            self._restore(chunk)
        return chunk

    def _check(self, number: int, document: dict[str, Any]) -> None:
        expected = (
            ("snapshot_id", self._meta.snapshot_id),
            ("chunk", number),
            ("source", self._meta.source),
            ("epoch", self._meta.epoch),
            ("table", self._meta.table),
            ("schema", self._meta.schema),
            ("lsn", self._meta.lsn_of(number)),
        )
        for key, value in expected:
            found = document.get(key)
            if found != value and str(found) != str(value):
                raise WireError(f"damaged message: {key} is {found!r}, the snapshot's is {value!r}")

    def _restore(self, chunk: ChunkRows) -> None:
        for column in self._columns:
            name = column.name
            for index, row in enumerate(chunk):
                if name in row and name not in chunk.raw(index):
                    row[name] = restore_json(row[name], column)

    def _arrow(self, number: int, stream: bytes) -> ArrowChunk:
        batch, document = read_arrow(stream, self._columns)
        self._check(number, document)
        odd = document.get("odd") or {}
        _check_odd(odd, batch)
        return ArrowChunk(number, batch, odd)

    def _rows_of(self, chunk: ArrowChunk) -> ChunkRows:
        try:
            return self._converted(chunk)
        except MISFITS as error:
            raise WireError(f"damaged Arrow chunk: {error!r}") from error

    def _converted(self, chunk: ArrowChunk) -> ChunkRows:
        batch, odd = chunk.batch, chunk.odd
        columns = {column.name: column for column in self._columns}
        values: dict[str, list[Any]] = {}
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            convert = _converter(array.type)
            items = array.to_pylist()
            values[name] = items if convert is None else [_apply(convert, item) for item in items]
            for row, value in odd.get(name, {}).items():
                column = columns.get(name)
                values[name][int(row)] = value if column is None else restore_json(value, column)
        names = list(values)
        rows = [dict(zip(names, row, strict=True)) for row in zip(*values.values(), strict=True)]
        # Arrow has no type for JSON: documents are text in every row.
        raw = tuple(
            column.name
            for column in self._columns
            if column.family in ("json", "jsonb") or column.element_family in ("json", "jsonb")
        )
        return ChunkRows(rows, chunk.number, raw)


@contextmanager
def _naming_chunk(number: int) -> Iterator[None]:
    """Turn errors of the wire format into errors that name the chunk."""
    try:
        yield
    except WireVersionError as error:
        raise VersionTooNew(f"chunk {number}: {error}") from error
    except WireError as error:
        raise CorruptData(f"chunk {number}: {error}") from error


def _check_odd(odd: Any, batch: Any) -> None:
    if not isinstance(odd, dict) or not odd.keys() <= set(batch.schema.names):
        raise WireError("damaged Arrow chunk: odd is not a map by column")
    for values in odd.values():
        if not isinstance(values, dict):
            raise WireError("damaged Arrow chunk: odd is not a map by column and row")
        for row in values:
            if _ROW_NUMBER.match(row) is None or int(row) >= batch.num_rows:
                raise WireError("damaged Arrow chunk: odd names a row that is not there")


def _raw_columns(document: dict[str, Any]) -> tuple[str, ...]:
    names = document.get("raw_columns") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise WireError("damaged message: raw_columns is not a list of names")
    return tuple(names)


def _raw_rows(document: dict[str, Any]) -> dict[int, tuple[str, ...]]:
    raw = document.get("raw") or {}
    try:
        return {int(index): tuple(map(str, names)) for index, names in raw.items()}
    except MISFITS as error:
        raise WireError("damaged message: raw is not a map of names by row") from error


def _apply(convert: Callable[[Any], Any], value: Any) -> Any:
    if value is None:
        return None
    return [_apply(convert, item) for item in value] if isinstance(value, list) else convert(value)


def _converter(kind: Any) -> Callable[[Any], Any] | None:
    """Converts a value read from Arrow to that of the other formats; None if they are equal."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return _converter(kind.value_type)
    if pa.types.is_timestamp(kind):
        return _zoned if kind.tz else _iso
    if pa.types.is_date(kind):
        return date.isoformat
    if pa.types.is_decimal(kind):
        return _fixed_point
    if pa.types.is_float32(kind):
        return _shortest_float4
    return None


def _iso(value: datetime) -> str:
    text = value.replace(tzinfo=None).isoformat()
    return text.rstrip("0") if "." in text else text


def _zoned(value: datetime) -> str:
    return _iso(value) + "Z"


def _fixed_point(value: Decimal) -> str:
    return format(value, "f")


def _shortest_float4(value: float) -> float:
    """The double that PostgreSQL's shortest text of a float4 reads as."""
    if not value or not math.isfinite(value):
        return value
    packed = struct.pack("f", value)
    # A normal float4 keeps at least six digits; a subnormal one keeps fewer.
    for digits in range(1 if abs(value) < 2**-126 else 6, 9):
        candidate = float(f"{value:.{digits}g}")
        if _reads_as(candidate, packed):
            return candidate
        # Above a power of two floats are farther apart, so more rounded-up texts read as it.
        if abs(math.frexp(value)[0]) == 0.5:
            candidate = float(Context(prec=digits, rounding=ROUND_UP).create_decimal(value))
            if _reads_as(candidate, packed):
                return candidate
    return float(f"{value:.9g}")


def _reads_as(value: float, packed: bytes) -> bool:
    """Whether a value rounds to this float4, and is not half-way to another one."""
    return all(
        struct.pack("f", near) == packed
        for near in (value, math.nextafter(value, math.inf), math.nextafter(value, -math.inf))
    )
