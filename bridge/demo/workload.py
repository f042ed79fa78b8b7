"""People in the shop: concurrent sessions whose transactions are counted when they commit."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Any, Final

import psycopg

from bridge.demo import errands
from bridge.demo.ledger import Ledger
from bridge.errors import SourceError

SESSIONS: Final = 3

# As it should be wherever TRUNCATE and DDL meet long readers: who cannot have the lock soon gives
# up, instead of holding up everybody who comes after.
LOCK_TIMEOUT_MS: Final = 1000
CONFLICTS: Final = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.IntegrityError,
    psycopg.errors.LockNotAvailable,
)

# Each session breathes between a quiet and a busy hour, so that rates are seen to move.
LONGEST_PAUSE_SECONDS: Final = 0.06
SHORTEST_PAUSE_SECONDS: Final = 0.005
DAY_SECONDS: Final = 20.0

# Not so often that a copy of the table would always have to begin again.
FIRST_TRUNCATE_SECONDS: Final = 2.0
TRUNCATE_EVERY_SECONDS: Final = 15.0


class Workload:
    """Runs the sessions until told to stop; `ledger` is right at any time between commits."""

    def __init__(self, dsn: str) -> None:
        self.ledger = Ledger()
        self._dsn = dsn
        self._stop = asyncio.Event()
        self._begun = self._next_truncate = time.monotonic()

    def stop(self) -> None:
        """Let every session finish its transaction and end; `run` returns then."""
        self._stop.set()

    async def run(self) -> None:
        """Work until stopped."""
        self._begun = time.monotonic()
        self._next_truncate = self._begun + FIRST_TRUNCATE_SECONDS
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(SESSIONS):
                    group.create_task(self._session(number))
        except* psycopg.OperationalError as errors:
            raise SourceError(f"the shop lost its database: {errors.exceptions[0]}") from errors

    async def _session(self, number: int) -> None:
        async with await psycopg.AsyncConnection.connect(
            self._dsn,
            autocommit=True,
            application_name=f"shop {number}",
            options=f"-c lock_timeout={LOCK_TIMEOUT_MS}",
        ) as connection:
            turn = 0
            while not self._stop.is_set():
                await self._one_transaction(connection, number, turn)
                turn += 1
                await self._pause(number)

    async def _one_transaction(
        self, connection: psycopg.AsyncConnection[Any], number: int, turn: int
    ) -> None:
        transaction = errands.Transaction(connection)
        regret = random.random() < 0.04
        try:
            async with connection.transaction(force_rollback=regret):
                await self._something(transaction, number, turn)
        except CONFLICTS:
            # Two people wanted the same thing; PostgreSQL has undone one of them.
            regret = True
        if regret:
            self.ledger.rolled_back += 1
        elif transaction.changes.total():
            self.ledger.changes.update(transaction.changes)
            self.ledger.transactions += 1

    async def _something(self, transaction: errands.Transaction, number: int, turn: int) -> None:
        if number == 0 and time.monotonic() > self._next_truncate:
            self._next_truncate = time.monotonic() + TRUNCATE_EVERY_SECONDS
            await transaction.change("visits", "truncate", "TRUNCATE visits")
        elif number == 1 and turn % 40 == 20:
            await errands.archive(transaction)
        else:
            (errand,) = random.choices(
                list(errands.ERRANDS), weights=list(errands.ERRANDS.values())
            )
            await errand(transaction)

    async def _pause(self, number: int) -> None:
        hour = (time.monotonic() - self._begun) / DAY_SECONDS + number / (4 * SESSIONS)
        calm = (1 + math.cos(2 * math.pi * hour)) / 2
        longest = SHORTEST_PAUSE_SECONDS + calm * (LONGEST_PAUSE_SECONDS - SHORTEST_PAUSE_SECONDS)
        try:
            await asyncio.wait_for(self._stop.wait(), random.uniform(0.2, 1) * longest)
        except TimeoutError:
            pass
