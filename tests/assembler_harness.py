"""An assembler fed with encoded pgoutput messages, and what came out of it in readable form."""

from __future__ import annotations

from typing import Any

from bridge.events.assembler import Assembler
from bridge.events.encoder import JsonEncoder, MsgpackEncoder
from bridge.events.outgoing import Item, Outgoing, Oversized, SchemaNotice
from bridge.events.relations import CompiledRelation, Structure
from bridge.events.resume import Resume
from bridge.events.values import ColumnType
from bridge.wal.messages import Begin, Commit, Message, Relation
from consumer_sdk.wire import Subjects, decode_payload, oids
from tests.pgoutput_encoder import encode_message

SOURCE, EPOCH = "main", 0x5F5E100
HEADER = b"w" + bytes(24)
COLUMNS = (("id", oids.INT4, -1, True), ("a", oids.TEXT, -1, False))


def structure(
    relation_id: int, table: str, columns: tuple[Any, ...] = COLUMNS, identity: str = "d"
) -> Structure:
    """A table of schema public as the log describes it."""
    return Structure(relation_id, "public", table, identity, columns)


class Harness:
    """Feeds one assembler and keeps everything that it has put out."""

    def __init__(
        self,
        *,
        pack: bool = False,
        json: bool = False,
        resume: Resume | None = None,
        max_payload: int = 1024 * 1024,
        utf8: bool = True,
    ) -> None:
        self.json = json
        self._utf8 = utf8
        self._encoder = JsonEncoder() if json else MsgpackEncoder()
        self._subjects = Subjects("")
        self.assembler = Assembler(
            source=SOURCE,
            epoch=EPOCH,
            subjects=self._subjects,
            encoder=self._encoder,
            resume=resume or Resume(),
            pack=pack,
            max_payload=max_payload,
            objects_bucket="cdc_objects",
            headers=f"Content-Type: {self._encoder.content_type}\r\n".encode(),
        )

    def describe(
        self, described: Structure, version: int = 1, notice: SchemaNotice | None = None
    ) -> None:
        """Take a relation, as the reader does for a Relation message."""
        self.assembler.describe(
            CompiledRelation(
                described, [ColumnType(oid, modifier) for _, oid, modifier, _ in described.columns],
                version, notice, source=SOURCE, epoch=EPOCH, subjects=self._subjects,
                encoder=self._encoder, json_messages=self.json, utf8=self._utf8,
            )
        )  # fmt: skip

    def feed(self, *messages: Message | bytes) -> None:
        """Feed messages one by one, each behind the header of a frame."""
        for message in messages:
            assert not isinstance(message, Relation)
            body = message if isinstance(message, bytes) else encode_message(message)
            self.assembler.feed(HEADER + body, len(HEADER))

    def transaction(self, lsn: int, *messages: Message, xid: int = 7, ts: int = 0) -> None:
        """Feed a whole transaction whose end LSN is `lsn + 8`."""
        ts = ts or 1_700_000_000_000_000 + lsn
        self.feed(Begin(lsn, ts, xid), *messages, Commit(0, lsn, lsn + 8, ts))

    @property
    def out(self) -> list[Item]:
        """What is finished."""
        assembler = self.assembler
        return assembler.out[: len(assembler.out) - assembler.is_open]

    def outgoing(self) -> list[Outgoing]:
        """The messages, those with an object included, schema notices left out."""
        return [
            item.message if isinstance(item, Oversized) else item
            for item in self.out
            if not isinstance(item, SchemaNotice)
        ]

    def documents(self) -> list[dict[str, Any]]:
        """The messages, decoded."""
        kind = {"Content-Type": self._encoder.content_type}
        return [decode_payload(kind, item.payload) for item in self.outgoing()]
