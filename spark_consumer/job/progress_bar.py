"""Progress of a bootstrap: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, TextIO

from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pyspark.sql import SparkSession

    from consumer_sdk.snapshot.request import SnapshotProgress

logger = logging.getLogger(__name__)

_WIDTH: Final = 28
_REDRAW_SECONDS: Final = 0.25
_LOG_SECONDS: Final = 10.0


class ProgressBar:
    """Shows the bootstrap of one table: the bridge takes the snapshot, then executors load it."""

    def __init__(self, table: str, stream: TextIO | None = None) -> None:
        self._table = table
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._shown_at = 0.0

    def snapshot(self, progress: SnapshotProgress) -> None:
        """Show the progress that the bridge reports for the snapshot."""
        self._show(f"snapshot {progress.state}", progress.rows, progress.estimated_rows, "rows")

    def loading(self, done: int, total: int) -> None:
        """Show how many parts the executors have written."""
        self._show("loading", done, total, "parts")

    def finish(self, rows: int) -> None:
        """Show that the table is loaded."""
        if self._terminal:
            self._draw(f"{self._table}: {rows:,} rows loaded")
            self._stream.write("\n")
            self._stream.flush()

    def _show(self, what: str, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        if now - self._shown_at < (_REDRAW_SECONDS if self._terminal else _LOG_SECONDS):
            return
        self._shown_at = now
        if not self._terminal:
            amount = f"{done}/{total}" if total else str(done)
            event(logger, "bootstrap", table=self._table, state=what, done=f"{amount} {unit}")
            return
        share = min(1.0, done / total) if total else 0.0
        filled = int(share * _WIDTH)
        bar = "█" * filled + "░" * (_WIDTH - filled)
        amount = f"{done:,}/{total:,}" if total else f"{done:,}"
        self._draw(f"{self._table}: {bar} {share:4.0%} {amount} {unit}, {what}")

    def _draw(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


class JobWatch:
    """Reports how many tasks of a Spark job are done, while a `with` block runs."""

    def __init__(self, spark: SparkSession, group: str, report: Callable[[int, int], None]) -> None:
        self._context = spark.sparkContext
        self._group = group
        self._report = report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._context.setJobGroup(self._group, self._group)
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]

    def _watch(self) -> None:
        tracker = self._context.statusTracker()
        while not self._ended.wait(_REDRAW_SECONDS):
            done = total = 0
            for job in tracker.getJobIdsForGroup(self._group):
                info = tracker.getJobInfo(job)
                for stage in info.stageIds if info else ():
                    tasks = tracker.getStageInfo(stage)
                    if tasks is not None:
                        done += tasks.numCompletedTasks
                        total += tasks.numTasks
            if total:
                self._report(done, total)
