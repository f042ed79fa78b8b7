"""A snapshot worker: a process that copies pieces of tables into chunks, told what by a pipe.

The task comes as one JSON line on stdin, so that no secret shows in the process list; questions
and reports go to stdout, answers come back on stdin. The end of stdin means that the bridge is
gone: the worker ends at once.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo

from bridge.errors import BridgeError
from bridge.snapshot.export import problem
from bridge.snapshot.tables import SESSION, SESSION_SQL, Piece, lock_sql
from bridge.snapshot.worker.chunk_store import ChunkStore
from bridge.snapshot.worker.table_copy import Abandoned, Pipe, TableCopy
from consumer_sdk.transport.holds import hold

NICENESS: Final = 10
GARBAGE_THRESHOLD: Final = 50_000
_STARTED_AT: Final = os.nice(0)


class Worker:
    """Imports the exported snapshot, locks the tables, and copies what it is given."""

    def __init__(self, pipe: Pipe, task: dict[str, Any]) -> None:
        self._pipe = pipe
        self._task = task
        self._store = ChunkStore(
            task["nats"], stream=task["stream"], objects_bucket=task["objects_bucket"]
        )

    def run(self) -> None:
        """Work until the bridge has no more pieces."""
        hold("snapshot.start")
        max_payload = self._store.open()
        copies = [
            TableCopy(index, document, self._task, self._store, self._pipe, max_payload)
            for index, document in enumerate(self._task["tables"])
        ]
        conninfo = make_conninfo(self._task["conninfo"], application_name="tailrace snapshot")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            self._prepare(connection, copies)
            self._copy(connection, copies)
        self._store.close()
        self._pipe.tell("done")

    def _prepare(self, connection: psycopg.Connection[Any], copies: list[TableCopy]) -> None:
        names = [name for name, _ in SESSION]
        connection.execute(SESSION_SQL, [names, [value for _, value in SESSION]])
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        name = self._task["snapshot_name"].replace("'", "''")
        connection.execute(f"SET TRANSACTION SNAPSHOT '{name}'".encode())
        self._pipe.tell("connected", pid=connection.info.backend_pid)
        patience = self._pipe.next_line()
        # Should this process die while it waits, its session does not wait for ever.
        connection.execute(f"SET lock_timeout = {int(patience['lock_seconds'] * 1000)}".encode())
        hold("snapshot.lock")
        failed = {}
        for copy in copies:
            connection.execute("SAVEPOINT table_lock")
            try:
                connection.execute(lock_sql(copy.shape).encode())
            except psycopg.Error as error:
                connection.execute("ROLLBACK TO SAVEPOINT table_lock")
                failed[copy.index] = problem(error)
        # Nor does it keep its locks for ever where nobody tells it on, as a frozen bridge does not.
        idle = int(patience["idle_seconds"] * 1000)
        connection.execute(f"SET idle_in_transaction_session_timeout = {idle}".encode())
        hold("snapshot.locked")
        self._pipe.tell("ready", failed=failed)

    def _copy(self, connection: psycopg.Connection[Any], copies: list[TableCopy]) -> None:
        current: TableCopy | None = None
        self._pipe.next_line()
        _give_way()
        while True:
            answer = self._pipe.ask("next")
            following = None if answer["table"] is None else copies[answer["table"]]
            if current is not None and current is not following:
                self._finish(current)
                current = None
            if following is None:
                return
            hold("snapshot.piece")
            connection.execute("SAVEPOINT piece")
            try:
                following.copy(connection, Piece(*answer["piece"]))
            except (BridgeError, Abandoned) as error:
                connection.execute("ROLLBACK TO SAVEPOINT piece")
                self._pipe.tell("failed", table=following.index, error=_described(error))
                current = None
            else:
                connection.execute("RELEASE SAVEPOINT piece")
                current = following

    def _finish(self, copy: TableCopy) -> None:
        try:
            copy.finish()
        except (BridgeError, Abandoned) as error:
            self._pipe.tell("failed", table=copy.index, error=_described(error))
        else:
            self._pipe.tell("finished", table=copy.index)


def _give_way() -> None:
    """Let everything else go first from here on.

    Not earlier: an exported snapshot, and whoever asked for it, waits for the worker to be ready.
    """
    behind = NICENESS - os.nice(0) + _STARTED_AT
    if behind > 0:
        os.nice(behind)


def _described(error: Exception) -> str:
    if isinstance(error, psycopg.Error):
        return problem(error)
    if isinstance(error, BridgeError):
        return str(error)
    # The text of a foreign exception can quote the value it stumbled over.
    return type(error).__name__


def main() -> int:
    """Work on one task after another, until the bridge ends the process."""
    # Ctrl-C reaches the whole process group; the bridge alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Rows come and go by the million and hold no cycles; looking for some costs a third.
    gc.set_threshold(GARBAGE_THRESHOLD)
    pipe = Pipe()
    while True:
        task = pipe.next_line()
        try:
            Worker(pipe, task).run()
        except Exception as error:  # noqa: BLE001 - the bridge reports it to whoever asked
            pipe.tell("error", error=_described(error))
            return 1


if __name__ == "__main__":
    sys.exit(main())
