"""The wire format in code: pure functions and types without I/O."""

from consumer_sdk.wire.envelope import Event, decode_payload, encode, read_events
from consumer_sdk.wire.errors import DictionaryMissing, WireError, WireVersionError
from consumer_sdk.wire.position import (
    MessageId,
    Position,
    format_lsn,
    message_id,
    parse_lsn,
    parse_message_id,
)
from consumer_sdk.wire.subjects import Subjects

__all__ = [
    "DictionaryMissing",
    "Event",
    "MessageId",
    "Position",
    "Subjects",
    "WireError",
    "WireVersionError",
    "decode_payload",
    "encode",
    "format_lsn",
    "message_id",
    "parse_lsn",
    "parse_message_id",
    "read_events",
]
