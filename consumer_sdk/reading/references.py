"""What messages refer to: zstd dictionaries, and wide rows stored as objects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import nats.errors
import nats.js.errors

from consumer_sdk.errors import CorruptData, GapError, NotAvailable, VersionTooNew
from consumer_sdk.reading.proof import Selection, Trimming
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.transport.api import parse_headers
from consumer_sdk.wire.checksums import sha256_hex
from consumer_sdk.wire.compression import LoadedDictionaries, decompress
from consumer_sdk.wire.envelope import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    DICTIONARY,
    JSON,
    MSGPACK,
    decode_payload,
    encode,
    events_of,
)
from consumer_sdk.wire.errors import MISFITS, DictionaryMissing, WireError, WireVersionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from consumer_sdk.transport.api import Frame
    from consumer_sdk.transport.connection import NatsConnection
    from consumer_sdk.wire.envelope import Document
    from consumer_sdk.wire.subjects import Subjects

# PostgreSQL sends at most 1 GiB of a row; as JSON it can be longer.
LARGEST_OBJECT_BYTES: Final = 4 * 1024**3
LONGEST_OBJECT_NAME: Final = 2000
# Objects are stored in pieces of 128 KiB, or of half the server's max_payload.
SMALLEST_PIECE_BYTES: Final = 512
EXPANDED_BYTES: Final = 64 * 1024**2
"""How much content one batch of messages may expand to, unless a single message has more."""
CHECK_SECONDS = 1.0
WINDOW = 32
_NUID = re.compile(r"[A-Za-z0-9]{1,64}\Z")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
_REFERENCED: Final = ("data", "old", "unchanged", "raw", "encoding")
_OUTSIDE: Final = "a row refers to an object outside this deployment's object store"
# A header block with PLAIN and without ENCODED belongs to a payload of uncompressed MessagePack.
PLAIN: Final = b"Content-Type: application/msgpack"
ENCODED: Final = b"Content-Encoding"
# The key `ref` in either encoding. A false match costs one decoding.
_REF_KEYS: Final = (b"\xa3ref", b'"ref"')


class References:
    """Fetches what the messages of one deployment refer to; dictionaries are kept."""

    def __init__(self, nc: NatsConnection, subjects: Subjects) -> None:
        self._nc = nc
        self._dictionaries_bucket = subjects.dicts_bucket
        self._objects_bucket = subjects.objects_bucket
        self._dictionaries = LoadedDictionaries()

    async def dictionary(self, dictionary_id: str) -> bytes:
        """A zstd dictionary by its id; fetched once."""
        known = self._dictionaries.get(dictionary_id)
        if known is None:
            known = await self.fetch_dictionary(dictionary_id)
            self._dictionaries.add(dictionary_id, known)
        return known

    async def plain_payload(self, headers: Mapping[str, str], payload: bytes) -> bytes:
        """A payload without its compression; WireError if it is damaged."""
        encoding = headers.get(CONTENT_ENCODING)
        if not encoding:
            return payload
        if encoding != "zstd":
            raise WireError(f"unknown Content-Encoding {encoding!r}")
        while True:
            try:
                return decompress(
                    payload,
                    dictionary_id=headers.get(DICTIONARY),
                    dictionaries=self._dictionaries,
                )
            except DictionaryMissing as missing:
                name = missing.dictionary_id
            await self.dictionary(name)

    async def document(self, headers: Mapping[str, str] | None, payload: bytes) -> Document:
        """The document in a message, in either encoding; WireError if it is damaged."""
        while True:
            try:
                return decode_payload(headers, payload, self._dictionaries)
            except DictionaryMissing as missing:
                name = missing.dictionary_id
            await self.dictionary(name)

    async def fill_in(self, document: Document, content_type: str) -> int:
        """Replace each `ref` by the row stored as an object; returns the bytes of these rows.

        Raises WireError if the message is damaged, before anything is fetched for it.
        """
        rows = document.get("rows")
        holders: Sequence[Any] = rows if isinstance(rows, list) else (document,)
        referring = [
            holder
            for holder in holders
            if isinstance(holder, dict) and isinstance(holder.get("ref"), dict)
        ]
        if not referring:
            return 0
        events_of(document)
        size = self.check_references([holder["ref"] for holder in referring])
        for holder in referring:
            row = await self.row(holder.pop("ref"), content_type)
            holder.update({key: row[key] for key in _REFERENCED if row.get(key) is not None})
        return size

    async def row(self, reference: dict[str, Any], content_type: str) -> Document:
        """The document stored as an object, in the encoding of the message that refers to it."""
        content = await self.fetch_object(reference)
        return decode_payload({CONTENT_TYPE: content_type}, content, versioned=False)

    async def self_contained(self, frames: Sequence[Frame]) -> list[tuple[str, bytes]]:
        """Content type and payload of the first messages, readable without NATS.

        Payloads are decompressed and wide rows filled in; everything else stays as stored. The
        list ends where they have EXPANDED_BYTES; it has at least one of them.
        """
        found = []
        size = 0
        for frame in frames:
            content_type, payload, block = MSGPACK, frame.payload, frame.headers
            try:
                if block is None or PLAIN not in block or ENCODED in block:
                    headers = parse_headers(block) or {}
                    content_type = headers.get(CONTENT_TYPE) or MSGPACK
                    payload = await self.plain_payload(headers, payload)
                if any(key in payload for key in _REF_KEYS):
                    document = decode_payload({CONTENT_TYPE: content_type}, payload)
                    if await self.fill_in(document, content_type):
                        payload = encode(document, as_json=content_type == JSON)
            except WireError as error:
                raise damaged_message(frame.stream_seq, error) from error
            found.append((content_type, payload))
            size += len(payload)
            if size >= EXPANDED_BYTES:
                break
        return found

    async def fetch_dictionary(self, dictionary_id: str) -> bytes:
        """Fetch a zstd dictionary by its id; CorruptData if there is none."""
        try:
            store = await self._nc.jetstream().key_value(self._dictionaries_bucket)
            entry = await store.get(dictionary_id)
        except (nats.js.errors.NotFoundError, nats.js.errors.InvalidKeyError) as error:
            raise CorruptData(
                f"zstd dictionary {dictionary_id!r} is not in {self._dictionaries_bucket}"
            ) from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise NotAvailable(
                f"zstd dictionary cannot be read: {self._nc.explain(error)}"
            ) from error
        return entry.value or b""

    def check_references(self, references: Sequence[dict[str, Any]]) -> int:
        """The bytes that all the objects have which one message refers to.

        Raises CorruptData unless each `ref` names an object of this deployment by a valid name,
        size and sha256, and all of them together are within the limit for one.
        """
        total = 0
        for reference in references:
            name, size = reference.get("name"), reference.get("size")
            digest = reference.get("sha256")
            if reference.get("bucket") != self._objects_bucket or not isinstance(name, str):
                raise CorruptData(_OUTSIDE)
            if not 0 < len(name) <= LONGEST_OBJECT_NAME or not name.isprintable():
                raise CorruptData(_OUTSIDE)
            if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
                raise CorruptData(f"object {name}: its size is not valid")
            if not isinstance(digest, str) or _SHA256.match(digest) is None:
                raise CorruptData(f"object {name}: no sha256")
            total += size
            if total > LARGEST_OBJECT_BYTES:
                raise CorruptData(f"object {name}: its size is not valid")
        return total

    async def fetch_object(self, reference: dict[str, Any]) -> bytes:
        """The content of the object that a `ref` names, with size and sha256 verified.

        A `ref` to a bucket other than the deployment's own raises CorruptData.
        """
        self.check_references([reference])
        name, size, digest = reference["name"], reference["size"], reference["sha256"]
        nuid = await self._content_id(name, size)
        content = await self._content(name, nuid, size)
        if len(content) != size:
            raise CorruptData(f"object {name} has {len(content)} bytes, {size} were written")
        if sha256_hex(content) != digest.lower():
            raise CorruptData(f"object {name} does not have the sha256 it was written with")
        return content

    async def _content_id(self, name: str, size: int) -> str:
        """The id under which an object's pieces are stored; its size must be `size`."""
        bucket = self._objects_bucket
        try:
            store = await self._nc.jetstream().object_store(bucket)
            info = await store.get_info(name)
            linked, found, nuid = info.is_link(), info.size, info.nuid
        except nats.js.errors.NotFoundError as error:
            raise CorruptData(f"object {name} is not in the object store {bucket}") from error
        except (nats.js.errors.BadObjectMetaError, *MISFITS) as error:
            raise CorruptData(f"object {name}: its metadata is damaged") from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise NotAvailable(f"object {name} cannot be read: {error}") from error
        if linked or _NUID.match(str(nuid)) is None:
            raise CorruptData(f"object {name}: its metadata is damaged")
        if found != size:
            raise CorruptData(f"object {name} has {found!r} bytes, {size} were written")
        return nuid

    async def _content(self, name: str, nuid: str, size: int) -> bytes:
        """The pieces in order, up to `size` bytes; NATS is waited for, missing pieces are not."""
        bucket = self._objects_bucket
        content = bytearray()
        pieces = Selection(f"OBJ_{bucket}", [f"$O.{bucket}.C.{nuid}"], trimming=Trimming.ALLOWED)
        consumer = PullConsumer(self._nc, pieces, window=WINDOW)
        most_pieces = size // SMALLEST_PIECE_BYTES + 2
        try:
            while len(content) < size:
                frames = await consumer.take(WINDOW, wait=CHECK_SECONDS)
                # Caught up means that the leader of the stream has no more of them.
                if not frames and consumer.caught_up:
                    raise CorruptData(f"object {name} has {len(content)} of its {size} bytes")
                most_pieces -= len(frames)
                for frame in frames:
                    content += frame.payload
                if len(content) > size or most_pieces < 0:
                    raise CorruptData(f"object {name} has other pieces than {size} bytes have")
        except GapError as error:
            raise CorruptData(f"object {name}: the object store {bucket} was recreated") from error
        finally:
            await consumer.close()
        return bytes(content)


def damaged_message(sequence: int, error: Exception) -> CorruptData:
    """The error to raise for a damaged message of the change stream."""
    kind = VersionTooNew if isinstance(error, WireVersionError) else CorruptData
    return kind(f"message {sequence} of the change stream: {error}")
