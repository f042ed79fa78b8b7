"""Messages of the change stream as rows of Arrow batches, in the three forms of `nats_cdc`.

`message` is the fastest: payloads as stored, but decompressed and with wide rows included, so that
they can be decoded later without NATS. `envelope` has the data as JSON text, `typed` has the
columns of one table.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from consumer_sdk.reading.decoder import read_self_contained, restore_row
from consumer_sdk.reading.references import damaged_message
from consumer_sdk.wire.envelope import JSON, ROW_OPERATIONS, Event, to_json_value
from consumer_sdk.wire.errors import MISFITS, WireError
from spark_consumer.lake.column_values import RowWriter
from spark_consumer.lake.table_definition import define
from spark_consumer.runtime.nats_thread import NatsThread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.reading.log import Frame
    from consumer_sdk.transport.settings import NatsSettings
    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.lake.column_values import Unrepresentable
    from spark_consumer.lake.table_definition import TableDefinition


MESSAGE_SCHEMA: Final = pa.schema(
    [
        ("stream_seq", pa.int64()),
        ("source", pa.string()),
        ("token", pa.string()),
        ("operation", pa.string()),
        ("content_type", pa.string()),
        ("payload", pa.binary()),
    ]
)
PROGRESS: Final = "$progress"
BATCH: Final = "$batch"

BATCH_ROWS: Final = 10_000


def read_messages(
    settings: NatsSettings,
    source: str,
    subjects: Sequence[str],
    first: int,
    end: int,
    created: int | None,
    timeout: float = 60.0,
) -> Iterator[pa.RecordBatch]:
    """The messages of one source at sequences [first, end); the iterator owns its connection."""
    with NatsThread(settings, timeout) as nats:
        messages = nats.client.log().read_raw(
            first, end, subjects, created=created, max_batch=BATCH_ROWS, timeout=timeout
        )
        with nats.iterate(messages) as batches:
            for frames in batches:
                while frames:
                    batch = nats.run(lambda client, frames=frames: _batch(client, source, frames))  # type: ignore[misc]
                    yield batch
                    frames = frames[batch.num_rows :]


async def _batch(client: Client, source: str, frames: Sequence[Frame]) -> pa.RecordBatch:
    """The first of the frames, as rows; at least one."""
    prefix = len(client.subjects.cdc) + 1
    tokens: list[str] = []
    operations: list[str] = []
    contents = await client.deployment.references.self_contained(frames)
    frames = frames[: len(contents)]
    for frame in frames:
        token, _, operation = frame.subject[prefix:].decode().rpartition(".")
        if token == PROGRESS:
            operation = "progress"
        tokens.append(token)
        operations.append(operation)
    sequences = pa.array([frame.stream_seq for frame in frames], pa.int64())
    return pa.RecordBatch.from_arrays(
        [
            sequences,
            pa.array([source] * len(frames), pa.string()),
            pa.array(tokens, pa.string()),
            pa.array(operations, pa.string()),
            pa.array([content_type for content_type, _ in contents], pa.string()),
            pa.array([payload for _, payload in contents], pa.binary()),
        ],
        schema=MESSAGE_SCHEMA,
    )


ENVELOPE_SCHEMA: Final = pa.schema(
    [
        ("stream_seq", pa.int64()),
        ("source", pa.string()),
        ("epoch", pa.int64()),
        ("schema", pa.string()),
        ("table", pa.string()),
        ("operation", pa.string()),
        ("commit_lsn", pa.int64()),
        ("seq", pa.int64()),
        ("xid", pa.int64()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("schema_version", pa.int64()),
        ("last", pa.bool_()),
        ("data", pa.string()),
        ("old", pa.string()),
        ("unchanged", pa.list_(pa.string())),
    ]
)

_HEAD: Final = (
    pa.field("_stream_seq", pa.int64()),
    pa.field("_operation", pa.string()),
    pa.field("_commit_lsn", pa.int64()),
    pa.field("_seq", pa.int64()),
    pa.field("_ts", pa.timestamp("us", tz="UTC")),
    pa.field("_unchanged", pa.list_(pa.string())),
)
_SHOWN: Final = ROW_OPERATIONS | {"TRUNCATE"}

Numbered = tuple[int, Event]


def typed_schema(definition: TableDefinition) -> pa.Schema:
    """The columns that describe a change, followed by the columns of the table."""
    return pa.schema([*_HEAD, *definition.columns])


def envelope_batches(messages: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Row changes, truncates and schema messages, one row each, with the data as JSON text."""
    for batch in messages:
        rows = [
            _envelope(stream_seq, event)
            for stream_seq, event, _ in _events(batch)
            if event.operation in _SHOWN or event.operation == "SCHEMA"
        ]
        if rows:
            columns = list(zip(*rows, strict=True))
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(values, field.type)
                    for values, field in zip(columns, ENVELOPE_SCHEMA, strict=True)
                ],
                schema=ENVELOPE_SCHEMA,
            )


def typed_batches(
    messages: Iterator[pa.RecordBatch], schema: TableSchema, policy: Unrepresentable
) -> Iterator[pa.RecordBatch]:
    """Row changes and truncates of one table, with the columns of `schema`."""
    definition = define(schema, policy)
    writer = RowWriter(definition, schema, policy)
    for batch in messages:
        found: list[Numbered] = []
        rows: list[dict[str, Any]] = []
        for stream_seq, event, kind in _events(batch):
            if event.operation not in _SHOWN:
                continue
            row = dict(event.data or {}) if event.operation in ROW_OPERATIONS else {}
            try:
                if kind == JSON:
                    restore_row(row, event.raw, schema)
                writer.write_json_as_text(row, event.raw)
            except (WireError, *MISFITS) as error:
                raise damaged_message(stream_seq, error) from error
            found.append((stream_seq, event))
            rows.append(row)
        if rows:
            yield _typed(definition, writer, found, rows)


def _typed(
    definition: TableDefinition,
    writer: RowWriter,
    found: Sequence[Numbered],
    rows: Sequence[dict[str, Any]],
) -> pa.RecordBatch:
    def describe(index: int) -> str:
        return f"at sequence {found[index][0]}"

    columns = writer.arrays(rows, definition.columns.names, describe)
    head = [
        [stream_seq for stream_seq, _ in found],
        [event.operation for _, event in found],
        [event.commit_lsn for _, event in found],
        [event.seq for _, event in found],
        [event.ts for _, event in found],
        [list(event.unchanged) or None for _, event in found],
    ]
    schema = typed_schema(definition)
    arrays = [pa.array(values, field.type) for values, field in zip(head, _HEAD, strict=True)]
    arrays += [columns[name] for name in definition.columns.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _events(batch: pa.RecordBatch) -> Iterator[tuple[int, Event, str]]:
    columns = [batch.column(name).to_pylist() for name in ("stream_seq", "content_type", "payload")]
    for stream_seq, kind, payload in zip(*columns, strict=True):
        try:
            events = read_self_contained(kind, payload)
        except WireError as error:
            raise damaged_message(stream_seq, error) from error
        for event in events:
            numbers = event.epoch | event.commit_lsn | event.seq | event.xid | event.schema_version
            if numbers >> 63:
                raise damaged_message(
                    stream_seq, WireError("a number is too large for a 64-bit integer")
                )
            yield stream_seq, event, kind


def _envelope(stream_seq: int, event: Event) -> tuple[Any, ...]:
    data = event.document if event.operation == "SCHEMA" else event.data
    try:
        texts = _json(data), _json(event.old)
    except MISFITS as error:
        raise damaged_message(stream_seq, error) from error
    return (
        stream_seq,
        event.source,
        event.epoch,
        event.schema,
        event.table,
        event.operation,
        event.commit_lsn,
        event.seq,
        event.xid,
        event.ts,
        event.schema_version,
        event.last,
        *texts,
        list(event.unchanged) or None,
    )


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(to_json_value(value), ensure_ascii=False)
