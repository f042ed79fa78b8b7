"""Messages for the CDC stream, and what must be stored before some of them.

`OutgoingMessage` has a constructor for each kind of message. `Packaging` holds what all messages
of one source share: encoding, headers and size limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from bridge.events.encoders import encoder_for
from consumer_sdk.wire.checksums import object_reference
from consumer_sdk.wire.compression import LARGEST_PLAIN_BYTES

if TYPE_CHECKING:
    from bridge.events.encoders import Encoder
    from bridge.source import Source

HEADER_ALLOWANCE: Final = 2048
"""Bytes reserved for headers within the server's payload limit; the longest ids take 500."""
END_ALLOWANCE: Final = 64
"""Bytes that are added to the last message of a transaction."""
ITEM_OVERHEAD: Final = 400
"""Memory of an item beside its payload, in bytes; the ring's byte bound counts it."""

Compress: TypeAlias = Callable[[str, bytes], tuple[bytes, bytes]]
"""Maps a table's token and a payload to the payload and the headers to send."""


class MessageKind(Enum):
    """What a message of the CDC stream contains."""

    CHANGE = "change"
    """One row change or truncate, or several packed rows."""
    COMMIT = "commit"
    """The end of a transaction, for each of its tables except that of the last change."""
    LOGICAL = "logical"
    """What pg_logical_emit_message wrote."""
    SCHEMA = "schema"
    PROGRESS = "progress"


_CHANGE, _COMMIT, _LOGICAL = MessageKind.CHANGE, MessageKind.COMMIT, MessageKind.LOGICAL


class TransactionHeader(NamedTuple):
    """A transaction as its Begin message describes it."""

    commit_lsn: int
    xid: int
    ts: int
    """Commit time, microseconds since 1970."""


class OutgoingMessage(NamedTuple):
    """One message for the CDC stream; there is a constructor for each kind."""

    kind: MessageKind
    subject: bytes
    msg_id: bytes
    headers: bytes
    payload: bytes
    token: str
    """The table, or the prefix of a logical message, as its subject spells it."""
    transaction: TransactionHeader | None
    """None for schema and progress messages: they have no place in a transaction."""
    ordinal: int
    """The first ordinal of the message. The changes and commit messages of a transaction are
    numbered together; logical messages are numbered separately."""
    events: int
    """The number of events: several in a packed message, none in a commit message."""
    end_lsn: int | None
    """Set on the last message of a transaction. Once it is acknowledged, everything up to this
    position may be confirmed."""

    @classmethod
    def change(
        cls, *, subject: bytes, msg_id: bytes, headers: bytes, payload: bytes, token: str,
        transaction: TransactionHeader, ordinal: int, events: int = 1,
    ) -> OutgoingMessage:  # fmt: skip
        """A row change or truncate, or several packed rows."""
        return cls(
            _CHANGE, subject, msg_id, headers, payload, token, transaction, ordinal, events, None
        )

    @classmethod
    def commit(
        cls, *, subject: bytes, msg_id: bytes, headers: bytes, payload: bytes, token: str,
        transaction: TransactionHeader, ordinal: int,
    ) -> OutgoingMessage:  # fmt: skip
        """The end of a transaction for one of its tables."""
        return cls(_COMMIT, subject, msg_id, headers, payload, token, transaction, ordinal, 0, None)

    @classmethod
    def logical(
        cls, *, subject: bytes, msg_id: bytes, headers: bytes, payload: bytes, token: str,
        transaction: TransactionHeader, ordinal: int,
    ) -> OutgoingMessage:  # fmt: skip
        """A logical message of a transaction."""
        return cls(
            _LOGICAL, subject, msg_id, headers, payload, token, transaction, ordinal, 1, None
        )

    @classmethod
    def schema(
        cls, *, subject: bytes, msg_id: bytes, headers: bytes, payload: bytes, token: str
    ) -> OutgoingMessage:
        """A schema version, published before the rows that need it."""
        return cls(MessageKind.SCHEMA, subject, msg_id, headers, payload, token, None, 0, 0, None)

    @classmethod
    def progress(
        cls, *, subject: bytes, msg_id: bytes, headers: bytes, payload: bytes
    ) -> OutgoingMessage:
        """A progress record of the source."""
        return cls(
            MessageKind.PROGRESS, subject, msg_id, headers, payload, "$progress", None, 0, 0, None
        )

    @property
    def next_ordinal(self) -> int:
        """The ordinal after the last one of the message."""
        return self.ordinal + (self.events or 1)


change_of_fields: Final = partial(tuple.__new__, OutgoingMessage)
"""HOT PATH: makes a message from a tuple of all fields, in less than half the time of `change`.

Only messages of single row changes are made this way."""


@dataclass(frozen=True, slots=True)
class SchemaNotice:
    """A schema version that must be announced before the rows that need it."""

    token: str
    document: dict[str, Any]
    must_store: bool


@dataclass(frozen=True, slots=True)
class Oversized:
    """A row that must be stored as an object first, and the `message` that refers to it."""

    name: str
    content: bytes
    message: OutgoingMessage


Item: TypeAlias = OutgoingMessage | SchemaNotice | Oversized


@dataclass(frozen=True, slots=True)
class Packaging:
    """How the messages of one source are encoded, and how large they may be."""

    source: Source
    max_payload: int
    """The largest payload that the server takes, headers included."""
    compress: Compress | None = None
    encoder: Encoder = field(init=False)
    headers: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", encoder_for(self.source))
        object.__setattr__(self, "headers", content_headers(self.source))

    @property
    def limit(self) -> int:
        """The largest allowed payload, in bytes."""
        return self.max_payload - HEADER_ALLOWANCE

    @property
    def room(self) -> int:
        """The largest payload that may still become the last one of its transaction."""
        return self.limit - END_ALLOWANCE

    def fitted(self, token: str, payload: bytes) -> tuple[bytes, bytes] | None:
        """Payload and headers to send; None if the payload exceeds the limit."""
        headers = self.headers
        if self.compress is not None and len(payload) <= LARGEST_PLAIN_BYTES:
            payload, headers = self.compress(token, payload)
        return (payload, headers) if len(payload) <= self.limit else None

    def object_name(self, msg_id: bytes) -> str:
        """Name of the object that a message refers to."""
        return f"{self.source.name}/{msg_id.decode()}"

    def reference(self, name: str, content: bytes) -> dict[str, Any]:
        """The fields by which a message refers to content in the object store."""
        return object_reference(self.source.subjects.objects_bucket, name, content)


def content_headers(source: Source) -> bytes:
    """The header lines of a message that is not compressed."""
    return f"Content-Type: {source.content_type}\r\n".encode()
