"""What a mirror reports while it runs: notices for a log, and its status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from consumer_sdk.targets.target import MirrorPosition, TableName

MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Notice:
    """One log line: the event in lower case, and its fields."""

    event: str
    fields: dict[str, str | int | float] = field(default_factory=dict)
    warning: bool = False


class MirrorPhase(StrEnum):
    """What a mirror is doing."""

    STARTING = "starting"
    LOADING = "loading"
    CATCHING_UP = "catching up"
    FOLLOWING = "following"
    STOPPED = "stopped"


@dataclass(slots=True)
class MirrorStatus:
    """What a mirror is doing and has done; the mirror updates it while it runs."""

    state: MirrorPhase = MirrorPhase.STARTING
    tables: int = 0
    tables_loading: int = 0
    rows_loaded: int = 0
    rows_expected: int = 0
    events_applied: int = 0
    commits: int = 0
    bootstraps: int = 0
    repairs: int = 0
    last_event_us: int = 0
    """Commit time of the last transaction read, microseconds since 1970."""
    caught_up: bool = False
    positions: dict[str, MirrorPosition] = field(default_factory=dict)


def table_list(tables: list[TableName] | frozenset[TableName]) -> str:
    """Table names for a log line; of a long list only the first."""
    names = [format_table_name(*table) for table in sorted(tables)]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ",".join(names[:MOST_NAMES]) + more
