"""What a bootstrap shows while it goes on."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

from consumer_sdk.snapshot.request import SnapshotProgress
from spark_consumer.job import progress_bar
from spark_consumer.job.progress_bar import JobWatch, ProgressBar
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    import pytest
    from pyspark.sql import SparkSession


class Terminal(io.StringIO):
    """Keeps what a terminal was sent."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_grows_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_REDRAW_SECONDS", 0.0)
    terminal = Terminal()
    bar = ProgressBar("sales.orders", terminal)
    bar.snapshot(SnapshotProgress("id", "copying", 1_500, 3_000, {}))
    bar.loading(3, 4)
    bar.finish(3_100)
    first, second, last = terminal.getvalue().split("\r\x1b[K")[1:]
    assert first == f"sales.orders: {'█' * 14}{'░' * 14}  50% 1,500/3,000 rows, snapshot copying"
    assert second == f"sales.orders: {'█' * 21}{'░' * 7}  75% 3/4 parts, loading"
    assert last == "sales.orders: 3,100 rows loaded\n"


def test_elsewhere_a_line_comes_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a program that uses the package has it; the command sends the lines to standard error.
    monkeypatch.setattr(logging.getLogger("spark_consumer"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("spark_consumer"), "propagate", True)
    caplog.set_level(logging.INFO, "spark_consumer")
    log = io.StringIO()
    bar = ProgressBar("users", log)
    for done in range(1, 5):
        bar.loading(done, 4)
    bar.finish(10)
    assert log.getvalue() == ""
    (record,) = caplog.records
    assert record.fields == {"table": "users", "state": "loading", "done": "1/4 parts"}


def test_the_tasks_of_a_job_are_counted_while_it_runs(spark: SparkSession) -> None:
    told: list[tuple[int, int]] = []
    with JobWatch(spark, "counted", lambda done, total: told.append((done, total))):
        spark.range(0, 3, 1, 3).rdd.map(lambda n: n).count()
        wait_until(lambda: (3, 3) in told, what=lambda: str(told))
    assert all(done <= total == 3 for done, total in told)
