"""Chunks of row maps, in MessagePack or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgpack

from bridge.jetstream.dictionaries import train
from bridge.snapshot.formats.chunks import REFERENCE
from bridge.snapshot.formats.copy_text import always_raw, compile_block_decoder
from consumer_sdk.wire import envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bridge.snapshot.formats.chunks import ChunkContent, ChunkHead, StoreObject
    from bridge.snapshot.formats.copy_text import Rows
    from bridge.snapshot.tables import CopyColumn

    Encode = Callable[[Rows], bytes]

MOST_SAMPLES: Final = 2000
SAMPLES_PER_CHUNK: Final = 500
MOST_SAMPLE_BYTES: Final = 1024 * 1024
# A row's entry in `raw`, beside the names themselves.
_RAW_ENTRY_BYTES: Final = 16
_RAW_NAME_BYTES: Final = 4
# Blocks are a small part of a chunk, so that chunks are nearly full, and small enough that
# what a block is decoded to stays in the processor's cache.
_BLOCKS_PER_CHUNK: Final = 8
_MOST_ROWS_PER_BLOCK: Final = 256


@dataclass(frozen=True, slots=True)
class RowContent:
    """Encoded rows of one chunk, in blocks of several."""

    head: ChunkHead
    row_count: int
    blocks: list[bytes]
    raw: dict[str, list[str]]
    raw_columns: tuple[str, ...]
    as_json: bool

    @property
    def content_type(self) -> str:
        return envelope.JSON if self.as_json else envelope.MSGPACK

    def encode(self, number: int) -> bytes:
        """The chunk's document; the rows are joined, not encoded again."""
        fields = self.head.fields(number)
        if self.raw_columns:
            fields["raw_columns"] = list(self.raw_columns)
        if self.raw:
            fields["raw"] = self.raw
        if self.as_json:
            opening = envelope.encode(fields, as_json=True)[:-1]
            return b"".join([opening, b',"data":[', b",".join(self.blocks), b"]}"])
        packer = msgpack.Packer(autoreset=False)
        packer.pack_map_header(len(fields) + 1)
        for key, value in fields.items():
            packer.pack(key)
            packer.pack(value)
        packer.pack("data")
        packer.pack_array_header(self.row_count)
        return b"".join([packer.bytes(), *self.blocks])

    def samples(self, count: int) -> list[bytes]:
        """Some of the rows, each encoded separately."""
        if self.as_json:
            rows = json.loads(b"[%b]" % self.blocks[0])
            return [_json_rows([row]) for row in rows[:: max(1, len(rows) // count)]]
        rows = list(msgpack.Unpacker(_Blob(self.blocks[0])))
        return [msgpack.packb(row) for row in rows[:: max(1, len(rows) // count)]]


class _Blob:
    """Bytes as the file that msgpack.Unpacker reads."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, _: int) -> bytes:
        data, self._data = self._data, b""
        return data


class RowSamples:
    """Rows of a snapshot, taken evenly from each chunk, to train a dictionary from."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._bytes = 0

    def add(self, content: ChunkContent) -> None:
        """Add some encoded rows of a chunk; chunks of other formats have none."""
        is_full = len(self._rows) >= MOST_SAMPLES or self._bytes >= MOST_SAMPLE_BYTES
        if is_full or not isinstance(content, RowContent):
            return
        rows = content.samples(SAMPLES_PER_CHUNK)
        self._rows += rows
        self._bytes += sum(map(len, rows))

    def train(self) -> bytes | None:
        """A dictionary from these rows; None if they are too few or too different."""
        return train(self._rows)


class RowEncoder:
    """Decodes rows of a COPY to values and encodes them as maps; wide rows become objects."""

    def __init__(
        self,
        head: ChunkHead,
        columns: Sequence[CopyColumn],
        *,
        as_json: bool,
        max_rows: int,
        max_bytes: int,
        store_object: StoreObject,
    ) -> None:
        self._head = head
        self._as_json = as_json
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._store_object = store_object
        pairs = [(column.name, column.type) for column in columns]
        self._decode = compile_block_decoder(pairs, as_json=as_json)
        self._raw_columns = tuple(column.name for column in columns if always_raw(column.type))
        self._encode: Encode = _json_rows if as_json else _msgpack_rows()
        self._blocks: list[bytes] = []
        self._raw: dict[str, list[str]] = {}
        self._count = 0
        self._bytes = 0

    def add(self, lines: list[bytes]) -> Iterator[ChunkContent]:
        """Add rows; yield the chunks that are full."""
        text_bytes = sum(map(len, lines)) + len(lines)
        share = self._max_bytes // _BLOCKS_PER_CHUNK
        step = min(_MOST_ROWS_PER_BLOCK, max(1, len(lines) * share // max(text_bytes, 1)))
        start = 0
        while start < len(lines):
            end = min(start + step, start + self._max_rows - self._count)
            block = lines[start:end]
            rows, raw = self._decode(block)
            yield from self._add_rows(rows, raw)
            start += len(block)
            if self._count == self._max_rows:
                yield self._take()

    def flush(self) -> Iterator[ChunkContent]:
        """Yield the remaining rows as a chunk."""
        if self._count:
            yield self._take()

    def _add_rows(self, rows: Rows, raw: dict[int, list[str]]) -> Iterator[ChunkContent]:
        block = self._encode(rows)
        raw_bytes = sum(map(_raw_bytes, raw.values()))
        # One more byte for the comma between blocks of JSON.
        if len(block) + 1 + raw_bytes > self._max_bytes:
            if len(rows) > 1:
                half = len(rows) // 2
                yield from self._add_rows(rows[:half], _between(raw, 0, half))
                yield from self._add_rows(rows[half:], _between(raw, half, len(rows)))
                return
            block = self._encode([{REFERENCE: self._store_object(block)}])
        size = len(block) + 1 + raw_bytes
        if self._count and self._bytes + size > self._max_bytes:
            yield self._take()
        for index, names in raw.items():
            self._raw[str(self._count + index)] = names
        self._blocks.append(block)
        self._count += len(rows)
        self._bytes += size

    def _take(self) -> RowContent:
        content = RowContent(
            self._head, self._count, self._blocks, self._raw, self._raw_columns, self._as_json
        )
        self._blocks, self._raw, self._count, self._bytes = [], {}, 0, 0
        return content


def _raw_bytes(names: list[str]) -> int:
    return sum(map(len, names)) + _RAW_NAME_BYTES * len(names) + _RAW_ENTRY_BYTES


def _between(raw: dict[int, list[str]], start: int, end: int) -> dict[int, list[str]]:
    return {index - start: names for index, names in raw.items() if start <= index < end}


def _msgpack_rows() -> Encode:
    pack: Callable[[Any], bytes] = msgpack.Packer().pack

    def encode(rows: Rows) -> bytes:
        # An array of up to 15 has a head of one byte, up to 65,535 of three, else of five.
        count = len(rows)
        return pack(rows)[1 if count < 16 else 3 if count < 65536 else 5 :]

    return encode


_dumps: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def _json_rows(rows: Rows) -> bytes:
    return _dumps(rows)[1:-1].encode()
