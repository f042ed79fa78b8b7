"""Writes snapshot rows and the hand-off's actions to the target, on a separate thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from consumer_sdk.mirror.decisions import Alter, Apply, ApplyAgain, Promote, RepairNeeded, Save
from consumer_sdk.targets.target import CannotAlter, CopyState, Lane, MirrorCopy
from consumer_sdk.transport.holds import hold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from consumer_sdk.mirror.decisions import Action
    from consumer_sdk.targets.target import SnapshotRow, Target, TargetState

Result = TypeVar("Result")

INTERRUPT_SECONDS = 1.0


class Writer:
    """The only writer to the target; one thread calls all methods but `interrupt`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._in_transaction = False

    def open(self) -> TargetState:
        """Open the target and read its saved state."""
        self._target.open()
        return self._target.read_state()

    def close(self) -> None:
        """Roll back what is not committed and close the target."""
        try:
            self.rollback()
        finally:
            self._target.close()

    def interrupt(self) -> None:
        """Make the running call end soon; any thread may call this."""
        self._target.interrupt()

    def read_state(self) -> TargetState:
        """The state saved in the target at its last commit."""
        self.rollback()
        return self._target.read_state()

    def rollback(self) -> None:
        """Roll back what is not committed."""
        if self._in_transaction:
            self._in_transaction = False
            self._target.rollback()

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform actions, in order; the transaction stays open until a Save."""
        target = self._target
        for action in actions:
            self._begin()
            if isinstance(action, Apply):
                target.apply(action.copy, action.events)
            elif isinstance(action, ApplyAgain):
                hold("mirror-before-replay")
                target.replay(action.copy, action.events)
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
        """Whether a transaction is open."""
        return self._in_transaction

    # building next copies, outside of any transaction of `perform`

    def plan(self, copies: Iterable[MirrorCopy]) -> None:
        """Plan next copies; an earlier next copy of the same table is dropped."""
        copies = list(copies)
        self._target.require_room(copies)
        self._begin_own()
        for copy in copies:
            assert copy.state is CopyState.PLANNED, f"a plan cannot be {copy.state}"
            self._target.drop(copy)
            self._target.save_copy(copy)
        self._commit()

    def retire(self, copies: Iterable[MirrorCopy]) -> None:
        """Drop next copies; live copies keep their rows and are no longer followed."""
        self._begin_own()
        for copy in copies:
            if copy.lane is Lane.NEXT:
                self._target.drop(copy)
            elif not copy.retired:
                self._target.save_copy(copy.become(CopyState.RETIRED))
        self._commit()

    def start_load(self, copy: MirrorCopy) -> None:
        """Create an empty next copy."""
        self._begin_own()
        self._target.create(copy)
        self._target.save_copy(copy)
        self._commit()

    def load(self, copy: MirrorCopy, rows: Sequence[SnapshotRow]) -> None:
        """Add rows to a next copy."""
        self._begin_own()
        self._target.load(copy, rows)
        self._commit()

    def finish_load(self, copy: MirrorCopy) -> None:
        """Save that a next copy holds its whole snapshot."""
        hold("mirror-before-loaded")
        self._begin_own()
        self._target.save_copy(copy.become(CopyState.CATCHING_UP))
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


class TargetThread:
    """Runs the writer on one thread, so that the event loop never waits for the target.

    `write` runs between two transactions: it waits while the target is `reserved`.
    """

    def __init__(self, target: Target) -> None:
        self.writer = Writer(target)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mirror-target")
        self._lock = asyncio.Lock()
        self._reserved = False

    async def call(self, step: Callable[..., Result], *arguments: object) -> Result:
        """Run a step on the thread; a cancellation is raised only after the step has ended.

        If the step does not end soon, it is interrupted, because it may wait for a lock.
        """
        running = asyncio.get_running_loop().run_in_executor(self._thread, step, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not (await asyncio.wait([running], timeout=INTERRUPT_SECONDS))[0]:
                await asyncio.to_thread(self.writer.interrupt)
            # Mark the error as retrieved, or asyncio would log it.
            running.exception()
            raise

    async def write(self, step: Callable[..., Result], *arguments: object) -> Result:
        """Run a step between two transactions."""
        async with self._lock:
            return await self.call(step, *arguments)

    @property
    def reserved(self) -> bool:
        """Whether a transaction of several steps is open."""
        return self._reserved

    async def reserve(self) -> None:
        """Keep `write` waiting until `release`; idempotent."""
        if not self._reserved:
            await self._lock.acquire()
            self._reserved = True

    def release(self) -> None:
        """Let `write` continue; idempotent."""
        if self._reserved:
            self._reserved = False
            self._lock.release()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
