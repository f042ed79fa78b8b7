"""What travels from the log to the stream: messages, and what must be stored before some of them.

A message has a kind, and a constructor for each kind. `Packaging` holds what all messages of one
source have in common: its encoding, its headers, and how large a message may be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from bridge.events.encoders import encoder_for

if TYPE_CHECKING:
    from bridge.events.encoders import Encoder
    from bridge.source import Source

HEADER_ALLOWANCE: Final = 2048
"""Room for headers below the server's payload limit; ids of the longest names take 500 bytes."""
END_ALLOWANCE: Final = 64
"""How much longer a message gets when it becomes the last of its transaction."""
ITEM_OVERHEAD: Final = 400
"""What an item costs in memory beside its payload, counted against the ring's byte bound."""

Compress: TypeAlias = Callable[[str, bytes], tuple[bytes, bytes]]
"""Takes a table's token and a payload; gives the payload and the headers to send."""


class MessageKind(Enum):
    """What a message of the CDC stream tells."""

    CHANGE = "change"
    """One row change or truncate, or several packed rows."""
    COMMIT = "commit"
    """The end of a transaction, for a table that does not hold its last change."""
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
    """One message for the CDC stream; the constructors below make them, one for each kind."""

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
    """The first ordinal the message takes. Changes and commit messages of a transaction are
    counted together, logical messages are counted for themselves."""
    events: int
    """How many events it carries: several where rows are packed, none in a commit message."""
    end_lsn: int | None
    """Set on the final message of a transaction. Once that is acknowledged, everything up to
    here may be confirmed."""

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
        """A schema version, ahead of the rows that need it."""
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
        """The ordinal after those that the message takes."""
        return self.ordinal + (self.events or 1)


change_of_fields: Final = partial(tuple.__new__, OutgoingMessage)
"""HOT PATH: a message from a tuple of all its fields, in less than half the time of `change`.

One message for every row change is made this way, and nothing else."""


@dataclass(frozen=True, slots=True)
class SchemaNotice:
    """Tell readers of a schema version before the rows that need it."""

    token: str
    document: dict[str, Any]
    must_store: bool


@dataclass(frozen=True, slots=True)
class Oversized:
    """A message whose rows go to the object store first; `message` refers to them."""

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
        """The most bytes that a payload may have."""
        return self.max_payload - HEADER_ALLOWANCE

    @property
    def room(self) -> int:
        """The most bytes that a payload may have which can still become the last one."""
        return self.limit - END_ALLOWANCE

    def fitted(self, token: str, payload: bytes) -> tuple[bytes, bytes] | None:
        """Payload and headers as they go out, or None where the payload exceeds the limit."""
        headers = self.headers
        if self.compress is not None:
            payload, headers = self.compress(token, payload)
        return (payload, headers) if len(payload) <= self.limit else None

    def object_name(self, msg_id: bytes) -> str:
        """Name of the object that holds what a message refers to."""
        return f"{self.source.name}/{msg_id.decode()}"

    def reference(self, name: str, content: bytes) -> dict[str, Any]:
        """What a message says of content that is kept in the object store."""
        return {
            "bucket": self.source.subjects.objects_bucket,
            "name": name,
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def content_headers(source: Source) -> bytes:
    """The header lines of a message that is not compressed."""
    return f"Content-Type: {source.content_type}\r\n".encode()
