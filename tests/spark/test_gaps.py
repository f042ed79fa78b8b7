"""What must stop the job, with the table left as it is, and what it must only wait for."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from bridge.preflight.permissions import READER_USER
from consumer_sdk.errors import CorruptData, GapError
from consumer_sdk.wire.subjects import Subjects
from spark_consumer.errors import LakeError, LakeOptionsError, UnsuitableTableError
from spark_consumer.lake.embedded import EmbeddedDeltaLake
from tests.fixtures.waiting import wait_until
from tests.spark.lake_oracle import assert_same_rows, lake_table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client as NatsClient

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.nats import SharedNats
    from tests.fixtures.postgres import Database
    from tests.spark.conftest import Jobs

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def users(
    database: Database, bridge_process: Callable[..., BridgeProcess], jobs: Jobs
) -> BridgeProcess:
    """A table that is in the lake and has moved on since."""
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute("INSERT INTO users SELECT n, 'first' FROM generate_series(1, 20) n")
    database.publish("users")
    bridge = bridge_process()
    jobs.once("users")
    published = bridge.status()["cdc_events_published"]
    database.execute("UPDATE users SET name = 'second' WHERE id < 4")
    wait_until(lambda: bridge.status()["cdc_events_published"] >= published + 3)
    return bridge


@pytest.fixture
def with_nats(nats_server: NatsServer) -> Callable[[Callable[[NatsClient], Awaitable[Any]]], Any]:
    """Do something on NATS."""
    import asyncio

    import nats

    async def run(action: Callable[[NatsClient], Awaitable[Any]]) -> Any:
        client = await nats.connect(nats_server.url)
        try:
            return await action(client)
        finally:
            await client.close()

    return lambda action: asyncio.run(run(action))


def test_a_trimmed_stream_stops_the_job_or_rebuilds_the_table(
    users: BridgeProcess, database: Database, jobs: Jobs, prefix: str, with_nats: Callable[..., Any]
) -> None:
    version = lake_table(jobs.lake, "users").version()
    with_nats(lambda client: client.jsm().purge_stream(Subjects(prefix).cdc_stream))
    with pytest.raises(GapError, match="position of table users were trimmed or purged"):
        jobs.once("users")
    assert lake_table(jobs.lake, "users").version() == version
    jobs.once("users", rebootstrap=True)
    assert_same_rows(database.dsn, jobs.lake, "users")


def test_a_recreated_stream_stops_the_job_or_rebuilds_the_table(
    users: BridgeProcess,
    bridge_process: Callable[..., BridgeProcess],
    database: Database,
    jobs: Jobs,
    prefix: str,
    with_nats: Callable[..., Any],
) -> None:
    users.kill()
    with_nats(lambda client: client.jsm().delete_stream(Subjects(prefix).cdc_stream))
    bridge_process("--on-gap", "new-epoch")
    database.execute("INSERT INTO users VALUES (100, 'later')")
    version = lake_table(jobs.lake, "users").version()
    with pytest.raises(GapError, match="the stream that table users followed was recreated"):
        jobs.once("users")
    assert lake_table(jobs.lake, "users").version() == version
    jobs.once("users", rebootstrap=True)
    assert_same_rows(database.dsn, jobs.lake, "users")


def test_rows_that_the_log_never_told_of_stop_the_job_or_rebuild_the_table(
    users: BridgeProcess, database: Database, jobs: Jobs
) -> None:
    database.execute("ALTER PUBLICATION pub DROP TABLE users")
    database.execute("INSERT INTO users VALUES (300, 'while it was not published')")
    database.execute("ALTER PUBLICATION pub ADD TABLE users")
    users.wait_logged("out of the publication", 30)
    database.execute("INSERT INTO users VALUES (301, 'published again')")
    wait_until(lambda: users.status()["wal_lag_bytes"] == 0)
    with pytest.raises(GapError, match="out of the publication"):
        jobs.once("users")
    jobs.once("users", rebootstrap=True)
    assert_same_rows(database.dsn, jobs.lake, "users")


def test_a_new_epoch_in_a_running_query_rebuilds_the_table(
    users: BridgeProcess,
    bridge_process: Callable[..., BridgeProcess],
    database: Database,
    jobs: Jobs,
) -> None:
    with jobs.following("users", rebootstrap=True):
        wait_until(lambda: _same(database, jobs), 300, "caught up")
        users.kill()
        slot = f"slot_{database.name}"
        wait_until(lambda: not (database.slot(slot) or {}).get("active"))
        database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        database.execute("DELETE FROM users WHERE id = 9")
        bridge_process("--on-gap", "new-epoch")
        database.execute("INSERT INTO users VALUES (200, 'new epoch')")
        wait_until(lambda: _same(database, jobs), 300, "rebuilt")


def test_a_job_whose_user_is_revoked_goes_on_when_it_is_restored(
    users: BridgeProcess,
    database: Database,
    jobs: Jobs,
    nats_server: SharedNats,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = nats_server.config
    with caplog.at_level(logging.WARNING), jobs.following("users"):
        wait_until(lambda: _same(database, jobs), 300, "caught up")
        database.execute("INSERT INTO users VALUES (300, 'a batch')")
        wait_until(lambda: _same(database, jobs), 300, "caught up")
        nats_server.config = config.replace(f"user: {READER_USER}\n", "user: nobody\n")
        nats_server.reload()
        database.execute("INSERT INTO users VALUES (301, 'meanwhile')")
        # Driver and executors have failed, and the job has begun to wait.
        wait_until(lambda: "waiting" in {one.getMessage() for one in caplog.records}, 300)
        nats_server.config = config
        nats_server.reload()
        wait_until(lambda: _same(database, jobs), 300, "applied after all")
    assert users.running


def _same(database: Database, jobs: Jobs) -> bool:
    try:
        assert_same_rows(database.dsn, jobs.lake, "users")
    except AssertionError:
        return False
    return True


def test_a_corrupt_message_stops_the_job_before_the_table_is_touched(
    users: BridgeProcess, jobs: Jobs, prefix: str, with_nats: Callable[..., Any]
) -> None:
    version = lake_table(jobs.lake, "users").version()
    subject = Subjects(prefix).change("users", "update")
    with_nats(lambda client: client.jetstream().publish(subject, b"\xc1 not a message"))
    with pytest.raises(CorruptData, match=r"message \d+ of the change stream"):
        jobs.once("users")
    assert lake_table(jobs.lake, "users").version() == version


def test_a_position_newer_than_the_stream_stops_the_job(
    users: BridgeProcess, jobs: Jobs, database: Database
) -> None:
    table = EmbeddedDeltaLake(str(jobs.lake)).find("public", "users")
    assert table is not None
    position = table.position(f"slot_{database.name}")
    assert position is not None
    table.advance(replace(position, stream_seq=position.stream_seq + 1000))
    with pytest.raises(GapError, match="table users is at a newer position than the stream"):
        jobs.once("users")


def test_a_restored_table_stops_the_job_or_is_rebuilt(
    users: BridgeProcess, jobs: Jobs, database: Database
) -> None:
    jobs.once("users")
    DeltaTable(str(jobs.lake / "users")).restore(0)
    with pytest.raises(LakeError, match=r"users was changed by another writer .*RESTORE"):
        jobs.once("users")
    jobs.once("users", rebootstrap=True)
    assert_same_rows(database.dsn, jobs.lake, "users")


def test_a_table_made_with_other_options_is_left_alone(users: BridgeProcess, jobs: Jobs) -> None:
    with pytest.raises(LakeOptionsError, match="users was made without --soft-deletes"):
        jobs.once("users", soft_deletes=True)


def test_a_table_without_key_is_refused_before_anything_is_written(
    database: Database, bridge_process: Callable[..., BridgeProcess], jobs: Jobs
) -> None:
    database.execute("CREATE TABLE plain (n int); CREATE TABLE good (id int PRIMARY KEY)")
    database.publish("plain", "good", options="publish = 'insert'")
    bridge_process()
    with pytest.raises(UnsuitableTableError, match="ALTER TABLE plain REPLICA IDENTITY FULL"):
        jobs.once("good", "plain")
    assert not (jobs.lake / "good").exists()
