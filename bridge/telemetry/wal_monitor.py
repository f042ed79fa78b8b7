"""Watches the WAL that PostgreSQL keeps for the slot, and says who or what holds it back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg

from bridge.cancellation import stay_cancelled
from bridge.telemetry.logs import event
from bridge.telemetry.wal_warnings import Holder, SlotReading, judge_slot

if TYPE_CHECKING:
    from bridge.telemetry.stats import BridgeStats

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
       (SELECT setting::bigint * 1024 * 1024 FROM pg_settings
         WHERE name = 'max_slot_wal_keep_size' AND setting <> '-1')
  FROM (SELECT CASE WHEN pg_is_in_recovery()
                    THEN coalesce(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn())
                    ELSE pg_current_wal_lsn() END AS lsn) w
  LEFT JOIN pg_replication_slots s ON s.slot_name = %s
"""

# Decoding has to restart before the first record of the oldest transaction that has written
# anything, in whichever database, so that transaction pins restart_lsn.
_HOLDERS = """
SELECT 'session ' || pid, coalesce(usename, ''), coalesce(application_name, ''),
       coalesce(state, ''), extract(epoch FROM now() - xact_start)::float8,
       format('SELECT pg_terminate_backend(%%s)', pid)
  FROM pg_stat_activity
 WHERE backend_xid IS NOT NULL AND xact_start < now() - make_interval(secs => %(seconds)s)
UNION ALL
SELECT 'prepared transaction ' || quote_literal(gid), owner::text, '', 'prepared',
       extract(epoch FROM now() - prepared)::float8,
       format('ROLLBACK PREPARED %%L', gid)
  FROM pg_prepared_xacts
 WHERE prepared < now() - make_interval(secs => %(seconds)s)
 ORDER BY 5 DESC
 LIMIT 5
"""


@dataclass(slots=True, frozen=True)
class _Point:
    at: float
    retained: int


class WalMonitor:
    """Reads lag and slot state on a connection of its own, and keeps the warnings up to date.

    The slot is read every few seconds, transactions that hold it back every `interval`. PostgreSQL
    being away only delays the next reading.
    """

    def __init__(
        self,
        conninfo: str,
        slot: str,
        stats: BridgeStats,
        interval: float = 30.0,
        warn_bytes: int = 512 * 1024**2,
        critical_bytes: int = 1024**3,
        long_transaction_seconds: float = 300.0,
    ) -> None:
        self._conninfo = conninfo
        self._slot = slot
        self._stats = stats
        self._interval = interval
        self._long_transaction_seconds = long_transaction_seconds
        self._connection: psycopg.AsyncConnection | None = None
        self._points: deque[_Point] = deque()
        self._holders: list[Holder] = []
        self._away = False
        stats.wal_warning_bytes = warn_bytes
        stats.wal_critical_bytes = critical_bytes

    async def run(self) -> None:
        """Check until cancelled; the connection is closed on the way out."""
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
            await self._close()

    async def check_once(self, *, with_holders: bool = True) -> None:
        """Read the slot once and judge it; psycopg errors pass through."""
        connection = await self._connected()
        cursor = await connection.execute(_SLOT, [self._slot])
        row = await cursor.fetchone()
        assert row is not None
        reading = SlotReading(*row)
        if with_holders:
            cursor = await connection.execute(_HOLDERS, {"seconds": self._long_transaction_seconds})
            self._holders = [Holder(*one) for one in await cursor.fetchall()]
        self._store(reading)
        for key, fresh in judge_slot(self._stats, self._slot, reading, self._holders).items():
            if fresh:
                warning = self._stats.warnings[key]
                level = logging.ERROR if warning.severity == "critical" else logging.WARNING
                event(log, warning.text, level=level, key=key, remedy=warning.remedy)

    async def close(self) -> None:
        """Close the connection, for those who call `check_once` themselves."""
        await self._close()

    async def _try_check(self, *, with_holders: bool) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self.check_once(with_holders=with_holders)
        except (psycopg.Error, OSError, TimeoutError) as error:
            await self._close()
            await stay_cancelled()
            if not self._away:
                self._away = True
                reason = " ".join(str(error).split()) or type(error).__name__
                event(log, "wal monitor cannot read", level=logging.WARNING, reason=reason)
            return False
        if self._away:
            self._away = False
            event(log, "wal monitor reads again")
        return True

    def _store(self, reading: SlotReading) -> None:
        stats, now = self._stats, time.monotonic()
        stats.wal_checked_at = time.time()
        stats.slot_active = reading.active
        stats.wal_status = reading.wal_status
        stats.slot_restart_lsn = reading.restart_lsn
        stats.safe_wal_size = reading.safe_wal_size
        stats.max_slot_wal_keep_bytes = reading.limit_bytes
        stats.wal_lag_bytes = reading.lag_bytes
        stats.retained_wal_bytes = reading.retained_bytes
        self._points.append(_Point(now, reading.retained_bytes))
        while now - self._points[0].at > RATE_WINDOW_SECONDS:
            self._points.popleft()
        stats.wal_headroom_seconds = self._headroom(reading)

    def _headroom(self, reading: SlotReading) -> float | None:
        # restart_lsn moves in steps, so the growth is taken over a window of two minutes.
        if reading.safe_wal_size is None:
            return None
        first, last = self._points[0], self._points[-1]
        elapsed, growth = last.at - first.at, last.retained - first.retained
        if elapsed <= 0 or growth <= 0:
            return None
        return max(reading.safe_wal_size, 0) * elapsed / growth

    async def _connected(self) -> psycopg.AsyncConnection:
        if self._connection is None or self._connection.closed:
            self._connection = await psycopg.AsyncConnection.connect(
                self._conninfo,
                autocommit=True,
                connect_timeout=TIMEOUT_SECONDS,
                client_encoding="utf8",
            )
            await self._connection.execute("SET statement_timeout = '5s'")
        return self._connection

    async def _close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()
