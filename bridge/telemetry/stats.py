"""The bridge's counters and gauges: the pipeline writes them and telemetry reads them.

Everything runs on one event loop, so no locks are needed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple


class State(StrEnum):
    """The state of a bridge."""

    STARTING = "starting"
    STANDBY = "standby"
    """Another bridge streams from the slot."""
    STREAMING = "streaming"
    RECONNECTING = "reconnecting"
    """The bridge has streamed before and tries to stream again."""
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED_STATES = frozenset({State.STOPPED, State.FAILED})
WarningSeverity = Literal["warning", "critical"]
SnapshotState = Literal["waiting", "copying", "done", "failed", "cancelled"]

MOST_COUNTERS = 1000
MESSAGE_TOKENS = "$message."
LATENCY_BOUNDS_SECONDS = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.1, 0.15,
    0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0,
    1800.0,
)  # fmt: skip
BATCH_BOUNDS_EVENTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)
FINISHED_SNAPSHOTS_KEPT = 20
REQUEST_OUTCOMES = ("granted", "refused", "busy", "dropped", "ignored")
"""What became of a snapshot request: `busy` may succeed later, `dropped` got no answer because of
too many others, `ignored` had a reply subject that is no inbox."""


class Histogram:
    """Counts per fixed bucket, the last one for everything beyond the largest bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[int]:
        """Cumulative counts for each bound; the last is the count of all values."""
        running = 0
        sums = []
        for count in self.counts:
            running += count
            sums.append(running)
        return sums


@dataclass(slots=True)
class TableStats:
    """Acknowledged events of one table; `last_ts` is the newest commit time in microseconds."""

    events: int = 0
    last_ts: int = 0


@dataclass(slots=True)
class SnapshotGauge:
    """The state of one snapshot; `waiting_for` names the transactions that it waits for."""

    table: str
    state: SnapshotState = "waiting"
    rows: int = 0
    chunks: int = 0
    started_at: float = field(default_factory=time.time)
    waiting_for: list[str] = field(default_factory=list)
    total_estimate: int | None = None
    finished_at: float | None = None
    error: str | None = None
    group: int | None = None
    """The group of key ranges under way, from 1, if the table is copied in groups."""


@dataclass(slots=True, frozen=True)
class StatusWarning:
    """A warning for the operator, with its remedy."""

    text: str
    remedy: str
    severity: WarningSeverity = "warning"


class Waiting(NamedTuple):
    """What a start waits for: a step, which anybody may see, and details, such as sessions."""

    step: str
    details: str

    def __str__(self) -> str:
        return f"{self.step}: {self.details}"


class BridgeStats:
    """All counters and gauges of one bridge; "published" always means acknowledged."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.started_monotonic = time.monotonic()
        self.state = State.STARTING
        self.source = ""
        self.epoch = 0
        self.publication = ""
        self.database = ""
        self.prefix = ""
        self.mode: Literal["", "fast-ingest", "plain"] = ""
        self.bridge_version = ""
        self.postgres_version = ""
        self.nats_version = ""
        self.last_error: str | None = None

        self.wal_messages_received = 0
        self.wal_bytes_received = 0
        self.cdc_events_published = 0
        self.transactions_published = 0
        self.current_lsn = 0
        self.received_lsn = 0
        self.confirmed_lsn = 0
        self.last_processing_time_us = 0

        self.is_connected = False
        self.nats_connected = False
        self.nats_refused_at: float | None = None
        """Since when NATS refuses the login, on the monotonic clock; None if it does not."""
        self.reconnect_count = 0
        self.nats_reconnect_count = 0

        self.ring_depth = 0
        self.ring_capacity = 0
        self.ring_bytes = 0
        self.ring_max_bytes = 0

        self.slot_active = False
        self.is_ready = False
        """Whether consumers find a schema for every table."""
        self.waiting: Waiting | None = None
        """What the bridge waits for before it is ready, if it is known."""
        self.wal_lag_bytes = 0
        self.wal_status = ""
        self.slot_restart_lsn = 0
        self.retained_wal_bytes = 0
        self.safe_wal_size: int | None = None
        self.slot_spill_txns = 0
        self.slot_spill_bytes = 0
        self.max_slot_wal_keep_bytes: int | None = None
        self.wal_headroom_seconds: float | None = None
        self.wal_checked_at = 0.0
        self.wal_warning_bytes = 512 * 1024**2
        self.wal_critical_bytes = 1024**3

        self.latency = Histogram(LATENCY_BOUNDS_SECONDS)
        self.batches = Histogram(BATCH_BOUNDS_EVENTS)
        self.per_table: dict[str, TableStats] = {}
        self.snapshots: dict[str, SnapshotGauge] = {}
        self.snapshot_requests = dict.fromkeys(REQUEST_OUTCOMES, 0)
        self.warnings: dict[str, StatusWarning] = {}

        self.observe_batch = self.batches.observe
        self.observe_latency = self.latency.observe

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self.started_monotonic

    def table(self, token: str) -> TableStats:
        """The counters of a table or of a prefix of logical messages; created at first use."""
        found = self.per_table.get(token)
        if found is None:
            if len(self.per_table) >= MOST_COUNTERS and token.startswith(MESSAGE_TOKENS):
                # Prefixes are free text: too many different ones must not fill the memory.
                token = MESSAGE_TOKENS + "*"
            found = self.per_table.setdefault(token, TableStats())
        return found

    def warn(self, key: str, text: str, remedy: str, severity: WarningSeverity = "warning") -> bool:
        """Show a warning until it is cleared; True if it is new or its severity has changed."""
        before = self.warnings.get(key)
        self.warnings[key] = StatusWarning(text, remedy, severity)
        return before is None or before.severity != severity

    def clear_warning(self, key: str) -> bool:
        """Remove a warning; True if there was one."""
        return self.warnings.pop(key, None) is not None

    def begin_snapshot(self, snapshot_id: str, table: str) -> SnapshotGauge:
        """Show a new snapshot, and remove the oldest finished ones beyond a few."""
        progress = self.snapshots[snapshot_id] = SnapshotGauge(table)
        finished = [key for key, one in self.snapshots.items() if one.finished_at is not None]
        for key in finished[:-FINISHED_SNAPSHOTS_KEPT]:
            del self.snapshots[key]
        return progress
