"""A snapshot worker: a process that copies pieces of tables into chunks.

It reads commands from stdin, so that no secret is visible in the process list, and writes reports
to stdout. The end of stdin means that the bridge has ended: the worker exits immediately.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from bridge.errors import BridgeError
from bridge.postgres.errors import StatementFailed
from bridge.postgres.sessions import CopySession
from bridge.snapshot.messages import (
    Connected,
    CopyDone,
    CopyPiece,
    CopyTask,
    LocksTaken,
    LockTables,
    NoMorePieces,
    PieceWanted,
    Ping,
    Pong,
    StartCopying,
    TableFailed,
    TableFinished,
    WorkerFailed,
    unexpected,
)
from bridge.snapshot.tables import lock_sql
from bridge.snapshot.worker.chunk_store import ChunkStore, NatsUnavailable
from bridge.snapshot.worker.pipe import CoordinatorPipe
from bridge.snapshot.worker.table_copier import CopyCancelled, TableCopier
from consumer_sdk.transport.holds import hold

if TYPE_CHECKING:
    from bridge.snapshot.tables import Piece

NICENESS: Final = 10
GARBAGE_THRESHOLD: Final = 50_000
_STARTED_AT: Final = os.nice(0)


class Worker:
    """Imports the exported snapshot, locks the tables, and copies the pieces it is given."""

    def __init__(self, pipe: CoordinatorPipe, task: CopyTask) -> None:
        self._pipe = pipe
        self._task = task
        self._store = ChunkStore(task.access.nats, task.subjects)

    def run(self) -> None:
        """Work until the coordinator has no more pieces."""
        hold("snapshot.start")
        os.environ.update(self._task.access.environment)
        self._store.open()
        copiers = [
            TableCopier(index, self._task, self._store, self._pipe)
            for index in range(len(self._task.tables))
        ]
        with CopySession.open(self._task.access.login, self._task.snapshot_name) as session:
            self._lock(session, copiers)
            self._copy(session, copiers)
        self._store.close()
        self._pipe.send(CopyDone())

    def _lock(self, session: CopySession, copiers: list[TableCopier]) -> None:
        self._pipe.send(Connected(session.backend_pid))
        limits = self._pipe.expect(LockTables)
        # The limit makes sure that the session ends even if this process dies while it waits.
        session.set_lock_timeout(limits.lock_seconds)
        hold("snapshot.lock")
        errors = {}
        for copier in copiers:
            try:
                session.lock(lock_sql(copier.description))
            except StatementFailed as error:
                errors[copier.index] = str(error)
        # The limit makes sure that the locks are released if the bridge hangs.
        session.set_idle_timeout(limits.idle_seconds)
        hold("snapshot.locked")
        self._pipe.send(LocksTaken(errors))

    def _copy(self, session: CopySession, copiers: list[TableCopier]) -> None:
        self._pipe.expect(StartCopying)
        _lower_priority()
        current: TableCopier | None = None
        while True:
            self._pipe.send(PieceWanted())
            match self._pipe.receive():
                case CopyPiece(table, piece):
                    following = copiers[table]
                    if current is not None and current is not following:
                        self._finish(current)
                    is_copied = self._copy_piece(session, following, piece)
                    current = following if is_copied else None
                case NoMorePieces():
                    if current is not None:
                        self._finish(current)
                    return
                case other:
                    raise unexpected(other)

    def _copy_piece(self, session: CopySession, copier: TableCopier, piece: Piece) -> bool:
        hold("snapshot.piece")
        session.set_savepoint()
        try:
            copier.copy(session, piece)
        except (BridgeError, CopyCancelled) as error:
            session.roll_back_to_savepoint()
            self._pipe.send(_failed(copier, error))
            return False
        session.release_savepoint()
        return True

    def _finish(self, copier: TableCopier) -> None:
        try:
            copier.finish()
        except (BridgeError, CopyCancelled) as error:
            self._pipe.send(_failed(copier, error))
        else:
            self._pipe.send(TableFinished(copier.index))


def _lower_priority() -> None:
    """Lower the priority of this process, so that the copy does not slow down other work.

    It must not be lowered earlier, because an exported snapshot waits for the worker to start.
    """
    behind = NICENESS - os.nice(0) + _STARTED_AT
    if behind > 0:
        os.nice(behind)


def _failed(copier: TableCopier, error: Exception) -> TableFailed:
    return TableFailed(copier.index, _described(error), isinstance(error, NatsUnavailable))


def _described(error: Exception) -> str:
    if isinstance(error, BridgeError):
        return str(error)
    # The text of other exceptions can contain values of rows.
    return type(error).__name__


def main() -> int:
    """Perform one task after another until the bridge ends the process."""
    # Ctrl-C is sent to the whole process group, but only the bridge may react to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Rows contain no reference cycles, and searching for cycles costs a third of the time.
    gc.set_threshold(GARBAGE_THRESHOLD)
    pipe = CoordinatorPipe()
    while True:
        try:
            match pipe.receive():
                case Ping():
                    pipe.send(Pong())
                case CopyTask() as task:
                    Worker(pipe, task).run()
                case other:
                    raise unexpected(other)
        except Exception as error:  # noqa: BLE001 - the bridge reports it to the consumer
            pipe.send(WorkerFailed(_described(error)))
            return 1


if __name__ == "__main__":
    sys.exit(main())
