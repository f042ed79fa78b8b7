"""Where to go on reading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resume:
    """Where the stream's record ends: everything before is skipped when PostgreSQL sends it again.

    `must_reappear` says that the slot stands before the recorded transaction, so that history
    without it is another history; so is one with changes behind it and before `nothing_before`,
    up to where the log is known to hold nothing more. `ts` is the transaction's commit time.
    """

    commit_lsn: int = 0
    next_seq: int = 0
    next_ordinal: int = 0
    ts: int = 0
    must_reappear: bool = False
    nothing_before: int = 0
