"""Commit-to-stored latency at a steady rate: the stream's own time stamps against commit times."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from consumer_sdk.wire import Subjects, read_events
from tests.bench.rig import fresh_name
from tests.bench.throughput import NARROW, wait_port, wait_streaming

if TYPE_CHECKING:
    from tests.bench.rig import Rig

RATES = (100, 1_000, 10_000)
SECONDS = 10


@dataclass(frozen=True)
class LatencyResult:
    """Milliseconds between commit and storage; `reached` is the rate the writers managed."""

    rate: int
    reached: float
    p50_ms: float
    p99_ms: float


def measure(rig: Rig, rate: int, seconds: float = SECONDS) -> LatencyResult:
    """Write at a rate for some seconds, then ask the stream when it stored what."""
    table, publication = fresh_name("latency"), fresh_name("pub")
    slot, prefix = fresh_name("slot"), fresh_name("p")
    rig.execute(f"CREATE TABLE {table} ({NARROW})")
    rig.execute(f"CREATE PUBLICATION {publication} FOR TABLE {table}")
    log_path = rig.directory / f"{slot}.log"
    environment = {**os.environ, "DATABASE_URL": rig.postgres.dsn(), "NATS_URL": rig.nats.url}
    command = [
        sys.executable, "-m", "bridge", "--slot", slot, "--pub", publication,
        "--prefix", prefix, "--port", "0",
    ]  # fmt: skip
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_port(log_path, process)
            wait_streaming(log_path, process)
            written, elapsed = write_steadily(rig, table, rate, seconds)
            latencies = asyncio.run(read_latencies(rig, prefix, written))
        finally:
            process.terminate()
            process.wait(30)
    rig.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    rig.execute(f"DROP PUBLICATION {publication}")
    rig.execute(f"DROP TABLE {table}")
    latencies.sort()
    return LatencyResult(
        rate,
        written / elapsed,
        latencies[len(latencies) // 2] * 1000,
        latencies[int(len(latencies) * 0.99)] * 1000,
    )


def write_steadily(rig: Rig, table: str, rate: int, seconds: float) -> tuple[int, float]:
    """Transactions of one row, of ten above a thousand a second, paced by the clock."""
    rows = 10 if rate > 1000 else 1
    pause = rows / rate
    written = 0
    started = time.perf_counter()

    def write() -> None:
        nonlocal written
        insert = (
            f"INSERT INTO {table} SELECT i, 1, 'name', 1.5, true, now() "
            "FROM generate_series(1, %s::bigint) i"
        )
        with rig.connect() as connection:
            due = time.perf_counter()
            while due - started < seconds:
                connection.execute(insert, [rows])
                written += rows
                due += pause
                late = due - time.perf_counter()
                if late > 0:
                    time.sleep(late)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    return written, time.perf_counter() - started


async def read_latencies(rig: Rig, prefix: str, expected: int) -> list[float]:
    client = await nats.connect(rig.nats.url)
    subjects = Subjects(prefix)
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
    found: list[float] = []
    try:
        subscription = await client.jetstream().pull_subscribe(
            f"{subjects.cdc}.*.insert", stream=subjects.cdc_stream, config=config
        )
        while len(found) < expected:
            for message in await subscription.fetch(1000, timeout=20):
                stored = message.metadata.timestamp.timestamp()
                for event in read_events(message.headers, message.data):
                    found.append(max(0.0, stored - event.ts / 1e6))  # noqa: PERF401
    finally:
        await client.close()
    # The first moments measure the start of the writers, not the bridge.
    return found[len(found) // 10 :]
