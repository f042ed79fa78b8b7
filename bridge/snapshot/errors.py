"""Errors of snapshots, by their effect on the request.

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
    """A request is refused; the message gives the reason and an alternative."""


class ForeignTable(BridgeError):
    """Another source of the same stream publishes the table."""


class SnapshotError(BridgeError):
    """A snapshot that was begun cannot be completed."""
