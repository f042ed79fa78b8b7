"""Every Prometheus metric of the bridge, built from BridgeStats when scraped."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from bridge.telemetry.stats import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from bridge.telemetry.stats import BridgeStats, Histogram

TABLES_SHOWN = 500
OTHER_TABLES = "$other"

_COUNTERS: tuple[tuple[str, str, Callable[[BridgeStats], float]], ...] = (
    (
        "bridge_wal_messages_received",
        "Replication messages read from PostgreSQL",
        lambda s: s.wal_messages_received,
    ),
    (
        "bridge_wal_bytes_received",
        "Bytes of replication messages read from PostgreSQL",
        lambda s: s.wal_bytes_received,
    ),
    (
        "bridge_cdc_events_published",
        "Events acknowledged by the CDC stream",
        lambda s: s.cdc_events_published,
    ),
    (
        "bridge_transactions_published",
        "Transactions acknowledged whole by the CDC stream",
        lambda s: s.transactions_published,
    ),
    (
        "bridge_reconnects",
        "Times the replication connection was lost and opened again",
        lambda s: s.reconnect_count,
    ),
    (
        "bridge_nats_reconnects",
        "Times the NATS connection was lost and opened again",
        lambda s: s.nats_reconnect_count,
    ),
)

_GAUGES: tuple[tuple[str, str, Callable[[BridgeStats], float | None]], ...] = (
    ("bridge_uptime_seconds", "Seconds since the bridge started", lambda s: s.uptime_seconds),
    ("bridge_epoch", "Epoch of the source, Unix seconds", lambda s: s.epoch),
    (
        "bridge_last_ack_lsn",
        "LSN confirmed to PostgreSQL: all up to it is stored in the stream",
        lambda s: s.confirmed_lsn,
    ),
    ("bridge_current_lsn", "LSN of the last decoded change", lambda s: s.current_lsn),
    ("bridge_received_lsn", "End of WAL as last reported by PostgreSQL", lambda s: s.received_lsn),
    ("bridge_connected", "1 while the replication connection is open", lambda s: s.is_connected),
    ("bridge_nats_connected", "1 while NATS is connected", lambda s: s.nats_connected),
    (
        "bridge_last_processing_time_us",
        "Microseconds from the receipt of the last batch's first WAL message to its ack",
        lambda s: s.last_processing_time_us,
    ),
    ("bridge_ring_depth", "Entries waiting between reader and publisher", lambda s: s.ring_depth),
    ("bridge_ring_capacity", "Entries the ring can hold", lambda s: s.ring_capacity),
    ("bridge_ring_bytes", "Bytes waiting in the ring", lambda s: s.ring_bytes),
    ("bridge_ring_max_bytes", "Bytes the ring may hold", lambda s: s.ring_max_bytes),
    ("bridge_slot_active", "1 while the slot is in use by a walsender", lambda s: s.slot_active),
    (
        "bridge_wal_lag_bytes",
        "WAL written after the position confirmed by the bridge",
        lambda s: s.wal_lag_bytes,
    ),
    (
        "bridge_retained_wal_bytes",
        "WAL PostgreSQL keeps on disk for the slot",
        lambda s: s.retained_wal_bytes,
    ),
    (
        "bridge_wal_safe_bytes",
        "WAL that can still be written before the slot is lost; absent without a limit",
        lambda s: s.safe_wal_size,
    ),
    (
        "bridge_wal_headroom_seconds",
        "Seconds until the slot is lost at the current rate of writing; absent without a limit",
        lambda s: s.wal_headroom_seconds,
    ),
    (
        "bridge_slot_spill_txns",
        (
            "Transactions that PostgreSQL wrote to disk while decoding, because they exceeded "
            "logical_decoding_work_mem; since its statistics of the slot were reset"
        ),
        lambda s: s.slot_spill_txns,
    ),
    (
        "bridge_slot_spill_bytes",
        "Bytes that PostgreSQL wrote to disk while decoding; since its statistics were reset",
        lambda s: s.slot_spill_bytes,
    ),
    (
        "bridge_wal_checked_timestamp_seconds",
        "When the slot was last read, Unix seconds",
        lambda s: s.wal_checked_at,
    ),
    ("bridge_warnings", "Warnings shown now", lambda s: len(s.warnings)),
)


class BridgeCollector(Collector):
    """Reads the stats when scraped, so that metrics cost the pipeline no time."""

    def __init__(self, stats: BridgeStats) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Collect nothing at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, read in _COUNTERS:
            yield CounterMetricFamily(name, text, value=read(stats))
        for name, text, read_gauge in _GAUGES:
            value = read_gauge(stats)
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        yield _histogram(
            "bridge_commit_to_ack_seconds",
            "Time from commit in PostgreSQL to acknowledgement by the stream",
            stats.latency,
        )
        yield _histogram("bridge_batch_events", "Events per published batch", stats.batches)
        yield InfoMetricFamily(
            "bridge",
            "What is running",
            value={
                "version": stats.bridge_version,
                "source": stats.source,
                "mode": stats.mode,
                "postgres": stats.postgres_version,
                "nats": stats.nats_version,
            },
        )
        states = GaugeMetricFamily("bridge_state", "1 for the present state", labels=["state"])
        for state in State:
            states.add_metric([state], float(stats.state == state))
        yield states
        yield from _wal_status(stats)
        yield from _tables(stats)
        yield from _snapshots(stats)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    cumulative = histogram.cumulative()
    bounds = [*(repr(bound) for bound in histogram.bounds), "+Inf"]
    buckets = [(bound, float(count)) for bound, count in zip(bounds, cumulative, strict=True)]
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


def _wal_status(stats: BridgeStats) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "bridge_wal_status", "1 for the slot's present wal_status", labels=["wal_status"]
    )
    for status in ("reserved", "extended", "unreserved", "lost"):
        family.add_metric([status], float(stats.wal_status == status))
    yield family


def _tables(stats: BridgeStats) -> Iterator[Metric]:
    events = CounterMetricFamily(
        "bridge_table_events", "Acknowledged events per table", labels=["table"]
    )
    last = GaugeMetricFamily(
        "bridge_table_last_commit_seconds",
        "Commit time of the newest acknowledged event per table, Unix seconds",
        labels=["table"],
    )
    for token, table in islice(stats.per_table.items(), TABLES_SHOWN):
        events.add_metric([token], table.events)
        last.add_metric([token], table.last_ts / 1e6)
    if len(stats.per_table) > TABLES_SHOWN:
        rest = islice(stats.per_table.values(), TABLES_SHOWN, None)
        events.add_metric([OTHER_TABLES], sum(table.events for table in rest))
    yield events
    yield last


def _snapshots(stats: BridgeStats) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "bridge_snapshot_requests", "Snapshot requests by what became of them", labels=["outcome"]
    )
    for outcome, count in stats.snapshot_requests.items():
        requests.add_metric([outcome], count)
    yield requests
    labels = ["table", "snapshot_id"]
    running = [(key, one) for key, one in stats.snapshots.items() if one.finished_at is None]
    yield GaugeMetricFamily("bridge_snapshots_running", "Snapshots under way", value=len(running))
    rows = GaugeMetricFamily(
        "bridge_snapshot_rows", "Rows stored by a running snapshot", labels=labels
    )
    chunks = GaugeMetricFamily(
        "bridge_snapshot_chunks", "Chunks stored by a running snapshot", labels=labels
    )
    total = GaugeMetricFamily(
        "bridge_snapshot_estimated_rows", "Rows the planner expects", labels=labels
    )
    age = GaugeMetricFamily(
        "bridge_snapshot_age_seconds", "Seconds since a running snapshot began", labels=labels
    )
    now = time.time()
    for snapshot_id, one in running:
        rows.add_metric([one.table, snapshot_id], one.rows)
        chunks.add_metric([one.table, snapshot_id], one.chunks)
        age.add_metric([one.table, snapshot_id], now - one.started_at)
        if one.total_estimate is not None:
            total.add_metric([one.table, snapshot_id], one.total_estimate)
    yield from (rows, chunks, total, age)


def registry_for(stats: BridgeStats) -> CollectorRegistry:
    """A separate registry with the metrics of the bridge and of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BridgeCollector(stats))
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The exposition text, version 0.0.4."""
    return generate_latest(registry)
