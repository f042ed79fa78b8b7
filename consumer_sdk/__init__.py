"""What a consumer of the change stream installs."""

from consumer_sdk.client import Client, connect
from consumer_sdk.errors import (
    AccessDenied,
    CdcError,
    CorruptData,
    GapError,
    NotAvailable,
    SnapshotFailed,
    TargetError,
    UnknownTable,
    UsageError,
    VersionTooNew,
)
from consumer_sdk.reading.changes import ChangeFeed
from consumer_sdk.reading.decoder import Stored
from consumer_sdk.reading.log import LogBounds, LogReader, read_log_blocking, read_log_blocking_raw
from consumer_sdk.reading.progress import Progress
from consumer_sdk.reading.starting_point import SourcePosition
from consumer_sdk.reading.stream import Frame
from consumer_sdk.reading.transactions import Transaction
from consumer_sdk.snapshot.chunks import ChunkRows
from consumer_sdk.snapshot.request import SnapshotProgress
from consumer_sdk.snapshot.snapshot import Snapshot, SnapshotMeta
from consumer_sdk.transport.settings import NatsSettings
from consumer_sdk.transport.version import __version__
from consumer_sdk.wire.column_types import Column, TableSchema
from consumer_sdk.wire.envelope import Event
from consumer_sdk.wire.lsn import format_lsn, parse_lsn
from consumer_sdk.wire.position import Position

__all__ = [
    "AccessDenied",
    "CdcError",
    "ChangeFeed",
    "ChunkRows",
    "Client",
    "Column",
    "CorruptData",
    "Event",
    "Frame",
    "GapError",
    "LogBounds",
    "LogReader",
    "NatsSettings",
    "NotAvailable",
    "Position",
    "Progress",
    "Snapshot",
    "SnapshotFailed",
    "SnapshotMeta",
    "SnapshotProgress",
    "SourcePosition",
    "Stored",
    "TableSchema",
    "TargetError",
    "Transaction",
    "UnknownTable",
    "UsageError",
    "VersionTooNew",
    "__version__",
    "connect",
    "format_lsn",
    "parse_lsn",
    "read_log_blocking",
    "read_log_blocking_raw",
]
