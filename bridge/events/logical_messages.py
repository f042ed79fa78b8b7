"""Logical messages (`pg_logical_emit_message`) as messages of the CDC stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bridge.events.outgoing import Item, Outgoing, Oversized, object_reference
from consumer_sdk.wire.subjects import message_token

if TYPE_CHECKING:
    from bridge.events.encoder import Encoder
    from consumer_sdk.wire.subjects import Subjects


SHOWN_PREFIX: Final = 1000
"""How much of its prefix a message shows that goes to the object store."""


class Noted(NamedTuple):
    """A logical message as it stood in its transaction: before the change number `seq`."""

    prefix: str
    ordinal: int
    seq: int
    content: bytes


class LogicalMessageEncoder:
    """Encodes the logical messages of one source and epoch."""

    def __init__(
        self,
        *,
        source: str,
        epoch: int,
        subjects: Subjects,
        encoder: Encoder,
        headers: bytes,
        objects_bucket: str,
        room: int,
    ) -> None:
        self._source = source
        self._epoch = epoch
        self._subjects = subjects
        self._encoder = encoder
        self._headers = headers
        self._objects_bucket = objects_bucket
        self._room = room

    def encode(
        self, noted: Noted, *, commit_lsn: int, xid: int, ts: int, end_lsn: int | None
    ) -> tuple[Item, int]:
        """The message and its size; what exceeds a message goes to the object store."""
        encode = self._encoder.document
        token = f"$message.{message_token(noted.prefix)}"
        subject = self._subjects.message(noted.prefix)
        msg_id = f"{commit_lsn:x}-{token}-message-{noted.ordinal}-{self._epoch:x}"
        fields: dict[str, Any] = {
            "v": 1,
            "source": self._source,
            "epoch": self._epoch,
            "operation": "MESSAGE",
            "prefix": noted.prefix,
            "msg_id": msg_id,
            "subject": subject,
            "lsn": commit_lsn,
            "xid": xid,
            "seq": noted.seq,
            "ordinal": noted.ordinal,
            "ts": ts,
        }
        if end_lsn is not None:
            fields["end_lsn"] = end_lsn
        try:
            body: dict[str, Any] = {"data": noted.content.decode(), "encoding": "utf8"}
        except UnicodeDecodeError:
            body = {"data": noted.content, "encoding": self._encoder.binary}
        payload = encode({**fields, **body})
        name, stored = f"{self._source}/{msg_id}", b""
        if len(payload) > self._room:
            if len(noted.prefix) > SHOWN_PREFIX:
                body["prefix"] = noted.prefix
                fields["prefix"] = noted.prefix[:SHOWN_PREFIX]
            stored = encode(body)
            payload = encode(
                {**fields, "ref": object_reference(self._objects_bucket, name, stored)}
            )
        message = Outgoing(
            subject.encode("ascii"), msg_id.encode(), self._headers, payload, token,
            commit_lsn, None, noted.ordinal, 0, 1, ts,
        )  # fmt: skip
        item = Oversized(name, stored, message) if stored else message
        return item, len(stored) + len(payload)
