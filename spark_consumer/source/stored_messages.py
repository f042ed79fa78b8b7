"""Messages as the stream stores them, made self-contained, as Arrow batches.

The quickest form to move: nothing is decoded but what cannot be decoded later without NATS, that is
compressed messages and rows kept as objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from consumer_sdk.errors import CorruptData, VersionTooNew
from consumer_sdk.reading.decoder import parse_headers
from consumer_sdk.wire.compression import decompress
from consumer_sdk.wire.envelope import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    DICTIONARY,
    JSON,
    MSGPACK,
    decode_payload,
    encode,
)
from consumer_sdk.wire.errors import DictionaryMissing, WireError, WireVersionError
from spark_consumer.runtime.nats_thread import NatsThread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.reading.log import Frame
    from consumer_sdk.transport.settings import NatsSettings

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

_PLAIN: Final = b"Content-Type: application/msgpack"
_ENCODED: Final = b"Content-Encoding"
# How the key `ref` looks in either encoding; a false alarm costs one decoding.
_REFERENCES: Final = (b"\xa3ref", b'"ref"')
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
    """The messages of one source stored at [first, end); the connection ends with the iteration."""
    with NatsThread(settings, timeout) as nats:
        for frames in iterate(nats, subjects, first, end, created, timeout):
            yield nats.run(lambda client, frames=frames: _batch(client, source, frames))  # type: ignore[misc]


def iterate(
    nats: NatsThread,
    subjects: Sequence[str],
    first: int,
    end: int,
    created: int | None,
    timeout: float,
) -> Iterator[list[Frame]]:
    """Raw frames of a range, for code without an event loop."""

    async def open_range(client: Client) -> AsyncGenerator[list[Frame], None]:
        return client.log().read_raw(
            first, end, subjects, created=created, max_batch=BATCH_ROWS, timeout=timeout
        )

    frames = nats.run(open_range)

    async def take(_: Client) -> list[Frame]:
        try:
            return await anext(frames)
        except StopAsyncIteration:
            return []

    async def close(_: Client) -> None:
        await frames.aclose()

    try:
        while batch := nats.run(take):
            yield batch
    finally:
        nats.run(close)


async def _batch(client: Client, source: str, frames: Sequence[Frame]) -> pa.RecordBatch:
    prefix = len(client.subjects.cdc) + 1
    tokens: list[str] = []
    operations: list[str] = []
    kinds: list[str] = []
    payloads: list[bytes] = []
    for frame in frames:
        token, _, operation = frame.subject[prefix:].decode().rpartition(".")
        if token == PROGRESS:
            operation = "progress"
        kind, payload = MSGPACK, frame.payload
        headers = frame.headers
        if headers is None or _PLAIN not in headers or _ENCODED in headers:
            kind, payload = await _plain(client, frame)
        if any(mark in payload for mark in _REFERENCES):
            payload = await _filled(client, frame.stream_seq, kind, payload)
        tokens.append(token)
        operations.append(operation)
        kinds.append(kind)
        payloads.append(payload)
    sequences = pa.array([frame.stream_seq for frame in frames], pa.int64())
    return pa.RecordBatch.from_arrays(
        [
            sequences,
            pa.array([source] * len(frames), pa.string()),
            pa.array(tokens, pa.string()),
            pa.array(operations, pa.string()),
            pa.array(kinds, pa.string()),
            pa.array(payloads, pa.binary()),
        ],
        schema=MESSAGE_SCHEMA,
    )


async def _plain(client: Client, frame: Frame) -> tuple[str, bytes]:
    """Content type and payload without its compression."""
    headers = parse_headers(frame.headers) or {}
    kind = headers.get(CONTENT_TYPE) or MSGPACK
    encoding = headers.get(CONTENT_ENCODING)
    if not encoding:
        return kind, frame.payload
    if encoding != "zstd":
        raise _damaged(frame.stream_seq, WireError(f"unknown Content-Encoding {encoding!r}"))
    known: dict[str, bytes] = {}
    try:
        while True:
            try:
                return kind, decompress(
                    frame.payload, dictionary_id=headers.get(DICTIONARY), dictionaries=known
                )
            except DictionaryMissing as missing:
                name = missing.dictionary_id
            known[name] = await client.dictionary(name)
    except WireError as error:
        raise _damaged(frame.stream_seq, error) from error


async def _filled(client: Client, stream_seq: int, kind: str, payload: bytes) -> bytes:
    """The message with the rows that it keeps as objects in their place."""
    try:
        document = decode_payload({CONTENT_TYPE: kind}, payload)
        rows = document.get("rows")
        holders: list[Any] = rows if isinstance(rows, list) else [document]
        changed = False
        for holder in holders:
            reference = holder.get("ref") if isinstance(holder, dict) else None
            if not isinstance(reference, dict):
                continue
            content = await client.fetch_object(reference)
            row = decode_payload({CONTENT_TYPE: kind}, content, versioned=False)
            del holder["ref"]
            holder.update({key: row[key] for key in _ROW_FIELDS if row.get(key) is not None})
            changed = True
    except WireError as error:
        raise _damaged(stream_seq, error) from error
    return encode(document, as_json=kind == JSON) if changed else payload


_ROW_FIELDS: Final = ("data", "old", "unchanged", "raw")


def _damaged(stream_seq: int, error: WireError) -> CorruptData:
    kind = VersionTooNew if isinstance(error, WireVersionError) else CorruptData
    return kind(f"message {stream_seq} of the change stream: {error}")
