"""Where the bridge's log lines go, and the METRICS line."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any, Literal, TextIO

from consumer_sdk.transport.logfmt import JsonFormatter, LogfmtFormatter, event
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from bridge.telemetry.stats import BridgeStats

LogFormat = Literal["logfmt", "json"]


def configure_logging(
    level: str | int = "info", fmt: LogFormat = "logfmt", stream: TextIO | None = None
) -> None:
    """Send all logging of the process to one stream, standard error by default."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if fmt == "json" else LogfmtFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper() if isinstance(level, str) else level)
    logging.captureWarnings(capture=True)
    if root.level > logging.DEBUG:
        # Libraries log every reconnect; the bridge logs it once, with a remedy.
        for noisy in ("nats", "aiohttp.access", "asyncio"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


class MetricsLine:
    """The METRICS log line: the state of the bridge in one line."""

    def __init__(self) -> None:
        self._events_before = 0
        self._uptime_before = 0.0

    def fields(self, stats: BridgeStats) -> dict[str, Any]:
        """The line's fields in order; `rate` is events per second since the last call."""
        uptime = stats.uptime_seconds
        elapsed = max(uptime - self._uptime_before, 1e-3)
        rate = (stats.cdc_events_published - self._events_before) / elapsed
        self._events_before, self._uptime_before = stats.cdc_events_published, uptime
        return {
            "uptime": int(uptime),
            "wal_messages": stats.wal_messages_received,
            "cdc_events": stats.cdc_events_published,
            "lsn": format_lsn(stats.current_lsn),
            "connected": int(stats.is_connected),
            "reconnects": stats.reconnect_count,
            "nats_reconnects": stats.nats_reconnect_count,
            "lag_bytes": stats.wal_lag_bytes,
            "slot_active": int(stats.slot_active),
            "confirmed_lsn": format_lsn(stats.confirmed_lsn),
            "state": stats.state,
            "rate": round(rate, 1),
            "ring": stats.ring_depth,
            "warnings": len(stats.warnings),
        }

    async def run(self, stats: BridgeStats, interval: float = 15.0) -> None:
        """Log the line every interval until cancelled."""
        logger = logging.getLogger("bridge.metrics")
        while True:
            await asyncio.sleep(interval)
            event(logger, "METRICS", **self.fields(stats))
