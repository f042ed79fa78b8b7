"""HOT PATH: pgoutput messages in, encoded CDC messages out. No I/O, no waiting.

The assembler tracks a transaction: its ordinals, its tables, its end, and which of its changes are
already recorded. `single` or `packed` turn changes into messages; finished messages go to the
outbox. The newest change is always held back, because only the message after it shows whether it
is the last change of the transaction.

Ordinals number the row changes, truncates (one per table) and commit messages of a transaction.
Logical messages are numbered separately, so that the numbers of changes have no gaps.
"""

from __future__ import annotations

from collections import deque
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception, whatever its case
from typing import TYPE_CHECKING, Any, Final

from bridge.errors import BrokerError, ProtocolError
from bridge.events.encoders import SHARED_FIELDS
from bridge.events.logical_messages import LogicalMessages
from bridge.events.messages import OutgoingMessage, TransactionHeader
from bridge.events.outbox import Outbox
from bridge.events.packed import PackedMessages
from bridge.events.resume import Replay
from bridge.events.rows import read_change
from bridge.events.single import SingleMessages
from bridge.wal.messages import Begin, Commit, LogicalMessage, Origin, Truncate, Type
from bridge.wal.pgoutput import decode
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from bridge.events.messages import Packaging
    from bridge.events.relations import CompiledRelation, MessageWriter
    from bridge.events.resume import Resume

NAMES_BYTES: Final = 4 * 1024 * 1024
"""How many bytes the commit messages of a transaction may use for table names, all together; if
more are needed, they do not name the tables."""
KEPT_TRUNCATIONS: Final = 1000

_relation_id_at = Struct(">I").unpack_from
_ROW_KINDS = frozenset(b"IUD")


class Assembler:
    """Turns the changes of transactions into messages, one transaction after another."""

    def __init__(self, packaging: Packaging, resume: Resume, *, pack: bool) -> None:
        self.outbox = Outbox()
        """The finished messages."""
        self.in_transaction = False
        self.commit_lsn = 0
        """Commit LSN of the last transaction that began."""
        self.complete_lsn = 0
        """End LSN of the last complete transaction."""
        self._packaging = packaging
        self._encoder = packaging.encoder
        self._logical = LogicalMessages(packaging, self.outbox)
        strategy = PackedMessages if pack else SingleMessages
        self._changes = strategy(packaging, self.outbox, self._logical)
        self._take = self._changes.take
        self._replay = Replay(resume)
        self._relations: dict[int, CompiledRelation] = {}
        self._writers: dict[bytes, MessageWriter] = {}
        self._truncations: deque[tuple[str, int]] = deque(maxlen=KEPT_TRUNCATIONS)
        """The tables truncated last, with the transactions that truncated them."""
        self._transaction = TransactionHeader(0, 0, 0)
        self._fragment = b""
        """The encoded fields that all messages of the transaction share."""
        self._seq = 0
        """Ordinal of the next change."""
        self._ordinal = 0
        """Ordinal of the next logical message."""
        self._skipping = False
        """Whether part of this transaction may already be recorded."""
        self._touched: dict[str, CompiledRelation] = {}
        self._last_relation: CompiledRelation | None = None

    def describe(self, relation: CompiledRelation) -> None:
        """Use this description of a relation from here on.

        PostgreSQL may send a description again at any time. An equal one must not end a packed
        message, because the bounds of packed messages may depend only on the transaction.
        """
        known = self._relations.get(relation.relation_id)
        if known is None or not known.is_same(relation):
            self._relations[relation.relation_id] = relation
            for key in known.writers if known is not None else ():
                del self._writers[key]
            self._writers |= relation.writers

    def feed(self, frame: bytes, start: int) -> None:
        """Process the pgoutput message from `start` to the end of the frame."""
        if self._skipping and frame[start] in _ROW_KINDS and self._skip(frame, start):
            return
        writer = self._writers.get(frame[start : start + 6])
        if writer is not None:
            body = writer.write(frame, start + 6)
            if body is not None:
                relation = writer.relation
                if relation is not self._last_relation:
                    self._last_relation = relation
                    self._touched[relation.token] = relation
                seq = self._seq
                self._seq = seq + 1
                self._take(writer.parts, seq, body, writer.field_count, len(frame) - start)
                return
        if frame[start] in _ROW_KINDS:
            self._read_change(frame, start)
        else:
            self._other(decode(frame[start:]))

    def expect_history(self, lsn: int) -> None:
        """Raise if the log has passed the recorded transaction without containing it."""
        self._replay.expect(lsn)

    def has_truncated(self, token: str, xid: int) -> bool:
        """Whether the log contained a TRUNCATE of the table by this transaction."""
        return (token, xid) in self._truncations

    def _skip(self, frame: bytes, start: int) -> bool:
        """Count a change that is already recorded; False if it must be published."""
        replay = self._replay
        if replay.skips_transaction():
            return True
        if self._seq >= replay.next_seq:
            self._skipping = False
            return False
        self._touch(frame, start)
        self._seq += 1
        return True

    def _touch(self, frame: bytes, start: int) -> CompiledRelation:
        """The relation of a change; it is added to the tables of the transaction."""
        try:
            relation = self._relations[_relation_id_at(frame, start + 1)[0]]
        except (KeyError, StructError) as error:
            decode(frame[start:])
            raise ProtocolError(
                "PostgreSQL sent a row of a relation it has not described"
            ) from error
        if relation is not self._last_relation:
            self._last_relation = relation
            self._touched[relation.token] = relation
        return relation

    def _read_change(self, frame: bytes, start: int) -> None:
        """Process a change whose row must be read."""
        relation = self._touch(frame, start)
        seq = self._seq
        self._seq = seq + 1
        parts, fields = read_change(relation, frame, start)
        self._take(parts, seq, self._encoder.body(fields), len(fields), len(frame) - start)

    def _other(self, message: Any) -> None:
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Commit):
            self._commit(message)
        elif isinstance(message, Truncate):
            self._truncate(message)
        elif isinstance(message, LogicalMessage):
            self._logical_message(message)
        elif not isinstance(message, Origin | Type):
            raise ProtocolError(f"unexpected message {type(message).__name__}")

    def _begin(self, message: Begin) -> None:
        if self.in_transaction:
            raise ProtocolError("a transaction began inside another")
        lsn = message.final_lsn
        if lsn <= self.commit_lsn:
            raise ProtocolError(
                f"commit {format_lsn(lsn)} came after {format_lsn(self.commit_lsn)}"
            )
        self._skipping = self._replay.begin(lsn, message.commit_time)
        self.in_transaction = True
        self.commit_lsn = lsn
        self._transaction = TransactionHeader(lsn, message.xid, message.commit_time)
        self._fragment = self._encoder.fragment(
            {"lsn": lsn, "xid": message.xid, "ts": message.commit_time}
        )
        self._changes.begin(self._transaction, self._fragment)
        self._logical.begin(self._transaction)
        self._seq = 0
        self._ordinal = 0
        self._touched = {}
        self._last_relation = None

    def _commit(self, message: Commit) -> None:
        if not self.in_transaction or message.commit_lsn != self.commit_lsn:
            raise ProtocolError("a commit does not belong to the transaction before it")
        finished_before = len(self.outbox)
        if not self._replay.is_recorded:
            changes = self._seq
            self._changes.release(message.end_lsn)
            if self._logical.pending:
                self._logical.emit(message.end_lsn)
            if len(self._touched) > 1:
                self._emit_commits(changes, message.end_lsn)
        if len(self.outbox) > finished_before:
            self.outbox.set_end(message.end_lsn)
        self.in_transaction = False
        self.complete_lsn = message.end_lsn

    def _emit_commits(self, changes: int, end_lsn: int) -> None:
        """Emit a commit message for each table except that of the last change."""
        assert self._last_relation is not None
        fields: dict[str, Any] = {"changes": changes, "end_lsn": end_lsn}
        if len(self._touched) * sum(map(len, self._touched)) <= NAMES_BYTES:
            fields["tables"] = list(self._touched)
        for token, relation in self._touched.items():
            if token != self._last_relation.token:
                seq = self._seq
                self._seq = seq + 1
                if seq >= self._replay.next_seq:
                    self._emit_commit(relation, seq, fields)

    def _emit_commit(self, relation: CompiledRelation, seq: int, fields: dict[str, Any]) -> None:
        parts = relation.commit
        parts.begin(self._transaction, self._fragment)
        msg_id = parts.message_id(seq)
        fields = {"msg_id": msg_id.decode(), "seq": seq, **fields}
        encode = self._encoder.message
        fitted = self._packaging.fitted(parts.token, encode(SHARED_FIELDS, parts.shared, fields))
        if fitted is None:
            # The names of so many tables do not fit into a message.
            fields.pop("tables", None)
            payload = encode(SHARED_FIELDS, parts.shared, fields)
            fitted = self._packaging.fitted(parts.token, payload)
            if fitted is None:
                # Without it, readers of this table would never see the end of the transaction.
                raise BrokerError(
                    f"the end of a transaction takes {len(payload)} bytes, more than a message may "
                    f"have here ({self._packaging.limit}); raise max_payload of nats-server, "
                    f"which is {self._packaging.max_payload}"
                )
        payload, headers = fitted
        message = OutgoingMessage.commit(
            subject=parts.subject, msg_id=msg_id, headers=headers, payload=payload,
            token=parts.token, transaction=self._transaction, ordinal=seq,
        )  # fmt: skip
        self.outbox.add(message, len(payload))

    def _truncate(self, message: Truncate) -> None:
        for relation_id in message.relation_ids:
            if relation_id in self._relations:
                token = self._relations[relation_id].token
                self._truncations.append((token, self._transaction.xid))
        if self._replay.skips_transaction():
            return
        for relation_id in message.relation_ids:
            relation = self._relations.get(relation_id)
            if relation is None:
                raise ProtocolError("PostgreSQL truncated a relation it has not described")
            seq = self._seq
            self._seq = seq + 1
            self._last_relation = relation
            self._touched[relation.token] = relation
            if seq < self._replay.next_seq:
                continue
            fields = {
                "data": {},
                "cascade": message.cascade,
                "restart_identity": message.restart_identity,
            }
            body = self._encoder.body(fields)
            self._changes.take_truncate(relation.truncate, seq, body, len(fields))

    def _logical_message(self, message: LogicalMessage) -> None:
        if not message.transactional or self._replay.skips_transaction():
            return
        if not self.in_transaction:
            raise ProtocolError("a transactional message came outside a transaction")
        ordinal = self._ordinal
        self._ordinal = ordinal + 1
        if ordinal >= self._replay.next_ordinal:
            self._logical.take(
                message, ordinal, self._seq, behind_change=self._changes.holds_change
            )
