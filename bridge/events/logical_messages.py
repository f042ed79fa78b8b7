"""Logical messages (`pg_logical_emit_message`) as messages of the CDC stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bridge.events.messages import ITEM_OVERHEAD, OutgoingMessage, Oversized, TransactionHeader
from consumer_sdk.wire.envelope import WIRE_VERSION
from consumer_sdk.wire.subjects import message_token

if TYPE_CHECKING:
    from bridge.events.messages import Packaging
    from bridge.events.outbox import Outbox
    from bridge.wal.messages import LogicalMessage

HELD_BYTES: Final = 1024 * 1024
SHOWN_PREFIX: Final = 1000
"""How much of the prefix is in a message whose content is in the object store."""


class _Pending(NamedTuple):
    """A logical message that its transaction wrote before the change number `seq`."""

    prefix: str
    ordinal: int
    seq: int
    content: bytes


class LogicalMessages:
    """Holds logical messages back while they must not overtake a change, then emits them.

    The newest one is always held back, because it may be the last message of its transaction.
    """

    def __init__(self, packaging: Packaging, outbox: Outbox) -> None:
        self._packaging = packaging
        self._outbox = outbox
        self._transaction = TransactionHeader(0, 0, 0)
        self.pending: list[_Pending] = []
        """The messages held back."""
        self._pending_bytes = 0

    def begin(self, transaction: TransactionHeader) -> None:
        """Set the transaction of the next messages."""
        self._transaction = transaction

    def take(self, message: LogicalMessage, ordinal: int, seq: int, *, behind_change: bool) -> None:
        """Hold a message back: behind the change held back, or as the newest message."""
        size = len(message.content) + ITEM_OVERHEAD
        if not behind_change or self._pending_bytes + size > HELD_BYTES:
            # Too many to hold back behind one change, so they are emitted before it. That is safe:
            # messages and changes are numbered separately.
            self.emit(None)
        self.pending.append(_Pending(message.prefix, ordinal, seq, message.content))
        self._pending_bytes += size

    def emit(self, end_lsn: int | None) -> None:
        """Emit the messages held back; with `end_lsn` the newest one ends its transaction."""
        pending, self.pending = self.pending, []
        self._pending_bytes = 0
        for place, message in enumerate(pending, start=1):
            self._emit(message, end_lsn if place == len(pending) else None)

    def _emit(self, pending: _Pending, end_lsn: int | None) -> None:
        """Emit a message; content that exceeds the payload limit goes to the object store."""
        packaging, transaction = self._packaging, self._transaction
        source, encode = packaging.source, packaging.encoder.document
        token = f"$message.{message_token(pending.prefix)}"
        subject = source.subjects.message(pending.prefix)
        msg_id = f"{transaction.commit_lsn:x}-{token}-message-{pending.ordinal}-{source.epoch:x}"
        fields: dict[str, Any] = {
            "v": WIRE_VERSION,
            "source": source.name,
            "epoch": source.epoch,
            "operation": "MESSAGE",
            "prefix": pending.prefix,
            "msg_id": msg_id,
            "subject": subject,
            "lsn": transaction.commit_lsn,
            "xid": transaction.xid,
            "seq": pending.seq,
            "ordinal": pending.ordinal,
            "ts": transaction.ts,
        }
        if end_lsn is not None:
            fields["end_lsn"] = end_lsn
        try:
            body: dict[str, Any] = {"data": pending.content.decode(), "encoding": "utf8"}
        except UnicodeDecodeError:
            body = {"data": pending.content, "encoding": packaging.encoder.binary}
        payload = encode({**fields, **body})
        name, stored = packaging.object_name(msg_id.encode()), b""
        if len(payload) > packaging.room:
            if len(pending.prefix) > SHOWN_PREFIX:
                body["prefix"] = pending.prefix
                fields["prefix"] = pending.prefix[:SHOWN_PREFIX]
            stored = encode(body)
            payload = encode({**fields, "ref": packaging.reference(name, stored)})
        message = OutgoingMessage.logical(
            subject=subject.encode("ascii"), msg_id=msg_id.encode(), headers=packaging.headers,
            payload=payload, token=token, transaction=transaction, ordinal=pending.ordinal,
        )  # fmt: skip
        item = Oversized(name, stored, message) if stored else message
        self._outbox.add(item, len(stored) + len(payload))
