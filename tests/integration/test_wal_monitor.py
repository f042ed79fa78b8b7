"""The WAL monitor against real slots: lag, limits, who holds the slot back, an absent server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
import pytest

from bridge.telemetry.stats import BridgeStats
from bridge.telemetry.status import status_document
from bridge.telemetry.wal_monitor import WalLimits, WalMonitor
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bridge.embedded import PostgresServer
    from tests.fixtures.postgres import Database

MEGABYTE = 1024**2


def create_slot(database: Database) -> str:
    slot = f"s_{database.name}"
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    return slot


def write_wal(database: Database, megabytes: int) -> None:
    database.execute("CREATE TABLE IF NOT EXISTS bulk (data text)")
    database.execute(
        "INSERT INTO bulk SELECT string_agg(md5(random()::text || n), '')"
        " FROM generate_series(1, %s) n GROUP BY n %% %s",
        [megabytes * 32768, megabytes * 128],
    )


@pytest.fixture
async def monitor(database: Database) -> AsyncIterator[WalMonitor]:
    stats = BridgeStats()
    stats.state, stats.nats_connected, stats.is_connected = "streaming", True, True
    one = WalMonitor(
        database.dsn,
        create_slot(database),
        stats,
        WalLimits(warning_bytes=2 * MEGABYTE, critical_bytes=6 * MEGABYTE),
        long_transaction_seconds=0,
    )
    yield one
    await one.close()


def stats_of(monitor: WalMonitor) -> BridgeStats:
    return monitor._stats


async def test_lag_grows_with_writes_and_warns_then_is_critical(
    database: Database, monitor: WalMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    stats = stats_of(monitor)
    await monitor.check_once()
    assert stats.wal_lag_bytes < MEGABYTE
    assert stats.wal_status == "reserved"
    assert not stats.slot_active
    assert stats.warnings == {}
    write_wal(database, 3)
    await monitor.check_once()
    assert stats.wal_lag_bytes > 2 * MEGABYTE
    assert stats.warnings["wal-lag"].severity == "warning"
    write_wal(database, 6)
    await monitor.check_once()
    await monitor.check_once()
    assert stats.warnings["wal-lag"].severity == "critical"
    logged = [record for record in caplog.records if "not confirmed" in record.message]
    assert [record.levelname for record in logged] == ["WARNING", "ERROR"]


async def test_the_warning_goes_when_the_slot_has_caught_up(
    database: Database, monitor: WalMonitor
) -> None:
    stats = stats_of(monitor)
    write_wal(database, 3)
    await monitor.check_once()
    assert "wal-lag" in stats.warnings
    database.execute(
        "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [f"s_{database.name}"]
    )
    await monitor.check_once()
    assert stats.warnings == {}
    assert stats.wal_lag_bytes < MEGABYTE


async def test_the_remedy_names_nats_when_nats_is_away(
    database: Database, monitor: WalMonitor
) -> None:
    stats = stats_of(monitor)
    write_wal(database, 3)
    stats.nats_connected = False
    await monitor.check_once()
    assert "NATS is away" in stats.warnings["wal-lag"].remedy
    stats.nats_connected, stats.is_connected = True, False
    await monitor.check_once()
    assert "replication connection" in stats.warnings["wal-lag"].remedy


async def test_the_transaction_that_holds_the_slot_back_is_named_and_can_be_ended(
    database: Database, monitor: WalMonitor
) -> None:
    stats = stats_of(monitor)
    database.execute("CREATE TABLE t (a int)")
    with psycopg.connect(database.dsn, application_name="forgotten") as connection:
        connection.execute("INSERT INTO t VALUES (1)")
        write_wal(database, 1)
        await monitor.check_once()
        warning = stats.warnings["slot-held-back"]
        assert f"session {connection.info.backend_pid}" in warning.text
        assert "forgotten" in warning.text
        assert "VALUES" not in warning.text
        database.execute(warning.remedy.removeprefix("end it: "))
        with suppress(psycopg.OperationalError):
            connection.execute("SELECT 1")

    async def is_released() -> bool:
        await monitor.check_once()
        return "slot-held-back" not in stats.warnings

    await eventually(is_released)


async def test_a_transaction_that_decoding_writes_to_disk_is_counted(
    database: Database, monitor: WalMonitor
) -> None:
    await monitor.check_once()
    assert (stats_of(monitor).slot_spill_txns, stats_of(monitor).slot_spill_bytes) == (0, 0)
    write_wal(database, 4)
    with database.connect() as connection:
        connection.execute("SET logical_decoding_work_mem = '1MB'")
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        connection.execute(
            "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'pub')",
            [monitor._slot],
        )

    async def counted() -> bool:
        await monitor.check_once()
        return bool(stats_of(monitor).slot_spill_txns)

    await eventually(counted)
    assert stats_of(monitor).slot_spill_bytes > MEGABYTE
    shown = status_document(stats_of(monitor), None)["wal"]
    assert shown["spill_txns"] >= 1
    assert shown["spill_bytes"] == stats_of(monitor).slot_spill_bytes


async def test_headroom_is_the_time_left_at_the_rate_of_growth(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres(settings={"max_slot_wal_keep_size": "64MB"})
    stats = BridgeStats()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        monitor = WalMonitor(server.dsn(), "s", stats)
        await monitor.check_once()
        assert stats.max_slot_wal_keep_bytes == 64 * MEGABYTE
        assert stats.safe_wal_size is not None
        assert stats.wal_headroom_seconds is None
        connection.execute(
            "CREATE TABLE bulk AS SELECT repeat(md5(n::text), 30) FROM generate_series(1, 20000) n"
        )
        await monitor.check_once()
        assert stats.wal_headroom_seconds is not None
        assert 0 < stats.wal_headroom_seconds < 300
        assert stats.warnings["wal-headroom"].severity == "critical"
        await monitor.close()


async def test_a_lost_slot_is_critical_and_says_how_to_go_on(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres(settings={"max_slot_wal_keep_size": "1MB"})
    stats = BridgeStats()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int)")
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        for number in range(3):
            connection.execute("INSERT INTO t VALUES (%s)", [number])
            connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")
    monitor = WalMonitor(server.dsn(), "s", stats)
    await monitor.check_once()
    await monitor.close()
    assert stats.wal_status == "lost"
    assert stats.warnings["wal-status"].severity == "critical"
    assert "bridge drop --slot s --yes" in stats.warnings["wal-status"].remedy


async def test_a_dropped_slot_is_critical_while_streaming(
    database: Database, monitor: WalMonitor
) -> None:
    stats = stats_of(monitor)
    database.execute("SELECT pg_drop_replication_slot(%s)", [f"s_{database.name}"])
    await monitor.check_once()
    assert stats.warnings["slot-missing"].severity == "critical"
    stats.state = "starting"
    await monitor.check_once()
    assert stats.warnings == {}


async def test_the_monitor_survives_a_restart_of_postgresql(
    own_postgres: Callable[..., PostgresServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = own_postgres()
    stats = BridgeStats()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    task = asyncio.create_task(WalMonitor(server.dsn(), "s", stats, interval=0.05).run())
    try:
        await eventually(lambda: stats.wal_checked_at > 0)
        await asyncio.to_thread(server.stop)
        await eventually(lambda: "wal monitor cannot read" in caplog.text)
        stopped_at = stats.wal_checked_at
        await asyncio.to_thread(server.start)
        await eventually(lambda: stats.wal_checked_at > stopped_at)
        [away] = [one for one in caplog.records if one.message == "wal monitor cannot read"]
        # A sentence of the server or of libpq, whichever of the two noticed first.
        reason = vars(away)["fields"]["reason"]
        assert "connection" in reason
        assert "\n" not in reason
        assert not task.done()
        assert server.password not in caplog.text + reason
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
