"""A whole mirror in a world where everything happens: what it shows is always what was true."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from consumer_sdk.mirror import bootstrap, follower, handoff, runner
from consumer_sdk.mirror.runner import Mirror
from consumer_sdk.targets.memory import MemoryTarget
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import Lane
from tests.mirror_model import normalized
from tests.mirror_world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TABLES = {
    "slot": [("public", "a"), ("public", "full"), ("public", "bag")],
    "other": [("public", "b"), ("sales", "full2"), ("sales", "Bag")],
}
STEPS = frozenset(
    [
        "begin",
        "commit",
        "save_position",
        "save_copy",
        "create",
        "drop",
        "load",
        "apply",
        "alter",
        "promote",
    ]
)


class Killed(Exception):
    """The process ends here."""


class FragileTarget:
    """Ends the process before or after some call, and looks at what shows after each commit."""

    def __init__(self, inner: Any, world: World, calls: int | None) -> None:
        self._inner = inner
        self._world = world
        self._calls = calls
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "rollback" and self.dead:
            return lambda: None
        if name not in STEPS:
            return method

        def step(*arguments: Any) -> None:
            self._count()
            method(*arguments)
            if name == "commit":
                check_shown(self._inner, self._world)
            self._count()

        return step

    def _count(self) -> None:
        if self._calls is not None:
            self._calls -= 1
            if self._calls < 0:
                self.dead = True
                raise Killed


def check_shown(target: Any, world: World) -> None:
    """Every live table that is followed is as of its source's position.

    One that another source publishes now stays as it was until that one's takes its place.
    """
    state = target.read_state()
    coming = state.lane(Lane.NEXT)
    for table, copy in state.lane(Lane.LIVE).items():
        moved = table in coming and coming[table].source != copy.source
        if not copy.retired and not moved:
            position = state.positions[copy.source]
            source = world.sources[copy.source]
            expected = source.rows_at(position.epoch, position.commit_lsn, table)
            found = target.rows(table[1], table[0])
            assert normalized(found) == normalized(expected), (table, position)


async def run_once(target: Any, world: World, *, fresh: bool = False) -> bool:
    mirror = Mirror(world, None, target, fresh=fresh, on_notice=world.notice)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(20):
            await mirror.run(once=True)
    except Killed:
        world.trace.append("killed")
        return False
    return True


@contextmanager
def without_pauses(world: World, data: Random) -> Iterator[None]:
    with (
        patch.object(runner, "REPAIR_PAUSES", (0.0,)),
        patch.object(runner, "RETRY_SECONDS", 0.0),
        patch.object(bootstrap, "RETRY_SECONDS", (0.0,)),
        patch.object(follower, "SAVE_SECONDS", data.choice([-1.0, 5.0])),
        patch.object(follower, "newest_lsn", world.newest_lsn),
        patch.dict(handoff.HandOff.__init__.__kwdefaults__, spill_events=data.choice([0, 2, 1000])),
    ):
        yield


def mirror_to_the_end(make: Callable[[], Any], world: World) -> None:
    """Mirror once while nothing happens any more, and compare."""
    world.steps = 0
    world.settle()
    assert asyncio.run(run_once(FragileTarget(make(), world, None), world))
    found = make()
    found.open()
    state = found.read_state()
    assert not state.lane(Lane.NEXT)
    shown = {name: copy for name, copy in state.lane(Lane.LIVE).items() if not copy.retired}
    for table, owner in world.owners.items():
        if table not in world.hidden:
            assert shown[table].source == owner
            expected = world.sources[owner].rows[table]
            assert normalized(found.rows(table[1], table[0])) == normalized(expected), table
    found.close()


def mirror_survives(make: Callable[[], Any], seed: int) -> None:
    data = Random(seed)
    world = World(data, TABLES)
    world.steps = data.randint(0, 40)
    while world.steps:
        world.step()
    with without_pauses(world, data):
        for _ in range(data.randint(1, 8)):
            world.steps = data.randint(0, 40)
            calls = data.choice([None, data.randint(0, 30), data.randint(0, 200)])
            target = FragileTarget(make(), world, calls)
            asyncio.run(run_once(target, world, fresh=data.random() < 0.15))
        mirror_to_the_end(make, world)


def test_a_table_moves_to_a_source_of_an_earlier_epoch(tmp_path: Path) -> None:
    data = Random(0)
    world = World(data, TABLES)
    slot = world.sources["slot"]
    for _ in range(3):
        world.new_epoch(slot)
    with without_pauses(world, data):
        make = partial(SqliteTarget, tmp_path / "mirror.db")
        mirror_to_the_end(make, world)
        world.move(slot)
        mirror_to_the_end(make, world)


def test_a_table_without_key_comes_back_with_the_snapshot_it_had(tmp_path: Path) -> None:
    data = Random(0)
    world = World(data, {"slot": [("public", "bag"), ("public", "bag2")]})
    with without_pauses(world, data):
        make = partial(SqliteTarget, tmp_path / "mirror.db")
        mirror_to_the_end(make, world)
        for _ in range(2):
            world.hide(world.sources["slot"])
            mirror_to_the_end(make, world)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_a_mirror_in_memory_always_shows_what_was_true(seed: int) -> None:
    target = MemoryTarget()
    mirror_survives(lambda: target, seed)


@settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32))
def test_a_mirror_in_sqlite_always_shows_what_was_true(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        mirror_survives(lambda: SqliteTarget(Path(directory, "mirror.db")), seed)
