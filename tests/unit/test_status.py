"""The /status document, the health word and the history behind the charts."""

from __future__ import annotations

import json

import pytest

from bridge.telemetry.stats import BridgeStats
from bridge.telemetry.status import (
    SAMPLES_KEPT,
    TABLES_LISTED,
    History,
    health_word,
    is_alive,
    quantile,
    status_document,
)

PROMISED = [
    "status", "uptime_seconds", "wal_messages_received", "cdc_events_published", "current_lsn",
    "is_connected", "reconnect_count", "nats_reconnect_count", "last_processing_time_us",
    "slot_active", "wal_lag_bytes", "wal_lag_mb", "source", "epoch",
]  # fmt: skip


def test_status_has_the_promised_fields_first_and_is_json() -> None:
    document = status_document(BridgeStats())
    assert list(document)[: len(PROMISED)] == PROMISED
    assert json.loads(json.dumps(document)) == document


def test_status_spells_positions_as_postgresql_does() -> None:
    stats = BridgeStats()
    stats.current_lsn, stats.wal_lag_bytes = 0x16_B374D848, 3 * 1024**2
    document = status_document(stats)
    assert document["current_lsn"] == "16/B374D848"
    assert document["wal_lag_mb"] == 3


def test_status_masks_a_secret_in_the_last_error() -> None:
    stats = BridgeStats()
    stats.last_error = "cannot connect to postgresql://u:s3cret@h/d"
    assert "s3cret" not in json.dumps(status_document(stats))


def test_status_lists_the_most_recent_of_very_many_tables() -> None:
    stats = BridgeStats()
    for number in range(TABLES_LISTED + 10):
        stats.table(f"t{number}").last_ts = number
    document = status_document(stats)
    assert document["table_count"] == TABLES_LISTED + 10
    assert len(document["tables"]) == TABLES_LISTED
    assert document["tables"][0]["table"] == f"t{TABLES_LISTED + 9}"


@pytest.mark.parametrize(
    ("state", "alive"),
    [
        ("starting", True), ("standby", True), ("streaming", True), ("reconnecting", True),
        ("draining", True), ("stopped", False), ("failed", False),
    ],
)  # fmt: skip
def test_health_fails_only_when_nothing_is_trying_any_more(state: str, alive: bool) -> None:
    stats = BridgeStats()
    stats.state = state  # type: ignore[assignment]
    assert is_alive(stats) is alive
    assert (health_word(stats) == "failed") is not alive


def test_the_health_word_is_that_of_the_worst_warning() -> None:
    stats = BridgeStats()
    assert health_word(stats) == "ok"
    assert stats.warn("a", "text", "remedy")
    assert health_word(stats) == "warning"
    assert stats.warn("a", "text", "remedy", "critical")
    assert health_word(stats) == "critical"
    assert not stats.warn("a", "other text", "remedy", "critical")
    assert stats.clear_warning("a")
    assert not stats.clear_warning("a")
    assert health_word(stats) == "ok"


def test_a_quantile_lies_within_its_bucket() -> None:
    assert quantile((1.0, 2.0, 4.0), (0, 10, 0, 0), 0.5) == pytest.approx(1.5)
    assert quantile((1.0, 2.0, 4.0), (10, 0, 0, 0), 0.99) == pytest.approx(0.99)
    assert quantile((1.0, 2.0, 4.0), (0, 0, 0, 5), 0.5) == 4.0
    assert quantile((1.0, 2.0, 4.0), (0, 0, 0, 0), 0.5) is None


def test_a_sample_covers_only_the_time_since_the_last() -> None:
    stats = BridgeStats()
    history = History(stats)
    stats.cdc_events_published = 100
    for _ in range(100):
        stats.latency.observe(0.003)
    first = history.take()
    assert first.events_per_second > 0
    assert first.latency_p50_seconds is not None
    assert 0.002 <= first.latency_p50_seconds <= 0.004
    second = history.take()
    assert second.events_per_second == 0
    assert second.latency_p50_seconds is None
    assert history.latest is second


def test_history_forgets_the_oldest_samples() -> None:
    history = History(BridgeStats())
    for _ in range(SAMPLES_KEPT + 5):
        history.take()
    document = history.document()
    assert {len(column) for column in document.values()} == {SAMPLES_KEPT}
