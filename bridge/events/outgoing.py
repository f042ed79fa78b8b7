"""What travels through the ring: messages ready to be framed, and orders to the publisher."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, NamedTuple


class Outgoing(NamedTuple):
    """One message for the CDC stream.

    `seq` is the first ordinal it carries, or None for a message outside the count; `ordinal`
    counts logical messages. `end_lsn` is set on the final message of a transaction: once it is
    acknowledged, everything up to there may be confirmed.
    """

    subject: bytes
    msg_id: bytes
    headers: bytes
    payload: bytes
    token: str
    commit_lsn: int
    seq: int | None
    ordinal: int
    end_lsn: int
    rows: int
    ts: int


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
    message: Outgoing


Item = Outgoing | SchemaNotice | Oversized

ITEM_OVERHEAD: Final = 400
"""What an item costs in memory beside its payload, counted against the ring's byte bound."""


def object_reference(bucket: str, name: str, content: bytes) -> dict[str, Any]:
    """What a message says of content that is kept in the object store."""
    return {
        "bucket": bucket,
        "name": name,
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
