"""What a user waits for: the start of commands, a comparison, a file, the first copy of tables."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psycopg

from tests.bench.rig import fresh_name
from tests.bench.throughput import wait_port, wait_streaming

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.rig import Rig

ROWS = 1_000_000
TABLES = 50
SMALL_ROWS = 100
BIN = Path(sys.executable).parent


def measure(rig: Rig, repeats: int, rows: int = ROWS) -> list[dict[str, Any]]:
    """Seconds of each command beside those of what limits it, in one run."""
    small = [fresh_name("small") for _ in range(TABLES)]
    large, publication = fresh_name("large"), fresh_name("pub")
    for table in small:
        rig.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, name text, at timestamptz)")
        _fill(rig, table, "g, 'name ' || g, now()", SMALL_ROWS)
    rig.execute(
        f"CREATE TABLE {large} (id bigint PRIMARY KEY, name text, email text,"
        " balance numeric(12,2), active boolean, created timestamptz)"
    )
    _fill(
        rig,
        large,
        "g, 'user ' || g, 'user' || g || '@example.com', (g % 100000) / 100.0, g % 3 = 0,"
        " now() - g * interval '1 second'",
        rows,
    )
    everything = ", ".join([*small, large])
    rig.execute(f"CREATE PUBLICATION {publication} FOR TABLE {everything}")
    try:
        with _bridge(rig, publication) as (run, log):
            return _measure(rig, run, log, small, large, max(1, repeats // 2))
    finally:
        rig.execute(f"DROP PUBLICATION {publication}")
        rig.execute(f"DROP TABLE {everything}")


def _fill(rig: Rig, table: str, columns: str, rows: int) -> None:
    rig.execute(f"INSERT INTO {table} SELECT {columns} FROM generate_series(1, {rows}) AS g")
    rig.execute(f"VACUUM ANALYZE {table}")


class _Runner:
    """Runs commands beside a bridge and takes their time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def __call__(self, *command: str) -> tuple[float, str]:
        began = time.perf_counter()
        done = subprocess.run(
            [BIN / command[0], *command[1:]],
            env=self._environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return time.perf_counter() - began, done.stdout


@contextmanager
def _bridge(rig: Rig, publication: str) -> Iterator[tuple[_Runner, Path]]:
    slot, prefix = fresh_name("slot"), fresh_name("p")
    log_path = rig.directory / f"{slot}.log"
    environment = {
        **os.environ,
        "DATABASE_URL": rig.postgres.dsn(),
        "NATS_URL": rig.nats.url,
        "BRIDGE_PREFIX": prefix,
    }
    command = [
        sys.executable, "-m", "bridge", "--slot", slot, "--pub", publication, "--port", "0",
    ]  # fmt: skip
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_port(log_path, process)
            wait_streaming(log_path, process)
            yield _Runner(environment), log_path
        finally:
            process.terminate()
            process.wait(30)
    rig.execute("SELECT pg_drop_replication_slot(%s)", [slot])


def _measure(
    rig: Rig, run: _Runner, log: Path, small: list[str], large: str, repeats: int
) -> list[dict[str, Any]]:
    replica = rig.directory / "replica.db"
    into = ("--into", f"sqlite:///{replica}", "--once")
    compare = ("--source", rig.postgres.dsn(), "--replica", f"sqlite:///{replica}")
    # The first snapshot waits for the bridge's workers to start.
    run("cdc", "mirror", small[0], *into)
    replica.unlink()

    def times(*command: str) -> float:
        return median(run(*command)[0] for _ in range(repeats))

    python = times("python", "-c", "pass")
    tables = times("cdc", "tables")
    rows = [
        _row("cdc --help", times("cdc", "--help"), "python -c pass", python, "< 0.25 s"),
        _row("bridge --help", times("bridge", "--help"), "python -c pass", python, "< 0.25 s"),
        _row("cdc tables", tables, "python -c pass", python, "< 0.25 s"),
    ]
    one, _ = run("cdc", "mirror", small[0], *into)
    rows.append(_row("mirror of 1 table", one, "cdc tables", tables, "0.3 s more"))
    fifty, _ = run("cdc", "mirror", *small, *into, "--fresh")
    rows.append(_row(f"mirror of {len(small)} tables", fifty, "cdc tables", tables, "3 s more"))
    fifty = times("cdc", "verify", *small, *compare)
    rows.append(_row(f"verify of {len(small)} tables", fifty, "cdc tables", tables, "< 5 s"))
    run("cdc", "mirror", large, *into)
    reading = median(_read_both(rig, replica, large) for _ in range(repeats))
    taken = times("cdc", "verify", large, *compare)
    rows.append(_row("verify of large table", taken, "reading both sides", reading, "ratio < 5"))
    out = rig.directory / "large.parquet"
    parquet = []
    for _ in range(repeats):
        taken, said = run("cdc", "snapshot", large, "--fresh", "--json", "--out", str(out))
        parquet.append((taken, _copy_seconds(log, json.loads(said)["snapshot_id"])))
    taken, copied = sorted(parquet)[len(parquet) // 2]
    rows.append(_row("snapshot to Parquet", taken, "the snapshot", copied, "ratio < 2"))
    return rows


def _row(what: str, taken: float, beside: str, seconds: float, goal: str) -> dict[str, Any]:
    return {
        "command": what,
        "seconds": taken,
        "beside": beside,
        "its seconds": seconds,
        "ratio": taken / seconds,
        "more seconds": taken - seconds,
        "goal": goal,
    }


def _read_both(rig: Rig, replica: Path, table: str) -> float:
    """Read every row of source and replica as Python objects, and do nothing with them."""
    began = time.perf_counter()
    with (
        psycopg.connect(rig.postgres.dsn()) as source,
        source.cursor(name="bench") as cursor,
    ):
        cursor.execute(f"SELECT * FROM {table}")
        while cursor.fetchmany(2000):
            pass
    with closing(sqlite3.connect(replica)) as copy:
        found = copy.execute(f"SELECT * FROM {table}")
        while found.fetchmany(2000):
            pass
    return time.perf_counter() - began


def _copy_seconds(log: Path, snapshot_id: str) -> float:
    """What the bridge says that a snapshot took, from the request to its meta."""
    found = re.search(rf"snapshot_id={snapshot_id} rows=.* seconds=([\d.e-]+)", log.read_text())
    assert found is not None
    return float(found[1])
