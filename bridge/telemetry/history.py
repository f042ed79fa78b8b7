"""The last minutes of the bridge, a sample a second: a freshly opened dashboard has a past."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.telemetry.stats import BridgeStats

SAMPLES_KEPT = 600


@dataclass(slots=True, frozen=True)
class Sample:
    """What happened in one second; latencies are None when nothing was acknowledged in it."""

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
        """Add the sample of the time since the last one."""
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
