"""Commit-to-stored latency of changes while snapshots of a large table run, and while none does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgpack
import nats
import nats.errors

from consumer_sdk.wire import Subjects
from tests.bench import latency
from tests.bench.rig import fresh_name
from tests.bench.throughput import NARROW, wait_port, wait_streaming

if TYPE_CHECKING:
    from tests.bench.rig import Rig

RATE = 1_000
SECONDS = 10.0
ROWS = 2_000_000


def measure(rig: Rig, rate: int = RATE, rows: int = ROWS) -> list[dict[str, Any]]:
    """Percentiles with and without a snapshot under way."""
    large = fresh_name("large")
    rig.execute(f"CREATE TABLE {large} (id bigint PRIMARY KEY, name text, at timestamptz)")
    rig.execute(
        f"INSERT INTO {large} SELECT g, 'name ' || g, now() FROM generate_series(1, {rows}) g"
    )
    try:
        results: list[dict[str, Any]] = []
        for name, form in (("none", None), ("msgpack", "msgpack"), ("arrow", "arrow")):
            found = _measure(rig, large, rate, form)
            alone = results[0]["p99 ms"] if results else found["p99 ms"]
            goal = "" if form is None else f"< {max(5 * alone, 150):.0f}"
            results.append({"snapshot": name, **found, "goal": goal})
        return results
    finally:
        rig.execute(f"DROP TABLE {large}")


def _measure(rig: Rig, large: str, rate: int, form: str | None) -> dict[str, Any]:
    table, publication = fresh_name("latency"), fresh_name("pub")
    slot, prefix = fresh_name("slot"), fresh_name("p")
    rig.execute(f"CREATE TABLE {table} ({NARROW})")
    rig.execute(f"CREATE PUBLICATION {publication} FOR TABLE {table}, {large}")
    log_path = rig.directory / f"{slot}.log"
    environment = {**os.environ, "DATABASE_URL": rig.postgres.dsn(), "NATS_URL": rig.nats.url}
    command = [
        sys.executable, "-m", "bridge", "--slot", slot, "--pub", publication,
        "--prefix", prefix, "--port", "0",
    ]  # fmt: skip
    stop = threading.Event()
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_port(log_path, process)
            wait_streaming(log_path, process)
            asking = threading.Thread(
                target=lambda: asyncio.run(_ask(rig, prefix, large, form, stop))
            )
            asking.start()
            written, _ = latency.write_steadily(rig, table, rate, SECONDS)
            stop.set()
            asking.join()
            found = sorted(asyncio.run(latency.read_latencies(rig, prefix, written)))
        finally:
            stop.set()
            process.terminate()
            process.wait(30)
    rig.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    rig.execute(f"DROP PUBLICATION {publication}")
    rig.execute(f"DROP TABLE {table}")
    return {
        "events/s": rate,
        "p50 ms": round(found[len(found) // 2] * 1000, 1),
        "p99 ms": round(found[int(len(found) * 0.99)] * 1000, 1),
    }


async def _ask(rig: Rig, prefix: str, table: str, form: str | None, stop: threading.Event) -> None:
    """Have a snapshot under way all the time."""
    if form is None:
        return
    client = await nats.connect(rig.nats.url)
    subject = Subjects(prefix).snapshot_request(table)
    try:
        while not stop.is_set():
            try:
                await client.request(
                    subject, msgpack.packb({"format": form, "fresh": True}), timeout=2
                )
            except nats.errors.Error:
                continue
            await asyncio.sleep(0.1)
    finally:
        await client.close()
