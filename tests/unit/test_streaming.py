"""What a start leaves behind that goes wrong after the stages were built."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from bridge.errors import BridgeError, DataAtRiskError, SourceError
from bridge.postgres.slot import Slot
from bridge.streaming import Streaming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Postgres:
    """Catalog and replication connection of a server whose slot stands at 0/100."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def rows(self, query: str, _: object = ()) -> list[tuple[Any, ...]]:
        if "pg_drop_replication_slot" in query:
            self.done.append("slot dropped")
        return [("0/100",)]

    async def close(self) -> None:
        self.done.append("connection closed")

    @asynccontextmanager
    async def kept_alive(self, _: float) -> AsyncIterator[None]:
        yield


class Failing:
    """A publisher and a snapshot service that fail, each at its own step."""

    def __init__(self, done: list[str], announcement: BridgeError | None) -> None:
        self._done = done
        self._announcement = announcement

    async def announce(self, *_: object) -> None:
        if self._announcement is not None:
            raise self._announcement

    async def start(self) -> None:
        raise SourceError("half-way")

    async def stop(self) -> None:
        self._done.append("snapshots stopped")


async def begin(slot_created_at: int | None, announcement: BridgeError | None) -> list[str]:
    """What is done when `begin` fails and the stretch is closed."""
    postgres = Postgres()
    failing = Failing(postgres.done, announcement)
    pipeline = SimpleNamespace(
        slot=Slot(cast("Any", postgres), name="s", publication="p"),
        connection=postgres,
        publisher=failing,
        snapshots=failing,
    )
    point = SimpleNamespace(
        known_lsn=0,
        server=SimpleNamespace(flushed_lsn=0),
        gap=None,
        slot_created_at=slot_created_at,
    )
    settings, nothing = SimpleNamespace(status_interval=1.0), cast("Any", None)
    streaming = Streaming(
        cast("Any", settings),
        nothing,
        nothing,
        cast("Any", point),
        cast("Any", pipeline),
        AsyncExitStack(),
    )
    with pytest.raises(BridgeError):
        await streaming.begin()
    await streaming.close()
    return postgres.done


async def test_data_at_risk_at_the_announcement_drops_a_slot_that_is_new() -> None:
    error = DataAtRiskError("the record cannot be read")
    assert await begin(0x100, error) == ["connection closed", "slot dropped"]


@pytest.mark.parametrize("created_at", [None, 0x90])
async def test_data_at_risk_at_the_announcement_keeps_a_slot_that_has_served(
    created_at: int | None,
) -> None:
    assert await begin(created_at, DataAtRiskError("the record cannot be read")) == []


async def test_an_error_that_may_pass_keeps_a_slot_that_is_new() -> None:
    assert await begin(0x100, SourceError("later")) == []


async def test_snapshots_that_started_half_way_are_stopped() -> None:
    assert await begin(0x100, None) == ["snapshots stopped"]
