"""Stores what must exist before a message is published: a schema in KV, a row as an object."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import APIError

from bridge.events.messages import Item, OutgoingMessage, Oversized, SchemaNotice, content_headers
from consumer_sdk.transport.holds import hold_async
from consumer_sdk.wire.envelope import encode
from consumer_sdk.wire.position import message_id

if TYPE_CHECKING:
    from bridge.jetstream.buckets import ObjectWriter
    from bridge.publish.outage import Outage
    from bridge.schemas.registry import SchemaRegistry
    from bridge.schemas.store import SchemaStore
    from bridge.source import Source


class Preparation:
    """Stores what an item's message refers to, then returns the message."""

    def __init__(
        self,
        *,
        registry: SchemaRegistry,
        schemas: SchemaStore,
        objects: ObjectWriter,
        source: Source,
        outage: Outage,
    ) -> None:
        self._registry = registry
        self._schemas = schemas
        self._objects = objects
        self._source = source
        self._outage = outage

    async def message(self, item: Item) -> OutgoingMessage:
        """Store what the item's message refers to, and return the message."""
        if isinstance(item, SchemaNotice):
            if item.must_store:
                await self._store_schema(item)
                await hold_async("between-kv-and-schema-message")
            return self._schema_message(item)
        if isinstance(item, Oversized):
            await self._store_object(item)
            return item.message
        return item

    async def _store_schema(self, item: SchemaNotice) -> None:
        while True:
            try:
                await self._schemas.put(item.token, item.document)
            except (TimeoutError, nats.errors.Error, APIError, OSError) as error:
                await self._outage.wait(f"schema of {item.token} not stored: {error}")
            else:
                self._registry.note_stored(item.token, item.document)
                return

    async def _store_object(self, item: Oversized) -> None:
        while True:
            try:
                await self._objects.put(item.name, item.content)
            except (TimeoutError, nats.errors.Error, APIError, OSError) as error:
                await self._outage.wait(f"object {item.name} not stored: {error}")
            else:
                return

    def _schema_message(self, notice: SchemaNotice) -> OutgoingMessage:
        document = notice.document
        version = document["schema_version"]
        subject = self._source.subjects.change(notice.token, "schema")
        msg_id = message_id(document["lsn"], notice.token, "schema", version, document["epoch"])
        # A version may be announced twice; deduplication must not drop the second message.
        unique = f"{msg_id}-{time.time_ns():x}"
        payload = encode(
            {
                **document,
                "operation": "SCHEMA",
                "msg_id": msg_id,
                "subject": subject,
                "ts": document["timestamp"],
            },
            as_json=self._source.as_json,
        )
        self._registry.note_announced(notice.token, version)
        return OutgoingMessage.schema(
            subject=subject.encode(),
            msg_id=unique.encode(),
            headers=content_headers(self._source),
            payload=payload,
            token=notice.token,
        )
