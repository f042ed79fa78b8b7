"""Carries out what the hand-off decides, in the target's transactions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from consumer_sdk.mirror.decisions import Alter, Apply, Promote, RepairNeeded, Save
from consumer_sdk.targets.target import CannotAlter, Lane, MirrorCopy
from consumer_sdk.transport.holds import hold

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from consumer_sdk.mirror.decisions import Action
    from consumer_sdk.targets.target import SnapshotRow, Target, TargetState


class Writer:
    """The only one that changes the target; every method but `interrupt` belongs to one thread."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._in_transaction = False

    def open(self) -> TargetState:
        """Open the target and read what it remembers."""
        self._target.open()
        return self._target.read_state()

    def close(self) -> None:
        """Give up what is not committed and close the target."""
        try:
            self.rollback()
        finally:
            self._target.close()

    def interrupt(self) -> None:
        """Let a call that is under way end soon; for any thread."""
        self._target.interrupt()

    def read_state(self) -> TargetState:
        """What the target remembers, as of its last commit."""
        self.rollback()
        return self._target.read_state()

    def rollback(self) -> None:
        """Give up what is not committed."""
        if self._in_transaction:
            self._in_transaction = False
            self._target.rollback()

    def perform(self, actions: Sequence[Action]) -> None:
        """Do these, in order; without a Save among them the transaction stays open."""
        target = self._target
        for action in actions:
            self._begin()
            if isinstance(action, Apply):
                target.apply(action.copy, action.events)
            elif isinstance(action, Save):
                for copy in action.copies:
                    target.save_copy(copy)
                hold("mirror-between-data-and-position")
                for position in action.positions:
                    target.save_position(position)
                self._commit()
                hold("mirror-after-commit")
            elif isinstance(action, Promote):
                hold("mirror-before-swap")
                target.promote(action.copies)
            elif isinstance(action, Alter):
                try:
                    target.alter(action.copy, action.schema)
                except CannotAlter as error:
                    raise RepairNeeded(str(error), [action.copy.name]) from error

    @property
    def in_transaction(self) -> bool:
        """Whether something is written that is not committed."""
        return self._in_transaction

    # building next copies, outside of any transaction of `perform`

    def expect(self, copies: Iterable[MirrorCopy]) -> None:
        """Plan next copies, not loaded; an earlier one of the same table is dropped."""
        copies = list(copies)
        self._target.require_room(copies)
        self._begin_own()
        for copy in copies:
            self._target.drop(replace(copy, lane=Lane.NEXT))
            self._target.save_copy(replace(copy, lane=Lane.NEXT, loaded=False))
        self._commit()

    def retire(self, copies: Iterable[MirrorCopy]) -> None:
        """Drop next copies, and keep live ones as they are from now on."""
        self._begin_own()
        for copy in copies:
            if copy.lane is Lane.LIVE:
                self._target.save_copy(replace(copy, loaded=False))
            else:
                self._target.drop(copy)
        self._commit()

    def start_load(self, copy: MirrorCopy) -> None:
        """Make an empty next copy."""
        self._begin_own()
        self._target.create(copy)
        self._target.save_copy(replace(copy, loaded=False))
        self._commit()

    def load(self, copy: MirrorCopy, rows: Sequence[SnapshotRow]) -> None:
        """Add rows to a next copy."""
        self._begin_own()
        self._target.load(copy, rows)
        self._commit()

    def finish_load(self, copy: MirrorCopy) -> None:
        """Declare a next copy complete as of its snapshot."""
        hold("mirror-before-loaded")
        self._begin_own()
        self._target.save_copy(replace(copy, loaded=True))
        self._commit()

    def _begin_own(self) -> None:
        assert not self._in_transaction, "a commit here would show part of a transaction"
        self._begin()

    def _begin(self) -> None:
        if not self._in_transaction:
            self._target.begin()
            self._in_transaction = True

    def _commit(self) -> None:
        self._target.commit()
        self._in_transaction = False
