"""Schemas of the published tables, and table names as users write them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors

from consumer_sdk.errors import (
    CorruptData,
    GapError,
    NotAvailable,
    UnknownTable,
    UsageError,
    VersionTooNew,
)
from consumer_sdk.reading.proof import Selection, Trimming
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.reading.references import damaged_message
from consumer_sdk.transport.api import get_message, parse_headers
from consumer_sdk.transport.connection import NoJetStream
from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.envelope import JSON, decode_payload
from consumer_sdk.wire.errors import WireError, WireVersionError
from consumer_sdk.wire.subjects import format_table_name, parse_table_name, table_token

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from nats.js.kv import KeyValue

    from consumer_sdk.reading.references import References
    from consumer_sdk.transport.api import Frame
    from consumer_sdk.transport.connection import NatsConnection
    from consumer_sdk.wire.subjects import Subjects

_BATCH = 256

TableName = str | tuple[str, str]
"""A table as SQL spells it, or as (schema, table)."""


def resolve_table(table: TableName) -> tuple[str, str]:
    """(schema, table) from either form; UsageError if it is not a table name."""
    if isinstance(table, tuple):
        return table
    try:
        return parse_table_name(table)
    except WireError as error:
        raise UsageError(str(error)) from error


def read_schema(key: str, value: bytes) -> TableSchema:
    """Decode a schema document of the bucket, in MessagePack or JSON."""
    headers = {"Content-Type": JSON} if value[:1] == b"{" else None
    try:
        schema = TableSchema.from_document(decode_payload(headers, value))
        token = table_token(schema.schema, schema.table)
        if token != key:
            raise WireError(f"it belongs to table {token}")
        return schema
    except WireVersionError as error:
        raise VersionTooNew(f"schema {key}: {error}") from error
    except WireError as error:
        raise CorruptData(f"schema {key}: {error}") from error


class Schemas:
    """Table schemas: the newest versions from the KV bucket, older ones from the change stream."""

    def __init__(self, nc: NatsConnection, subjects: Subjects, references: References) -> None:
        self._nc = nc
        self._subjects = subjects
        self._references = references
        self._bucket = subjects.schemas_bucket
        self._store: KeyValue | None = None

    async def find(self, token: str) -> TableSchema | None:
        """The newest schema of one table by its token, None if there is none."""
        try:
            if self._store is None:
                self._store = await self._nc.jetstream().key_value(self._bucket)
            entry = await self._store.get(token)
        except nats.js.errors.BucketNotFoundError as error:
            raise _no_bucket(self._bucket) from error
        except (nats.js.errors.KeyNotFoundError, nats.js.errors.KeyDeletedError):
            return None
        except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError) as error:
            raise NoJetStream from error
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise NotAvailable(f"schemas cannot be read: {self._nc.explain(error)}") from error
        return read_schema(token, entry.value or b"")

    async def of_version(self, token: str, version: int) -> TableSchema | None:
        """The schema that a row was written with; the newest if that version is not stored."""
        newest = await self.find(token)
        if newest is not None and newest.schema_version == version:
            return newest
        request = {"seq": 1, "next_by_subj": self._subjects.change(token, "schema")}
        while frame := await get_message(self._nc, self._subjects.cdc_stream, request):
            headers = parse_headers(frame.headers)
            try:
                document = await self._references.document(headers, frame.payload)
                schema = TableSchema.from_document(document)
            except WireError as error:
                raise damaged_message(frame.stream_seq, error) from error
            if schema.schema_version == version:
                return schema
            request["seq"] = frame.stream_seq + 1
        return newest

    async def get(self, table: TableName) -> TableSchema:
        """The newest schema of one table; UnknownTable with similar names if there is none."""
        schema_name, name = resolve_table(table)
        found = await self.find(table_token(schema_name, name))
        if found is None:
            wanted = format_table_name(schema_name, name)
            known = [format_table_name(one.schema, one.table) for one in await self.all()]
            raise UnknownTable(wanted, difflib.get_close_matches(wanted, known, n=3, cutoff=0.5))
        return found

    async def all(self) -> list[TableSchema]:
        """The newest schema of every published table, sorted by schema and name."""
        found: dict[str, TableSchema] = {}
        consumer = self._consumer(timeout=10.0)
        try:
            # The first call opens the consumer, which then knows whether anything is stored.
            frames = await consumer.take(_BATCH, wait=0)
            while frames or not consumer.caught_up:
                self._apply(frames, found)
                frames = await consumer.take(_BATCH, wait=0 if consumer.caught_up else 1.0)
        except NoJetStream:
            raise
        except (GapError, NotAvailable) as error:
            raise _no_bucket(self._bucket) from error
        finally:
            await consumer.close()
        return sorted(found.values(), key=lambda one: (one.schema, one.table))

    async def watch(self) -> AsyncGenerator[TableSchema, None]:
        """Every table's schema now, then each new version as it is published; never ends."""
        seen: dict[str, int] = {}
        while True:
            consumer = self._consumer(timeout=None)
            try:
                while True:
                    for frame in await consumer.take(_BATCH):
                        schema = self._schema_of(frame)
                        if schema is None:
                            seen.pop(self._key(frame), None)
                        elif seen.get(self._key(frame)) != frame.stream_seq:
                            seen[self._key(frame)] = frame.stream_seq
                            yield schema
            except GapError:
                # The bucket was recreated: start over with what it holds now.
                seen.clear()
            finally:
                await consumer.close()

    def _consumer(self, timeout: float | None) -> PullConsumer:
        everything = Selection(
            f"KV_{self._bucket}", [f"$KV.{self._bucket}.>"], trimming=Trimming.ALLOWED
        )
        return PullConsumer(self._nc, everything, window=512, timeout=timeout)

    def _apply(self, frames: list[Frame], found: dict[str, TableSchema]) -> None:
        for frame in frames:
            schema = self._schema_of(frame)
            if schema is None:
                found.pop(self._key(frame), None)
            else:
                found[self._key(frame)] = schema

    def _key(self, frame: Frame) -> str:
        return frame.subject.decode("utf-8", "replace").removeprefix(f"$KV.{self._bucket}.")

    def _schema_of(self, frame: Frame) -> TableSchema | None:
        headers = parse_headers(frame.headers) or {}
        if "KV-Operation" in headers or "Nats-Marker-Reason" in headers or not frame.payload:
            return None
        return read_schema(self._key(frame), frame.payload)


def _no_bucket(bucket: str) -> NotAvailable:
    return NotAvailable(f"there is no bucket {bucket} on this NATS; has a bridge run?")
