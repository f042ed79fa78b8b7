"""Schema documents in the KV bucket; each table belongs to one source."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError

from bridge.errors import BridgeError, Retryable, SchemaOvertaken, TableTaken
from bridge.schemas.registry import DocumentVersion, fingerprint_of
from consumer_sdk.wire.envelope import decode_payload, encode
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nats.js.kv import KeyValue

    from consumer_sdk.wire.envelope import Document


PUTS_AT_ONCE = 64


def read_document(value: bytes) -> Document | None:
    """A schema document as stored, in either encoding; None for anything else."""
    headers = {"Content-Type": "application/json"} if value[:1] == b"{" else None
    try:
        document = decode_payload(headers, value)
    except WireError:
        return None
    try:
        fingerprint_of(document)
    except (KeyError, TypeError):
        return None
    is_ordered = all(type(number) is int for number in DocumentVersion.of(document))
    return document if is_ordered else None


class SchemaStore:
    """The bucket `schemas`; only a later document of the same source replaces a document."""

    def __init__(self, bucket: KeyValue, *, source: str, as_json: bool) -> None:
        self._bucket = bucket
        self._source = source
        self._as_json = as_json
        self._locks = tuple(asyncio.Lock() for _ in range(PUTS_AT_ONCE))
        """A document has one of these: two of the same table are not put at the same time."""
        self._known: dict[str, DocumentVersion] = {}
        """The documents that this bridge has read or written, by table."""

    async def load(self) -> dict[str, Document]:
        """All documents by table token."""
        documents = {}
        watcher = await self._bucket.watchall(ignore_deletes=True)
        try:
            # None follows the last stored value.
            while entry := await watcher.updates():  # type: ignore[no-untyped-call]
                document = read_document(entry.value or b"")
                if document is not None:
                    documents[entry.key] = document
                    self._known[entry.key] = DocumentVersion.of(document)
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]
        return documents

    def foreign_tables(self, documents: Mapping[str, Document]) -> set[str]:
        """The tokens of the tables that belong to other sources."""
        return {
            token for token, document in documents.items() if document.get("source") != self._source
        }

    def refuse_foreign(self, document: Document | None) -> None:
        """Raise TableTaken if the document of a table belongs to another source."""
        if document is None or document.get("source") == self._source:
            return
        name = format_table_name(str(document.get("schema")), str(document.get("table")))
        raise TableTaken(
            f"table {name} is already published by source {document.get('source')!r} on this "
            "stream; take it out of one publication, or give this bridge another --prefix"
        )

    def _lock_of(self, token: str) -> asyncio.Lock:
        return self._locks[hash(token) % len(self._locks)]

    async def put_all(
        self, documents: Mapping[str, Document], note_stored: Callable[[str, Document], None]
    ) -> None:
        """Store documents as `put` does, many at a time; raise an error when all were tried."""
        waiting = iter(documents.items())
        errors: list[Exception] = []

        async def work() -> None:
            for token, document in waiting:
                try:
                    await self.put(token, document)
                except (BridgeError, Retryable, nats.errors.Error, APIError, TimeoutError) as error:
                    errors.append(error)
                else:
                    note_stored(token, document)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(PUTS_AT_ONCE, len(documents))):
                group.create_task(work())
        for error in errors:
            raise error

    async def put(self, token: str, document: Document) -> None:
        """Store a document unless KV holds a later one.

        TableTaken if the table belongs to another source. SchemaOvertaken if another bridge of
        this source has stored a version that this bridge has neither read nor written.
        """
        value = encode(document, as_json=self._as_json)
        async with self._lock_of(token):
            is_new = token not in self._known
            for _ in range(5):
                try:
                    if is_new:
                        # Most often there is none yet, so this is the only request.
                        is_new = False
                        raise KeyNotFoundError
                    entry = await self._bucket.get(token)
                    held = read_document(entry.value or b"")
                    self.refuse_foreign(held)
                    if held is None or self._is_before(token, held, document):
                        await self._bucket.update(token, value, last=entry.revision)
                except KeyNotFoundError:
                    try:
                        await self._bucket.create(token, value)
                    except KeyWrongLastSequenceError:
                        continue
                except KeyWrongLastSequenceError:
                    continue
                known = self._known.get(token, DocumentVersion())
                self._known[token] = max(known, DocumentVersion.of(document))
                return
        raise nats.errors.TimeoutError

    def _is_before(self, token: str, held: Document, document: Document) -> bool:
        """Whether the held document must be replaced by this one."""
        found, ours = DocumentVersion.of(held), DocumentVersion.of(document)
        if found == ours and fingerprint_of(held) == fingerprint_of(document):
            return False
        if found == ours or found > self._known.get(token, DocumentVersion()):
            name = format_table_name(str(document["schema"]), str(document["table"]))
            raise SchemaOvertaken(
                f"another bridge has stored version {found.version} of the schema of {name}"
            )
        return found < ours

    async def remove(self, token: str) -> None:
        """Remove a table of this source from the bucket."""
        async with self._lock_of(token):
            try:
                entry = await self._bucket.get(token)
            except KeyNotFoundError:
                return
            held = read_document(entry.value or b"")
            if held is not None and held.get("source") == self._source:
                await self._bucket.delete(token)

    async def release(self) -> int:
        """Remove every table of this source from the bucket; return how many there were."""
        released = 0
        for token, document in (await self.load()).items():
            if document.get("source") == self._source:
                await self._bucket.delete(token)
                released += 1
        return released
