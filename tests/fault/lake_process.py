"""`spark-consumer` as users run it, on a small private cluster, and what readers see."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from bridge.embedded import GuardedProcess
from bridge.embedded.guardian import children
from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.waiting import eventually
from tests.spark.lake_oracle import assert_same_rows, lake_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FOLLOWING_SECONDS = 300
MASTER = "local-cluster[1,1,1024]"


class LakeProcess:
    """A Spark job that is restarted whenever it has ended."""

    def __init__(
        self, directory: Path, tables: Sequence[str], nats_url: str, prefix: str, holds: Path
    ) -> None:
        self.lake = directory / "lake"
        self.tables = list(tables)
        self._directory = directory
        self._nats_url = nats_url
        self._prefix = prefix
        self._holds = holds
        self._launched = 0
        self._seen_versions = 0
        self._process: GuardedProcess
        self._versions_before = -1

    def launch(self) -> None:
        """Start it."""
        self._launched += 1
        self._versions_before = self._versions()
        self._process = GuardedProcess(
            "spark-consumer",
            [
                sys.executable, "-m", "spark_consumer", "--tables", ",".join(self.tables),
                "--lake", self.lake, "--prefix", self._prefix, "--trigger", "500ms",
                "--rebootstrap", "--master", MASTER, "--conf", "spark.ui.enabled=false",
                "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            ],
            log_path=self._directory / f"lake-{self._launched}.log",
            stop_signal=signal.SIGKILL,
            environment=clean_environment(
                NATS_URL=self._nats_url, TAILRACE_HOLD=str(self._holds)
            ),
        )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.running

    @property
    def exit_code(self) -> int | None:
        return self._process.exit_code

    def kill(self) -> None:
        """SIGKILL the driver and all processes that it has started."""
        self._process.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver."""
        self._process.signal_tree(number)

    def terminate(self) -> None:
        """Request a graceful end."""
        self._process.send_signal(signal.SIGTERM)

    def log_tail(self) -> str:
        return self._process.log_path.read_text(errors="replace")[-4000:]

    def executors(self) -> list[int]:
        """Process ids of the executors."""
        return [pid for pid in _tree(self._process.pid) if _is_executor(pid)]

    def _versions(self) -> int:
        try:
            return int(lake_table(self.lake, "accounts").version())
        except TableNotFoundError:
            return -1

    async def until_following(self, supervise: Callable[[], None]) -> None:
        """Wait until the current job has written something."""

        def following() -> bool:
            supervise()
            return self.running and self._versions() > self._versions_before

        await eventually(lambda: asyncio.to_thread(following), FOLLOWING_SECONDS, self.log_tail)

    def differs(self, dsn: str) -> str:
        """The differences of lake and source, "" if there are none."""
        try:
            assert_same_rows(dsn, self.lake, *self.tables)
        except (AssertionError, TableNotFoundError) as error:
            return str(error) or type(error).__name__
        return ""

    def sums(self) -> list[int]:
        """The sum of the accounts in every version that a reader could have seen since."""
        root = lake_table(self.lake, "accounts").table_uri
        newest = self._versions()
        found = []
        for version in range(self._seen_versions, newest + 1):
            rows = DeltaTable(root, version=version).to_pyarrow_table(columns=["balance"])
            if rows.num_rows:
                found.append(sum(rows["balance"].to_pylist()))
        self._seen_versions = newest + 1
        return found


def _tree(pid: int) -> list[int]:
    below = children(pid)
    return [pid, *(found for child in below for found in _tree(child))]


def _is_executor(pid: int) -> bool:
    try:
        return b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
