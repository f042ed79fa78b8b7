"""What may be confirmed to PostgreSQL, and the progress records in the stream and in KV.

These words have one meaning each in the bridge:

    stored        the message is in the stream
    acknowledged  the bridge has received the stream's acknowledgement, or has read the message
                  back, so it knows that the message is stored
    recorded      the stream's own messages prove that everything up to a position is stored
    kept          the KV bucket `bridge` holds a progress record for that position
    confirmed     reported to PostgreSQL, which may remove the WAL up to that position

The rule of confirmation is:

    confirmed = max(end of every transaction whose messages are all acknowledged,
                    position of every acknowledged progress record)

A progress record is written only while every received change is acknowledged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import nats.errors
from nats.js.errors import APIError, KeyValueError, KeyWrongLastSequenceError

from bridge.events.messages import MessageKind, OutgoingMessage, content_headers
from bridge.jetstream.record import read_progress
from consumer_sdk.wire.envelope import encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.js.kv import KeyValue

    from bridge.postgres.connection import Server
    from bridge.source import Source
    from consumer_sdk.wire.envelope import Document


@dataclass(frozen=True, slots=True)
class StoredUpTo:
    """How far the messages of a source are stored at one moment.

    `stream_seq` and `msg_id` identify the source's newest message, so that the loss of the
    stream's end is detected. The position is the one right after that message.
    """

    stream_seq: int
    msg_id: str
    commit_lsn: int = 0
    next_seq: int = 0
    next_ordinal: int = 0
    ts: int = 0

    def after(self, item: OutgoingMessage) -> StoredUpTo:
        """The state after this change or logical message was stored too."""
        stored, transaction = self, item.transaction
        assert transaction is not None
        lsn = transaction.commit_lsn
        if lsn > stored.commit_lsn:
            stored = replace(stored, commit_lsn=lsn, next_seq=0, next_ordinal=0, ts=transaction.ts)
        if lsn < stored.commit_lsn:
            return stored
        if item.kind is MessageKind.LOGICAL:
            return replace(stored, next_ordinal=max(stored.next_ordinal, item.next_ordinal))
        return replace(stored, next_seq=max(stored.next_seq, item.next_ordinal))


class ProgressLog:
    """Builds the progress records of one source and epoch, and keeps the newest in KV."""

    def __init__(
        self, bucket: KeyValue, source: Source, server: Server, stream_created_us: int
    ) -> None:
        self._bucket = bucket
        self._source = source
        self._server = server
        self._stream_created_us = stream_created_us
        self._count = 0
        self._revision = 0

    def record(
        self, lsn: int, stored: StoredUpTo, source_lsn: int, gap: Document | None = None
    ) -> Document:
        """A progress record, which states that every change up to `lsn` is stored."""
        source, server = self._source, self._server
        return {
            "v": 1,
            "source": source.name,
            "epoch": source.epoch,
            "system_id": server.system_id,
            "timeline": server.timeline,
            "database": server.database,
            "publication": source.publication,
            "lsn": lsn,
            "stream_seq": stored.stream_seq,
            "stream_created": self._stream_created_us,
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

    def message(self, document: Document) -> OutgoingMessage:
        """The record as a message for the stream."""
        source = self._source
        self._count += 1
        unique = f"{time.time_ns():x}{self._count:x}"
        msg_id = f"{document['lsn']:x}-$progress.{source.name}-{unique}-{source.epoch:x}"
        return OutgoingMessage.progress(
            subject=source.subjects.progress(source.name).encode(),
            msg_id=msg_id.encode(),
            headers=content_headers(source),
            payload=encode(document, as_json=source.as_json),
        )

    async def keep(self, document: Document) -> bool:
        """Write the record to KV, where the stream's retention does not remove it.

        False if that failed, or if a later bridge has already written a newer record.
        """
        source = self._source
        key, value = f"progress.{source.name}", encode(document, as_json=source.as_json)
        try:
            try:
                self._revision = await self._bucket.update(key, value, last=self._revision)
            except KeyWrongLastSequenceError:
                kept = await read_progress(self._bucket, source.name)
                if kept.document is not None and _order(kept.document) > _order(document):
                    return False
                self._revision = await self._bucket.update(key, value, last=kept.revision)
        except (TimeoutError, nats.errors.Error, APIError, KeyValueError, OSError, ValueError):
            return False
        return True


def _order(document: Document) -> tuple[int, int]:
    return int(document["epoch"]), int(document["lsn"])


class Confirmation:
    """Tracks which messages are stored; `lsn` is the position that may be confirmed."""

    def __init__(self, log: ProgressLog, stored: StoredUpTo, lsn: int) -> None:
        self._log = log
        self._stored = stored
        self.lsn = lsn
        self._recorded_lsn = 0
        """The position up to which the stream's messages prove that everything is stored."""
        self._kept_lsn = 0
        """Position of the newest progress record in KV."""

    def acknowledge(self, newest: Iterable[OutgoingMessage], end_lsn: int) -> None:
        """Take acknowledged messages into account; `newest` are the newest with a position.

        `end_lsn` is the end of the newest completely stored transaction, or 0.
        """
        if end_lsn > self.lsn:
            self.lsn = end_lsn
            self.note_recorded(end_lsn)
        for item in newest:
            self._stored = self._stored.after(item)

    def note_end(self, stream_seq: int, msg_id: str) -> None:
        """Note which message of the source is the newest in the stream."""
        self._stored = replace(self._stored, stream_seq=stream_seq, msg_id=msg_id)

    def confirm(self, lsn: int) -> None:
        """Note that a progress record for this position was acknowledged."""
        self.lsn = max(self.lsn, lsn)

    def record(self, lsn: int, source_lsn: int = 0, gap: Document | None = None) -> Document:
        """A progress record, which states that every change up to `lsn` is stored."""
        return self._log.record(lsn, self._stored, source_lsn, gap)

    def message(self, document: Document) -> OutgoingMessage:
        """A progress record as a message for the stream."""
        return self._log.message(document)

    def is_recorded(self, lsn: int) -> bool:
        """Whether the stream's messages already prove that everything up to here is stored."""
        return lsn <= self._recorded_lsn

    def note_recorded(self, lsn: int) -> None:
        """Note that the stream's messages prove that everything up to here is stored."""
        self._recorded_lsn = max(self._recorded_lsn, lsn)

    @property
    def is_kept(self) -> bool:
        """Whether KV holds a progress record for the confirmed position."""
        return self.lsn <= self._kept_lsn

    async def keep(self, document: Document) -> None:
        """Write a progress record to KV; after a failure KV still holds the older one."""
        if await self._log.keep(document):
            self._kept_lsn = document["lsn"]
