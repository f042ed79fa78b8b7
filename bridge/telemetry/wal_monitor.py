"""Monitors the WAL that PostgreSQL keeps for the slot and finds what holds the slot back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.errors import Retryable, SourceError
from bridge.postgres.connection import connect_catalog
from bridge.postgres.errors import DriverError, one_line
from bridge.telemetry.stats import State
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.escaping import sql_literal

if TYPE_CHECKING:
    from bridge.postgres.connection import CatalogConnection
    from bridge.telemetry.stats import BridgeStats, WarningSeverity

HEADROOM_WARNING_SECONDS = 1800.0
HEADROOM_CRITICAL_SECONDS = 300.0

LOST_REMEDY = (
    "changes are gone from WAL: drop the slot (bridge drop --slot {slot} --yes), start with "
    "--on-gap=new-epoch, consumers bootstrap again; then raise max_slot_wal_keep_size"
)


@dataclass(slots=True, frozen=True)
class SlotReading:
    """One reading of the slot; sizes in bytes, positions as integers."""

    exists: bool
    active: bool
    wal_status: str
    safe_wal_size: int | None
    restart_lsn: int
    confirmed_lsn: int
    current_lsn: int
    limit_bytes: int | None
    spill_txns: int = 0
    spill_bytes: int = 0

    @property
    def lag_bytes(self) -> int:
        return max(self.current_lsn - self.confirmed_lsn, 0) if self.confirmed_lsn else 0

    @property
    def retained_bytes(self) -> int:
        return max(self.current_lsn - self.restart_lsn, 0) if self.restart_lsn else 0


@dataclass(slots=True, frozen=True)
class OpenTransaction:
    """A transaction of a session, or a prepared one, which has an identifier instead."""

    pid: int | None
    gid: str | None

    @property
    def who(self) -> str:
        if self.gid is None:
            return f"session {self.pid}"
        return f"prepared transaction {sql_literal(self.gid)}"

    @property
    def end_statement(self) -> str:
        """The SQL that ends it."""
        if self.gid is None:
            return f"SELECT pg_catalog.pg_terminate_backend({self.pid})"
        return f"ROLLBACK PREPARED {sql_literal(self.gid)}"


@dataclass(slots=True, frozen=True)
class Holder:
    """A long-running writing transaction, and who runs it."""

    transaction: OpenTransaction
    user: str
    application: str
    state: str
    seconds: float

    def describe(self) -> str:
        parts = [part for part in (self.user, self.application, self.state) if part]
        return (
            f"{self.transaction.who} ({', '.join(parts)}) open for {format_duration(self.seconds)}"
        )


def format_bytes(count: float) -> str:
    """Format bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


def format_duration(seconds: float) -> str:
    """Format seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@dataclass(slots=True, frozen=True)
class WalLimits:
    """The monitor warns when this many bytes of WAL are not confirmed."""

    warning_bytes: int = 512 * 1024**2
    critical_bytes: int = 1024**3

    def severity(self, lag_bytes: int) -> WarningSeverity | None:
        """How serious this lag is; None if it is normal."""
        if lag_bytes >= self.critical_bytes:
            return "critical"
        return "warning" if lag_bytes >= self.warning_bytes else None


@dataclass(slots=True, frozen=True)
class SlotFindings:
    """What the monitor has found out about a slot."""

    slot: str
    reading: SlotReading
    holders: list[Holder]
    headroom_seconds: float | None
    """Time until the slot is lost at the present rate; None if it is not in danger."""


def judge_slot(stats: BridgeStats, found: SlotFindings, limits: WalLimits) -> dict[str, bool]:
    """Set and clear the WAL warnings; return the keys of those set, with True for new ones."""
    slot, reading, holders = found.slot, found.reading, found.holders
    shown: dict[str, bool] = {}

    def decide(key: str, severity: WarningSeverity | None, text: str, remedy: str) -> None:
        if severity is None:
            stats.clear_warning(key)
        else:
            shown[key] = stats.warn(key, text, remedy, severity)

    if not reading.exists:
        for key in ("wal-lag", "wal-status", "wal-headroom", "slot-held-back"):
            stats.clear_warning(key)
        decide(
            "slot-missing",
            # Without a slot, a bridge that does not stream yet creates one.
            "critical" if stats.state == State.STREAMING else None,
            f"replication slot {slot} does not exist",
            "it was dropped; restart the bridge, which reports whether continuity is lost",
        )
        return shown
    stats.clear_warning("slot-missing")

    decide(
        "wal-lag",
        limits.severity(reading.lag_bytes),
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
        "SELECT pg_catalog.pg_reload_conf(); then let the bridge catch up",
    )
    decide(
        "wal-headroom",
        _headroom_severity(found.headroom_seconds),
        f"at the present rate the slot is lost in {format_duration(found.headroom_seconds or 0)}",
        "raise max_slot_wal_keep_size (reload is enough) or remove what holds the slot back",
    )
    held = holders and reading.retained_bytes >= limits.warning_bytes // 8
    decide(
        "slot-held-back",
        "warning" if held else None,
        f"PostgreSQL keeps {format_bytes(reading.retained_bytes)} of WAL for "
        + "; ".join(holder.describe() for holder in holders),
        "end it: " + "; ".join(holder.transaction.end_statement for holder in holders[:1]),
    )
    return shown


def _headroom_severity(seconds: float | None) -> WarningSeverity | None:
    if seconds is None or seconds >= HEADROOM_WARNING_SECONDS:
        return None
    return "critical" if seconds < HEADROOM_CRITICAL_SECONDS else "warning"


def _lag_remedy(stats: BridgeStats) -> str:
    """The remedy that the operator reads, by what the statistics show at this moment."""
    if not stats.nats_connected:
        return "NATS is away: bring it back, the bridge goes on by itself"
    if not stats.is_connected:
        return "the replication connection is down: see last_error and the log"
    if stats.ring_capacity and stats.ring_depth >= stats.ring_capacity // 2:
        return "NATS stores events slower than PostgreSQL writes them: check its disk and replicas"
    return (
        "a large transaction is being decoded, or writes outrun the bridge; try --pack and --zstd"
    )


log = logging.getLogger("bridge.wal_monitor")

LAG_INTERVAL_SECONDS = 5.0
RATE_WINDOW_SECONDS = 120.0
TIMEOUT_SECONDS = 10

_SLOT = """
SELECT s.slot_name IS NOT NULL,
       coalesce(s.active, false),
       coalesce(s.wal_status, ''),
       s.safe_wal_size::bigint,
       coalesce(s.restart_lsn - '0/0'::pg_lsn, 0)::bigint,
       coalesce(s.confirmed_flush_lsn - '0/0'::pg_lsn, 0)::bigint,
       (w.lsn - '0/0'::pg_lsn)::bigint,
       (SELECT setting::bigint * 1024 * 1024 FROM pg_catalog.pg_settings
         WHERE name = 'max_slot_wal_keep_size' AND setting <> '-1'),
       coalesce(r.spill_txns, 0), coalesce(r.spill_bytes, 0)
  FROM (SELECT CASE WHEN pg_catalog.pg_is_in_recovery()
                    THEN coalesce(pg_catalog.pg_last_wal_receive_lsn(),
                                  pg_catalog.pg_last_wal_replay_lsn())
                    ELSE pg_catalog.pg_current_wal_lsn() END AS lsn) w
  LEFT JOIN pg_catalog.pg_replication_slots s ON s.slot_name = %s
  LEFT JOIN pg_catalog.pg_stat_replication_slots r ON r.slot_name = s.slot_name
"""

# Decoding must restart before the first record of the oldest writing transaction of any database,
# so that transaction holds restart_lsn back.
_HOLDERS = """
SELECT pid, NULL, coalesce(usename, ''), coalesce(application_name, ''), coalesce(state, ''),
       extract(epoch FROM pg_catalog.now() - xact_start)::float8
  FROM pg_catalog.pg_stat_activity
 WHERE backend_xid IS NOT NULL
   AND xact_start < pg_catalog.now() - pg_catalog.make_interval(secs => %(seconds)s)
UNION ALL
SELECT NULL, gid, owner::text, '', 'prepared',
       extract(epoch FROM pg_catalog.now() - prepared)::float8
  FROM pg_catalog.pg_prepared_xacts
 WHERE prepared < pg_catalog.now() - pg_catalog.make_interval(secs => %(seconds)s)
 ORDER BY 6 DESC
 LIMIT 5
"""


DEFAULT_LIMITS = WalLimits()


@dataclass(slots=True, frozen=True)
class _Point:
    at: float
    retained: int


class WalMonitor:
    """Reads lag and slot state on a connection of its own, and keeps the warnings up to date.

    The slot is read every few seconds, the transactions that hold it back every `interval`. An
    outage of PostgreSQL only delays the next reading.
    """

    def __init__(
        self,
        conninfo: str,
        slot: str,
        stats: BridgeStats,
        limits: WalLimits = DEFAULT_LIMITS,
        *,
        interval: float = 30.0,
        long_transaction_seconds: float = 300.0,
    ) -> None:
        self._conninfo = conninfo
        self._slot = slot
        self._stats = stats
        self._limits = limits
        self._interval = interval
        self._long_transaction_seconds = long_transaction_seconds
        self._connection: CatalogConnection | None = None
        self._points: deque[_Point] = deque()
        self._holders: list[Holder] = []
        self._away = False
        stats.wal_warning_bytes = limits.warning_bytes
        stats.wal_critical_bytes = limits.critical_bytes

    async def run(self) -> None:
        """Check until cancelled, then close the connection."""
        pause = min(self._interval, LAG_INTERVAL_SECONDS)
        next_full = 0.0
        try:
            while True:
                await stay_cancelled()
                full = time.monotonic() >= next_full
                if await self._try_check(with_holders=full) and full:
                    next_full = time.monotonic() + self._interval
                await asyncio.sleep(pause)
        finally:
            await self.close()

    async def check_once(self, *, with_holders: bool = True) -> None:
        """Read the slot once and update the warnings; raises the driver's errors."""
        connection = await self._connected()
        cursor = await connection.execute(_SLOT, [self._slot])
        row = await cursor.fetchone()
        assert row is not None
        reading = SlotReading(*row)
        if with_holders:
            cursor = await connection.execute(_HOLDERS, {"seconds": self._long_transaction_seconds})
            self._holders = [
                Holder(OpenTransaction(pid, gid), *rest)
                for pid, gid, *rest in await cursor.fetchall()
            ]
        headroom = self._headroom(reading)
        self._store(reading, headroom)
        found = SlotFindings(self._slot, reading, self._holders, headroom)
        for key, fresh in judge_slot(self._stats, found, self._limits).items():
            if fresh:
                warning = self._stats.warnings[key]
                level = logging.ERROR if warning.severity == "critical" else logging.WARNING
                event(log, warning.text, level=level, key=key, remedy=warning.remedy)

    async def _try_check(self, *, with_holders: bool) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self.check_once(with_holders=with_holders)
        except (DriverError, Retryable, SourceError, OSError, TimeoutError) as error:
            await self.close()
            await stay_cancelled()
            if not self._away:
                self._away = True
                reason = one_line(error) or type(error).__name__
                event(log, "wal monitor cannot read", level=logging.WARNING, reason=reason)
            return False
        if self._away:
            self._away = False
            event(log, "wal monitor reads again")
        return True

    def _store(self, reading: SlotReading, headroom: float | None) -> None:
        stats = self._stats
        stats.wal_checked_at = time.time()
        stats.slot_active = reading.active
        stats.wal_status = reading.wal_status
        stats.slot_restart_lsn = reading.restart_lsn
        stats.safe_wal_size = reading.safe_wal_size
        stats.max_slot_wal_keep_bytes = reading.limit_bytes
        stats.wal_lag_bytes = reading.lag_bytes
        stats.retained_wal_bytes = reading.retained_bytes
        stats.wal_headroom_seconds = headroom
        stats.slot_spill_txns = reading.spill_txns
        stats.slot_spill_bytes = reading.spill_bytes

    def _headroom(self, reading: SlotReading) -> float | None:
        """The time until the slot is lost, if the retained WAL grows as it did until now."""
        # restart_lsn advances in steps, so the growth is measured over two minutes.
        now = time.monotonic()
        self._points.append(_Point(now, reading.retained_bytes))
        while now - self._points[0].at > RATE_WINDOW_SECONDS:
            self._points.popleft()
        if reading.safe_wal_size is None:
            return None
        first, last = self._points[0], self._points[-1]
        elapsed, growth = last.at - first.at, last.retained - first.retained
        if elapsed <= 0 or growth <= 0:
            return None
        return max(reading.safe_wal_size, 0) * elapsed / growth

    async def _connected(self) -> CatalogConnection:
        if self._connection is None or self._connection.closed:
            self._connection = await connect_catalog(self._conninfo)
            await self._connection.execute("SET statement_timeout = '5s'")
        return self._connection

    async def close(self) -> None:
        """Close the connection; the next check opens another one."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()
