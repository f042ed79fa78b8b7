"""A bridge that must not go on leaves everything as it found it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from nats.js.api import DiscardPolicy
from nats.js.errors import NotFoundError

from tests.fault.nats_binaries import TOO_OLD, nats_binary
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.postgres import Database


@pytest.fixture
async def stopped(
    database: Database, bridge_process: Callable[..., BridgeProcess], cdc: CdcLog
) -> str:
    """The slot of a bridge that has published something and was stopped."""
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge = bridge_process()
    database.execute("INSERT INTO users VALUES (1)")
    await cdc.settle()
    bridge.terminate()
    assert bridge.wait(30) == 0
    return f"slot_{database.name}"


async def test_a_slot_that_is_gone_is_named_and_not_left_behind(
    stopped: str, database: Database, bridge_process: Callable[..., BridgeProcess]
) -> None:
    database.execute("SELECT pg_drop_replication_slot(%s)", [stopped])
    database.execute("INSERT INTO users VALUES (2)")
    bridge = bridge_process(wait=False)
    assert bridge.wait(30) == 4
    assert "the slot was gone" in bridge.log_text()
    assert database.value("SELECT count(*) FROM pg_replication_slots") == 0
    bridge_process("--on-gap", "new-epoch")


async def test_a_slot_made_by_a_try_that_failed_is_not_left_behind_by_the_next(
    stopped: str, database: Database, cdc: CdcLog, bridge_process: Callable[..., BridgeProcess]
) -> None:
    database.execute("SELECT pg_drop_replication_slot(%s)", [stopped])
    database.execute("INSERT INTO users VALUES (2)")
    manager = cdc.client.jsm()
    found = await manager.stream_info(cdc.subjects.cdc_stream)
    full = replace(found.config, max_msgs=found.state.messages, discard=DiscardPolicy.NEW)
    await manager.update_stream(full)
    bridge = bridge_process(wait=False)
    wait_until(lambda: "takes no messages" in bridge.log_text(), 30, bridge.log_text)
    assert database.value("SELECT count(*) FROM pg_replication_slots") == 1
    await manager.update_stream(found.config)
    assert bridge.wait(30) == 4
    assert "the slot was gone" in bridge.log_text()
    assert database.value("SELECT count(*) FROM pg_replication_slots") == 0


async def test_a_stream_that_is_gone_is_not_created_before_somebody_decides(
    stopped: str, cdc: CdcLog, bridge_process: Callable[..., BridgeProcess]
) -> None:
    manager = cdc.client.jsm()
    name = cdc.subjects.cdc_stream
    await manager.delete_stream(name)
    bridge = bridge_process(wait=False)
    assert bridge.wait(30) == 4
    assert f"stream {name} is gone" in bridge.log_text()
    assert "--on-gap=new-epoch" in bridge.log_text()
    with pytest.raises(NotFoundError):
        await manager.stream_info(name)
    bridge_process("--on-gap", "new-epoch")
    assert (await manager.stream_info(name)).state.messages


async def test_a_bridge_without_nats_is_not_ready(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    own_nats: Callable[..., NatsServer],
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    server = own_nats()
    bridge = bridge_process(nats_url=server.url)
    status = bridge.status()
    assert status["confirmed_lsn"] != "0/0"
    database.execute("INSERT INTO users VALUES (1)")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)
    assert "bridge_wal_bytes_received_total 0.0" not in bridge.http("/metrics").text
    server.kill()
    wait_until(lambda: bridge.http("/ready").status == 503)
    assert bridge.http("/health").status == 200
    server.start()
    wait_until(lambda: bridge.http("/ready").status == 200)


async def test_a_nats_server_that_cannot_compare_fences_is_refused(
    database: Database,
    own_nats: Callable[..., NatsServer],
    bridge_process: Callable[..., BridgeProcess],
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    server = own_nats(binary=nats_binary(TOO_OLD))
    bridge = bridge_process(wait=False, nats_url=server.url)
    assert bridge.wait(30) == 3
    assert f"nats-server {TOO_OLD} is too old; upgrade it to 2.11 or newer" in bridge.log_text()
    assert database.value("SELECT count(*) FROM pg_replication_slots") == 0
