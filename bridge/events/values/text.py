"""Text, and every type that travels as PostgreSQL prints it."""

from __future__ import annotations

from bridge.errors import ProtocolError
from bridge.events.values.converter import Converter


def to_text(data: bytes) -> str:
    """Decode text; the session's client_encoding makes it UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(
            f"a text value is not UTF-8 at byte {error.start}; set client_encoding to UTF8"
        ) from error


TEXT = Converter(to_text, inline="{}.decode()")
