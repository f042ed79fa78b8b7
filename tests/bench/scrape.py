"""What being watched costs: Prometheus every second and an open dashboard, under full load."""

from __future__ import annotations

import http.client
import threading
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

from bridge.embedded import free_port
from tests.bench.throughput import Prepared, Workload, bridge_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.rig import Rig

WORKLOAD = Workload("100-row transactions", 300_000, 100)
INTERVAL_SECONDS = 1.0


@contextmanager
def watched(port: int, paths: tuple[str, ...]) -> Iterator[list[int]]:
    """Ask for the pages every second until the block ends; the list counts the answers."""
    answers = [0]
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(INTERVAL_SECONDS):
            for path in paths:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                try:
                    connection.request("GET", path)
                    connection.getresponse().read()
                    answers[0] += 1
                except OSError:
                    pass
                finally:
                    connection.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


def measure(rig: Rig, repeats: int) -> list[dict[str, Any]]:
    """Interleaved pairs, unwatched and watched; the cost is the median of the pairs."""
    prepared = Prepared(rig, WORKLOAD)
    plain: list[dict[str, float]] = []
    scraped: list[dict[str, float]] = []
    answered = 0
    try:
        for number in range(repeats):
            for is_watched in (False, True) if number % 2 == 0 else (True, False):
                port = free_port()
                paths = ("/metrics", "/status") if is_watched else ()
                with watched(port, paths) as answers:
                    elapsed, cpu = bridge_run(prepared, ("--port", str(port)))
                answered += answers[0]
                (scraped if is_watched else plain).append({"elapsed": elapsed, **cpu})
    finally:
        prepared.drop()
    time_cost = median(b["elapsed"] / a["elapsed"] - 1 for a, b in zip(plain, scraped, strict=True))
    cpu_cost = median(b["bridge"] / a["bridge"] - 1 for a, b in zip(plain, scraped, strict=True))
    return [
        {
            "pairs": repeats,
            "pages answered": answered,
            "events/s unwatched": round(WORKLOAD.rows / median(a["elapsed"] for a in plain)),
            "events/s watched": round(WORKLOAD.rows / median(b["elapsed"] for b in scraped)),
            "cost in time, %": round(time_cost * 100, 1),
            "cost in CPU, %": round(cpu_cost * 100, 1),
        }
    ]
