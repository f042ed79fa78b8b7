"""The blocking facade, against a real bridge."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk import NotAvailable, UnknownTable, sync
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database


@pytest.fixture
def cdc(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
) -> Iterator[sync.BlockingClient]:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.execute("INSERT INTO users SELECT n, 'user ' || n FROM generate_series(1, 250) n")
    database.publish("users")
    bridge_process()
    with sync.connect(nats_server.reader_url, prefix=prefix) as client:
        wait_until(client.tables, what="schemas")
        yield client


def test_schemas_snapshot_and_changes_without_await(
    cdc: sync.BlockingClient, database: Database
) -> None:
    assert [table.table for table in cdc.tables()] == ["users"]
    assert cdc.schema("users").primary_key == ("id",)
    with pytest.raises(UnknownTable):
        cdc.schema("absent")
    snapshot = cdc.snapshot("users")
    assert sorted(row["id"] for row in snapshot.rows()) == list(range(1, 251))
    assert sum(map(len, snapshot.chunks())) == 250
    assert not snapshot.reused
    with cdc.changes(["users"], after=snapshot.meta.cdc_seq - 1) as changes:
        database.execute("UPDATE users SET name = 'x' WHERE id IN (1, 2)")
        found = changes.next(20)
        while found.commit_lsn < snapshot.meta.snapshot_lsn:
            found = changes.next(20)
        assert sorted(event.data["id"] for event in found.events if event.data) == [1, 2]
        with pytest.raises(TimeoutError):
            changes.next(0.05)
        database.execute("DELETE FROM users WHERE id = 3")
        assert [event.operation for event in changes.next(20).events] == ["DELETE"]
    progress = cdc.progress(cdc.schema("users").source)
    assert progress is not None


def test_events_messages_and_the_log_without_await(
    cdc: sync.BlockingClient, database: Database
) -> None:
    database.execute("SELECT pg_logical_emit_message(true, 'outbox', 'hello')")
    with cdc.messages("outbox", after="start") as messages:
        assert messages.next(20).event.data == "hello"
    database.execute("DELETE FROM users WHERE id < 11")
    with cdc.changes(["users"], after="start", as_events=True) as events:
        seen: list[Any] = []
        while len(seen) < 10:
            event = events.next(20).event
            if event.operation == "DELETE":
                seen.append(event.data["id"])
    assert seen == list(range(1, 11))
    bounds = cdc.log_bounds()
    batches = list(cdc.read_log(bounds.first, bounds.last + 1))
    assert sum(one.event.operation == "DELETE" for batch in batches for one in batch) == 10
    with cdc.watch_schemas() as schemas:
        assert schemas.next(10).table == "users"


async def test_it_works_where_a_loop_is_running(nats_server: NatsServer, prefix: str) -> None:
    assert asyncio.get_running_loop().is_running()
    with sync.connect(nats_server.reader_url, prefix=prefix) as client, pytest.raises(NotAvailable):
        client.tables()
