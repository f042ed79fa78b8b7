"""Packed messages (`--pack`): consecutive changes of one kind to one table share a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bridge.events.messages import OutgoingMessage, Oversized, TransactionHeader
from bridge.events.single import SingleMessages

if TYPE_CHECKING:
    from bridge.events.logical_messages import LogicalMessages
    from bridge.events.messages import Packaging
    from bridge.events.outbox import Outbox
    from bridge.events.relations import MessageParts

PACK_ROWS: Final = 500
PACK_BYTES: Final = 96 * 1024
"""Bounds of a packed message. They count bytes of the log and of column names, so that they depend
only on the transaction and are the same when it is sent again."""


class PackedMessages:
    """Collects rows until a change of another kind follows or a bound is reached.

    A truncate is never packed with other changes.
    """

    def __init__(self, packaging: Packaging, outbox: Outbox, logical: LogicalMessages) -> None:
        self._packaging = packaging
        self._outbox = outbox
        self._logical = logical
        self._encoder = packaging.encoder
        self._single = SingleMessages(packaging, outbox, logical)
        self._transaction = TransactionHeader(0, 0, 0)
        self._fragment = b""
        self._parts: MessageParts | None = None
        """The shared parts of the rows held back; None if there are none."""
        self._seq = 0
        self._rows: list[bytes] = []
        self._bytes = 0

    def begin(self, transaction: TransactionHeader, fragment: bytes) -> None:
        """Set the transaction of the next changes."""
        self._single.begin(transaction, fragment)
        self._transaction = transaction
        self._fragment = fragment

    @property
    def holds_change(self) -> bool:
        """Whether a change is held back."""
        return self._parts is not None or self._single.holds_change

    def take(self, parts: MessageParts, seq: int, body: bytes, count: int, size: int) -> None:
        """Add this change to the rows held back, or emit those and hold only this one."""
        row = self._encoder.row(body, count)
        size += parts.relation.names_bytes
        if parts is self._parts and not self._logical.pending and parts.relation.notice is None:
            self._bytes += size
            if len(self._rows) < PACK_ROWS and self._bytes <= PACK_BYTES:
                self._rows.append(row)
                return
        self._emit_held()
        if parts.relation.notice is not None:
            self._outbox.add(parts.relation.take_notice(), 0)
        if parts.transaction is not self._transaction:
            parts.begin(self._transaction, self._fragment)
        self._parts = parts
        self._seq = seq
        self._rows = [row]
        self._bytes = size

    def take_truncate(self, parts: MessageParts, seq: int, body: bytes, count: int) -> None:
        """Emit the rows held back, and hold a truncate back."""
        self._emit_held()
        self._single.take_truncate(parts, seq, body, count)

    def _emit_held(self) -> None:
        """Emit the rows held back, and the logical messages behind them."""
        self.release(None)
        if self._logical.pending:
            self._logical.emit(None)

    def release(self, end_lsn: int | None) -> None:
        """Emit the rows held back; with `end_lsn` they end their transaction."""
        parts = self._parts
        if parts is None:
            self._single.release(end_lsn)
            return
        rows, self._rows, self._parts = self._rows, [], None
        self._emit(parts, self._seq, rows, end_lsn)

    def _emit(self, parts: MessageParts, seq: int, rows: list[bytes], end_lsn: int | None) -> None:
        """Emit rows as one message; halve them if it is too large; a single one as an object."""
        msg_id = parts.message_id(seq)
        # A row that is too large for a message is not encoded as one.
        if len(rows) > 1 or len(rows[0]) <= self._packaging.room:
            payload = self._payload(parts, seq, msg_id, rows, end_lsn)
            fitted = self._packaging.fitted(parts.token, payload)
            if fitted is not None:
                payload, headers = fitted
                message = self._message(parts, seq, msg_id, headers, payload, len(rows))
                self._outbox.add(message, len(payload))
                return
        if len(rows) == 1:
            self._emit_reference(parts, seq, msg_id, rows[0], end_lsn)
            return
        middle = len(rows) // 2
        self._emit(parts, seq, rows[:middle], None)
        self._emit(parts, seq + middle, rows[middle:], end_lsn)

    def _emit_reference(
        self, parts: MessageParts, seq: int, msg_id: bytes, row: bytes, end_lsn: int | None
    ) -> None:
        encoder = self._encoder
        name = self._packaging.object_name(msg_id)
        body = encoder.body({"ref": self._packaging.reference(name, row)})
        payload = self._payload(parts, seq, msg_id, [encoder.row(body, 1)], end_lsn)
        message = self._message(parts, seq, msg_id, self._packaging.headers, payload, 1)
        self._outbox.add(Oversized(name, row, message), len(row) + len(payload))

    def _payload(
        self, parts: MessageParts, seq: int, msg_id: bytes, rows: list[bytes], end_lsn: int | None
    ) -> bytes:
        payload = self._encoder.rows(parts.shared, msg_id, seq, rows)
        return payload if end_lsn is None else self._encoder.with_end(payload, end_lsn)

    def _message(
        self, parts: MessageParts, seq: int, msg_id: bytes, headers: bytes, payload: bytes,
        rows: int,
    ) -> OutgoingMessage:  # fmt: skip
        return OutgoingMessage.change(
            subject=parts.subject, msg_id=msg_id, headers=headers, payload=payload,
            token=parts.token, transaction=self._transaction, ordinal=seq, events=rows,
        )  # fmt: skip
