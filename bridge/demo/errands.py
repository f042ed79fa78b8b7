"""What people do in the shop, each errand one transaction."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from bridge.demo import shop

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import LiteralString

    import psycopg

# Beyond this many the oldest orders are archived, so that a long demonstration stays small.
MOST_ORDERS: Final = 3000
ARCHIVED_AT_ONCE: Final = 150
MOST_PRODUCTS: Final = 250

# A few orders of one status, from anywhere in the table; what somebody else holds is left alone.
SOME_ORDERS: Final = """
    SELECT id FROM orders WHERE status = %s::order_status AND id >= (
        SELECT min(id) + floor(random() * (max(id) - min(id)))::bigint FROM orders)
    ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""


class Transaction:
    """One open transaction: statements that count the rows they change."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self.changes: Counter[tuple[str, str]] = Counter()

    async def change(
        self, token: str, operation: str, statement: LiteralString, values: Sequence[Any] = ()
    ) -> list[Any]:
        """Execute a statement that changes one table; the result is what it returns."""
        cursor = await self._connection.execute(statement, values or None)
        self.changes[token, operation] += 1 if operation == "truncate" else cursor.rowcount
        return await cursor.fetchall() if cursor.description else []

    async def query(self, statement: LiteralString, values: Sequence[Any] = ()) -> list[Any]:
        """Execute a statement that changes nothing."""
        return await (await self._connection.execute(statement, values or None)).fetchall()

    async def undone(self, statement: LiteralString, values: Sequence[Any] = ()) -> None:
        """Execute a statement in a savepoint and roll it back."""
        async with self._connection.transaction(force_rollback=True):
            await self._connection.execute(statement, values or None)


async def place_order(transaction: Transaction) -> None:
    ((order,),) = await transaction.change(
        "orders",
        "insert",
        "INSERT INTO orders (customer_id, note) SELECT id, %s FROM customers WHERE id >= ("
        " SELECT 1 + floor(random() * max(id))::bigint FROM customers) ORDER BY id LIMIT 1"
        " RETURNING id",
        [random.choice([None, None, "as a gift", "ring twice", "no hurry\nplease"])],
    )
    await transaction.change(
        "items",
        "insert",
        f"INSERT INTO items (order_id, line, product_id, quantity, price)"
        f" SELECT %s, n, 1 + floor(random() * 120)::int, 1 + floor(random() * 5)::int,"
        f" {shop.A_PRICE} FROM generate_series(1, %s) n",
        [order, random.randint(1, 5)],
    )
    await transaction.change(
        "orders",
        "update",
        "UPDATE orders SET total = (SELECT sum(quantity * price) FROM items WHERE order_id = id)"
        " WHERE id = %s",
        [order],
    )
    if random.random() < 0.1:
        await transaction.undone("DELETE FROM items WHERE order_id = %s", [order])


async def pay(transaction: Transaction) -> None:
    for (order,) in await transaction.query(SOME_ORDERS, ["new", 2]):
        await transaction.change(
            "orders", "update", "UPDATE orders SET status = 'paid' WHERE id = %s", [order]
        )
        await transaction.change(
            "sales.invoices",
            "insert",
            "INSERT INTO sales.invoices (order_id, amount) SELECT id, total FROM orders"
            " WHERE id = %s",
            [order],
        )
        await transaction.change(
            "customers",
            "update",
            "UPDATE customers SET balance = balance - total FROM orders"
            " WHERE orders.id = %s AND customers.id = customer_id",
            [order],
        )


async def ship(transaction: Transaction) -> None:
    orders = [order for (order,) in await transaction.query(SOME_ORDERS, ["paid", 12])]
    await transaction.change(
        "orders", "update", "UPDATE orders SET status = 'shipped' WHERE id = ANY (%s)", [orders]
    )


async def return_order(transaction: Transaction) -> None:
    orders = [order for (order,) in await transaction.query(SOME_ORDERS, ["shipped", 1])]
    await delete_orders(transaction, orders)


async def archive(transaction: Transaction) -> None:
    orders = await transaction.query(
        "SELECT id FROM orders WHERE (SELECT count(*) FROM orders) > %s"
        " ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED",
        [MOST_ORDERS, ARCHIVED_AT_ONCE],
    )
    await delete_orders(transaction, [order for (order,) in orders])


async def delete_orders(transaction: Transaction, orders: list[int]) -> None:
    await transaction.change(
        "items", "delete", "DELETE FROM items WHERE order_id = ANY (%s)", [orders]
    )
    await transaction.change(
        "sales.invoices",
        "delete",
        "DELETE FROM sales.invoices WHERE order_id = ANY (%s)",
        [orders],
    )
    await transaction.change("orders", "delete", "DELETE FROM orders WHERE id = ANY (%s)", [orders])


async def renumber_lines(transaction: Transaction) -> None:
    # A change of the primary key.
    for (order,) in await transaction.query(SOME_ORDERS, ["new", 1]):
        await transaction.change(
            "items", "update", "UPDATE items SET line = line + 10 WHERE order_id = %s", [order]
        )


async def sign_up(transaction: Transaction) -> None:
    await transaction.change(
        "customers",
        "insert",
        f"INSERT INTO customers (name, email, preferences)"
        f" SELECT name, lower(replace(name, ' ', '.')) || '@example.com', %s::jsonb"
        f" FROM (SELECT {shop.A_CUSTOMER}) AS someone (name)",
        [json.dumps({"newsletter": random.random() < 0.5, "theme": "dark"})],
    )


async def move_house(transaction: Transaction) -> None:
    await transaction.change(
        "customers",
        "update",
        "UPDATE customers SET preferences = preferences || jsonb_build_object('moved', now()),"
        " balance = balance + 5 WHERE id = (SELECT 1 + floor(random() * max(id))::bigint"
        " FROM customers)",
    )


async def reprice(transaction: Transaction) -> None:
    # The description is not touched, so PostgreSQL does not send it.
    await transaction.change(
        "products",
        "update",
        f"UPDATE products SET price = {shop.A_PRICE}, rating = random() * 5,"
        f" prices_seen = (prices_seen || price)[2:], stock = greatest(0, stock - 1),"
        f" changed_at = clock_timestamp() WHERE id IN (SELECT id FROM products"
        f" ORDER BY random() LIMIT %s)",
        [random.randint(1, 3)],
    )


async def change_range(transaction: Transaction) -> None:
    await transaction.change("products", "insert", shop.NEW_PRODUCTS, [1])
    await transaction.change(
        "products",
        "delete",
        "DELETE FROM products WHERE id = (SELECT min(id) FROM products HAVING count(*) > %s)",
        [MOST_PRODUCTS],
    )


async def browse(transaction: Transaction) -> None:
    await transaction.change("visits", "insert", shop.NEW_VISITS, [random.randint(1, 8)])


async def remember(transaction: Transaction) -> None:
    # One of several equal rows: the table has no key.
    await transaction.change(
        "visits",
        "update",
        "UPDATE visits SET seconds = coalesce(seconds, 0) + 1"
        " WHERE ctid = (SELECT ctid FROM visits ORDER BY random() LIMIT 1)",
    )


async def forget(transaction: Transaction) -> None:
    await transaction.change(
        "visits",
        "delete",
        "DELETE FROM visits WHERE ctid = (SELECT ctid FROM visits ORDER BY random() LIMIT 1)",
    )


async def remind(transaction: Transaction) -> None:
    await transaction.change(
        "sales.invoices",
        "update",
        "UPDATE sales.invoices SET reminders = reminders + 1, due_on = due_on + 7"
        " WHERE id = (SELECT min(id) + floor(random() * 300)::bigint FROM sales.invoices)",
    )


# How often each thing happens.
ERRANDS: Final = {
    place_order: 26,
    pay: 18,
    ship: 6,
    return_order: 5,
    renumber_lines: 3,
    sign_up: 6,
    move_house: 8,
    reprice: 8,
    change_range: 2,
    browse: 10,
    remember: 4,
    forget: 4,
    remind: 6,
}
