"""Random work on three tables: all operations, many types, TOASTed values, rolled back attempts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

TABLES = ("everything", "sales.pairs", "heap")

SCHEMA = """
CREATE SCHEMA sales;
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TABLE everything (
    id bigint PRIMARY KEY, small smallint, whole integer, big bigint, flag boolean, single real,
    double double precision, amount numeric(12, 2), loose numeric, name text, code char(5),
    label varchar(20), raw bytea, day date, at timestamp, moment timestamptz, clock time,
    span interval, ident uuid, doc json, tree jsonb, feeling mood, numbers integer[],
    words text[], body text);
ALTER TABLE everything ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE sales.pairs (
    region integer, code text, count bigint, body text, "Odd Col." text,
    PRIMARY KEY (region, code));
ALTER TABLE sales.pairs ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE TABLE heap (number integer, letter text, at timestamp);
ALTER TABLE heap REPLICA IDENTITY FULL;
"""

_LETTERS = "abcdefghijklmnopqrstuvwxyz äé€😀\"'\\,\t"


class Workload:
    """Does random work, reproducible by its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.next_id = 1

    def run(self, connection: psycopg.Connection[Any], transactions: int) -> None:
        """Some transactions of some changes each; one in ten is rolled back."""
        for _ in range(transactions):
            with connection.transaction() as transaction:
                for _ in range(self.random.randrange(1, 8)):
                    self.random.choices(
                        (self.everything, self.pairs, self.heap, self.truncate),
                        (40, 35, 24, 1),
                    )[0](connection)
                if self.random.random() < 0.1:
                    from psycopg import Rollback

                    raise Rollback(transaction)

    def maybe(self, value: Any) -> Any:
        return None if self.random.random() < 0.15 else value

    def text(self, length: int) -> str:
        return "".join(self.random.choice(_LETTERS) for _ in range(length))

    def body(self) -> str:
        """Large enough to be kept apart from its row, which PostgreSQL then leaves out."""
        return self.text(40) * 80

    def values(self) -> dict[str, Any]:
        pick = self.random
        words = [self.maybe(self.text(pick.randrange(4))) for _ in range(pick.randrange(4))]
        return {
            "small": self.maybe(pick.randrange(-(2**15), 2**15)),
            "whole": self.maybe(pick.randrange(-(2**31), 2**31)),
            "big": self.maybe(pick.randrange(-(2**63), 2**63)),
            "flag": self.maybe(pick.random() < 0.5),
            "single": self.maybe(pick.choice((0.1, 1.5e-20, 3.25, float("inf")))),
            "double": self.maybe(pick.choice((pick.random(), 1e300, float("-inf"), -0.0))),
            "amount": self.maybe(f"{pick.randrange(-(10**9), 10**9)}.{pick.randrange(100):02}"),
            "loose": self.maybe(pick.choice(("1.500", "-0.00001", "9" * 60, "NaN"))),
            "name": self.maybe(self.text(pick.randrange(30))),
            "code": self.maybe(pick.choice(("a", "ab", "abcde"))),
            "label": self.maybe(self.text(pick.randrange(20))),
            "raw": self.maybe(pick.randbytes(pick.randrange(20))),
            "day": self.maybe(f"{pick.randrange(1, 9999):04}-02-28"),
            "at": self.maybe(
                f"{pick.randrange(1, 9999):04}-01-31 23:59:59.{pick.randrange(10**6)}"
            ),
            "moment": self.maybe(f"{pick.randrange(1, 9999):04}-06-30 12:00:00.5+02"),
            "clock": self.maybe(f"{pick.randrange(24):02}:00:00.25"),
            "span": self.maybe(f"{pick.randrange(100)} days 03:00:00"),
            "ident": self.maybe(f"{pick.getrandbits(128):032x}"),
            "doc": self.maybe(pick.choice(('{"a":  1}', "[1, 2.50]", '"x"', "null"))),
            "tree": self.maybe(pick.choice(('{"b": [1, {"c": null}]}', '"text"', "1.50", "12e30"))),
            "feeling": self.maybe(pick.choice(("sad", "ok", "happy"))),
            "numbers": self.maybe([self.maybe(pick.randrange(100)) for _ in range(3)]),
            "words": self.maybe(words),
            "body": self.maybe(self.body()),
        }

    def everything(self, connection: psycopg.Connection[Any]) -> None:
        action = self.random.random()
        known = max(1, self.next_id - 1)
        target = self.random.randrange(1, known + 1)
        if action < 0.45 or self.next_id < 5:
            row = {"id": self.next_id, **self.values()}
            self.next_id += 1
            names = ", ".join(row)
            places = ", ".join(f"%({name})s" for name in row)
            connection.execute(f"INSERT INTO everything ({names}) VALUES ({places})", row)
        elif action < 0.6:
            row = self.values()
            changes = ", ".join(f"{name} = %({name})s" for name in row)
            connection.execute(f"UPDATE everything SET {changes} WHERE id = {target}", row)
        elif action < 0.8:
            connection.execute("UPDATE everything SET whole = 7 WHERE id = %s", [target])
        elif action < 0.9:
            moved = {"old": target, "new": self.next_id}
            self.next_id += 1
            connection.execute("UPDATE everything SET id = %(new)s WHERE id = %(old)s", moved)
        else:
            connection.execute("DELETE FROM everything WHERE id = %s", [target])

    def pairs(self, connection: psycopg.Connection[Any]) -> None:
        action = self.random.random()
        key = (self.random.randrange(3), f"k{self.random.randrange(12)}")
        other = (self.random.randrange(3), f"k{self.random.randrange(12)}")
        if action < 0.4:
            connection.execute(
                "INSERT INTO sales.pairs VALUES (%s, %s, 1, %s, %s) ON CONFLICT (region, code) "
                "DO UPDATE SET count = pairs.count + 1",
                [*key, self.body(), self.text(4)],
            )
        elif action < 0.6:
            connection.execute(
                "UPDATE sales.pairs SET region = %s, code = %s WHERE (region, code) = (%s, %s) "
                "AND NOT EXISTS (SELECT FROM sales.pairs WHERE (region, code) = (%s, %s))",
                [*other, *key, *other],
            )
        elif action < 0.75:
            self.swap(connection, key, other)
        elif action < 0.9:
            connection.execute(
                'UPDATE sales.pairs SET count = 0, "Odd Col." = %s WHERE region = %s',
                [self.text(3), key[0]],
            )
        else:
            connection.execute("DELETE FROM sales.pairs WHERE (region, code) = (%s, %s)", key)

    def swap(self, connection: psycopg.Connection[Any], key: Any, other: Any) -> None:
        """Two rows exchange their keys."""
        move = "UPDATE sales.pairs SET region = %s, code = %s WHERE (region, code) = (%s, %s)"
        if key != other:
            for new, old in (((99, "spare"), key), (key, other), (other, (99, "spare"))):
                connection.execute(move, [*new, *old])

    def heap(self, connection: psycopg.Connection[Any]) -> None:
        action = self.random.random()
        number, letter = self.random.choice((1, 2, None)), self.random.choice(("a", None))
        same = "number IS NOT DISTINCT FROM %s AND letter IS NOT DISTINCT FROM %s"
        one = f"ctid = (SELECT ctid FROM heap WHERE {same} LIMIT 1)"
        if action < 0.55:
            connection.execute("INSERT INTO heap VALUES (%s, %s, NULL)", [number, letter])
        elif action < 0.75:
            connection.execute(f"UPDATE heap SET number = 3 WHERE {one}", [number, letter])
        else:
            connection.execute(f"DELETE FROM heap WHERE {one}", [number, letter])

    def truncate(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(f"TRUNCATE {self.random.choice(TABLES)}")
