"""Judges a reading of the slot: which warnings stand, and what the operator should do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from bridge.telemetry.stats import BridgeStats

HEADROOM_WARNING_SECONDS = 1800.0
HEADROOM_CRITICAL_SECONDS = 300.0

LOST_REMEDY = (
    "changes are gone from WAL: drop the slot (bridge drop --slot {slot} --yes), start with "
    "--on-gap=new-epoch, consumers bootstrap again; then raise max_slot_wal_keep_size"
)


@dataclass(slots=True, frozen=True)
class SlotReading:
    """One row about the slot; sizes in bytes, positions as integers."""

    exists: bool
    active: bool
    wal_status: str
    safe_wal_size: int | None
    restart_lsn: int
    confirmed_lsn: int
    current_lsn: int
    limit_bytes: int | None

    @property
    def lag_bytes(self) -> int:
        return max(self.current_lsn - self.confirmed_lsn, 0) if self.confirmed_lsn else 0

    @property
    def retained_bytes(self) -> int:
        return max(self.current_lsn - self.restart_lsn, 0) if self.restart_lsn else 0


@dataclass(slots=True, frozen=True)
class Holder:
    """A writing transaction that has been open for long, and the statement that ends it."""

    who: str
    user: str
    application: str
    state: str
    seconds: float
    statement: str

    def describe(self) -> str:
        parts = [part for part in (self.user, self.application, self.state) if part]
        return f"{self.who} ({', '.join(parts)}) open for {format_duration(self.seconds)}"


def format_bytes(count: float) -> str:
    """Bytes as a person says them."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def format_duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def judge_slot(
    stats: BridgeStats, slot: str, reading: SlotReading, holders: list[Holder]
) -> dict[str, bool]:
    """Set and clear the WAL warnings; returns those standing, True where worth a log line."""
    standing: dict[str, bool] = {}

    def decide(
        key: str, severity: Literal["warning", "critical"] | None, text: str, remedy: str
    ) -> None:
        if severity is None:
            stats.clear_warning(key)
        else:
            standing[key] = stats.warn(key, text, remedy, severity)

    if not reading.exists:
        for key in ("wal-lag", "wal-status", "wal-headroom", "slot-held-back"):
            stats.clear_warning(key)
        missing: Literal["critical"] | None = "critical" if stats.state == "streaming" else None
        decide(
            "slot-missing",
            missing,
            f"replication slot {slot} does not exist",
            "somebody dropped it; restart the bridge, which says what can be proven and what not",
        )
        return standing
    stats.clear_warning("slot-missing")

    decide(
        "wal-lag",
        _lag_severity(stats, reading.lag_bytes),
        f"{format_bytes(reading.lag_bytes)} of WAL are not confirmed yet",
        _lag_remedy(stats),
    )
    decide(
        "wal-status",
        "critical" if reading.wal_status in ("unreserved", "lost") else None,
        "the slot has lost WAL it needs"
        if reading.wal_status == "lost"
        else "the slot is beyond max_slot_wal_keep_size and is lost at the next checkpoint",
        LOST_REMEDY.format(slot=slot)
        if reading.wal_status == "lost"
        else "raise the limit now: ALTER SYSTEM SET max_slot_wal_keep_size = '...'; "
        "SELECT pg_reload_conf(); then let the bridge catch up",
    )
    decide(
        "wal-headroom",
        _headroom_severity(stats.wal_headroom_seconds),
        "at the present rate the slot is lost in "
        + format_duration(stats.wal_headroom_seconds or 0),
        "raise max_slot_wal_keep_size (reload is enough) or remove what holds the slot back",
    )
    held = holders and reading.retained_bytes >= stats.wal_warning_bytes // 8
    decide(
        "slot-held-back",
        "warning" if held else None,
        f"PostgreSQL keeps {format_bytes(reading.retained_bytes)} of WAL for "
        + "; ".join(holder.describe() for holder in holders),
        "end it: " + "; ".join(holder.statement for holder in holders[:1]),
    )
    return standing


def _lag_severity(stats: BridgeStats, lag: int) -> Literal["warning", "critical"] | None:
    if lag >= stats.wal_critical_bytes:
        return "critical"
    return "warning" if lag >= stats.wal_warning_bytes else None


def _headroom_severity(seconds: float | None) -> Literal["warning", "critical"] | None:
    if seconds is None or seconds >= HEADROOM_WARNING_SECONDS:
        return None
    return "critical" if seconds < HEADROOM_CRITICAL_SECONDS else "warning"


def _lag_remedy(stats: BridgeStats) -> str:
    if not stats.nats_connected:
        return "NATS is away: bring it back, the bridge goes on by itself"
    if not stats.is_connected:
        return "the replication connection is down: see last_error and the log"
    if stats.ring_capacity and stats.ring_depth >= stats.ring_capacity // 2:
        return "NATS takes events slower than PostgreSQL writes them: look at its disk and replicas"
    return (
        "a large transaction is being decoded, or writes outrun the bridge; try --pack and --zstd"
    )
