"""Fixtures of the fault tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nats
import pytest

from tests.fault.nats_binaries import nats_binary
from tests.fault.scenario import LONG, Scenario
from tests.fault.workload import Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
async def scenario(database, prefix, nats_server, nats_client, bridge_process) -> Scenario:
    """A scenario on the shared servers, with a deduplication window of one second."""
    return Scenario(
        database,
        prefix,
        nats_server.bridge_url,
        nats_client,
        bridge_process,
        flags=("--duplicate-window", "1s"),
    )


@pytest.fixture
async def scenario_on(
    database, prefix, own_nats, bridge_process
) -> AsyncIterator[Callable[..., Any]]:
    """Factory of scenarios, each on a private nats-server of the given version."""
    clients = []

    async def make(version: str | None = None, **options: Any) -> tuple[Scenario, Any]:
        if version is not None:
            options["binary"] = nats_binary(version)
        server = own_nats(**options)
        client = await nats.connect(server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        clients.append(client)
        made = Scenario(
            database,
            prefix,
            server.url,
            client,
            bridge_process,
            flags=("--duplicate-window", "1s"),
        )
        return made, server

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def workload(scenario) -> Workload:
    """Writers on the scenario's database, not started; their tables are created and published."""
    return prepare(scenario)


def prepare(scenario: Scenario, **options: Any) -> Workload:
    """Create and publish the tables of a workload."""
    load = Workload(scenario.database.dsn, scenario.seed, **options)
    load.create_tables()
    scenario.database.publish(*load.tables)
    return load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Twenty rounds take longer than the limit of an ordinary test."""
    for item in items:
        if LONG and "tests/fault/" in str(item.path):
            item.add_marker(pytest.mark.timeout(1800))
