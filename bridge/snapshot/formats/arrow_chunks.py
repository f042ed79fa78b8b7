"""Chunks as Arrow IPC streams of one record batch each.

What a typed column cannot hold stands in the chunk's `odd` map: column, then row number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from bridge.snapshot.formats.arrow_batches import BatchParser
from consumer_sdk.wire import envelope

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bridge.snapshot.formats.arrow_batches import Odd
    from bridge.snapshot.formats.chunks import ChunkHead, Content, Refer
    from bridge.snapshot.tables import CopyColumn

METADATA_KEY: Final = b"cdc"
# Text of a chunk is at most so much larger than its batch; the split below mends a wrong guess.
_FIRST_GUESS: Final = 0.8


@dataclass(frozen=True, slots=True)
class ArrowContent:
    """One record batch, or a reference to it where it is too large for a message."""

    head: ChunkHead
    batch: Any
    odd: Odd
    refer: Refer | None

    @property
    def row_count(self) -> int:
        count: int = self.batch.num_rows
        return count

    @property
    def content_type(self) -> str:
        return envelope.ARROW if self.refer is None else envelope.MSGPACK

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
        if self.refer is None:
            return stream
        return envelope.encode({**self.head.fields(number), "ref": self.refer(stream)})


class ArrowEncoder:
    """Gathers rows of a COPY and parses a chunk's worth of them at once."""

    def __init__(
        self,
        head: ChunkHead,
        columns: Sequence[CopyColumn],
        *,
        max_rows: int,
        max_bytes: int,
        refer: Refer,
    ) -> None:
        self._head = head
        self._max_rows = max_rows
        self._refer = refer
        self._parser = BatchParser(columns)
        # Every chunk begins with the schema, about 100 bytes for each column.
        self._max_bytes = max_bytes - self._parser.schema_bytes
        self._lines: list[bytes] = []
        self._text_bytes = 0
        self._text_limit = max(1024, int(self._max_bytes * _FIRST_GUESS))

    def add(self, lines: list[bytes]) -> Iterator[Content]:
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

    def flush(self) -> Iterator[Content]:
        lines, self._lines, self._text_bytes = self._lines, [], 0
        if lines:
            yield from self._emit(lines)

    def _emit(self, lines: list[bytes]) -> Iterator[Content]:
        batch, odd = self._parser.parse(lines)
        size = pa.ipc.get_record_batch_size(batch)
        if odd:
            size += len(envelope.encode(odd, as_json=True))
        if size <= self._max_bytes:
            text = sum(map(len, lines)) + len(lines)
            # Aim the next chunk at nine tenths of the limit, by what this one came to.
            ratio = text / max(size, 1)
            self._text_limit = int(min(4.0, max(0.1, ratio)) * self._max_bytes * 0.9)
            yield ArrowContent(self._head, batch, odd, None)
        elif len(lines) == 1:
            yield ArrowContent(self._head, batch, odd, self._refer)
        else:
            self._text_limit = max(1024, self._text_limit // 2)
            half = len(lines) // 2
            yield from self._emit(lines[:half])
            yield from self._emit(lines[half:])
