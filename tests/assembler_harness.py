"""An assembler fed with encoded pgoutput messages, and what came out of it in readable form."""

from __future__ import annotations

from typing import Any

from bridge.events.assembler import Assembler
from bridge.events.messages import Item, OutgoingMessage, Oversized, Packaging, SchemaNotice
from bridge.events.relations import (
    CompiledRelation,
    Structure,
    StructureColumn,
    VersionedStructure,
)
from bridge.events.resume import Resume
from bridge.events.values import ColumnType
from bridge.publish.ring import Ring
from bridge.source import Source
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
    described = tuple(StructureColumn(*column) for column in columns)
    return Structure(relation_id, "public", table, identity, described)


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
        cold_rows: int = 0,
    ) -> None:
        source = Source(SOURCE, EPOCH, "pub", Subjects(""), as_json=json)
        self._packaging = Packaging(source, max_payload)
        self._utf8 = utf8
        self._cold_rows = cold_rows
        self._ring: Ring[Item] = Ring(65_536, 1 << 30)
        self._finished: list[Item] = []
        self.assembler = Assembler(self._packaging, resume or Resume(), pack=pack)

    def describe(
        self, described: Structure, version: int = 1, notice: SchemaNotice | None = None
    ) -> None:
        """Take a relation, as the reader does for a Relation message."""
        types = [ColumnType(one.type_oid, one.type_modifier) for one in described.columns]
        versioned = VersionedStructure(described, types, version, notice)
        self.assembler.describe(
            CompiledRelation(versioned, self._packaging, utf8=self._utf8, cold_rows=self._cold_rows)
        )

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
        assert self.assembler.outbox.move_into(self._ring)
        while items := self._ring.take(65_536, 1 << 30):
            self._finished += items
        return list(self._finished)

    def outgoing(self) -> list[OutgoingMessage]:
        """The messages, those with an object included, schema notices left out."""
        return [
            item.message if isinstance(item, Oversized) else item
            for item in self.out
            if not isinstance(item, SchemaNotice)
        ]

    def documents(self) -> list[dict[str, Any]]:
        """The messages, decoded."""
        kind = {"Content-Type": self._packaging.source.content_type}
        return [decode_payload(kind, item.payload) for item in self.outgoing()]
