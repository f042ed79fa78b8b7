"""bytea: PostgreSQL's hex text to bytes."""

from __future__ import annotations

from binascii import unhexlify

from bridge.errors import ProtocolError
from bridge.events.values.converter import Converter


def to_bytes(data: bytes) -> bytes:
    r"""Read `\x0aff`, the form that bytea_output hex prints."""
    if data[:2] != b"\\x":
        raise ProtocolError("a bytea value is not in hex format; set bytea_output to hex")
    try:
        return unhexlify(data[2:])
    except ValueError:
        raise ProtocolError("a bytea value has a damaged hex digit") from None


BYTEA = Converter(to_bytes)
