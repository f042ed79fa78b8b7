"""The `/status` document, and a history of the last minutes with one sample per second.

The document has the fields of the contract first, then everything that the dashboard shows.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from bridge.telemetry.stats import ENDED_STATES
from consumer_sdk.transport.logfmt import mask_secrets
from consumer_sdk.wire.position import format_lsn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.telemetry.stats import BridgeStats

TABLES_LISTED = 500
SAMPLES_KEPT = 600
REFUSED_SECONDS = 300.0
"""For so long a refused login may be a rotation of credentials."""


def is_alive(stats: BridgeStats) -> bool:
    """False if streaming has ended and trying again is of no use.

    The bridge does not try again, or NATS has refused its login for minutes: a new process may have
    other credentials in its environment.
    """
    if stats.state in ENDED_STATES:
        return False
    since = stats.nats_refused_at
    return since is None or time.monotonic() - since < REFUSED_SECONDS


def health_word(stats: BridgeStats) -> str:
    """The health in one word: ok, warning, critical or failed."""
    if not is_alive(stats):
        return "failed"
    if any(one.severity == "critical" for one in stats.warnings.values()):
        return "critical"
    return "warning" if stats.warnings else "ok"


def status_document(stats: BridgeStats, sample: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state of the bridge without secrets: any client of the port may read it."""
    return {
        "status": stats.state,
        "uptime_seconds": int(stats.uptime_seconds),
        "wal_messages_received": stats.wal_messages_received,
        "cdc_events_published": stats.cdc_events_published,
        "current_lsn": format_lsn(stats.current_lsn),
        "is_connected": stats.is_connected,
        "reconnect_count": stats.reconnect_count,
        "nats_reconnect_count": stats.nats_reconnect_count,
        "last_processing_time_us": stats.last_processing_time_us,
        "slot_active": stats.slot_active,
        "wal_lag_bytes": stats.wal_lag_bytes,
        "wal_lag_mb": round(stats.wal_lag_bytes / 1024**2, 2),
        "source": stats.source,
        "epoch": stats.epoch,
        "health": health_word(stats),
        "now": time.time(),
        "started_at": stats.started_at,
        "nats_connected": stats.nats_connected,
        "confirmed_lsn": format_lsn(stats.confirmed_lsn),
        "received_lsn": format_lsn(stats.received_lsn),
        "transactions_published": stats.transactions_published,
        "publication": stats.publication,
        "database": stats.database,
        "prefix": stats.prefix,
        "mode": stats.mode,
        "versions": {
            "bridge": stats.bridge_version,
            "postgres": stats.postgres_version,
            "nats": stats.nats_version,
        },
        "last_error": mask_secrets(stats.last_error) if stats.last_error else None,
        "waiting_for": mask_secrets(str(stats.waiting)) if stats.waiting else None,
        "ring": {
            "depth": stats.ring_depth,
            "capacity": stats.ring_capacity,
            "bytes": stats.ring_bytes,
            "max_bytes": stats.ring_max_bytes,
        },
        "wal": _wal(stats),
        "latency": {
            "bounds_seconds": list(stats.latency.bounds),
            "counts": list(stats.latency.counts),
        },
        "tables": _tables(stats),
        "table_count": len(stats.per_table),
        "snapshots": [
            {"snapshot_id": key, **asdict(progress)} for key, progress in stats.snapshots.items()
        ],
        "warnings": [
            {"key": key, **asdict(warning)} for key, warning in sorted(stats.warnings.items())
        ],
        "sample": sample,
    }


def _wal(stats: BridgeStats) -> dict[str, Any]:
    return {
        "status": stats.wal_status,
        "restart_lsn": format_lsn(stats.slot_restart_lsn),
        "retained_bytes": stats.retained_wal_bytes,
        "safe_bytes": stats.safe_wal_size,
        "limit_bytes": stats.max_slot_wal_keep_bytes,
        "headroom_seconds": stats.wal_headroom_seconds,
        "spill_txns": stats.slot_spill_txns,
        "spill_bytes": stats.slot_spill_bytes,
        "warning_bytes": stats.wal_warning_bytes,
        "critical_bytes": stats.wal_critical_bytes,
        "checked_at": stats.wal_checked_at or None,
    }


def _tables(stats: BridgeStats) -> list[dict[str, Any]]:
    shown = stats.per_table.items()
    if len(shown) > TABLES_LISTED:
        newest = heapq.nlargest(TABLES_LISTED, shown, key=lambda item: item[1].last_ts)
        return [{"table": token, **asdict(table)} for token, table in newest]
    return [{"table": token, **asdict(table)} for token, table in shown]


@dataclass(slots=True, frozen=True)
class Sample:
    """The rates of one second; latencies are None if nothing was acknowledged in it."""

    ts: float
    events_per_second: float
    latency_p50_seconds: float | None
    latency_p99_seconds: float | None
    wal_lag_bytes: int
    ring_depth: int
    ring_bytes: int


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate a quantile from bucket counts, linear within the bucket; None without any count."""
    total = sum(counts)
    if total == 0:
        return None
    wanted = share * total
    below = 0
    lower = 0.0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            if index == len(bounds):
                return bounds[-1]
            return lower + (bounds[index] - lower) * (wanted - below) / count
        below += count
        lower = bounds[min(index, len(bounds) - 1)]
    return bounds[-1]


class History:
    """Samples the stats every second and keeps ten minutes of them."""

    def __init__(self, stats: BridgeStats) -> None:
        self._stats = stats
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._events = stats.cdc_events_published
        self._latency = list(stats.latency.counts)
        self._at = time.monotonic()

    @property
    def latest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def take(self) -> Sample:
        """Add a sample for the time since the last one."""
        stats, now = self._stats, time.monotonic()
        elapsed = max(now - self._at, 1e-3)
        counts = list(stats.latency.counts)
        fresh = [after - before for after, before in zip(counts, self._latency, strict=True)]
        sample = Sample(
            ts=time.time(),
            events_per_second=(stats.cdc_events_published - self._events) / elapsed,
            latency_p50_seconds=quantile(stats.latency.bounds, fresh, 0.5),
            latency_p99_seconds=quantile(stats.latency.bounds, fresh, 0.99),
            wal_lag_bytes=stats.wal_lag_bytes,
            ring_depth=stats.ring_depth,
            ring_bytes=stats.ring_bytes,
        )
        self._events, self._latency, self._at = stats.cdc_events_published, counts, now
        self._samples.append(sample)
        return sample

    def document(self) -> dict[str, list[Any]]:
        """All samples by column, oldest first."""
        return {
            column.name: [getattr(sample, column.name) for sample in self._samples]
            for column in fields(Sample)
        }

    def latest_document(self) -> dict[str, Any] | None:
        return asdict(self.latest) if self.latest is not None else None

    async def run(self, interval: float = 1.0) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(interval)
            self.take()
