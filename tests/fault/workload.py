"""Writers that change a database in all ways that are known to break replicas.

Each writer is a thread with its own random generator, derived from one seed. It numbers its ledger
rows without gaps, so that a missing or repeated row is obvious. It reopens a lost connection and
forgets what was not committed; only the source defines what was.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Connection = psycopg.Connection[Any]

ACCOUNTS = 12
OPENING_BALANCE = 1000
TOAST_BYTES = 3000

SCHEMA = """
CREATE TABLE accounts (id int PRIMARY KEY, balance bigint NOT NULL);
CREATE TABLE keyed (k int PRIMARY KEY, v text, big text);
ALTER TABLE keyed ALTER COLUMN big SET STORAGE EXTERNAL;
CREATE TABLE bulk (id bigserial PRIMARY KEY, writer int, payload text);
CREATE TABLE evolving (id bigserial PRIMARY KEY, a text);
"""

BASIC = ("ledger", "ledger", "ledger", "transfer", "keyed", "copy", "rollback", "savepoint")
ALL = (*BASIC, "ledger", "swap", "wide", "delete", "truncate", "evolve", "message")


def ledger_of(writer: int) -> str:
    """Name of a writer's own ledger."""
    return f"ledger_{writer}"


@dataclass
class Workload:
    """A number of writers, running between `start` and `stop`."""

    dsn: str
    seed: int
    writers: int = 2
    pause: float = 0.02
    kinds: Sequence[str] = BASIC
    transactions: int = 0
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def tables(self) -> list[str]:
        """Every table that the writers change."""
        return ["accounts", "keyed", "bulk", "evolving", *map(ledger_of, range(self.writers))]

    def create_tables(self) -> None:
        """Create the empty tables, before the bridge starts, so that it reads the first row."""
        with psycopg.connect(self.dsn) as connection:
            connection.execute(SCHEMA)
            for writer in range(self.writers):
                connection.execute(
                    f"CREATE TABLE {ledger_of(writer)} (n bigint PRIMARY KEY, body text)"
                )

    def open_accounts(self) -> None:
        """Insert, once, the rows that the writers update."""
        with psycopg.connect(self.dsn) as connection:
            connection.execute(
                "INSERT INTO accounts SELECT i, %s FROM generate_series(1, %s) i"
                " ON CONFLICT DO NOTHING",
                [OPENING_BALANCE, ACCOUNTS],
            )

    def start(self) -> None:
        """Start writing."""
        self.open_accounts()
        self.resume()

    def resume(self) -> None:
        """Write again after `stop`."""
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._write, args=(writer,), name=f"writer {writer}")
            for writer in range(self.writers)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the current transactions; raises unexpected errors of the writers."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads = []
        assert not self.problems, self.problems

    def __enter__(self) -> Workload:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _write(self, writer: int) -> None:
        rng = random.Random(f"{self.seed}-{writer}-{self.transactions}")
        while not self._stop.is_set():
            try:
                with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                    self._write_on(connection, writer, rng)
            except psycopg.OperationalError:
                # The server is not reachable, or two writers conflicted.
                self._stop.wait(0.2)
            except psycopg.Error as error:
                self.problems.append(f"writer {writer}: {type(error).__name__}: {error}")
                return

    def _write_on(self, connection: Connection, writer: int, rng: random.Random) -> None:
        actions = _Actions(connection, writer, rng)
        while not self._stop.is_set():
            kind = rng.choice(self.kinds)
            action: Callable[[], None] = getattr(actions, kind)
            action()
            connection.commit()
            with self._lock:
                self.transactions += 1
            self._stop.wait(rng.random() * 2 * self.pause)


class _Actions:
    """The changes of a writer in one transaction; the caller commits."""

    def __init__(self, connection: Connection, writer: int, rng: random.Random) -> None:
        self._connection = connection
        self._run = connection.execute
        self._writer = writer
        self._table = ledger_of(writer)
        self._rng = rng
        row = self._run(f"SELECT coalesce(max(n), 0) FROM {self._table}").fetchone()
        connection.commit()
        assert row is not None
        self._next = row[0] + 1

    def ledger(self) -> None:
        """The next rows of the ledger, alone or together with a transfer."""
        count = self._rng.choice((1, 1, 2, 5, 20, 60))
        self._write_ledger(count)
        if self._rng.random() < 0.3:
            self.transfer()

    def _write_ledger(self, count: int) -> None:
        first, self._next = self._next, self._next + count
        self._run(
            f"INSERT INTO {self._table} SELECT n, repeat(md5(n::text), %s)"
            " FROM generate_series(%s::bigint, %s) n",
            [self._rng.choice((1, 1, 3, 30)), first, first + count - 1],
        )

    def transfer(self) -> None:
        """A transfer, which keeps the sum of all accounts."""
        giver, taker = sorted(self._rng.sample(range(1, ACCOUNTS + 1), 2))
        amount = self._rng.randint(-50, 50)
        for account, change in ((giver, -amount), (taker, amount)):
            self._run("UPDATE accounts SET balance = balance + %s WHERE id = %s", [change, account])

    def keyed(self) -> None:
        """Insert a row, update it without its TOASTed value, delete it, or change its key."""
        base = self._writer * 1000
        key = base + self._rng.randint(0, 30)
        big = self._rng.randbytes(TOAST_BYTES // 2).hex()
        self._run(
            "INSERT INTO keyed VALUES (%s, %s, %s) ON CONFLICT (k) DO UPDATE SET v = excluded.v",
            [key, str(self._rng.random()), big],
        )
        if self._rng.random() < 0.4:
            fresh = base + 100 + self._rng.randint(0, 800)
            self._run("DELETE FROM keyed WHERE k = %s", [fresh])
            self._run("UPDATE keyed SET k = %s WHERE k = %s", [fresh, key])

    def swap(self) -> None:
        """Swap the keys of two rows."""
        base = self._writer * 1000
        rows = self._run(
            "SELECT k FROM keyed WHERE k BETWEEN %s AND %s ORDER BY k LIMIT 2", [base, base + 999]
        ).fetchall()
        if len(rows) == 2:
            (one,), (two,) = rows
            spare = -1 - self._writer
            for new, old in ((spare, one), (one, two), (two, spare)):
                self._run("UPDATE keyed SET k = %s WHERE k = %s", [new, old])

    def copy(self) -> None:
        """COPY many rows, most of which share the LSN of their record."""
        with self._connection.cursor().copy("COPY bulk (writer, payload) FROM STDIN") as copy:
            for number in range(self._rng.choice((5, 40, 200))):
                copy.write_row((self._writer, f"{number}-{self._rng.random()}"))

    def delete(self) -> None:
        """Delete some bulk rows."""
        self._run(
            "DELETE FROM bulk WHERE id IN (SELECT id FROM bulk WHERE writer = %s LIMIT 30)",
            [self._writer],
        )

    def truncate(self) -> None:
        """Truncate a table in the middle of a transaction that also writes to other tables."""
        self._write_ledger(1)
        if self._rng.random() < 0.3:
            self._run("TRUNCATE bulk")
            self._write_ledger(1)

    def wide(self) -> None:
        """Insert wide rows."""
        self._run(
            "INSERT INTO bulk (writer, payload) SELECT %s, repeat('wide ', %s)"
            " FROM generate_series(1, 5)",
            [self._writer, self._rng.choice((800, 8000))],
        )

    def evolve(self) -> None:
        """Add and drop a column, with rows before and after."""
        self._run("INSERT INTO evolving (a) VALUES ('before')")
        if self._rng.random() < 0.15:
            # A new name each time: a column that is added again is empty.
            name = f"extra_{self._rng.randbytes(6).hex()}"
            self._run(f"ALTER TABLE evolving ADD COLUMN {name} text")
            self._run(f"INSERT INTO evolving (a, {name}) VALUES ('with', 'it')")
            if self._rng.random() < 0.5:
                self._run(f"ALTER TABLE evolving DROP COLUMN {name}")
                self._run("INSERT INTO evolving (a) VALUES ('without')")

    def message(self) -> None:
        """Emit a logical message among changes."""
        self._run("SELECT pg_logical_emit_message(true, 'audit', %s)", [str(self._next)])
        self._write_ledger(1)

    def rollback(self) -> None:
        """Change rows and roll back; no reader may ever see them."""
        kept = self._next
        self._write_ledger(3)
        self._run("INSERT INTO bulk (writer, payload) VALUES (-1, 'rolled back')")
        self._connection.rollback()
        self._next = kept

    def savepoint(self) -> None:
        """Roll back the middle of the transaction to a savepoint."""
        self._write_ledger(1)
        self._run("SAVEPOINT middle")
        kept = self._next
        self._write_ledger(2)
        self._run("ROLLBACK TO SAVEPOINT middle")
        self._next = kept
        self._write_ledger(1)
