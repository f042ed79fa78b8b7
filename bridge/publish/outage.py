"""How long nothing could be stored, and the warning that the operator sees meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from nats.aio.client import Client

    from bridge.telemetry.stats import BridgeStats

log = logging.getLogger("bridge.publish")

RETRY_SECONDS = 2.0
RECONNECT_SECONDS = 0.25
WARNING = "publish"
RESTORE_NATS = "bring NATS back; PostgreSQL keeps the WAL meanwhile"
FREE_SPACE = "free room in the stream or raise its limits; the bridge goes on by itself"
RUN_CHECK = "`bridge check` reports why the stream refuses it; the bridge goes on by itself"


class OutageTooLong(Exception):
    """Nothing could be stored for so long that the replication connection must be closed."""


class Outage:
    """Waits between attempts to store something; OutageTooLong when they fail for too long."""

    def __init__(self, client: Client, stats: BridgeStats, limit_seconds: float) -> None:
        self._client = client
        self._stats = stats
        self._limit_seconds = limit_seconds
        self._since: float | None = None
        self._warned = False

    def reset(self) -> None:
        """NATS is connected and there is nothing to store: the outage does not count on."""
        self._since = None

    def end(self) -> None:
        """Something was stored: the outage is over, and its warning is cleared."""
        self._since = None
        self._warned = False
        # An earlier streaming session may have left the warning.
        self._stats.clear_warning(WARNING)

    def note(self, reason: str) -> None:
        """Note that nothing can be stored; OutageTooLong once that lasts too long."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since > self._limit_seconds:
            raise OutageTooLong(reason)

    async def wait(self, reason: str, remedy: str = RESTORE_NATS) -> None:
        """Wait before the next attempt, and warn the operator with a remedy."""
        self.note(reason)
        if not self._warned:
            self._warned = True
            event(log, "cannot publish", level=logging.WARNING, reason=reason)
        self._stats.warn(WARNING, f"nothing can be stored: {reason}", remedy)
        self._stats.last_error = reason
        await asyncio.sleep(RETRY_SECONDS if self._client.is_connected else RECONNECT_SECONDS)
