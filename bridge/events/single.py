"""HOT PATH: makes one message for each change."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bridge.events.messages import (
    MessageKind,
    OutgoingMessage,
    Oversized,
    TransactionHeader,
    change_of_fields,
)

if TYPE_CHECKING:
    from bridge.events.logical_messages import LogicalMessages
    from bridge.events.messages import Packaging
    from bridge.events.outbox import Outbox
    from bridge.events.relations import MessageParts

_CHANGE = MessageKind.CHANGE


class _Encoded(NamedTuple):
    """A change that is large or will be compressed, while it is held back."""

    parts: MessageParts
    seq: int
    msg_id: bytes
    payload: bytes
    """Empty if the change is too large for a message."""
    body: bytes
    fields: int


class SingleMessages:
    """Makes a message of each change and holds it back until it is known whether it is the last.

    Small messages are made at once. Large messages, and those to be compressed, are made when they
    are emitted, because the fields that mark the end of a transaction are compressed with the
    others and count against the payload limit.
    """

    def __init__(self, packaging: Packaging, outbox: Outbox, logical: LogicalMessages) -> None:
        self._packaging = packaging
        self._outbox = outbox
        self._add = outbox.add
        self._logical = logical
        self._encoder = packaging.encoder
        self._event = packaging.encoder.event
        self._headers = packaging.headers
        self._room = packaging.room
        self._small = 0 if packaging.compress is not None else packaging.room
        """A message with a larger payload is made when it is emitted."""
        self._transaction = TransactionHeader(0, 0, 0)
        self._fragment = b""
        self._held: OutgoingMessage | None = None
        self._held_encoded: _Encoded | None = None

    def begin(self, transaction: TransactionHeader, fragment: bytes) -> None:
        """Set the transaction of the next changes."""
        self._transaction = transaction
        self._fragment = fragment

    @property
    def holds_change(self) -> bool:
        """Whether a change is held back."""
        return self._held is not None or self._held_encoded is not None

    def take(self, parts: MessageParts, seq: int, body: bytes, count: int, size: int) -> None:
        """Encode this change and hold it back; emit the one before it."""
        transaction = self._transaction
        if parts.transaction is not transaction:
            parts.begin(transaction, self._fragment)
        held = self._held
        if held is not None:
            self._add(held, len(held[4]))
        elif self._held_encoded is not None:
            self._emit_encoded(None)
        if self._logical.pending:
            self._logical.emit(None)
        if parts.relation.notice is not None:
            self._outbox.add(parts.relation.take_notice(), 0)
        msg_id = b"%b%d%b" % (parts.id_head, seq, parts.id_tail)
        # What is too large for a message is not encoded as one.
        payload = b"" if size > self._room else self._event(parts.shared, msg_id, seq, body, count)
        if 0 < len(payload) <= self._small:
            self._held = change_of_fields(
                (
                    _CHANGE, parts.subject, msg_id, self._headers, payload, parts.token,
                    transaction, seq, 1, None,
                )
            )  # fmt: skip
        else:
            self._held = None
            self._held_encoded = _Encoded(parts, seq, msg_id, payload, body, count)

    def release(self, end_lsn: int | None) -> None:
        """Emit the change held back; with `end_lsn` it is the last of its transaction."""
        held = self._held
        if held is None:
            if self._held_encoded is not None:
                self._emit_encoded(end_lsn)
            return
        self._held = None
        if end_lsn is not None:
            held = held._replace(payload=self._encoder.with_end(held.payload, end_lsn))
        self._add(held, len(held.payload))

    def take_truncate(self, parts: MessageParts, seq: int, body: bytes, count: int) -> None:
        """Hold a truncate back; emit the change before it."""
        self.take(parts, seq, body, count, 0)

    def _emit_encoded(self, end_lsn: int | None) -> None:
        assert self._held_encoded is not None
        parts, seq, msg_id, payload, body, count = self._held_encoded
        self._held_encoded = None
        fitted = None
        if payload:
            if end_lsn is not None:
                payload = self._encoder.with_end(payload, end_lsn)
            fitted = self._packaging.fitted(parts.token, payload)
        if fitted is not None:
            payload, headers = fitted
            self._add(self._message(parts, seq, msg_id, headers, payload), len(payload))
            return
        row = self._encoder.row(body, count)
        # The row may be large, so no second copy of it is kept.
        del body, payload
        name = self._packaging.object_name(msg_id)
        body = self._encoder.body({"ref": self._packaging.reference(name, row)})
        payload = self._event(parts.shared, msg_id, seq, body, 1)
        if end_lsn is not None:
            payload = self._encoder.with_end(payload, end_lsn)
        message = self._message(parts, seq, msg_id, self._headers, payload)
        self._add(Oversized(name, row, message), len(row) + len(payload))

    def _message(
        self, parts: MessageParts, seq: int, msg_id: bytes, headers: bytes, payload: bytes
    ) -> OutgoingMessage:
        return OutgoingMessage.change(
            subject=parts.subject, msg_id=msg_id, headers=headers, payload=payload,
            token=parts.token, transaction=self._transaction, ordinal=seq,
        )  # fmt: skip
