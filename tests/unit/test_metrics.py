"""Prometheus metrics: every promised name is there, and moves when it should."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge.telemetry.metrics import OTHER_TABLES, TABLES_SHOWN, registry_for, render
from bridge.telemetry.stats import MOST_COUNTERS, BridgeStats

PROMISED = [
    "bridge_uptime_seconds",
    "bridge_wal_messages_received_total",
    "bridge_cdc_events_published_total",
    "bridge_last_ack_lsn",
    "bridge_connected",
    "bridge_reconnects_total",
    "bridge_nats_reconnects_total",
    "bridge_last_processing_time_us",
    "bridge_slot_active",
    "bridge_wal_lag_bytes",
    "bridge_commit_to_ack_seconds_bucket",
    "bridge_commit_to_ack_seconds_count",
    "bridge_commit_to_ack_seconds_sum",
    "bridge_batch_events_bucket",
    "bridge_ring_depth",
    "bridge_ring_bytes",
    "bridge_snapshots_running",
]


def samples(stats: BridgeStats) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = render(registry_for(stats)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(stats: BridgeStats, name: str, **labels: str) -> float:
    return samples(stats)[name, tuple(sorted(labels.items()))]


@pytest.mark.parametrize("name", PROMISED)
def test_promised_metric_is_exported_from_the_start(name: str) -> None:
    assert name in {key[0] for key in samples(BridgeStats())}


@pytest.mark.parametrize(
    ("attribute", "metric", "new"),
    [
        ("wal_messages_received", "bridge_wal_messages_received_total", 12),
        ("wal_bytes_received", "bridge_wal_bytes_received_total", 12),
        ("cdc_events_published", "bridge_cdc_events_published_total", 9),
        ("transactions_published", "bridge_transactions_published_total", 3),
        ("confirmed_lsn", "bridge_last_ack_lsn", 0x1_0000_0001),
        ("current_lsn", "bridge_current_lsn", 77),
        ("received_lsn", "bridge_received_lsn", 78),
        ("is_connected", "bridge_connected", True),
        ("nats_connected", "bridge_nats_connected", True),
        ("reconnect_count", "bridge_reconnects_total", 4),
        ("nats_reconnect_count", "bridge_nats_reconnects_total", 5),
        ("last_processing_time_us", "bridge_last_processing_time_us", 321),
        ("slot_active", "bridge_slot_active", True),
        ("wal_lag_bytes", "bridge_wal_lag_bytes", 1 << 40),
        ("retained_wal_bytes", "bridge_retained_wal_bytes", 1 << 41),
        ("slot_spill_txns", "bridge_slot_spill_txns", 3),
        ("slot_spill_bytes", "bridge_slot_spill_bytes", 1 << 33),
        ("ring_depth", "bridge_ring_depth", 17),
        ("ring_capacity", "bridge_ring_capacity", 65536),
        ("ring_bytes", "bridge_ring_bytes", 1700),
        ("ring_max_bytes", "bridge_ring_max_bytes", 1 << 24),
        ("epoch", "bridge_epoch", 1_765_000_000),
        ("wal_checked_at", "bridge_wal_checked_timestamp_seconds", 1_765_000_001.5),
    ],
)
def test_each_metric_moves_with_what_it_is_named_after(
    attribute: str, metric: str, new: Any
) -> None:
    stats = BridgeStats()
    others = {key: one for key, one in samples(stats).items() if not _is_process(key[0])}
    assert value(stats, metric) == 0
    setattr(stats, attribute, new)
    assert value(stats, metric) == float(new)
    after = samples(stats)
    changed = {key[0] for key, one in others.items() if after[key] != one}
    assert changed - {"bridge_uptime_seconds"} == {metric}


def _is_process(name: str) -> bool:
    return name.startswith("process_")


def test_uptime_grows() -> None:
    stats = BridgeStats()
    stats.started_monotonic -= 100
    assert value(stats, "bridge_uptime_seconds") >= 100


def test_a_limit_of_the_slot_is_absent_when_there_is_none() -> None:
    stats = BridgeStats()
    names = {key[0] for key in samples(stats)}
    assert not {"bridge_wal_safe_bytes", "bridge_wal_headroom_seconds"} & names
    stats.safe_wal_size, stats.wal_headroom_seconds = 5, 60.0
    assert value(stats, "bridge_wal_safe_bytes") == 5
    assert value(stats, "bridge_wal_headroom_seconds") == 60


def test_latency_falls_into_the_bucket_of_its_bound() -> None:
    stats = BridgeStats()
    for seconds in (0.001, 0.0011, 7000.0):
        stats.observe_latency(seconds)
    assert value(stats, "bridge_commit_to_ack_seconds_bucket", le="0.001") == 1
    assert value(stats, "bridge_commit_to_ack_seconds_bucket", le="0.002") == 2
    assert value(stats, "bridge_commit_to_ack_seconds_bucket", le="1800.0") == 2
    assert value(stats, "bridge_commit_to_ack_seconds_bucket", le="+Inf") == 3
    assert value(stats, "bridge_commit_to_ack_seconds_count") == 3
    assert value(stats, "bridge_commit_to_ack_seconds_sum") == pytest.approx(7000.0021)


def test_many_events_of_one_commit_count_as_many() -> None:
    stats = BridgeStats()
    for _ in range(100):
        stats.latency.observe(0.5)
    stats.observe_batch(100)
    assert value(stats, "bridge_commit_to_ack_seconds_count") == 100
    assert value(stats, "bridge_batch_events_bucket", le="100.0") == 1
    assert value(stats, "bridge_batch_events_bucket", le="50.0") == 0


def test_tables_have_their_own_counters() -> None:
    stats = BridgeStats()
    users = stats.table("users")
    users.events, users.last_ts = 5, 1_765_000_000_500_000
    assert stats.table("users") is users
    assert value(stats, "bridge_table_events_total", table="users") == 5
    assert value(stats, "bridge_table_last_commit_seconds", table="users") == 1_765_000_000.5


def test_a_database_of_very_many_tables_does_not_make_a_scrape_endless() -> None:
    stats = BridgeStats()
    for number in range(TABLES_SHOWN + 100):
        stats.table(f"t{number}").events = 2
    shown = [key for key in samples(stats) if key[0] == "bridge_table_events_total"]
    assert len(shown) == TABLES_SHOWN + 1
    assert value(stats, "bridge_table_events_total", table=OTHER_TABLES) == 200


def test_running_snapshots_show_progress_and_finished_ones_do_not() -> None:
    stats = BridgeStats()
    progress = stats.begin_snapshot("s1", "users")
    progress.state, progress.rows, progress.chunks, progress.total_estimate = "copying", 30, 3, 100
    labels = {"table": "users", "snapshot_id": "s1"}
    assert value(stats, "bridge_snapshots_running") == 1
    assert value(stats, "bridge_snapshot_rows", **labels) == 30
    assert value(stats, "bridge_snapshot_chunks", **labels) == 3
    assert value(stats, "bridge_snapshot_estimated_rows", **labels) == 100
    assert value(stats, "bridge_snapshot_age_seconds", **labels) >= 0
    progress.finished_at = 1.0
    assert value(stats, "bridge_snapshots_running") == 0
    assert "bridge_snapshot_rows" not in {key[0] for key in samples(stats)}


def test_only_the_newest_finished_snapshots_are_remembered() -> None:
    stats = BridgeStats()
    for number in range(50):
        stats.begin_snapshot(f"s{number}", "t").finished_at = float(number)
    running = stats.begin_snapshot("running", "t")
    assert running.finished_at is None
    assert 20 <= len(stats.snapshots) <= 22
    assert "s49" in stats.snapshots
    assert "s0" not in stats.snapshots


def test_the_state_is_exactly_one_of_its_words() -> None:
    stats = BridgeStats()
    stats.state, stats.wal_status = "standby", "extended"
    states = {key: one for key, one in samples(stats).items() if key[0] == "bridge_state"}
    assert sum(states.values()) == 1
    assert value(stats, "bridge_state", state="standby") == 1
    assert value(stats, "bridge_wal_status", wal_status="extended") == 1


def test_odd_table_names_survive_the_exposition_format() -> None:
    stats = BridgeStats()
    stats.table('a"b\\c\nd').events = 1
    assert value(stats, "bridge_table_events_total", table='a"b\\c\nd') == 1


def test_prefixes_of_messages_do_not_fill_memory() -> None:
    stats = BridgeStats()
    for number in range(3000):
        stats.table(f"$message.order-{number}").events += 1
    stats.table("one more table").events += 1
    assert len(stats.per_table) == MOST_COUNTERS + 2
    assert stats.per_table["$message.*"].events == 3000 - MOST_COUNTERS
