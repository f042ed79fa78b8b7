"""The faults of a campaign; importing this registers all of them."""

from __future__ import annotations

from tests.fault.faults import history, hostile, jetstream, network, processes, servers, spark
from tests.fault.faults.registry import FAULTS, Fault

__all__ = [
    "FAULTS",
    "Fault",
    "history",
    "hostile",
    "jetstream",
    "network",
    "processes",
    "servers",
    "spark",
]
