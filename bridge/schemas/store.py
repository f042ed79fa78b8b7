"""Schema documents in the KV bucket; a table belongs to one source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nats.errors
from nats.js.errors import (
    BucketNotFoundError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
    NoKeysError,
)

from bridge.errors import TableTaken
from consumer_sdk.wire.envelope import decode_payload, encode
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

Document = dict[str, Any]


def read_document(value: bytes) -> Document | None:
    """A schema document as stored, in either encoding; None for anything else."""
    headers = {"Content-Type": "application/json"} if value[:1] == b"{" else None
    try:
        document = decode_payload(headers, value)
    except WireError:
        return None
    return document if isinstance(document.get("columns"), list) else None


class SchemaStore:
    """The bucket `schemas`; writing checks that the table is ours."""

    def __init__(self, bucket: KeyValue, *, source: str, as_json: bool) -> None:
        self._bucket = bucket
        self._source = source
        self._as_json = as_json

    async def load(self) -> dict[str, Document]:
        """All documents by table token."""
        try:
            keys = await self._bucket.keys()
        except (NoKeysError, BucketNotFoundError):
            return {}
        documents = {}
        for key in keys:
            try:
                entry = await self._bucket.get(key)
            except KeyNotFoundError:
                continue
            document = read_document(entry.value or b"")
            if document is not None:
                documents[key] = document
        return documents

    def refuse_foreign(self, document: Document | None) -> None:
        """Stop where the stored document of a table is that of another source."""
        if document is None or document.get("source") == self._source:
            return
        name = format_table_name(str(document.get("schema")), str(document.get("table")))
        raise TableTaken(
            f"table {name} is already published by source {document.get('source')!r} on this "
            "stream; take it out of one publication, or give this bridge another --prefix"
        )

    async def put(self, token: str, document: Document) -> None:
        """Store a document unless the table belongs to another source."""
        value = encode(document, as_json=self._as_json)
        for _ in range(5):
            try:
                entry = await self._bucket.get(token)
                self.refuse_foreign(read_document(entry.value or b""))
                await self._bucket.update(token, value, last=entry.revision)
            except KeyNotFoundError:
                try:
                    await self._bucket.create(token, value)
                except KeyWrongLastSequenceError:
                    continue
            except KeyWrongLastSequenceError:
                continue
            return
        raise nats.errors.TimeoutError

    async def release(self) -> int:
        """Give up every table of this source."""
        released = 0
        for token, document in (await self.load()).items():
            if document.get("source") == self._source:
                await self._bucket.delete(token)
                released += 1
        return released
