"""Opens Arrow chunks, whose bytes are not trusted: nothing is returned before all of it is checked.

Arrow itself follows the offsets in a batch without looking where they lead. Therefore a chunk must
have exactly the columns of its snapshot, none of its buffers may be compressed (their sizes would
be the sender's to choose), and every offset is validated before a value is read.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final

from consumer_sdk.errors import UsageError
from consumer_sdk.wire.arrow_types import arrow_type
from consumer_sdk.wire.envelope import MOST_CHUNK_ROWS, WIRE_VERSION
from consumer_sdk.wire.errors import MISFITS, WireError, WireVersionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.wire.column_types import Column

METADATA_KEY: Final = b"cdc"

# Fields of the flatbuffers in https://github.com/apache/arrow/blob/main/format/Message.fbs
_MESSAGE_HEADER: Final = 2
_BATCH_COMPRESSION: Final = 3


def read_arrow(stream: bytes, columns: Sequence[Column]) -> tuple[Any, dict[str, Any]]:
    """The record batch of an Arrow chunk, and the chunk's fields from its schema metadata.

    Raises WireError unless the chunk is one valid batch with the columns of its snapshot.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UsageError(
            "this snapshot is in Arrow format, which needs pyarrow: pip install 'tailrace[arrow]'"
        ) from error
    try:
        messages = list(_messages(pa.ipc.MessageReader.open_stream(stream)))
        if [message.type for message in messages] != ["schema", "record batch"]:
            raise WireError("damaged Arrow chunk: not one schema and one batch")
        schema = pa.ipc.read_schema(messages[0])
        fields = _fields(schema)
        if not schema.equals(_expected(pa, columns)):
            raise WireError("damaged Arrow chunk: its columns are not those of the snapshot")
        if _table_field(messages[1].metadata, _BATCH_COMPRESSION):
            raise WireError("damaged Arrow chunk: its buffers are compressed")
        batch = pa.ipc.read_record_batch(messages[1], schema)
        if batch.num_rows > MOST_CHUNK_ROWS:
            raise WireError(f"damaged Arrow chunk: more than {MOST_CHUNK_ROWS} rows")
        batch.validate(full=True)
    except (pa.ArrowException, OSError, struct.error, *MISFITS) as error:
        raise WireError(f"damaged Arrow chunk: {type(error).__name__}") from error
    return batch, fields


def _messages(reader: Any) -> Any:
    # A third message is enough to see that a chunk has too many of them.
    for _ in range(3):
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _fields(schema: Any) -> dict[str, Any]:
    document = json.loads((schema.metadata or {})[METADATA_KEY])
    if not isinstance(document, dict):
        raise WireError("damaged Arrow chunk: its fields are not a map")
    version = document.get("v")
    if not isinstance(version, int) or version > WIRE_VERSION:
        raise WireVersionError(f"chunk has wire version {version}; upgrade this reader")
    return document


def _expected(pa: Any, columns: Sequence[Column]) -> Any:
    return pa.schema(
        [
            (
                column.name,
                arrow_type(column.base_type_oid, column.element_oid, column.type_modifier).build(
                    pa
                ),
            )
            for column in columns
        ]
    )


def _table_field(metadata: Any, field: int) -> bool:
    """Whether the header of an IPC message has this field."""
    buffer = memoryview(metadata)
    (root,) = struct.unpack_from("<I", buffer, 0)
    place = _offset_of(buffer, root, _MESSAGE_HEADER)
    if place is None:
        raise ValueError("an IPC message without a header")
    (header,) = struct.unpack_from("<I", buffer, place)
    return _offset_of(buffer, place + header, field) is not None


def _offset_of(buffer: memoryview, table: int, field: int) -> int | None:
    """Where a field of a flatbuffer's table is; None if the table does not have it."""
    (distance,) = struct.unpack_from("<i", buffer, table)
    layout = table - distance
    if layout < 0:
        raise ValueError("a flatbuffer's layout before its beginning")
    (size,) = struct.unpack_from("<H", buffer, layout)
    entry = 4 + 2 * field
    if entry + 2 > size:
        return None
    (offset,) = struct.unpack_from("<H", buffer, layout + entry)
    return table + offset if offset else None
