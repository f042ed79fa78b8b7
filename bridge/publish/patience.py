"""How long nothing could be stored, and what an operator is told meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from bridge.telemetry.stats import StatusWarning
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from nats.aio.client import Client

    from bridge.telemetry.stats import BridgeStats

log = logging.getLogger("bridge.publish")

RETRY_SECONDS = 2.0
RECONNECT_SECONDS = 0.25
BRING_BACK = "bring NATS back; PostgreSQL keeps the WAL meanwhile"
FREE_ROOM = "free room in the stream or raise its limits; the bridge goes on by itself"
ASK_CHECK = "`bridge check` tells what the stream does not take; the bridge goes on by itself"


class PatienceEnded(Exception):
    """Nothing could be stored for so long that PostgreSQL must not be kept waiting."""


class Patience:
    """Waits before the next attempt, and ends when attempts have failed for too long."""

    def __init__(self, client: Client, stats: BridgeStats, away_seconds: float) -> None:
        self._client = client
        self._stats = stats
        self._away_seconds = away_seconds
        self._failing_since: float | None = None

    def renew(self) -> None:
        """Nothing to store, and NATS is there: what failed before does not count."""
        self._failing_since = None

    def reward(self) -> None:
        """Something was stored."""
        self._failing_since = None
        self._stats.warnings.pop("publish", None)

    def note(self, reason: str) -> None:
        """Remember since when nothing can be stored; PatienceEnded when that is too long ago."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since > self._away_seconds:
            raise PatienceEnded(reason)

    async def wait(self, reason: str, remedy: str = BRING_BACK) -> None:
        """Wait before the next attempt, and say what the operator can do."""
        self.note(reason)
        if "publish" not in self._stats.warnings:
            event(log, "cannot publish", level=logging.WARNING, reason=reason)
        self._stats.warnings["publish"] = StatusWarning(f"nothing can be stored: {reason}", remedy)
        self._stats.last_error = reason
        await asyncio.sleep(RETRY_SECONDS if self._client.is_connected else RECONNECT_SECONDS)
