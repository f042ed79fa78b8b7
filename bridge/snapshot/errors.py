"""Errors of snapshots, by what becomes of the request.

Refused
    The request is answered with the reason; no snapshot was begun.
ForeignTable
    The request is not answered, because the bridge that publishes the table answers it.
SnapshotError
    The snapshot fails with this message; the next request begins a new one.
"""

from __future__ import annotations

from bridge.errors import BridgeError


class Refused(BridgeError):
    """A request that cannot be granted; the message says why, and what can be asked instead."""


class ForeignTable(BridgeError):
    """A table that another source of the same stream publishes."""


class SnapshotError(BridgeError):
    """A snapshot that was begun cannot be completed."""
