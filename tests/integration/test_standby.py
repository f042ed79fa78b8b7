"""A bridge that reads from a standby, through its promotion."""

from __future__ import annotations

import subprocess
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.fixtures.cdc_log import CdcLog
from tests.fixtures.postgres import Database
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bridge.embedded import PostgresServer
    from tests.fixtures.bridge_process import BridgeProcess

pytestmark = pytest.mark.quick_checks


class Nudge:
    """Writes the running transactions to the primary's log, as OPERATIONS.md advises."""

    def __init__(self, dsn: str) -> None:
        self._stop = Event()
        self._thread = Thread(target=self._run, args=[dsn])

    def _run(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not self._stop.wait(0.1):
                connection.execute("SELECT pg_log_standby_snapshot()")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def standby_of(own_postgres: Callable[..., PostgresServer]) -> Callable[..., PostgresServer]:
    """Factory of standbys that follow a primary."""

    def start(primary: PostgresServer) -> PostgresServer:
        standby = own_postgres(primary.version)
        standby.stop()
        primary.stop()
        data = standby.directory / "data"
        subprocess.run(["rm", "-r", data], check=True)
        subprocess.run(["cp", "-a", primary.directory / "data", data], check=True)
        primary.start()
        (data / "standby.signal").touch()
        standby.settings |= {"primary_conninfo": primary.dsn(), "hot_standby_feedback": "on"}
        standby.start()
        return standby

    return start


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", [18, 16])
async def test_changes_and_snapshots_come_from_a_standby_also_after_its_promotion(
    own_postgres: Callable[..., PostgresServer],
    standby_of: Callable[..., PostgresServer],
    database: Database,
    cdc: CdcLog,
    bridge_process: Callable[..., BridgeProcess],
    run_command: Callable[..., Any],
    prefix: str,
    tmp_path: Path,
    version: int,
) -> None:
    del database
    primary = Database(own_postgres(version), "postgres")
    primary.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    primary.execute("INSERT INTO t SELECT g, 'before' FROM generate_series(1, 100) g")
    primary.publish("t")
    standby = standby_of(primary.server)
    dsn = standby.dsn(password=primary.server.password)
    log = CdcLog(cdc.client, cdc.subjects, primary)
    replica = f"sqlite:///{tmp_path / 'replica.db'}"

    def run(*arguments: str) -> Any:
        done = run_command("cdc", *arguments, environment={"BRIDGE_PREFIX": prefix})
        assert done.returncode == 0, done.stderr + done.stdout
        return done

    with Nudge(primary.dsn):
        bridge = bridge_process(database_url=dsn)
        run("mirror", "t", "--into", replica, "--once")
        primary.execute("UPDATE t SET v = 'after' WHERE id > 50; DELETE FROM t WHERE id = 1")
        await log.settle()
        run("mirror", "t", "--into", replica, "--once")
        run("verify", "t", "--source", primary.dsn, "--replica", replica)
    epoch = bridge.status()["epoch"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_promote()")
        connection.execute("INSERT INTO t VALUES (1000, 'promoted')")

    async def has_arrived() -> bool:
        return any(event.data.get("id") == 1000 for event in await log.changes("t"))

    await eventually(has_arrived, 40, bridge.log_text)
    run("mirror", "t", "--into", replica, "--once")
    run("verify", "t", "--source", dsn, "--replica", replica)
    assert bridge.running
    assert bridge.status()["epoch"] == epoch
    records = await log.progress()
    assert [record["gap"] for record in records if record["gap"]] == []
