"""The list of faults. Each acts on a world and has taken itself back when it ends.

A fault gets a random generator of its own, drawn from the campaign's seed and its place, so that
what it does depends on nothing that happened before it.
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
    """One way of hurting a world."""

    name: str
    act: Action
    weight: int
    at_rest: bool
    """Injected after a barrier, writers stopped; otherwise under load."""
    gap: bool
    """Breaks history: the bridge must refuse to go on, and announce it when told to go on."""
    needs: frozenset[str]
    """What a world must have: single, cluster, mirror, spark."""

    def fits(self, features: Set[str]) -> bool:
        """Whether a world with these features can have it."""
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
