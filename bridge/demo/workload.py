"""The workload of the demonstration: concurrent sessions; changes are counted on commit."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from bridge.demo import shop
from bridge.errors import SourceError
from consumer_sdk.transport.cancellation import errors_of

SESSIONS: Final = 3

# A session that does not get a lock soon gives up, so that it does not block the others.
LOCK_TIMEOUT_MS: Final = 1000
CONFLICTS: Final = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.IntegrityError,
    psycopg.errors.LockNotAvailable,
)
ROLLED_BACK_SHARE: Final = 0.04

# Pauses between transactions grow and shrink in a cycle, so that the rates visibly change.
LONGEST_PAUSE_SECONDS: Final = 0.06
SHORTEST_PAUSE_SECONDS: Final = 0.005
CYCLE_SECONDS: Final = 20.0

# Rare enough that a copy of the table need not always begin again.
FIRST_TRUNCATE_SECONDS: Final = 2.0
TRUNCATE_EVERY_SECONDS: Final = 15.0
TRUNCATE: Final = ("TRUNCATE visits",)

# Beyond this many the oldest orders are deleted, so that a long demonstration stays small.
MOST_ORDERS: Final = 3000
DELETED_AT_ONCE: Final = 150
DELETE_OLD_EVERY: Final = 40
MOST_PRODUCTS: Final = 250

SAVEPOINT: Final = "SAVEPOINT undone"
ROLLBACK_TO_SAVEPOINT: Final = "ROLLBACK TO SAVEPOINT undone"

_PICKED: Final = "ANY (current_setting('shop.picked')::bigint[])"
_PLACED: Final = "currval('orders_id_seq')"
_CHANGE: Final = re.compile(r"\s*(INSERT|UPDATE|DELETE|TRUNCATE)(?: INTO| FROM)? ([\w.]+)")


def _pick(orders: str) -> str:
    """Lock some orders and keep their ids for the statements that follow in the transaction."""
    return (
        "SELECT set_config('shop.picked', coalesce(array_agg(id), '{}')::text, true)"
        f" FROM ({orders} FOR UPDATE SKIP LOCKED) AS orders_to_pick"
    )


def _some(status: str, count: int) -> str:
    """A few orders of one status, from anywhere in the table."""
    return _pick(
        f"SELECT id FROM orders WHERE status = '{status}' AND id >= ("
        " SELECT min(id) + floor(random() * (max(id) - min(id)))::bigint FROM orders)"
        f" ORDER BY id LIMIT {count}"
    )


_PLACE_ORDER: Final = (
    """INSERT INTO orders (customer_id, note)
       SELECT id, (ARRAY[NULL, NULL, 'as a gift', 'ring twice', E'no hurry\\nplease'])
                  [1 + floor(random() * 5)::int]
         FROM customers WHERE id >= (SELECT 1 + floor(random() * max(id))::bigint FROM customers)
        ORDER BY id LIMIT 1""",
    f"""INSERT INTO items (order_id, line, product_id, quantity, price)
        SELECT {_PLACED}, n, 1 + floor(random() * 120)::int, 1 + floor(random() * 5)::int,
               {shop.A_PRICE} FROM generate_series(1, 1 + floor(random() * 5)::int) n""",
    f"""UPDATE orders SET total = (SELECT sum(quantity * price) FROM items WHERE order_id = id)
         WHERE id = {_PLACED}""",
)
_DELETE_PICKED: Final = (
    f"DELETE FROM items WHERE order_id = {_PICKED}",
    f"DELETE FROM sales.invoices WHERE order_id = {_PICKED}",
    f"DELETE FROM orders WHERE id = {_PICKED}",
)
DELETE_OLD: Final = (
    _pick(
        f"SELECT id FROM orders WHERE (SELECT count(*) FROM orders) > {MOST_ORDERS}"
        f" ORDER BY id LIMIT {DELETED_AT_ONCE}"
    ),
    *_DELETE_PICKED,
)

# The statements of each transaction, and its relative frequency.
TRANSACTIONS: Final[dict[tuple[str, ...], int]] = {
    _PLACE_ORDER: 23,
    (
        *_PLACE_ORDER,
        SAVEPOINT,
        f"DELETE FROM items WHERE order_id = {_PLACED}",
        ROLLBACK_TO_SAVEPOINT,
    ): 3,
    (
        _some("new", 2),
        f"UPDATE orders SET status = 'paid' WHERE id = {_PICKED}",
        f"""INSERT INTO sales.invoices (order_id, amount)
            SELECT id, total FROM orders WHERE id = {_PICKED}""",
        f"""UPDATE customers SET balance = balance - total FROM orders
             WHERE orders.id = {_PICKED} AND customers.id = customer_id""",
    ): 18,
    (_some("paid", 12), f"UPDATE orders SET status = 'shipped' WHERE id = {_PICKED}"): 6,
    (_some("shipped", 1), *_DELETE_PICKED): 5,
    # A change of the primary key.
    (_some("new", 1), f"UPDATE items SET line = line + 10 WHERE order_id = {_PICKED}"): 3,
    (
        f"""INSERT INTO customers (name, email, preferences)
            SELECT name, lower(replace(name, ' ', '.')) || '@example.com',
                   jsonb_build_object('newsletter', random() < 0.5, 'theme', 'dark')
              FROM (SELECT {shop.A_CUSTOMER}) AS someone (name)""",
    ): 6,
    (
        """UPDATE customers
              SET preferences = preferences || jsonb_build_object('moved', now()),
                  balance = balance + 5
            WHERE id = (SELECT 1 + floor(random() * max(id))::bigint FROM customers)""",
    ): 8,
    # The description is not touched, so PostgreSQL does not send it.
    (
        f"""UPDATE products
               SET price = {shop.A_PRICE}, rating = random() * 5,
                   prices_seen = (prices_seen || price)[2:], stock = greatest(0, stock - 1),
                   changed_at = clock_timestamp()
             WHERE id IN (SELECT id FROM products ORDER BY random() LIMIT 2)""",
    ): 8,
    (
        shop.new_products(1),
        f"""DELETE FROM products
             WHERE id = (SELECT min(id) FROM products HAVING count(*) > {MOST_PRODUCTS})""",
    ): 2,
    (shop.new_visits(4),): 10,
    # One of several equal rows: the table has no key.
    (
        """UPDATE visits SET seconds = coalesce(seconds, 0) + 1
            WHERE ctid = (SELECT ctid FROM visits ORDER BY random() LIMIT 1)""",
    ): 4,
    (
        """DELETE FROM visits
            WHERE ctid = (SELECT ctid FROM visits ORDER BY random() LIMIT 1)""",
    ): 4,
    (
        """UPDATE sales.invoices SET reminders = reminders + 1, due_on = due_on + 7
            WHERE id = (SELECT min(id) + floor(random() * 300)::bigint FROM sales.invoices)""",
    ): 6,
}


@dataclass
class CommittedChanges:
    """Changes counted when their commit has succeeded, by table (as in subjects) and operation."""

    changes: Counter[tuple[str, str]] = field(default_factory=Counter)
    transactions: int = 0
    rolled_back: int = 0

    @property
    def total(self) -> int:
        """All changes."""
        return self.changes.total()

    def of_table(self, token: str) -> int:
        """All changes of one table."""
        return sum(count for (table, _), count in self.changes.items() if table == token)


class Workload:
    """Runs the sessions until `stop`; `committed` counts the committed changes."""

    def __init__(self, dsn: str) -> None:
        self.committed = CommittedChanges()
        self._dsn = dsn
        self._stopping = asyncio.Event()
        self._begun = self._next_truncate = time.monotonic()

    def stop(self) -> None:
        """Let every session finish its transaction and end; then `run` returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until stopped."""
        self._begun = time.monotonic()
        self._next_truncate = self._begun + FIRST_TRUNCATE_SECONDS
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(SESSIONS):
                    group.create_task(self._session(number))
        except BaseExceptionGroup as group:
            error = errors_of(group)[0]
            if not isinstance(error, psycopg.OperationalError):
                raise
            raise SourceError(f"the workload lost its database: {error}") from group

    async def execute(self, statement: str) -> None:
        """Run one statement on a connection of its own."""
        async with await psycopg.AsyncConnection.connect(self._dsn, autocommit=True) as connection:
            await connection.execute(statement.encode())

    async def _session(self, number: int) -> None:
        async with await psycopg.AsyncConnection.connect(
            self._dsn,
            autocommit=True,
            application_name=f"shop {number}",
            options=f"-c lock_timeout={LOCK_TIMEOUT_MS}",
        ) as connection:
            turn = 0
            while not self._stopping.is_set():
                await self._transact(connection, self._choose(number, turn))
                turn += 1
                await self._pause(number)

    def _choose(self, number: int, turn: int) -> tuple[str, ...]:
        if number == 0 and time.monotonic() > self._next_truncate:
            self._next_truncate = time.monotonic() + TRUNCATE_EVERY_SECONDS
            return TRUNCATE
        if number == 1 and turn % DELETE_OLD_EVERY == DELETE_OLD_EVERY // 2:
            return DELETE_OLD
        return random.choices(list(TRANSACTIONS), weights=list(TRANSACTIONS.values()))[0]

    async def _transact(
        self, connection: psycopg.AsyncConnection[Any], statements: tuple[str, ...]
    ) -> None:
        changes: Counter[tuple[str, str]] = Counter()
        roll_back = random.random() < ROLLED_BACK_SHARE
        try:
            async with connection.transaction(force_rollback=roll_back):
                changes = await _execute(connection, statements)
        except CONFLICTS:
            # Two sessions wanted the same rows; PostgreSQL has rolled one of them back.
            roll_back = True
        if roll_back:
            self.committed.rolled_back += 1
        elif changes.total():
            self.committed.changes.update(changes)
            self.committed.transactions += 1

    async def _pause(self, number: int) -> None:
        phase = (time.monotonic() - self._begun) / CYCLE_SECONDS + number / (4 * SESSIONS)
        calm = (1 + math.cos(2 * math.pi * phase)) / 2
        longest = SHORTEST_PAUSE_SECONDS + calm * (LONGEST_PAUSE_SECONDS - SHORTEST_PAUSE_SECONDS)
        try:
            await asyncio.wait_for(self._stopping.wait(), random.uniform(0.2, 1) * longest)
        except TimeoutError:
            pass


async def _execute(
    connection: psycopg.AsyncConnection[Any], statements: tuple[str, ...]
) -> Counter[tuple[str, str]]:
    """The rows changed by the statements, without those rolled back to a savepoint."""
    changes: Counter[tuple[str, str]] = Counter()
    at_savepoint: Counter[tuple[str, str]] = Counter()
    for statement in statements:
        cursor = await connection.execute(statement.encode())
        if statement == SAVEPOINT:
            at_savepoint = Counter(changes)
        elif statement == ROLLBACK_TO_SAVEPOINT:
            changes = at_savepoint
        elif (change := _CHANGE.match(statement)) is not None:
            operation, table = change[1].lower(), change[2]
            changes[table, operation] += 1 if operation == "truncate" else cursor.rowcount
    return changes
