"""The driver's memory does not grow with the table: no load and no batch passes through it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from consumer_sdk.wire import parse_lsn
from tests.fixtures.waiting import wait_until
from tests.spark.lake_oracle import lake_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database
    from tests.spark.conftest import Jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 100_000
WIDTH = 1_600
"""Together 160 MB as Arrow, and incompressible, so that no encoding hides them."""
LOAD_LIMIT_MB = 80
BATCH_LIMIT_MB = 500
"""400 rows that touch every file take 350; with row groups of any size they took 680."""


class PeakMemory:
    """How far this process grows while a block runs, as the kernel sees it."""

    grown_mb = 0.0

    def __enter__(self) -> PeakMemory:
        # 5: forget the peak so far.
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_mb("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.grown_mb = _status_mb("VmHWM") - self._before


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(found.split()[1]) / 1024


def test_neither_a_load_nor_a_batch_passes_through_the_driver(
    database: Database, bridge_process: Callable[..., BridgeProcess], jobs: Jobs
) -> None:
    database.execute("CREATE TABLE wide (id int PRIMARY KEY, body text)")
    text = f"(SELECT string_agg(md5(n::text || g), '') FROM generate_series(1, {WIDTH // 32}) n)"
    database.execute(f"INSERT INTO wide SELECT g, {text} FROM generate_series(1, {ROWS}) g")
    database.publish("wide")
    bridge = bridge_process("--pack")
    with PeakMemory() as load:
        jobs.once("wide")
    with PeakMemory() as batch:
        _apply(jobs, database, bridge, "WHERE id % 250 = 7")
    # One transaction as large as the table: a batch holds it whole, whatever its limit.
    _apply(jobs, database, bridge, "")
    found = lake_table(jobs.lake, "wide").to_pyarrow_dataset()
    assert found.count_rows() == ROWS
    (row,) = found.to_table(filter=ds.field("id") == 7).to_pylist()
    assert row["body"] == database.value("SELECT body FROM wide WHERE id = 7")
    print(f"grown by {load.grown_mb:.0f} MB and {batch.grown_mb:.0f} MB")
    assert load.grown_mb < LOAD_LIMIT_MB
    assert batch.grown_mb < BATCH_LIMIT_MB


def _apply(jobs: Jobs, database: Database, bridge: BridgeProcess, where: str) -> None:
    database.execute(f"UPDATE wide SET body = reverse(body) {where}")
    written = parse_lsn(database.current_lsn())
    wait_until(lambda: parse_lsn(bridge.status()["confirmed_lsn"]) >= written, 120)
    jobs.once("wide")
