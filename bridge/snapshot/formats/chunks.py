"""Chunks: what all formats share, from the head of the document to the message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import zstandard

from consumer_sdk.wire import envelope
from consumer_sdk.wire.checksums import sha256_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.jetstream.dictionaries import ZstdDictionary

    StoreObject = Callable[[bytes], dict[str, Any]]
    """Stores a wide row as an object and returns the reference to it."""

# Larger messages have no advantage, and nats-server and readers hold each one in memory.
LARGEST_BYTES: Final = 900_000
# Reserved for document head, NATS headers and rounding, which are far smaller.
RESERVED_BYTES: Final = 16 * 1024
# A dictionary only helps at the beginning of the data; larger chunks gain nothing from it.
DICTIONARY_HELPS_BYTES: Final = 32 * 1024
REFERENCE: Final = "$ref"
EXPECTED_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"


@dataclass(frozen=True, slots=True)
class ChunkHead:
    """The fields that all chunks of one snapshot share."""

    source: str
    epoch: int
    table: str
    schema: str
    snapshot_id: str
    snapshot_lsn: int

    def fields(self, number: int) -> dict[str, Any]:
        """The document of chunk `number`, without its rows."""
        return {
            "v": envelope.WIRE_VERSION,
            "source": self.source,
            "epoch": self.epoch,
            "table": self.table,
            "schema": self.schema,
            "operation": "snapshot",
            "snapshot_id": self.snapshot_id,
            "chunk": number,
            "lsn": self.snapshot_lsn,
        }


class ChunkContent(Protocol):
    """The rows of one chunk, before it has a number."""

    @property
    def row_count(self) -> int: ...

    @property
    def content_type(self) -> str: ...

    def encode(self, number: int) -> bytes: ...


class ChunkEncoder(Protocol):
    """Collects rows of a COPY into chunks of one format."""

    def add(self, lines: list[bytes]) -> Iterator[ChunkContent]:
        """Add rows; yield the chunks that are full."""

    def flush(self) -> Iterator[ChunkContent]:
        """Yield the remaining rows as chunks."""


def byte_limit(max_payload: int) -> int:
    """The largest size of a chunk's rows, given the server's max_payload."""
    return min(LARGEST_BYTES, max(max_payload - RESERVED_BYTES, max_payload // 2))


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """A chunk as it is stored."""

    payload: bytes
    headers: dict[str, str]
    sha256: str


class ChunkMessageBuilder:
    """Compresses the chunks of one snapshot and adds headers and checksums."""

    def __init__(
        self,
        snapshot_id: str,
        *,
        zstd: bool,
        dictionary: ZstdDictionary | None = None,
        attempt: str = "",
    ) -> None:
        """With `attempt`, the stream stores a chunk only if it holds none of that number.

        The chunks of another attempt have other ids, so that none is taken for a duplicate.
        """
        self._snapshot_id = snapshot_id
        self._attempt = attempt
        self._plain = zstandard.ZstdCompressor(level=3) if zstd else None
        self._dictionary_id = ""
        self._with_dictionary: zstandard.ZstdCompressor | None = None
        if zstd and dictionary is not None:
            self._dictionary_id = dictionary.id
            shared = zstandard.ZstdCompressionDict(dictionary.content)
            self._with_dictionary = zstandard.ZstdCompressor(level=3, dict_data=shared)

    def build(self, content: ChunkContent, number: int) -> ChunkMessage:
        """The message of a chunk; the checksum is of the payload as stored."""
        payload = content.encode(number)
        headers = {
            envelope.MSG_ID: f"{self._snapshot_id}-{number}",
            envelope.CONTENT_TYPE: content.content_type,
        }
        if self._attempt:
            headers[envelope.MSG_ID] += f"-{self._attempt}"
            headers[EXPECTED_SUBJECT_SEQUENCE] = "0"
        if self._plain is not None:
            payload = self._compress(self._plain, payload, headers)
        digest = sha256_hex(payload)
        headers[envelope.CHUNK_SHA256] = digest
        return ChunkMessage(payload, headers, digest)

    def _compress(
        self, plain: zstandard.ZstdCompressor, payload: bytes, headers: dict[str, str]
    ) -> bytes:
        small = plain.compress(payload)
        headers[envelope.CONTENT_ENCODING] = "zstd"
        if self._with_dictionary is not None and len(payload) <= DICTIONARY_HELPS_BYTES:
            smaller = self._with_dictionary.compress(payload)
            if len(smaller) < len(small):
                headers[envelope.DICTIONARY] = self._dictionary_id
                return smaller
        return small
