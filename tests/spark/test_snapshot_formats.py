"""Arrow chunks are asked for first; only a bridge that refuses them is asked for another format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from consumer_sdk.errors import SnapshotFailed
from consumer_sdk.snapshot.request import RequestRefused, SnapshotAbandoned
from spark_consumer.source.snapshot_source import take_snapshot


class Bridge:
    """Answers as a client does: refuses or fails in some formats."""

    def __init__(self, problems: dict[str | None, Exception]) -> None:
        self.problems = problems
        self.asked: list[str | None] = []

    async def snapshot(
        self,
        _table: object,
        *,
        format: str | None,  # noqa: A002
        pieces: bool,
        **_: object,
    ) -> Any:
        assert not pieces, "a load of several points would show rows of no single moment"
        self.asked.append(format)
        if format in self.problems:
            raise self.problems[format]
        return SimpleNamespace(meta=SimpleNamespace(schema_version=1))

    async def schema(self, _table: object) -> Any:
        return SimpleNamespace(schema_version=1)


async def ask(bridge: Any) -> None:
    await take_snapshot(bridge, ("public", "t"))


async def test_a_refused_format_is_replaced_by_the_bridges_own() -> None:
    bridge = Bridge({"arrow": RequestRefused("format arrow needs pyarrow")})
    await ask(bridge)
    assert bridge.asked == ["arrow", None]


async def test_a_snapshot_that_failed_is_not_copied_once_more_in_another_format() -> None:
    bridge = Bridge({"arrow": SnapshotFailed("snapshot of t failed: disk full")})
    with pytest.raises(SnapshotFailed, match="disk full"):
        await ask(bridge)
    assert bridge.asked == ["arrow"]


async def test_a_snapshot_that_its_bridge_abandoned_is_requested_again() -> None:
    abandoned = SnapshotAbandoned("the bridge stopped")
    bridge = Bridge({"arrow": abandoned})
    with pytest.raises(SnapshotAbandoned):
        await ask(bridge)
    assert bridge.asked == ["arrow"] * 5


async def test_a_request_that_is_refused_in_every_format_is_an_error() -> None:
    refused = RequestRefused("table t is not published")
    bridge = Bridge({"arrow": refused, None: refused})
    with pytest.raises(SnapshotFailed, match="not published"):
        await ask(bridge)
    assert bridge.asked == ["arrow", None]
