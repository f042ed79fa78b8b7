"""Thousands of tables and partitions: first start, restart, memory, and the delay of other rows."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.bench.rig import cpu_seconds, fresh_name, peak_rss_mb
from tests.bench.throughput import wait_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.bench.rig import Rig

TABLES, PARTITIONS = 5000, 3000
STATEMENTS = 200
READY_SECONDS = 300.0


def measure(rig: Rig, tables: int = TABLES, partitions: int = PARTITIONS) -> list[dict[str, Any]]:
    """Start a bridge twice on so many tables; the second start continues with the first rows."""
    schema, publication = fresh_name("many"), fresh_name("pub")
    slot, prefix = fresh_name("slot"), fresh_name("p")
    create(rig, schema, tables, partitions)
    rig.execute(f"CREATE PUBLICATION {publication} FOR TABLES IN SCHEMA {schema}")
    flags = ["--slot", slot, "--pub", publication, "--prefix", prefix]
    rows = []
    for name in ("first start", "restart"):
        with started_bridge(rig, flags, rig.directory / f"{slot}.log") as (process, port, seconds):
            row = {"step": name, "tables": tables, "partitions": partitions, "ready s": seconds}
            row["CPU s"] = cpu_seconds(process.pid)
            row["rows s"] = first_rows(rig, schema, tables, port) if name == "restart" else 0.0
            row["RSS MB"] = peak_rss_mb(process.pid)
            rows.append(row)
    rig.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    rig.execute(f"DROP PUBLICATION {publication}")
    return rows


def create(rig: Rig, schema: str, tables: int, partitions: int) -> None:
    """The tables, and a root with its partitions."""
    rig.execute(f"CREATE SCHEMA {schema}")
    root = f"{schema}.root"
    columns = "id bigint PRIMARY KEY, account int, name text, active bool, at timestamptz"
    rig.execute(f"CREATE TABLE {root} ({columns}) PARTITION BY RANGE (id)")
    statements = [f"CREATE TABLE {schema}.t{n} ({columns})" for n in range(tables)]
    statements += [
        f"CREATE TABLE {root}_{n} PARTITION OF {root} FOR VALUES FROM ({n}) TO ({n + 1})"
        for n in range(partitions)
    ]
    for start in range(0, len(statements), STATEMENTS):
        rig.execute(";".join(statements[start : start + STATEMENTS]))


@contextmanager
def started_bridge(
    rig: Rig, flags: list[str], log_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """A bridge that is ready: its process, its port, and after how many seconds."""
    environment = {**os.environ, "DATABASE_URL": rig.postgres.dsn(), "NATS_URL": rig.nats.url}
    command = [sys.executable, "-m", "bridge", "--port", "0", *flags]
    begun = time.perf_counter()
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            port = wait_port(log_path, process)
            while ask(port, "/ready") != 200:
                if process.poll() is not None or time.perf_counter() - begun > READY_SECONDS:
                    raise RuntimeError(log_path.read_text()[-2000:])
                time.sleep(0.02)
            yield process, port, time.perf_counter() - begun
        finally:
            process.terminate()
            process.wait(60)


def ask(port: int, path: str) -> int:
    """The status of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def first_rows(rig: Rig, schema: str, tables: int, port: int) -> float:
    """Seconds from the first rows of all tables, one each, until they are confirmed."""
    begun = time.perf_counter()
    for start in range(0, tables, STATEMENTS):
        names = range(start, min(start + STATEMENTS, tables))
        rig.execute(";".join(f"INSERT INTO {schema}.t{n} (id) VALUES (1)" for n in names))
    published = 0
    while published < tables:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        line = next(
            one for one in text.splitlines()
            if one.startswith("bridge_cdc_events_published_total")
        )  # fmt: skip
        published = int(float(line.split()[-1]))
        time.sleep(0.05)
    return time.perf_counter() - begun
