"""Frames to events: the hot path of every reader, and the slow paths beside it.

Plain MessagePack rows are decoded in one tight loop. What is unusual, or needs something fetched
first (dictionaries, schemas for values that JSON cannot carry), goes through `_resolve`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from consumer_sdk.errors import CorruptData, VersionTooNew
from consumer_sdk.wire.column_types import TableSchema, restore_json
from consumer_sdk.wire.compression import LoadedDictionaries
from consumer_sdk.wire.envelope import (
    CONTENT_TYPE,
    JSON,
    ROW_OPERATIONS,
    Event,
    decode_payload,
    events_of,
    message_content,
)
from consumer_sdk.wire.errors import DictionaryMissing, WireError, WireVersionError
from consumer_sdk.wire.row_messages import read_row_message
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from consumer_sdk.reading.stream import Frame
    from consumer_sdk.wire.subjects import Subjects

_PLAIN = b"Content-Type: application/msgpack"
_ENCODED = b"Content-Encoding"


class Stored(msgspec.Struct, gc=False):
    """An event and the sequence of the message that carried it; packed events share one."""

    stream_seq: int
    event: Event


def parse_headers(block: bytes | None) -> dict[str, str] | None:
    """A NATS header block as a dictionary; of repeated names the last counts."""
    if not block:
        return None
    lines = block.decode("utf-8", "replace").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return {name.strip(): value.strip() for name, _, value in pairs}


class EventDecoder:
    """Decodes frames of the CDC stream.

    `fetch_dictionary`, `fetch_object` and `fetch_schema` reach for what a message refers to. A
    damaged message raises CorruptData, one of a newer format VersionTooNew; both name the sequence.
    """

    def __init__(
        self,
        subjects: Subjects,
        *,
        fetch_dictionary: Callable[[str], Awaitable[bytes]],
        fetch_object: Callable[[dict[str, Any]], Awaitable[bytes]],
        fetch_schema: Callable[[str, int], Awaitable[TableSchema | None]],
    ) -> None:
        self._special = f"{subjects.cdc}.$".encode()
        self._progress = f"{subjects.cdc}.$progress.".encode()
        self._message = f"{subjects.cdc}.$message.".encode()
        self._dictionaries = LoadedDictionaries()
        self._schemas: dict[tuple[str, int], TableSchema] = {}
        self._fetch_dictionary = fetch_dictionary
        self._fetch_object = fetch_object
        self._fetch_schema = fetch_schema

    async def decode(self, frames: Sequence[Frame]) -> list[Stored]:
        """The events of all frames, in order; fences and unknown service messages are left out."""
        return (await self.decode_some(frames, sys.maxsize))[0]

    async def decode_some(self, frames: Iterable[Frame], enough: int) -> tuple[list[Stored], int]:
        """The events of the first frames, until there are `enough`; and how many frames that took.

        A frame is decoded whole: packed rows may make it a few hundred more.
        """
        stored: list[Stored] = []
        append = stored.append
        special = self._special
        used = 0
        for sequence, subject, headers, payload in frames:
            events = None
            if (
                headers is not None
                and _PLAIN in headers
                and _ENCODED not in headers
                and not subject.startswith(special)
            ):
                events = read_row_message(payload)
            if events is None:
                events = await self._resolve(sequence, subject, headers, payload)
            for event in events:
                if event.ref is not None:
                    await self._fill(sequence, event, parse_headers(headers))
                append(Stored(sequence, event))
            used += 1
            if len(stored) >= enough:
                break
        return stored, used

    async def _resolve(
        self, sequence: int, subject: bytes, block: bytes | None, payload: bytes
    ) -> list[Event]:
        progress = subject.startswith(self._progress)
        service = subject.startswith(self._special) and not subject.startswith(self._message)
        if service and not progress:
            return []
        headers = parse_headers(block)
        try:
            document = await self._document(headers, payload)
            if progress:
                return [_progress_event(document, subject.decode("utf-8", "replace"))]
            events = events_of(document)
            if events[0].operation == "SCHEMA":
                self._note_schema(TableSchema.from_document(document))
        except WireError as error:
            raise _damaged(sequence, error) from error
        for event in events:
            if event.ref is not None:
                await self._fill(sequence, event, headers)
            if headers and headers.get(CONTENT_TYPE) == JSON:
                await self._restore(sequence, event)
        return events

    async def _document(self, headers: dict[str, str] | None, payload: bytes) -> dict[str, Any]:
        while True:
            try:
                return decode_payload(headers, payload, self._dictionaries)
            except DictionaryMissing as missing:
                name = missing.dictionary_id
            self._dictionaries[name] = await self._fetch_dictionary(name)

    async def _fill(self, sequence: int, event: Event, headers: dict[str, str] | None) -> None:
        """Put the row kept as an object in its place."""
        assert event.ref is not None
        content = await self._fetch_object(event.ref)
        plain = {CONTENT_TYPE: headers[CONTENT_TYPE]} if headers and CONTENT_TYPE in headers else {}
        try:
            row = decode_payload(plain, content, self._dictionaries, versioned=False)
            if event.operation == "MESSAGE":
                event.data, event.ref = message_content(row), None
                return
            filled = events_of(
                {
                    "operation": event.operation,
                    "source": event.source,
                    "epoch": event.epoch,
                    "lsn": event.commit_lsn,
                    "data": row.get("data"),
                    "old": row.get("old"),
                    "unchanged": row.get("unchanged"),
                    "raw": row.get("raw"),
                }
            )[0]
        except WireError as error:
            raise _damaged(sequence, error) from error
        event.data, event.old = filled.data, filled.old
        event.unchanged, event.raw = filled.unchanged, filled.raw
        event.ref = None

    def _note_schema(self, schema: TableSchema) -> None:
        self._schemas[table_token(schema.schema, schema.table), schema.schema_version] = schema

    async def _restore(self, sequence: int, event: Event) -> None:
        """Give values read from JSON the types MessagePack would have carried."""
        if event.operation not in ROW_OPERATIONS or not isinstance(event.data, dict):
            return
        wanted = (table_token(event.schema, event.table), event.schema_version)
        known = self._schemas.get(wanted)
        if known is None:
            known = await self._fetch_schema(*wanted)
            if known is None:
                return
            self._schemas[wanted] = known
        try:
            restore_row(event.data, event.raw, known)
            if event.old is not None:
                restore_row(event.old, event.raw, known)
        except WireError as error:
            raise _damaged(sequence, error) from error


def restore_row(row: dict[str, Any], raw: Sequence[str], schema: TableSchema) -> None:
    """Replace in `row` what JSON wrote as text or base64, by the columns' types."""
    for column in schema.columns:
        if column.name in row and column.name not in raw:
            row[column.name] = restore_json(row[column.name], column)


def _progress_event(document: dict[str, Any], subject: str) -> Event:
    known = ("source", "epoch", "lsn", "ts")
    fields: dict[str, Any] = {key: document[key] for key in known if key in document}
    event = events_of({**fields, "operation": "COMMIT"})[0]
    if subject.partition("$progress.")[2] != event.source:
        raise WireError(f"damaged message: progress of source {event.source!r} as another's")
    event.operation, event.subject, event.document = "PROGRESS", subject, document
    return event


def _damaged(sequence: int, error: Exception) -> CorruptData:
    if isinstance(error, WireVersionError):
        return VersionTooNew(f"message {sequence} of the change stream: {error}")
    return CorruptData(f"message {sequence} of the change stream: {error}")
