"""Random histories of a table, with the changes they give and the rows they leave: the model that
folding is held against."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, str]
Row = dict[str, Any]
Change = dict[str, Any]

COLUMNS = ("region", "code", "count", "note", "body")
KEY = ("region", "code")
TOASTABLE = ("note", "body")


@dataclass
class KeyedHistory:
    """A table with a key of two columns and two columns that PostgreSQL may leave out."""

    seed: int
    keys: int = 12
    rows: dict[Key, Row] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.commit_lsn = 1000
        self.seq = 0
        self.counter = 0

    def start(self, count: int) -> list[Row]:
        """Give the table its first rows."""
        for key in self.random.sample(self.all_keys(), count):
            self.rows[key] = self.new_row(key)
        return [dict(row) for row in self.rows.values()]

    def run(self, steps: int, *, truncates: bool = False) -> None:
        """Do random things, swaps and chains of key changes among them."""
        actions = [self.insert, self.update, self.update, self.rekey, self.delete, self.swap]
        for _ in range(steps):
            if truncates and self.random.random() < 0.02:
                self.truncate()
            else:
                self.random.choice(actions)()
            if self.random.random() < 0.3:
                self.commit_lsn += self.random.randrange(1, 50)
                self.seq = 0

    def all_keys(self) -> list[Key]:
        return [(index % 3, f"k{index}") for index in range(self.keys)]

    def new_row(self, key: Key) -> Row:
        return {"region": key[0], "code": key[1], **self.values()}

    def values(self) -> Row:
        self.counter += 1
        text = f"v{self.counter}"
        note = None if self.random.random() < 0.2 else f"note {text}"
        return {"count": self.counter, "note": note, "body": f"body {text}"}

    def emit(self, operation: str, **fields: Any) -> None:
        change = {"_commit_lsn": self.commit_lsn, "_seq": self.seq, "_operation": operation}
        self.changes.append({**change, "_old": None, "_unchanged": None, **fields})
        self.seq += 1

    def insert(self) -> None:
        free = [key for key in self.all_keys() if key not in self.rows]
        if free:
            key = self.random.choice(free)
            self.rows[key] = self.new_row(key)
            self.emit("insert", **self.rows[key])

    def update(self) -> None:
        if self.rows:
            key = self.random.choice(list(self.rows))
            self.change_row(key, key)

    def rekey(self) -> None:
        free = [key for key in self.all_keys() if key not in self.rows]
        if self.rows and free:
            self.change_row(self.random.choice(list(self.rows)), self.random.choice(free))

    def swap(self) -> None:
        """Two rows exchange their keys by way of a third."""
        free = [key for key in self.all_keys() if key not in self.rows]
        if len(self.rows) >= 2 and free:
            first, second = self.random.sample(list(self.rows), 2)
            spare = self.random.choice(free)
            self.change_row(first, spare)
            self.change_row(second, first)
            self.change_row(spare, second)

    def change_row(self, old: Key, new: Key) -> None:
        row = self.rows.pop(old)
        untouched = [name for name in TOASTABLE if self.random.random() < 0.6]
        fresh = {**row, **self.new_row(new), **{name: row[name] for name in untouched}}
        self.rows[new] = fresh
        carried = {name: fresh[name] for name in COLUMNS if name not in untouched}
        self.emit(
            "update",
            _old={"region": old[0], "code": old[1]} if old != new else None,
            _unchanged=untouched or None,
            **carried,
        )

    def delete(self) -> None:
        if self.rows:
            key = self.random.choice(list(self.rows))
            del self.rows[key]
            self.emit("delete", region=key[0], code=key[1])

    def truncate(self) -> None:
        self.rows.clear()
        self.emit("truncate")

    def state(self) -> list[tuple[Any, ...]]:
        """The rows now, sorted."""
        return sorted(tuple(row[name] for name in COLUMNS) for row in self.rows.values())


@dataclass
class BagHistory:
    """A table without key, where equal rows are several rows."""

    seed: int
    rows: list[tuple[int | None, str | None]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.position = 0

    def some_row(self) -> tuple[int | None, str | None]:
        return self.random.choice((1, 2, None)), self.random.choice(("a", "b", None))

    def run(self, steps: int) -> None:
        """Do random things to rows of which many are equal."""
        for _ in range(steps):
            action = self.random.random()
            if action < 0.5 or not self.rows:
                row = self.some_row()
                self.rows.append(row)
                self.emit("insert", row)
            elif action < 0.75:
                row = self.rows.pop(self.random.randrange(len(self.rows)))
                self.emit("delete", row)
            elif action < 0.99:
                old = self.rows.pop(self.random.randrange(len(self.rows)))
                row = self.some_row()
                self.rows.append(row)
                self.emit("update", row, old)
            else:
                self.rows.clear()
                self.emit("truncate", (None, None))

    def emit(self, operation: str, row: Any, old: Any = None) -> None:
        self.position += 1
        self.changes.append(
            {
                "_commit_lsn": 50 + self.position // 5,
                "_seq": self.position % 5,
                "_operation": operation,
                "_old": None if old is None else {"number": old[0], "letter": old[1]},
                "_unchanged": None,
                "number": row[0],
                "letter": row[1],
            }
        )
