"""What the coordinator and a worker say to each other, one line of JSON for each message.

    coordinator      worker
    CopyTask      →                connects to NATS and PostgreSQL, imports the snapshot
                  ←  Connected
    LockTables    →                locks every table
                  ←  LocksTaken
    StartCopying  →
                  ←  PieceWanted        answered by CopyPiece, or NoMorePieces
                  ←  ChunkNumberWanted  answered by ChunkNumber, or TableCancelled
                  ←  ObjectAnnounced, ChunkStored, DictionaryTrained
                  ←  TableFinished, or TableFailed
                  ←  CopyDone           the next CopyTask may come
                  ←  WorkerFailed       instead of any other: the process ends

A worker sends Alive every few seconds beside all that. `table` is an index of the task's tables.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from bridge.snapshot.errors import SnapshotError
from bridge.snapshot.tables import Piece, TableDescription  # noqa: TC001 - msgspec reads them

ChunkFormat: TypeAlias = Literal["msgpack", "json", "arrow"]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message; its class is its tag."""


class ServerAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker reaches PostgreSQL and NATS; `nats` are the settings that name them."""

    conninfo: str
    nats: dict[str, Any]


class TrainedDictionary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A zstd dictionary and the id under which readers find it."""

    id: str
    content: bytes


class TableTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table to be copied; `train` asks for a dictionary from its rows."""

    description: TableDescription
    snapshot_id: str
    format: ChunkFormat
    zstd: bool
    dictionary: TrainedDictionary | None
    train: bool


class CopyTask(Message, frozen=True):
    """Everything a worker must know to copy tables of one export."""

    worker: int
    access: ServerAccess
    snapshot_name: str
    snapshot_lsn: int
    source: str
    epoch: int
    prefix: str
    chunk_rows: int
    tables: tuple[TableTask, ...]


class LockTables(Message, frozen=True):
    """Lock every table; wait and keep the locks no longer than this."""

    lock_seconds: float
    idle_seconds: float


class StartCopying(Message, frozen=True):
    """Every worker holds its locks and the tables are as they were."""


class CopyPiece(Message, frozen=True):
    """Copy this piece next."""

    table: int
    piece: Piece


class NoMorePieces(Message, frozen=True):
    """Send what is left, then be done."""


class ChunkNumber(Message, frozen=True):
    """The number of the chunk that waits for one."""

    number: int


class TableCancelled(Message, frozen=True):
    """No more chunks of this table are wanted."""


class Alive(Message, frozen=True):
    """The worker may be slow, but it does not hang."""


class Connected(Message, frozen=True):
    """The snapshot is imported by this backend."""

    backend_pid: int


class LocksTaken(Message, frozen=True):
    """Every table is locked, except those with an error here."""

    errors: dict[int, str]


class PieceWanted(Message, frozen=True):
    """The worker has nothing to copy."""


class ChunkNumberWanted(Message, frozen=True):
    """A chunk of this table is ready to be sent."""

    table: int


class ObjectAnnounced(Message, frozen=True):
    """A wide row will be stored as this object."""

    table: int
    name: str


class ChunkStored(Message, frozen=True):
    """The stream has acknowledged a chunk."""

    table: int
    number: int
    rows: int
    sha256: str


class DictionaryTrained(Message, frozen=True):
    """A dictionary from rows of this table."""

    table: int
    content: bytes


class TableFinished(Message, frozen=True):
    """Every row that this worker has read of the table is in an acknowledged chunk."""

    table: int


class TableFailed(Message, frozen=True):
    """The table cannot be copied; the worker goes on with others."""

    table: int
    error: str


class CopyDone(Message, frozen=True):
    """The worker has released its locks."""


class WorkerFailed(Message, frozen=True):
    """The worker ends."""

    error: str


Command: TypeAlias = (
    CopyTask | LockTables | StartCopying | CopyPiece | NoMorePieces | ChunkNumber | TableCancelled
)
"""From the coordinator to a worker."""

Report: TypeAlias = (
    Alive
    | Connected
    | LocksTaken
    | PieceWanted
    | ChunkNumberWanted
    | ObjectAnnounced
    | ChunkStored
    | DictionaryTrained
    | TableFinished
    | TableFailed
    | CopyDone
    | WorkerFailed
)
"""From a worker to the coordinator."""

_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError)
_encoder = msgspec.json.Encoder()
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """The message as a line."""
    return _encoder.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Read a line of the coordinator; SnapshotError if it is no command."""
    try:
        return _commands.decode(line)
    except _DAMAGED:
        # The error's own text can quote the message, which holds credentials.
        raise SnapshotError("the bridge sent its snapshot worker no valid message") from None


def decode_report(line: bytes) -> Report:
    """Read a line of a worker; SnapshotError if it is no report."""
    try:
        return _reports.decode(line)
    except _DAMAGED:
        raise SnapshotError("a snapshot worker sent the bridge no valid message") from None


def unexpected(message: Command | Report) -> SnapshotError:
    """The error for a message that has no place at this point of the conversation."""
    return SnapshotError(
        f"the bridge and a snapshot worker disagree: {type(message).__name__} was not expected"
    )
