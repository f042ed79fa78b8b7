"""The messages between the coordinator and a worker; each is one line of JSON.

    coordinator      worker
    CopyTask      →                connects to NATS and PostgreSQL, imports the snapshot
                  ←  Connected
    LockTables    →                locks every table
                  ←  LocksTaken
    StartCopying  →
                  ←  PieceWanted        answered by CopyPiece, or NoMorePieces
                  ←  PieceCut           after CopyPiece of a piece with `rows`
                  ←  ChunkNumberWanted  answered by ChunkNumber, or TableCancelled
                  ←  ObjectAnnounced, ChunkStored, DictionaryTrained
                  ←  TableFinished, or TableFailed
                  ←  CopyDone           the worker is idle now
    Ping          →                before the next CopyTask
                  ←  Pong
                  ←  WorkerFailed       instead of any other: the process ends

In addition, a worker sends Alive every few seconds. `table` is an index of the task's tables.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from bridge.errors import SnapshotError
from bridge.jetstream.dictionaries import ZstdDictionary  # noqa: TC001 - msgspec reads it
from bridge.postgres.login import Conninfo
from bridge.snapshot.tables import Piece, TableDescription  # noqa: TC001 - msgspec reads them
from consumer_sdk.transport.passwords import PasswordSource
from consumer_sdk.wire.subjects import Subjects

ChunkFormat: TypeAlias = Literal["msgpack", "json", "arrow"]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One message; its class is its tag."""


class ServerAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a worker connects to PostgreSQL (`conninfo`) and to NATS (`nats`, its settings).

    A worker reads a password file, or runs the command, itself and for every connection.
    """

    conninfo: str
    nats: dict[str, Any]
    password_file: str = ""
    password_command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    """The variables for the commands that print passwords."""

    @property
    def login(self) -> Conninfo:
        """The connection string for PostgreSQL, with the source of its password."""
        source = PasswordSource(file=self.password_file, command=self.password_command)
        return Conninfo(self.conninfo, source)


class TableTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table to copy; with `train`, the worker trains a dictionary from its rows."""

    description: TableDescription
    snapshot_id: str
    format: ChunkFormat
    zstd: bool
    dictionary: ZstdDictionary | None
    train: bool
    attempt: str = ""
    """Of a table in groups: names this attempt at one group in message ids and objects."""


class CopyTask(Message, frozen=True):
    """Everything that a worker needs to copy tables of one export."""

    worker: int
    access: ServerAccess
    snapshot_name: str
    snapshot_lsn: int
    source: str
    epoch: int
    prefix: str
    init_stream: str
    """Its name, which does not follow from the prefix where `--init-stream` is set."""
    chunk_rows: int
    tables: tuple[TableTask, ...]

    @property
    def subjects(self) -> Subjects:
        """Names on NATS."""
        subjects = Subjects(self.prefix)
        subjects.init_stream = self.init_stream
        return subjects


class Ping(Message, frozen=True):
    """Asks an idle worker whether it still works."""


class LockTables(Message, frozen=True):
    """Lock every table; limits the wait for the locks and the idle time with them."""

    lock_seconds: float
    idle_seconds: float


class StartCopying(Message, frozen=True):
    """All workers hold their locks, and the tables have not changed."""


class CopyPiece(Message, frozen=True):
    """Copy this piece next."""

    table: int
    piece: Piece


class NoMorePieces(Message, frozen=True):
    """No piece is left: send the remaining rows, then CopyDone."""


class ChunkNumber(Message, frozen=True):
    """The number for the chunk that the worker is ready to send."""

    number: int


class TableCancelled(Message, frozen=True):
    """No more chunks of this table are wanted."""


class Alive(Message, frozen=True):
    """The worker does not hang, although it may be slow."""


class Pong(Message, frozen=True):
    """The answer of an idle worker to Ping."""


class Connected(Message, frozen=True):
    """The snapshot is imported by this backend."""

    backend_pid: int


class LocksTaken(Message, frozen=True):
    """Every table is locked, except those with an error here."""

    errors: dict[int, str]


class PieceWanted(Message, frozen=True):
    """The worker has nothing to copy."""


class PieceCut(Message, frozen=True):
    """The piece that the worker copies now ends before this key; None: at the end of the table."""

    table: int
    end: tuple[str, ...] | None


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
    """All rows that this worker has read from the table are in acknowledged chunks."""

    table: int


class TableFailed(Message, frozen=True):
    """The table cannot be copied; the worker continues with others.

    With `is_passing`, the reason is NATS: another attempt may succeed.
    """

    table: int
    error: str
    is_passing: bool = False


class CopyDone(Message, frozen=True):
    """The worker has released its locks."""


class WorkerFailed(Message, frozen=True):
    """The worker ends."""

    error: str


Command: TypeAlias = (
    Ping
    | CopyTask
    | LockTables
    | StartCopying
    | CopyPiece
    | NoMorePieces
    | ChunkNumber
    | TableCancelled
)
"""From the coordinator to a worker."""

Report: TypeAlias = (
    Alive
    | Pong
    | Connected
    | LocksTaken
    | PieceWanted
    | PieceCut
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
    """Encode a message as one line."""
    return _encoder.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Decode a line from the coordinator; SnapshotError if it is not a command."""
    try:
        return _commands.decode(line)
    except _DAMAGED:
        # The error's own text can quote the message, which contains credentials.
        raise SnapshotError("the bridge sent an invalid message to its snapshot worker") from None


def decode_report(line: bytes) -> Report:
    """Decode a line from a worker; SnapshotError if it is not a report."""
    try:
        return _reports.decode(line)
    except _DAMAGED:
        raise SnapshotError("a snapshot worker sent an invalid message to the bridge") from None


def unexpected(message: Command | Report) -> SnapshotError:
    """The error for a message that the protocol does not allow at this point."""
    return SnapshotError(
        f"the bridge and a snapshot worker disagree: {type(message).__name__} was not expected"
    )
