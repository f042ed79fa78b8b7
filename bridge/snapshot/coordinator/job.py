"""One snapshot under way, from the request to its end."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from consumer_sdk.wire.checksums import snapshot_checksum
from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    from bridge.snapshot.coordinator.requests import Options
    from bridge.snapshot.tables import Piece, TableShape
    from bridge.telemetry.stats import SnapshotGauge

State = Literal["waiting", "copying", "ready", "failed"]
Key = tuple[str, str, "Options"]


def new_snapshot_id() -> str:
    """An id that no other snapshot has or will have, safe as a token of a subject."""
    return f"{time.time_ns() // 1_000_000:x}-{secrets.token_hex(6)}"


@dataclass(slots=True)
class Job:
    """A snapshot of one table with one set of options; all who ask for it share it."""

    schema: str
    table: str
    options: Options
    asked: dict[str, Any]
    snapshot_id: str
    progress: SnapshotGauge
    state: State = "waiting"
    attempts: int = 0
    record_revision: int = 0
    shape: TableShape | None = None
    described: dict[str, Any] = field(default_factory=dict)
    """The schema document of the table."""
    snapshot_lsn: int = 0
    cdc_seq: int = 0
    stream_created: int = 0
    pieces: list[Piece] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)
    next_chunk: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    rows: int = 0
    objects: list[str] = field(default_factory=list)
    waiting_for: list[str] = field(default_factory=list)
    error: str | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no worker can send a chunk of it any more."""

    @property
    def key(self) -> Key:
        """What two requests must have in common to share this snapshot."""
        return self.schema, self.table, self.options

    @property
    def token(self) -> str:
        return table_token(self.schema, self.table)

    @property
    def name(self) -> str:
        """The table as SQL spells it."""
        return format_table_name(self.schema, self.table)

    @property
    def is_over(self) -> bool:
        return self.state in ("ready", "failed")

    @property
    def is_copied(self) -> bool:
        """Whether every row is in an acknowledged chunk."""
        return not self.pieces and not self.workers and len(self.digests) == self.next_chunk

    def take_number(self) -> int | None:
        """The number of the next chunk, None if no more are wanted."""
        if self.is_over:
            return None
        number = self.next_chunk
        self.next_chunk += 1
        return number

    def note_stored(self, chunk: int, rows: int, digest: str) -> None:
        """Count a chunk that the stream has acknowledged."""
        self.digests[chunk] = digest
        self.rows += rows
        self.progress.rows = self.rows
        self.progress.chunks = len(self.digests)

    def checksum(self) -> str:
        """The checksum of all chunks together, for the meta."""
        return snapshot_checksum(self.digests, self.next_chunk)
