"""The record of a source: the position that the messages in the stream prove to be stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nats.js.errors import KeyNotFoundError

from bridge.events.messages import MessageKind
from consumer_sdk.wire.envelope import JSON, Document, decode_payload, final_seq
from consumer_sdk.wire.errors import MISFITS, WireError

if TYPE_CHECKING:
    from nats.js.kv import KeyValue

    from bridge.events.messages import OutgoingMessage


@dataclass(slots=True)
class StreamRecord:
    """The record of one source; positions are those of its newest epoch."""

    epoch: int = 0
    progress: Document | None = None
    commit_lsn: int = 0
    next_seq: int = 0
    next_ordinal: int = 0
    ts: int = 0
    """Commit time of the newest transaction."""
    end_lsn: int = 0
    """End of the newest transaction if the message with its end was found, else 0."""
    schemas: dict[str, Document] = field(default_factory=dict)
    """Last schema message of each table of this source."""
    newest_ids: set[bytes] = field(default_factory=set)
    """Ids of the newest messages of this source on their subjects."""
    needs_tail_scan: bool = False
    """The newest message of a subject is not the bridge's own, so the tail must be read."""

    def note(self, document: Document) -> None:
        """Take one message of this source into account."""
        epoch, lsn = document.get("epoch"), document.get("lsn")
        if not isinstance(epoch, int) or not isinstance(lsn, int):
            raise WireError("no epoch or position")
        if document.get("operation") == "MESSAGE":
            next_seq, next_ordinal = 0, int(document["ordinal"]) + 1
        else:
            next_seq, next_ordinal = final_seq(document) + 1, 0
        if self.note_position(epoch, lsn, next_seq, next_ordinal, int(document["ts"])):
            self.end_lsn = max(self.end_lsn, int(document.get("end_lsn") or 0))

    def note_position(
        self, epoch: int, lsn: int, next_seq: int, next_ordinal: int, ts: int
    ) -> bool:
        """Take a stored position into account; False if a newer transaction is known."""
        if epoch < self.epoch or (epoch == self.epoch and lsn < self.commit_lsn):
            return False
        if (epoch, lsn) > (self.epoch, self.commit_lsn):
            self.epoch, self.commit_lsn, self.ts = epoch, lsn, ts
            self.next_seq = self.next_ordinal = self.end_lsn = 0
        self.next_seq = max(self.next_seq, next_seq)
        self.next_ordinal = max(self.next_ordinal, next_ordinal)
        return True

    def note_progress(self, document: Document) -> None:
        """Take a progress record into account, and the stored position that it contains."""
        held = self.progress
        order = (int(document["epoch"]), int(document["lsn"]))
        if held is None or order >= (held["epoch"], held["lsn"]):
            self.progress = document
        position = document.get("position")
        if isinstance(position, dict):
            self.note_position(
                order[0], int(position["lsn"]), int(position["seq"]), int(position["ordinal"]),
                int(position["ts"]),
            )  # fmt: skip
        else:
            self.note_position(order[0], 0, 0, 0, 0)

    @property
    def proven_lsn(self) -> int:
        """Every change that ends at or before this is stored."""
        return max(self.commit_lsn, self.progress_lsn)

    @property
    def recorded_lsn(self) -> int:
        """The highest position that a bridge can have confirmed for the stored messages."""
        return max(self.end_lsn, self.proven_lsn)

    @property
    def progress_lsn(self) -> int:
        """Position of the newest progress record of this epoch, 0 without one."""
        if self.progress is not None and self.progress["epoch"] == self.epoch:
            return int(self.progress["lsn"])
        return 0


def has_position(item: OutgoingMessage) -> bool:
    """Whether a message has a position: schema and progress messages have none."""
    return item.transaction is not None


def is_recorded(item: OutgoingMessage, record: StreamRecord) -> bool:
    """Whether a message with a position is at or before the record's position."""
    assert item.transaction is not None
    commit_lsn = item.transaction.commit_lsn
    if commit_lsn != record.commit_lsn:
        return commit_lsn < record.commit_lsn
    if item.kind is MessageKind.LOGICAL:
        return item.ordinal < record.next_ordinal
    return item.ordinal < record.next_seq


async def load_progress(bucket: KeyValue, source: str) -> Document | None:
    """The source's progress record in the KV bucket, if there is one."""
    return (await read_progress(bucket, source)).document


class KeptProgress(NamedTuple):
    """The key of a source in the KV bucket: its revision and its progress record, if it has one."""

    revision: int
    document: Document | None


async def read_progress(bucket: KeyValue, source: str) -> KeptProgress:
    """Read the source's key; the revision is 0 if the key never existed."""
    try:
        entry = await bucket.get(f"progress.{source}")
    except KeyNotFoundError as error:
        # A deleted key still has a revision, which the next update must name.
        return KeptProgress((error.entry.revision or 0) if error.entry is not None else 0, None)
    value, revision = entry.value or b"", entry.revision or 0
    try:
        document = decode_payload({"Content-Type": JSON} if value[:1] == b"{" else None, value)
        if any(type(document[key]) is not int for key in ("epoch", "lsn", "stream_seq")):
            raise WireError("not a progress record")
        StreamRecord().note_progress(document)
    except (WireError, *MISFITS):
        return KeptProgress(revision, None)
    return KeptProgress(revision, document)
