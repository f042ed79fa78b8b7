"""HOT PATH: pgoutput messages in, encoded CDC messages out. No I/O, no waiting.

This is the narrow seam around decode -> encode: `feed` takes the bytes of one pgoutput message,
finished items collect in `out`. One change is always held back, because only the message after it
tells whether it was the transaction's last: the final item of `out` while `is_open`, or one that
is not an item yet.

Ordinals count row changes, truncates (one per table) and commit messages. Logical messages have an
ordinal of their own, so that a reader of changes never misses a number.
"""

from __future__ import annotations

from collections import deque
from struct import Struct
from struct import error as StructError  # noqa: N812 - an exception, whatever its case
from typing import TYPE_CHECKING, Any, Final

from bridge.errors import ProtocolError
from bridge.events.encoder import SHARED_FIELDS
from bridge.events.logical_messages import LogicalMessageEncoder, Noted
from bridge.events.outgoing import ITEM_OVERHEAD, Item, Outgoing, Oversized, object_reference
from bridge.events.resume import Replay
from bridge.events.rows import read_change
from bridge.wal.messages import Begin, Commit, LogicalMessage, Origin, Truncate, Type
from bridge.wal.pgoutput import decode
from consumer_sdk.wire.lsn import format_lsn

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.events.encoder import Encoder
    from bridge.events.relations import CompiledRelation, MessageParts, Writer
    from bridge.events.resume import Resume
    from consumer_sdk.wire.subjects import Subjects

PACK_ROWS: Final = 500
PACK_BYTES: Final = 96 * 1024
"""Bounds of a packed message, counted in bytes of the log and of column names, so that they depend
on nothing but the transaction."""
HELD_MESSAGE_BYTES: Final = 1024 * 1024
HEADER_ALLOWANCE: Final = 2048
"""Room for headers below the server's payload limit; ids of the longest names take 500 bytes."""
NAMES_BYTES: Final = 4 * 1024 * 1024
"""What all ends of one transaction may take together to name its tables; else they do not."""
KEPT_TRUNCATIONS: Final = 1000
END_ALLOWANCE: Final = 64
"""What the last message of a transaction has more than the others."""

_new_tuple = tuple.__new__
_relation_id_at = Struct(">I").unpack_from
_ROW_KINDS = frozenset(b"IUD")


class Assembler:
    """Turns the changes of transactions into messages, one transaction after another."""

    def __init__(
        self,
        *,
        source: str,
        epoch: int,
        subjects: Subjects,
        encoder: Encoder,
        resume: Resume,
        pack: bool,
        max_payload: int,
        objects_bucket: str,
        headers: bytes,
        compress: Callable[[str, bytes], tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.relations: dict[int, CompiledRelation] = {}
        self._writers: dict[bytes, Writer] = {}
        self.out: list[Item] = []
        self.out_sizes: list[int] = []
        self.out_bytes = 0
        self.is_open = False
        """Whether the final item of `out` may still turn out to be the last of its transaction."""
        self.truncations: deque[tuple[str, int]] = deque(maxlen=KEPT_TRUNCATIONS)
        """The last tables truncated, and by which transactions."""
        self.in_transaction = False
        self.commit_lsn = 0
        self.complete_lsn = 0
        """End LSN of the last transaction seen to its end."""
        self._source = source
        self._encoder = encoder
        self._replay = Replay(resume)
        self._objects_bucket = objects_bucket
        self._headers = headers
        self._compress = compress
        self._event = encoder.event
        self._take = self._take_packed if pack else self._take_single
        self._limit = max_payload - HEADER_ALLOWANCE
        self._room = self._limit - END_ALLOWANCE
        self._message_encoder = LogicalMessageEncoder(
            source=source,
            epoch=epoch,
            subjects=subjects,
            encoder=encoder,
            headers=headers,
            objects_bucket=objects_bucket,
            room=self._room,
        )
        self._xid = 0
        self._ts = 0
        self._transaction = b""
        self._id_tail = f"-{epoch:x}".encode()
        self._seq = 0
        self._ordinal = 0
        self._skipping = False
        """Whether there may be something to skip in this transaction."""
        self._touched: dict[str, CompiledRelation] = {}
        self._last_relation: CompiledRelation | None = None
        self._held: tuple[MessageParts, int, bytes, bytes, bytes, int] | None = None
        """A change held back outside of `out`, since it is large or to be compressed: ordinal, id,
        payload if another one follows (empty where it is too large), and the fragment with its
        number of fields."""
        self._held_parts: MessageParts | None = None
        self._held_seq = 0
        self._held_rows: list[bytes] = []
        """The rows held back to be packed, and what the first of them is."""
        self._held_bytes = 0
        self._messages: list[Noted] = []
        self._messages_bytes = 0

    def describe(self, relation: CompiledRelation) -> None:
        """Take a relation as it is from here on.

        PostgreSQL describes relations again whenever it likes: an equal description must not end
        a packed message, whose bounds depend on the transaction alone.
        """
        known = self.relations.get(relation.relation_id)
        if known is None or not known.is_same(relation):
            self.relations[relation.relation_id] = relation
            for key in known.writers if known is not None else ():
                del self._writers[key]
            self._writers |= relation.writers

    def feed(self, frame: bytes, start: int) -> None:
        """Take the pgoutput message that begins at `start` and ends with the frame."""
        if self._skipping and frame[start] in _ROW_KINDS and self._skip(frame, start):
            return
        writer = self._writers.get(frame[start : start + 6])
        if writer is not None:
            write, count, parts, relation = writer
            body = write(frame, start + 6)
            if body is not None:
                if relation is not self._last_relation:
                    self._last_relation = relation
                    self._touched[relation.token] = relation
                seq = self._seq
                self._seq = seq + 1
                self._take(parts, seq, body, count, len(frame) - start)
                return
        if frame[start] in _ROW_KINDS:
            self._read_change(frame, start)
        else:
            self._other(decode(frame[start:]))

    def _skip(self, frame: bytes, start: int) -> bool:
        """Count a change that is recorded already; False from the first one that is not."""
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
        """The relation that a change is of; it is part of the transaction from then on."""
        try:
            relation = self.relations[_relation_id_at(frame, start + 1)[0]]
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
        """Take a change whose row must be read."""
        relation = self._touch(frame, start)
        seq = self._seq
        self._seq = seq + 1
        parts, fields = read_change(relation, frame, start)
        self._take(parts, seq, self._encoder.body(fields), len(fields), len(frame) - start)

    def _take_single(
        self, parts: MessageParts, seq: int, body: bytes, count: int, size: int
    ) -> None:
        """Encode this change and hold it back; the one before it goes out: a message for each."""
        if parts.commit_lsn != self.commit_lsn:
            parts.begin(self.commit_lsn, self._transaction)
        if self._held is not None:
            self._emit_single(0)
        if self._messages:
            self._emit_messages(None)
        if parts.relation.notice is not None:
            self._announce(parts.relation)
        msg_id = b"%b%d%b" % (parts.id_head, seq, self._id_tail)
        # What is too large to be a message is not made one.
        payload = b"" if size > self._room else self._event(parts.shared, msg_id, seq, body, count)
        size = len(payload)
        if self._compress is not None or not size or size > self._room:
            self.is_open = False
            self._held = (parts, seq, msg_id, payload, body, count)
            return
        self.out.append(
            _new_tuple(
                Outgoing,
                (
                    parts.subject, msg_id, self._headers, payload, parts.token, self.commit_lsn,
                    seq, 0, 0, 1, self._ts,
                ),
            )
        )  # fmt: skip
        size += ITEM_OVERHEAD
        self.out_sizes.append(size)
        self.out_bytes += size
        self.is_open = True

    def _take_packed(
        self, parts: MessageParts, seq: int, body: bytes, count: int, size: int
    ) -> None:
        """Add this change to the rows held back, or emit those and begin anew."""
        row = self._encoder.row(body, count)
        size += parts.relation.names_bytes
        if parts is self._held_parts and not self._messages and parts.relation.notice is None:
            rows = self._held_rows
            self._held_bytes += size
            if len(rows) < PACK_ROWS and self._held_bytes <= PACK_BYTES:
                rows.append(row)
                return
        self._release()
        if parts.relation.notice is not None:
            self._announce(parts.relation)
        if parts.commit_lsn != self.commit_lsn:
            parts.begin(self.commit_lsn, self._transaction)
        self._held_parts = parts
        self._held_seq = seq
        self._held_rows = [row]
        self._held_bytes = size

    def _announce(self, relation: CompiledRelation) -> None:
        assert relation.notice is not None
        self._append(relation.notice, ITEM_OVERHEAD)
        relation.notice = None

    def _release(self) -> None:
        """Emit the held change as one that is not the last, and what was held behind it."""
        self._emit_held(0)
        if self._messages:
            self._emit_messages(None)

    def _emit_messages(self, end_lsn: int | None) -> None:
        """Emit the held logical messages; `end_lsn` goes on the newest if it ends everything."""
        messages, self._messages = self._messages, []
        self._messages_bytes = 0
        for place, message in enumerate(messages, start=1):
            self._emit_message(message, end_lsn if place == len(messages) else None)

    def _emit_held(self, end_lsn: int) -> None:
        """Emit what is held back; with `end_lsn` it ends the transaction's changes."""
        if self.is_open:
            self.is_open = False
            if end_lsn:
                self._end_open(end_lsn)
        elif self._held is not None:
            self._emit_single(end_lsn)
        elif self._held_parts is not None:
            parts, rows = self._held_parts, self._held_rows
            self._held_parts, self._held_rows = None, []
            self._emit_rows(parts, self._held_seq, rows, end_lsn)

    def _end_open(self, end_lsn: int) -> None:
        """Make the final item of `out` the last change of its transaction."""
        item = self.out[-1]
        assert isinstance(item, Outgoing)
        payload = self._encoder.with_end(item.payload, end_lsn)
        more = len(payload) - len(item.payload)
        self.out[-1] = item._replace(payload=payload)
        self.out_sizes[-1] += more
        self.out_bytes += more

    def _emit_single(self, end_lsn: int) -> None:
        """Emit the held change; with `end_lsn` it is the last of its transaction."""
        assert self._held is not None
        parts, seq, msg_id, payload, body, count = self._held
        self._held = None
        if end_lsn and payload:
            payload = self._encoder.with_end(payload, end_lsn)
        headers = self._headers
        if self._compress is not None and payload:
            payload, headers = self._compress(parts.token, payload)
        size = len(payload)
        if not size or size > self._limit:
            row = self._encoder.row(body, count)
            del body, payload
            self._emit_reference(parts, seq, msg_id, row, end_lsn, packed=False)
            return
        item = Outgoing(
            parts.subject, msg_id, headers, payload, parts.token, self.commit_lsn, seq,
            0, 0, 1, self._ts,
        )  # fmt: skip
        self._append(item, size)

    def _emit_rows(self, parts: MessageParts, seq: int, rows: list[bytes], end_lsn: int) -> None:
        """Emit rows as one message, or by halves, or a single one by way of the object store."""
        msg_id = b"%b%d%b" % (parts.id_head, seq, self._id_tail)
        if len(rows) == 1 and len(rows[0]) > self._room:
            self._emit_reference(parts, seq, msg_id, rows[0], end_lsn, packed=True)
            return
        payload = self._encoder.rows(parts.shared, msg_id, seq, rows)
        if end_lsn:
            payload = self._encoder.with_end(payload, end_lsn)
        if self._emit(parts, seq, msg_id, payload, len(rows)):
            return
        if len(rows) == 1:
            self._emit_reference(parts, seq, msg_id, rows[0], end_lsn, packed=True)
            return
        middle = len(rows) // 2
        self._emit_rows(parts, seq, rows[:middle], 0)
        self._emit_rows(parts, seq + middle, rows[middle:], end_lsn)

    def _emit(
        self, parts: MessageParts, seq: int, msg_id: bytes, payload: bytes, rows: int
    ) -> bool:
        """Append one message; False if it is beyond the limit."""
        headers = self._headers
        if self._compress is not None:
            payload, headers = self._compress(parts.token, payload)
        if len(payload) > self._limit:
            return False
        item = Outgoing(
            parts.subject, msg_id, headers, payload, parts.token, self.commit_lsn, seq,
            0, 0, rows, self._ts,
        )  # fmt: skip
        self._append(item, len(payload))
        return True

    def _emit_reference(
        self,
        parts: MessageParts,
        seq: int,
        msg_id: bytes,
        row: bytes,
        end_lsn: int,
        *,
        packed: bool,
    ) -> None:
        """Send a row by way of the object store."""
        name = f"{self._source}/{msg_id.decode()}"
        encoder = self._encoder
        body = encoder.body({"ref": object_reference(self._objects_bucket, name, row)})
        if packed:
            payload = encoder.rows(parts.shared, msg_id, seq, [encoder.row(body, 1)])
        else:
            payload = encoder.event(parts.shared, msg_id, seq, body, 1)
        if end_lsn:
            payload = encoder.with_end(payload, end_lsn)
        message = Outgoing(
            parts.subject, msg_id, self._headers, payload, parts.token, self.commit_lsn,
            seq, 0, 0, 1, self._ts,
        )  # fmt: skip
        self._append(Oversized(name, row, message), len(row) + len(payload))

    def withdraw(self) -> tuple[Item, int] | None:
        """Take the change held back out of `out`; `restore` brings it back."""
        if not self.is_open:
            return None
        self.is_open = False
        size = self.out_sizes.pop()
        self.out_bytes -= size
        return self.out.pop(), size

    def restore(self, held: tuple[Item, int] | None) -> None:
        """Put back what `withdraw` has taken."""
        if held is not None:
            self.is_open = True
            self._append(held[0], held[1] - ITEM_OVERHEAD)

    def _append(self, item: Item, size: int) -> None:
        self.out.append(item)
        self.out_sizes.append(size + ITEM_OVERHEAD)
        self.out_bytes += size + ITEM_OVERHEAD

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
        self._xid = message.xid
        self._ts = message.commit_time
        self._transaction = self._encoder.fragment(
            {"lsn": lsn, "xid": message.xid, "ts": message.commit_time}
        )
        self._seq = 0
        self._ordinal = 0
        self._touched = {}
        self._last_relation = None

    def expect_history(self, lsn: int) -> None:
        """Raise where the log has passed the recorded transaction without showing it."""
        self._replay.expect(lsn)

    def _commit(self, message: Commit) -> None:
        if not self.in_transaction or message.commit_lsn != self.commit_lsn:
            raise ProtocolError("a commit does not belong to the transaction before it")
        mark = len(self.out) - self.is_open
        if not self._replay.is_recorded:
            changes = self._seq
            self._emit_held(message.end_lsn)
            if self._messages:
                self._emit_messages(message.end_lsn)
            last = self._last_relation
            tables: list[str] | None = list(self._touched)
            if len(self._touched) * sum(map(len, self._touched)) > NAMES_BYTES:
                tables = None
            for token, relation in self._touched.items():
                if last is not None and token != last.token:
                    self._commit_notice(relation, tables, changes, message.end_lsn)
        if len(self.out) > mark:
            self.out[-1] = _with_end(self.out[-1], message.end_lsn)
        self.in_transaction = False
        self.complete_lsn = message.end_lsn

    def _commit_notice(
        self, relation: CompiledRelation, tables: list[str] | None, changes: int, end_lsn: int
    ) -> None:
        seq = self._seq
        self._seq = seq + 1
        if seq < self._replay.next_seq:
            return
        parts = relation.commit
        if parts.commit_lsn != self.commit_lsn:
            parts.begin(self.commit_lsn, self._transaction)
        msg_id = b"%b%d%b" % (parts.id_head, seq, self._id_tail)
        fields: dict[str, Any] = {
            "msg_id": msg_id.decode(),
            "seq": seq,
            "changes": changes,
            "end_lsn": end_lsn,
        }
        if tables is not None:
            fields["tables"] = tables
        message = self._encoder.message
        if not self._emit(parts, seq, msg_id, message(SHARED_FIELDS, parts.shared, fields), 0):
            # So many that their names alone exceed a message; whoever needs them counts the ends.
            fields.pop("tables", None)
            self._emit(parts, seq, msg_id, message(SHARED_FIELDS, parts.shared, fields), 0)

    def _truncate(self, message: Truncate) -> None:
        for relation_id in message.relation_ids:
            if relation_id in self.relations:
                self.truncations.append((self.relations[relation_id].token, self._xid))
        if self._replay.skips_transaction():
            return
        for relation_id in message.relation_ids:
            relation = self.relations.get(relation_id)
            if relation is None:
                raise ProtocolError("PostgreSQL truncated a relation it has not described")
            seq = self._seq
            self._seq = seq + 1
            self._last_relation = relation
            self._touched[relation.token] = relation
            if seq < self._replay.next_seq:
                continue
            self._release()
            fields = {
                "data": {},
                "cascade": message.cascade,
                "restart_identity": message.restart_identity,
            }
            self._take_single(relation.truncate, seq, self._encoder.body(fields), len(fields), 0)

    def _logical_message(self, message: LogicalMessage) -> None:
        if not message.transactional or self._replay.skips_transaction():
            return
        if not self.in_transaction:
            raise ProtocolError("a transactional message came outside a transaction")
        ordinal = self._ordinal
        self._ordinal = ordinal + 1
        if ordinal < self._replay.next_ordinal:
            return
        self._messages.append(Noted(message.prefix, ordinal, self._seq, message.content))
        self._messages_bytes += len(message.content) + ITEM_OVERHEAD
        nothing_held = not self.is_open and self._held is None and self._held_parts is None
        if nothing_held or self._messages_bytes > HELD_MESSAGE_BYTES:
            # Too much to hold back behind one change: these go ahead of it. Readers lose nothing,
            # messages and changes are numbered apart. The newest stays, it may be the end.
            newest = self._messages.pop()
            held = self.withdraw()
            for earlier in self._messages:
                self._emit_message(earlier, None)
            self.restore(held)
            self._messages = [newest]
            self._messages_bytes = len(message.content) + ITEM_OVERHEAD

    def _emit_message(self, noted: Noted, end_lsn: int | None) -> None:
        item, size = self._message_encoder.encode(
            noted, commit_lsn=self.commit_lsn, xid=self._xid, ts=self._ts, end_lsn=end_lsn
        )
        self._append(item, size)


def _with_end(item: Item, end_lsn: int) -> Item:
    if isinstance(item, Outgoing):
        return item._replace(end_lsn=end_lsn)
    assert isinstance(item, Oversized)
    return Oversized(item.name, item.content, item.message._replace(end_lsn=end_lsn))
