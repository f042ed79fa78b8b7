r"""Chunks as Arrow IPC streams of one record batch each, with typed columns.

A row of COPY in text format is a CSV row with tabs, without quotes, with `\N` for null; only text
that contains a backslash must be unescaped afterwards. Values that a typed column cannot hold
(infinity, years BC or beyond 9999, NaN as a decimal, arrays of several dimensions) are null in the
batch. The chunk's `odd` map (column, then row number) holds them as in the other formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from bridge.errors import ProtocolError
from bridge.events.values import converter_for
from bridge.snapshot.formats.copy_text import unescape
from consumer_sdk.wire import envelope
from consumer_sdk.wire.arrow_types import arrow_type
from consumer_sdk.wire.oids import CHAR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bridge.snapshot.formats.chunks import ChunkContent, ChunkHead, StoreObject
    from bridge.snapshot.tables import CopyColumn

    Odd = dict[str, dict[str, Any]]

METADATA_KEY: Final = b"cdc"
# The text of a chunk is usually at most this much larger than its batch; a larger chunk is split.
_FIRST_GUESS: Final = 0.8
_BLOCK_BYTES: Final = 2**31 - 1
_NULL: Final = "\\N"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ArrowContent:
    """One record batch, or a reference to it if it is too large for a message."""

    head: ChunkHead
    batch: Any
    odd: Odd
    store_object: StoreObject | None

    @property
    def row_count(self) -> int:
        count: int = self.batch.num_rows
        return count

    @property
    def content_type(self) -> str:
        return envelope.ARROW if self.store_object is None else envelope.MSGPACK

    def encode(self, number: int) -> bytes:
        """An IPC stream whose schema metadata holds the chunk's fields."""
        fields = self.head.fields(number)
        if self.odd:
            fields["odd"] = self.odd
        schema = self.batch.schema.with_metadata(
            {METADATA_KEY: envelope.encode(fields, as_json=True)}
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(self.batch.replace_schema_metadata(schema.metadata))
        stream: bytes = sink.getvalue().to_pybytes()
        if self.store_object is None:
            return stream
        return envelope.encode({**self.head.fields(number), "ref": self.store_object(stream)})


class ArrowEncoder:
    """Collects rows of a COPY and parses those of a chunk at once."""

    def __init__(
        self,
        head: ChunkHead,
        columns: Sequence[CopyColumn],
        *,
        max_rows: int,
        max_bytes: int,
        store_object: StoreObject,
    ) -> None:
        self._head = head
        self._max_rows = max_rows
        self._store_object = store_object
        self._parser = BatchParser(columns)
        # Every chunk begins with the schema, about 100 bytes for each column.
        self._max_bytes = max_bytes - self._parser.schema_bytes
        self._lines: list[bytes] = []
        self._text_bytes = 0
        self._text_limit = max(1024, int(self._max_bytes * _FIRST_GUESS))

    def add(self, lines: list[bytes]) -> Iterator[ChunkContent]:
        size = sum(map(len, lines)) + len(lines)
        kept = self._lines
        if self._text_bytes + size <= self._text_limit and len(kept) + len(lines) < self._max_rows:
            kept += lines
            self._text_bytes += size
            return
        total, limit, most = self._text_bytes, self._text_limit, self._max_rows
        for line in lines:
            if kept and (total + len(line) >= limit or len(kept) == most):
                yield from self._emit(kept)
                kept, total, limit = [], 0, self._text_limit
            kept.append(line)
            total += len(line) + 1
        self._lines, self._text_bytes = kept, total

    def flush(self) -> Iterator[ChunkContent]:
        lines, self._lines, self._text_bytes = self._lines, [], 0
        if lines:
            yield from self._emit(lines)

    def _emit(self, lines: list[bytes]) -> Iterator[ChunkContent]:
        batch, odd = self._parser.parse(lines)
        size = pa.ipc.get_record_batch_size(batch)
        if odd:
            size += len(envelope.encode(odd, as_json=True))
        if size <= self._max_bytes:
            text = sum(map(len, lines)) + len(lines)
            # From the size of this chunk, aim the next one at nine tenths of the limit.
            ratio = text / max(size, 1)
            self._text_limit = int(min(4.0, max(0.1, ratio)) * self._max_bytes * 0.9)
            yield ArrowContent(self._head, batch, odd, None)
        elif len(lines) == 1:
            yield ArrowContent(self._head, batch, odd, self._store_object)
        else:
            self._text_limit = max(1024, self._text_limit // 2)
            half = len(lines) // 2
            yield from self._emit(lines[:half])
            yield from self._emit(lines[half:])


class BatchParser:
    """Parses rows of COPY text into a record batch with typed columns."""

    def __init__(self, columns: Sequence[CopyColumn]) -> None:
        self._columns = [_Column(column) for column in columns]
        self._schema = pa.schema([(column.name, column.type) for column in self._columns])
        names = [str(index) for index in range(len(columns))]
        self._parse = pa_csv.ParseOptions(
            delimiter="\t", quote_char=False, escape_char=False, ignore_empty_lines=False
        )
        self._read = pa_csv.ReadOptions(
            column_names=names, use_threads=False, block_size=_BLOCK_BYTES
        )
        self._typed = _convert_options(
            {str(i): column.parsed_type for i, column in enumerate(self._columns)}
        )
        self._untyped = _convert_options(
            {str(i): column.untyped_type for i, column in enumerate(self._columns)}
        )

    @property
    def schema_bytes(self) -> int:
        """How large the schema of the batches is in a stream."""
        size: int = self._schema.serialize().size
        return size

    def parse(self, lines: list[bytes]) -> tuple[Any, Odd]:
        """A batch with a row for each line, and the values it cannot hold."""
        if not self._columns:
            raise ProtocolError("a table without columns has no Arrow form; ask for msgpack")
        # Arrow drops one mark at the start, even if it belongs to the first value.
        marked = lines[0].startswith(_BYTE_ORDER_MARK)
        text = (_BYTE_ORDER_MARK if marked else b"") + b"\n".join([*lines, b""])
        odd: Odd = {}
        try:
            table = self._read_text(text, self._typed)
            typed = True
        except pa.ArrowInvalid:
            table = self._read_text(text, self._untyped)
            typed = False
        if table.num_rows != len(lines):
            raise ProtocolError(f"{len(lines)} COPY rows were parsed as {table.num_rows}")
        arrays = []
        for index, column in enumerate(self._columns):
            parsed = table.column(index).combine_chunks()
            if isinstance(parsed, pa.ChunkedArray):
                parsed = pa.concat_arrays(parsed.chunks)
            values, strange = column.finish(parsed, typed=typed)
            arrays.append(values)
            if strange:
                odd[column.name] = strange
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema), odd

    def _read_text(self, text: bytes, options: Any) -> Any:
        return pa_csv.read_csv(
            pa.BufferReader(text),
            read_options=self._read,
            parse_options=self._parse,
            convert_options=options,
        )


def _convert_options(types: dict[str, Any]) -> Any:
    return pa_csv.ConvertOptions(
        column_types=types,
        null_values=[_NULL],
        strings_can_be_null=True,
        true_values=["t"],
        false_values=["f"],
    )


class _Column:
    """Converts one column from COPY text to its Arrow array."""

    def __init__(self, column: CopyColumn) -> None:
        self.name = column.name
        kind = column.type
        self.type = arrow_type(kind.base_oid, kind.element_oid, kind.typmod).build(pa)
        self._convert = converter_for(column.type, json_messages=True).convert
        # Before version 16, PostgreSQL prints a "char" from 128 on as a byte that is no UTF-8.
        self._by_value = (
            pa.types.is_list(self.type) or pa.types.is_binary(self.type) or kind.base_oid == CHAR
        )
        self._is_text = self.type == pa.string() and not self._by_value
        # The types that Arrow parses; bytes if Python converts the values afterwards.
        self.parsed_type = pa.binary() if self._by_value else self.type
        self.untyped_type = pa.binary() if self._by_value else pa.string()
        self._element = (
            _element_reader(self.type.value_type) if pa.types.is_list(self.type) else None
        )

    def finish(self, parsed: Any, *, typed: bool) -> tuple[Any, dict[str, Any]]:
        if self._is_text:
            return _unescaped(parsed), {}
        if self._by_value or not typed:
            return self._one_by_one(parsed)
        return parsed, {}

    def _one_by_one(self, parsed: Any) -> tuple[Any, dict[str, Any]]:
        if not self._by_value:
            return self._parsed_again(parsed.to_pylist())
        values: list[Any] = []
        odd: dict[str, Any] = {}
        fields: list[bytes | None] = parsed.to_pylist()
        for row, field in enumerate(fields):
            value = None
            if field is not None:
                wire = self._convert(unescape(field))
                value = wire
                if self._element is not None:
                    value = _flat(wire, self._element)
                    if value is None:
                        odd[str(row)] = wire
            values.append(value)
        return pa.array(values, type=self.type), odd

    def _parsed_again(self, texts: list[str | None]) -> tuple[Any, dict[str, Any]]:
        odd: dict[str, Any] = {}
        if _is_strange := _strange_test(self.type):
            for row, text in enumerate(texts):
                if text is not None and _is_strange(text):
                    odd[str(row)] = self._convert(text.encode())
                    texts[row] = None
        lines = "".join((_NULL if text is None else text) + "\n" for text in texts).encode()
        try:
            table = pa_csv.read_csv(
                pa.BufferReader(lines),
                read_options=pa_csv.ReadOptions(
                    column_names=["0"], use_threads=False, block_size=_BLOCK_BYTES
                ),
                parse_options=pa_csv.ParseOptions(
                    delimiter="\t", quote_char=False, escape_char=False, ignore_empty_lines=False
                ),
                convert_options=_convert_options({"0": self.type}),
            )
        except pa.ArrowInvalid:
            # Arrow's message would quote a value of a row.
            raise ProtocolError(
                f"column {self.name!r} holds a value that is no {self.type}; ask for msgpack"
            ) from None
        values = table.column(0).combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
        return values, odd


def _unescaped(parsed: Any) -> Any:
    escaped = pc.match_substring(parsed, "\\")
    if not pc.any(escaped).as_py():
        return parsed
    values = parsed.to_pylist()
    for row in pc.indices_nonzero(escaped).to_pylist():
        values[row] = unescape(values[row].encode()).decode()
    return pa.array(values, type=pa.string())


def _strange_test(kind: Any) -> Callable[[str], bool] | None:
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return lambda text: text[4:5] != "-" or text.endswith("BC") or "infinity" in text
    if pa.types.is_decimal(kind):
        return lambda text: text == "NaN"
    return None


def _flat(wire: Any, read: Callable[[Any], Any]) -> list[Any] | None:
    """The elements of a one-dimensional array; None if they do not fit a list column."""
    if not isinstance(wire, list):
        return None
    try:
        return [None if item is None else read(item) for item in wire]
    except (ValueError, TypeError, ArithmeticError):
        return None


def _element_reader(kind: Any) -> Callable[[Any], Any]:
    if pa.types.is_decimal(kind):
        return _finite_decimal
    if pa.types.is_timestamp(kind):
        return datetime.fromisoformat
    if pa.types.is_date(kind):
        return date.fromisoformat
    return _one_value


def _finite_decimal(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite():
        raise ValueError("not a decimal")
    return value


def _one_value(value: Any) -> Any:
    if isinstance(value, list):
        raise TypeError("an array of several dimensions")
    return value
