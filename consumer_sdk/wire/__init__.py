"""The wire format in code: pure functions and types without I/O.

Each name is imported at its first use, because every import of a submodule runs this file: what
needs only names of subjects does not wait for the codecs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "DictionaryMissing": "errors",
    "Event": "envelope",
    "MessageId": "position",
    "Position": "position",
    "Subjects": "subjects",
    "WireError": "errors",
    "WireVersionError": "errors",
    "decode_payload": "envelope",
    "encode": "envelope",
    "format_lsn": "position",
    "message_id": "position",
    "parse_lsn": "position",
    "parse_message_id": "position",
    "read_events": "envelope",
}

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
