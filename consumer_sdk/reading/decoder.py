"""HOT PATH: frames to events, for every reader.

Plain MessagePack rows are decoded in one tight loop. `_resolve` decodes every other message, among
them those that need a dictionary, a wide row or a schema to be fetched first.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from consumer_sdk.reading.references import ENCODED, EXPANDED_BYTES, PLAIN, damaged_message
from consumer_sdk.transport.api import parse_headers
from consumer_sdk.wire.column_types import TableSchema, restore_json
from consumer_sdk.wire.envelope import (
    CONTENT_TYPE,
    JSON,
    MSGPACK,
    ROW_OPERATIONS,
    Event,
    decode_payload,
    events_of,
)
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.row_messages import read_row_message
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from consumer_sdk.reading.references import References
    from consumer_sdk.transport.api import Frame
    from consumer_sdk.wire.subjects import Subjects


class Stored(msgspec.Struct, gc=False):
    """An event and the sequence of the message that carried it; packed rows share one sequence."""

    stream_seq: int
    event: Event


class SchemaVersions(Protocol):
    """Where a decoder finds the schema that a row was written with."""

    async def of_version(self, token: str, version: int) -> TableSchema | None:
        """The schema of a table by its token in subjects, None if there is none."""
        ...


class EventDecoder:
    """Decodes frames of the CDC stream.

    A damaged message raises CorruptData, a message in a newer format raises VersionTooNew; both
    errors name the sequence.
    """

    def __init__(self, subjects: Subjects, references: References, schemas: SchemaVersions) -> None:
        self._special = f"{subjects.cdc}.$".encode()
        self._progress = f"{subjects.cdc}.$progress.".encode()
        self._message = f"{subjects.cdc}.$message.".encode()
        self._references = references
        self._schema_versions = schemas
        self._schemas: dict[tuple[str, int], TableSchema] = {}

    async def decode(self, frames: Sequence[Frame]) -> list[Stored]:
        """The events of all frames, in order, without fences and unknown service messages."""
        stored: list[Stored] = []
        while frames:
            found, used = await self.decode_some(frames, sys.maxsize)
            stored += found
            frames = frames[used:]
        return stored

    async def decode_some(self, frames: Iterable[Frame], enough: int) -> tuple[list[Stored], int]:
        """The events of the first frames, until there are `enough`, and the number of these frames.

        It ends earlier where compressed messages and wide rows expand to EXPANDED_BYTES. Frames
        are decoded whole, so there may be a few hundred events more than `enough`.
        """
        stored: list[Stored] = []
        append = stored.append
        special = self._special
        used = expanded = 0
        for sequence, subject, headers, payload in frames:
            events = None
            if (
                headers is not None
                and PLAIN in headers
                and ENCODED not in headers
                and not subject.startswith(special)
            ):
                events = read_row_message(payload)
            if events is None:
                events, size = await self._resolve(sequence, subject, headers, payload)
                expanded += size
            for event in events:
                append(Stored(sequence, event))
            used += 1
            if len(stored) >= enough or expanded >= EXPANDED_BYTES:
                break
        return stored, used

    async def _resolve(
        self, sequence: int, subject: bytes, block: bytes | None, payload: bytes
    ) -> tuple[list[Event], int]:
        """The events of a message, and the bytes that it has with what it refers to."""
        progress = subject.startswith(self._progress)
        service = subject.startswith(self._special) and not subject.startswith(self._message)
        if service and not progress:
            return [], 0
        headers = parse_headers(block) or {}
        content_type = headers.get(CONTENT_TYPE) or MSGPACK
        try:
            plain = await self._references.plain_payload(headers, payload)
            document = decode_payload({CONTENT_TYPE: content_type}, plain)
            if progress:
                event = _progress_event(document, subject.decode("utf-8", "replace"))
                return [event], len(plain)
            size = len(plain) + await self._references.fill_in(document, content_type)
            events = events_of(document)
            if events[0].operation == "SCHEMA":
                self._keep_schema(TableSchema.from_document(document))
        except WireError as error:
            raise damaged_message(sequence, error) from error
        if content_type == JSON:
            for event in events:
                await self._restore(sequence, event)
        return events, size

    def _keep_schema(self, schema: TableSchema) -> None:
        self._schemas[table_token(schema.schema, schema.table), schema.schema_version] = schema

    async def _restore(self, sequence: int, event: Event) -> None:
        """Convert values read from JSON to what MessagePack would have carried."""
        if event.operation not in ROW_OPERATIONS or not isinstance(event.data, dict):
            return
        wanted = (table_token(event.schema, event.table), event.schema_version)
        known = self._schemas.get(wanted)
        if known is None:
            known = await self._schema_versions.of_version(*wanted)
            if known is None:
                return
            self._schemas[wanted] = known
        try:
            restore_row(event.data, event.raw, known)
            if event.old is not None:
                restore_row(event.old, event.raw, known)
        except WireError as error:
            raise damaged_message(sequence, error) from error


def read_self_contained(content_type: str, payload: bytes) -> list[Event]:
    """The events of a message from `References.self_contained`; WireError if it is damaged."""
    events = read_row_message(payload) if content_type == MSGPACK else None
    if events is None:
        events = events_of(decode_payload({CONTENT_TYPE: content_type}, payload))
    return events


def restore_row(row: dict[str, Any], raw: Sequence[str], schema: TableSchema) -> None:
    """Convert the values that JSON carries as text or base64 to the types of their columns."""
    for column in schema.columns:
        if column.name in row and column.name not in raw:
            row[column.name] = restore_json(row[column.name], column)


def _progress_event(document: dict[str, Any], subject: str) -> Event:
    known = ("source", "epoch", "lsn", "ts")
    fields: dict[str, Any] = {key: document[key] for key in known if key in document}
    event = events_of({**fields, "operation": "COMMIT"})[0]
    if subject.partition("$progress.")[2] != event.source:
        raise WireError(
            f"damaged message: progress of source {event.source!r} on the subject of another source"
        )
    event.operation, event.subject, event.document = "PROGRESS", subject, document
    return event
