"""The SDK for consumers of the change stream.

Each name is imported at its first use, because every import of a submodule runs this file: the
bridge, the commands and Spark's workers need `consumer_sdk.wire` without waiting for the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from consumer_sdk.reading.log import (
        LogBounds,
        LogReader,
        read_log_blocking,
        read_log_blocking_raw,
    )
    from consumer_sdk.reading.progress import Progress
    from consumer_sdk.reading.starting_point import SourcePosition
    from consumer_sdk.reading.transactions import Transaction
    from consumer_sdk.snapshot.chunks import ChunkRows
    from consumer_sdk.snapshot.request import SnapshotProgress
    from consumer_sdk.snapshot.snapshot import Snapshot, SnapshotMeta
    from consumer_sdk.transport.api import Frame
    from consumer_sdk.transport.settings import NatsSettings
    from consumer_sdk.transport.version import __version__
    from consumer_sdk.wire.column_types import Column, TableSchema
    from consumer_sdk.wire.envelope import Event
    from consumer_sdk.wire.position import Position, format_lsn, parse_lsn

_SUBMODULES = ("client", "errors", "wire")
_MODULES = {
    "AccessDenied": "errors",
    "CdcError": "errors",
    "ChangeFeed": "reading.changes",
    "ChunkRows": "snapshot.chunks",
    "Client": "client",
    "Column": "wire.column_types",
    "CorruptData": "errors",
    "Event": "wire.envelope",
    "Frame": "transport.api",
    "GapError": "errors",
    "LogBounds": "reading.log",
    "LogReader": "reading.log",
    "NatsSettings": "transport.settings",
    "NotAvailable": "errors",
    "Position": "wire.position",
    "Progress": "reading.progress",
    "Snapshot": "snapshot.snapshot",
    "SnapshotFailed": "errors",
    "SnapshotMeta": "snapshot.snapshot",
    "SnapshotProgress": "snapshot.request",
    "SourcePosition": "reading.starting_point",
    "Stored": "reading.decoder",
    "TableSchema": "wire.column_types",
    "TargetError": "errors",
    "Transaction": "reading.transactions",
    "UnknownTable": "errors",
    "UsageError": "errors",
    "VersionTooNew": "errors",
    "__version__": "transport.version",
    "connect": "client",
    "format_lsn": "wire.position",
    "parse_lsn": "wire.position",
    "read_log_blocking": "reading.log",
    "read_log_blocking_raw": "reading.log",
}

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
