"""The list of faults. Each acts on a world and is undone when it ends.

A fault has its own random generator, derived from the campaign's seed and its place in the list of
faults, so that its choices do not depend on earlier faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Set

    from tests.fault.world import World

    Action = Callable[[World, random.Random], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    act: Action
    weight: int
    at_rest: bool
    """Injected after a barrier with the writers stopped; otherwise under load."""
    gap: bool
    """Breaks the history: the bridge must refuse to continue, and announce a gap afterwards."""
    needs: frozenset[str]
    """What a world must have: single, cluster, mirror, spark."""

    def fits(self, features: Set[str]) -> bool:
        """Whether it can be injected into a world with these features."""
        return self.needs <= features


FAULTS: list[Fault] = []


def fault(
    name: str, *, weight: int = 3, at_rest: bool = False, gap: bool = False, needs: str = ""
) -> Callable[[Action], Action]:
    """Register a fault."""

    def register(act: Action) -> Action:
        wanted = frozenset(needs.split())
        FAULTS.append(Fault(name, act, weight, at_rest or gap, gap, wanted))
        return act

    return register
