"""Events per second of the bridge against pg_recvlogical over the same WAL."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from tests.bench.rig import cpu_seconds, fresh_name, peak_rss_mb, tool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.rig import Rig

NARROW = "id bigint, account int, name text, amount numeric(12,2), active bool, at timestamptz"
NARROW_ROW = (
    "SELECT i, i %% 1000, 'customer ' || i, (i %% 100000) / 100.0, i %% 2 = 0, "
    "'2026-01-01T00:00:00Z'::timestamptz + i * interval '1 second' "
    "FROM generate_series(%s::bigint, %s::bigint) i"
)
WIDE = "id bigint, " + ", ".join(f"column_{n} {kind}" for n, kind in enumerate(
    ["text", "int", "numeric", "timestamptz", "float8", "bool"] * 5))  # fmt: skip
WIDE_ROW = (
    "SELECT i, " + ", ".join([
        "'some text of a row ' || i", "i::int", "i / 7.0", "now()", "i * 1.5::float8", "true",
    ] * 5) + " FROM generate_series(%s::bigint, %s::bigint) i"
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Rows written in transactions of a given size before anybody reads them."""

    name: str
    rows: int
    rows_per_transaction: int
    wide: bool = False
    copy: bool = False


WORKLOADS = (
    Workload("single-row transactions", 20_000, 1),
    Workload("100-row transactions", 100_000, 100),
    Workload("one huge transaction", 100_000, 100_000),
    Workload("COPY", 100_000, 100_000, copy=True),
    Workload("wide rows, 100 a transaction", 20_000, 100, wide=True),
)


@dataclass
class Result:
    """Medians over the repeats; `ratio` is ours / pg_recvlogical, run by run."""

    workload: str
    mode: str
    rows: int
    reference_rate: float = 0.0
    rate: float = 0.0
    ratio: float = 0.0
    spread: float = 0.0
    bridge_us: float = 0.0
    walsender_us: float = 0.0
    nats_us: float = 0.0
    peak_rss_mb: float = 0.0
    ratios: list[float] = field(default_factory=list)


class Prepared:
    """A table with its WAL written, and a slot that stands before all of it."""

    def __init__(self, rig: Rig, workload: Workload) -> None:
        self.rig = rig
        self.workload = workload
        self.table = fresh_name("bench")
        self.publication = fresh_name("pub")
        self.slot = fresh_name("base")
        columns, row = (WIDE, WIDE_ROW) if workload.wide else (NARROW, NARROW_ROW)
        rig.execute(f"CREATE TABLE {self.table} ({columns})")
        rig.execute(f"CREATE PUBLICATION {self.publication} FOR TABLE {self.table}")
        rig.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self.slot])
        with rig.connect() as connection:
            if workload.copy:
                data = connection.execute(
                    f"SELECT * FROM ({row}) rows", [1, workload.rows]
                ).fetchall()
                with connection.cursor().copy(f"COPY {self.table} FROM STDIN") as copy:
                    for values in data:
                        copy.write_row(values)
            else:
                step = workload.rows_per_transaction
                for first in range(1, workload.rows + 1, step):
                    last = min(first + step - 1, workload.rows)
                    connection.execute(f"INSERT INTO {self.table} {row}", [first, last])
        self.end_lsn = rig.value("SELECT pg_current_wal_lsn()")

    def copy_slot(self) -> str:
        name = fresh_name("slot")
        self.rig.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [self.slot, name])
        return name

    def drop(self) -> None:
        rig = self.rig
        rig.execute("SELECT pg_drop_replication_slot(%s)", [self.slot])
        rig.execute(f"DROP PUBLICATION {self.publication}")
        rig.execute(f"DROP TABLE {self.table}")


def reference_seconds(prepared: Prepared) -> float:
    """How long pg_recvlogical takes to throw all of it away."""
    rig = prepared.rig
    slot = prepared.copy_slot()
    command = [
        tool(rig, "pg_recvlogical"), "-d", rig.postgres.dsn(), "--slot", slot, "--start",
        "-o", "proto_version=1", "-o", f"publication_names={prepared.publication}",
        "--endpos", prepared.end_lsn, "-f", "/dev/null", "--no-loop",
    ]  # fmt: skip
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    elapsed = time.perf_counter() - started
    rig.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    return elapsed


def bridge_run(
    prepared: Prepared, flags: Sequence[str], *, in_own_account: bool = False
) -> tuple[float, dict[str, float]]:
    """How long the bridge takes from its first read until all is acknowledged, and CPU times.

    It logs in to NATS as an administrator, or with the permissions that `bridge check` prints.
    """
    rig = prepared.rig
    slot = prepared.copy_slot()
    prefix = fresh_name("p")
    log_path = rig.directory / f"{slot}.log"
    if in_own_account:
        rig.nats.grant(prefix)
    environment = {
        **os.environ,
        "DATABASE_URL": rig.postgres.dsn(),
        "NATS_URL": rig.nats.bridge_url if in_own_account else rig.nats.url,
    }
    command = [
        sys.executable, "-m", "bridge", "--slot", slot, "--pub", prepared.publication,
        "--prefix", prefix, "--port", "0", *flags,
    ]  # fmt: skip
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            port = wait_port(log_path, process)
            started = wait_streaming(log_path, process)
            used = {"nats": cpu_seconds(rig.nats.pid), "bridge": cpu_seconds(process.pid)}
            walsender = rig.value(
                "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", [slot]
            )
            finished = _wait_published(port, prepared.workload.rows, process)
            cpu = {
                "nats": cpu_seconds(rig.nats.pid) - used["nats"],
                "bridge": cpu_seconds(process.pid) - used["bridge"],
                "walsender": cpu_seconds(walsender) if walsender else 0.0,
                "rss": peak_rss_mb(process.pid),
            }
        finally:
            process.terminate()
            process.wait(30)
    rig.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    return finished - started, cpu


def wait_port(log_path, process) -> int:  # type: ignore[no-untyped-def]
    match = _wait_log(log_path, process, r'event="http listening".* port=(\d+)')
    return int(match[1])


def wait_streaming(log_path, process) -> float:  # type: ignore[no-untyped-def]
    _wait_log(log_path, process, r'event="streaming starts"')
    return time.perf_counter()


def _wait_log(log_path, process, pattern):  # type: ignore[no-untyped-def]
    deadline = time.perf_counter() + 60
    while time.perf_counter() < deadline:
        text = log_path.read_text()
        match = re.search(pattern, text)
        if match:
            return match
        if process.poll() is not None:
            raise RuntimeError(f"the bridge ended: {text[-2000:]}")
        time.sleep(0.005)
    raise RuntimeError(f"not in the log: {pattern}")


def _wait_published(port: int, rows: int, process) -> float:  # type: ignore[no-untyped-def]
    """Ask rarely at first and often towards the end: asking costs the bridge time too."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    began = time.perf_counter()
    while True:
        connection.request("GET", "/status")
        status = json.loads(connection.getresponse().read())
        if status["cdc_events_published"] >= rows:
            return time.perf_counter()
        if process.poll() is not None:
            raise RuntimeError("the bridge ended")
        share = status["cdc_events_published"] / rows
        left = (time.perf_counter() - began) * (1 - share) / share if share else 0.1
        # A guess from the first moments may be far too long.
        time.sleep(min(max(left * 0.5, 0.005), 0.1))


OWN_ACCOUNT = "msgpack, least privileges"
MODES: dict[str, tuple[str, ...]] = {
    "msgpack": (),
    "json": ("--json",),
    "pack": ("--pack",),
    OWN_ACCOUNT: (),
}


def measure(rig: Rig, workload: Workload, modes: Sequence[str], repeats: int) -> list[Result]:
    """Interleave reference and bridge, so that a slow moment of the machine meets both."""
    prepared = Prepared(rig, workload)
    results = {mode: Result(workload.name, mode, workload.rows) for mode in modes}
    samples: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    try:
        for _ in range(repeats):
            for mode in modes:
                reference = reference_seconds(prepared)
                elapsed, cpu = bridge_run(prepared, MODES[mode], in_own_account=mode == OWN_ACCOUNT)
                results[mode].ratios.append(reference / elapsed)
                samples[mode].append({**cpu, "reference": reference, "elapsed": elapsed})
    finally:
        prepared.drop()
    for mode, result in results.items():
        rows = workload.rows
        result.reference_rate = rows / median(s["reference"] for s in samples[mode])
        result.rate = rows / median(s["elapsed"] for s in samples[mode])
        result.ratio = median(result.ratios)
        result.spread = max(result.ratios) - min(result.ratios)
        result.bridge_us = median(s["bridge"] for s in samples[mode]) / rows * 1e6
        result.walsender_us = median(s["walsender"] for s in samples[mode]) / rows * 1e6
        result.nats_us = median(s["nats"] for s in samples[mode]) / rows * 1e6
        result.peak_rss_mb = max(s["rss"] for s in samples[mode])
    return list(results.values())
