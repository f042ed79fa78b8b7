"""`make bench`: everything that can be measured in one run, as ratios to what limits it.

Absolute figures differ from machine to machine; a ratio taken within one run does not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.bench import latency, memory, report, throughput
from tests.bench.rig import Rig, started

SECTIONS = (
    "throughput", "latency", "memory", "scrape", "snapshot", "reading", "commands", "tables",
    "spark",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; default all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()
    wanted = options.sections or list(SECTIONS)
    unknown = sorted(set(wanted) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {unknown[0]!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with started() as rig:
        for section in wanted:
            results[section] = _RUNNERS[section](rig, options.repeats)
            report.write_json(options.out / "bench.json", results)
    if "throughput" in results:
        report.plot(options.out / "throughput.png", results["throughput"])
    print(f"\nwritten: {options.out}/bench.json")
    return 0


def _throughput(rig: Rig, repeats: int) -> list[throughput.Result]:
    results = []
    for workload in throughput.WORKLOADS:
        results += throughput.measure(rig, workload, list(throughput.MODES), repeats)
    report.print_table(
        "bridge against pg_recvlogical -f /dev/null, the same WAL, interleaved; medians",
        ["workload", "mode", "ratio", "spread", "events/s", "recvlogical/s", "bridge µs",
         "walsender µs", "nats µs", "RSS MB"],
        [
            [r.workload, r.mode, r.ratio, r.spread, r.rate, r.reference_rate, r.bridge_us,
             r.walsender_us, r.nats_us, r.peak_rss_mb]
            for r in results
        ],
    )  # fmt: skip
    return results


def _latency(rig: Rig, _repeats: int) -> list[latency.LatencyResult]:
    results = [latency.measure(rig, rate) for rate in latency.RATES]
    report.print_table(
        "commit to stored",
        ["events/s", "reached", "p50 ms", "p99 ms"],
        [[r.rate, r.reached, r.p50_ms, r.p99_ms] for r in results],
    )
    return results


def _memory(rig: Rig, _repeats: int) -> list[memory.MemoryResult]:
    results = [memory.measure(rig)]
    report.print_table(
        "one transaction of many rows",
        ["rows", "peak RSS MB", "seconds"],
        [[r.rows, r.peak_rss_mb, r.seconds] for r in results],
    )
    return results


def _snapshot(rig: Rig, repeats: int) -> Any:
    from tests.bench import snapshot, snapshot_latency

    speed = _generic("snapshot", snapshot.measure(rig, repeats))
    beside = _generic("commit to stored beside a snapshot", snapshot_latency.measure(rig))
    return {"speed": speed, "latency": beside}


def _scrape(rig: Rig, repeats: int) -> Any:
    from tests.bench import scrape

    return _generic("the cost of being watched", scrape.measure(rig, repeats))


def _reading(rig: Rig, repeats: int) -> Any:
    from tests.bench import reading

    return _generic("reading and mirroring", reading.measure(rig, repeats))


def _commands(rig: Rig, repeats: int) -> Any:
    from tests.bench import commands

    return _generic("what a user waits for", commands.measure(rig, repeats))


def _tables(rig: Rig, _repeats: int) -> Any:
    from tests.bench import many_tables

    return _generic("thousands of tables and partitions", many_tables.measure(rig))


def _spark(rig: Rig, repeats: int) -> Any:
    from tests.bench import spark

    return _generic("Spark", spark.measure(rig, repeats))


def _generic(title: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if rows:
        header = list(rows[0])
        report.print_table(title, header, [[row.get(key, "") for key in header] for row in rows])
    return rows


_RUNNERS = {
    "throughput": _throughput,
    "latency": _latency,
    "memory": _memory,
    "scrape": _scrape,
    "snapshot": _snapshot,
    "reading": _reading,
    "commands": _commands,
    "tables": _tables,
    "spark": _spark,
}

if __name__ == "__main__":
    sys.exit(main())
