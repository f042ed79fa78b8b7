"""Peak memory of the bridge through one huge transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench import throughput

if TYPE_CHECKING:
    from tests.bench.rig import Rig

ROWS = 5_000_000


@dataclass(frozen=True)
class MemoryResult:
    rows: int
    peak_rss_mb: float
    seconds: float


def measure(rig: Rig, rows: int = ROWS) -> MemoryResult:
    """Stream one transaction of so many rows, packed to keep the stream's size within reason."""
    prepared = throughput.Prepared(rig, throughput.Workload("one transaction", rows, rows))
    try:
        seconds, used = throughput.bridge_run(prepared, ("--pack",))
    finally:
        prepared.drop()
    return MemoryResult(rows, used["rss"], seconds)
