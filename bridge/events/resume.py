"""Skips changes that PostgreSQL sends again after a restart and that are already recorded."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import HistoryBroken
from consumer_sdk.wire.position import format_lsn


@dataclass(frozen=True, slots=True)
class Resume:
    """The position where the stream's record ends; earlier changes are skipped."""

    commit_lsn: int = 0
    """The newest transaction that is recorded, at least in part."""
    next_seq: int = 0
    """Its first change that is not recorded."""
    next_ordinal: int = 0
    """Its first logical message that is not recorded."""
    ts: int = 0
    """Its commit time."""
    must_reappear: bool = False
    """The slot is before that transaction, so the log must contain it again; if it does not, the
    server has a different history."""
    nothing_before: int = 0
    """There was no change between that transaction and this position; if the log contains one, the
    server has a different history."""


class Replay:
    """Finds the changes that PostgreSQL sends again and that are already recorded.

    It raises HistoryBroken if PostgreSQL sends other transactions than those recorded.
    """

    def __init__(self, resume: Resume) -> None:
        self._resume = resume
        self._must_reappear = resume.must_reappear
        self._commit_lsn = 0
        self._is_impossible = False
        self.is_recorded = False
        """Whether the whole transaction is already recorded."""
        self.next_seq = 0
        self.next_ordinal = 0
        """Else, the first change and the first logical message that are not recorded."""

    def begin(self, commit_lsn: int, commit_time: int) -> bool:
        """Begin the next transaction; True if part of it may have to be skipped."""
        resume = self._resume
        if self._must_reappear and commit_lsn >= resume.commit_lsn:
            self.expect(commit_lsn)
            if resume.ts and resume.ts != commit_time:
                raise _broken(commit_lsn)
            self._must_reappear = False
        self._commit_lsn = commit_lsn
        self._is_impossible = resume.commit_lsn < commit_lsn < resume.nothing_before
        self.is_recorded = commit_lsn < resume.commit_lsn or self._is_impossible
        is_partly = commit_lsn == resume.commit_lsn
        self.next_seq = resume.next_seq if is_partly else 0
        self.next_ordinal = resume.next_ordinal if is_partly else 0
        return self.is_recorded or is_partly

    def skips_transaction(self) -> bool:
        """Whether the whole current transaction is already recorded; called for every change."""
        if self._is_impossible:
            raise _broken(self._commit_lsn)
        return self.is_recorded

    def expect(self, lsn: int) -> None:
        """Raise if the log has passed the recorded transaction without containing it."""
        if self._must_reappear and lsn > self._resume.commit_lsn:
            raise _broken(self._resume.commit_lsn)


def _broken(lsn: int) -> HistoryBroken:
    return HistoryBroken(
        f"this server's history at {format_lsn(lsn)} is not the one that the stream records "
        "(restored from a backup?); consumers need a new bootstrap: start with "
        "--on-gap=new-epoch"
    )
