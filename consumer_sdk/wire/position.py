"""Where in a source's history an event stands."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """Commit LSN and ordinal in the transaction; comparable only within one source and epoch."""

    commit_lsn: int
    seq: int
