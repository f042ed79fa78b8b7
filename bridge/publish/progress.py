"""Progress records: what is stored up to which position, in the stream and in KV.

The rule of confirmation, as a formula:

    confirmed = max(end of every transaction whose messages are all acknowledged,
                    position of every acknowledged progress record)

and a progress record is written only while nothing received is unacknowledged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import nats.errors
from nats.js.errors import (
    APIError,
    KeyValueError,
    KeyWrongLastSequenceError,
)

from bridge.events.outgoing import Outgoing
from bridge.jetstream.record import read_progress
from consumer_sdk.wire.envelope import JSON, MSGPACK, encode

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

    from bridge.postgres.slot import Server

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """What the stream holds of a source at one moment.

    `stream_seq` and `msg_id` are those of the source's newest message, so that a stream which has
    lost its tail is known; the position is the one right after that message.
    """

    stream_seq: int
    msg_id: str
    commit_lsn: int = 0
    next_seq: int = 0
    next_ordinal: int = 0
    ts: int = 0

    def after(self, item: Outgoing) -> Stored:
        """The same with a change or logical message that was stored since."""
        stored = self
        if item.commit_lsn > stored.commit_lsn:
            stored = replace(
                stored, commit_lsn=item.commit_lsn, next_seq=0, next_ordinal=0, ts=item.ts
            )
        if item.commit_lsn < stored.commit_lsn:
            return stored
        if item.seq is None:
            return replace(stored, next_ordinal=max(stored.next_ordinal, item.ordinal + 1))
        return replace(stored, next_seq=max(stored.next_seq, item.seq + max(item.rows, 1)))


@dataclass(slots=True)
class ProgressLog:
    """Builds the records of one source and epoch, and keeps the newest in KV."""

    bucket: KeyValue
    subject: str
    source: str
    epoch: int
    server: Server
    publication: str
    stream_created_us: int
    as_json: bool
    _count: int = 0
    _revision: int = 0

    def record(
        self, lsn: int, stored: Stored, source_lsn: int, gap: Document | None = None
    ) -> Document:
        """One record: every change that ends at or before `lsn` is among what is stored."""
        return {
            "v": 1,
            "source": self.source,
            "epoch": self.epoch,
            "system_id": self.server.system_id,
            "timeline": self.server.timeline,
            "database": self.server.database,
            "publication": self.publication,
            "lsn": lsn,
            "stream_seq": stored.stream_seq,
            "stream_created": self.stream_created_us,
            "stream_msg_id": stored.msg_id,
            "position": {
                "lsn": stored.commit_lsn,
                "seq": stored.next_seq,
                "ordinal": stored.next_ordinal,
                "ts": stored.ts,
            },
            "source_lsn": max(source_lsn, lsn),
            "gap": gap,
            "ts": time.time_ns() // 1000,
        }

    def message(self, document: Document) -> Outgoing:
        """The record as a message for the stream."""
        self._count += 1
        kind = JSON if self.as_json else MSGPACK
        unique = f"{time.time_ns():x}{self._count:x}"
        return Outgoing(
            self.subject.encode(),
            f"{document['lsn']:x}-$progress.{self.source}-{unique}-{self.epoch:x}".encode(),
            f"Content-Type: {kind}\r\n".encode(),
            encode(document, as_json=self.as_json),
            "$progress",
            document["lsn"],
            None,
            -1,
            0,
            0,
            0,
        )

    async def keep(self, document: Document) -> bool:
        """Put the record into KV, where it outlives the stream's retention.

        A record that is not newer than what is there is left out: its writer is a stale one.
        """
        key, value = f"progress.{self.source}", encode(document, as_json=self.as_json)
        try:
            try:
                self._revision = await self.bucket.update(key, value, last=self._revision)
            except KeyWrongLastSequenceError:
                revision, held = await read_progress(self.bucket, self.source)
                if held is not None and _order(held) > _order(document):
                    return False
                self._revision = await self.bucket.update(key, value, last=revision)
        except (TimeoutError, nats.errors.Error, APIError, KeyValueError, OSError, ValueError):
            return False
        return True


def _order(document: Document) -> tuple[int, int]:
    return int(document["epoch"]), int(document["lsn"])
