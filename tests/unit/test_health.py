"""What /health says of a bridge whose login NATS refuses."""

from __future__ import annotations

import time

from bridge.telemetry.stats import BridgeStats, State
from bridge.telemetry.status import REFUSED_SECONDS, health_word, is_alive


def test_a_bridge_whose_login_is_refused_for_long_is_not_healthy() -> None:
    stats = BridgeStats()
    stats.state = State.STREAMING
    assert is_alive(stats)
    stats.nats_refused_at = time.monotonic()
    assert is_alive(stats)
    stats.nats_refused_at = time.monotonic() - REFUSED_SECONDS - 1
    assert not is_alive(stats)
    assert health_word(stats) == "failed"
    stats.nats_refused_at = None
    assert is_alive(stats)
