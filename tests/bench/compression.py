"""What zstd and per-table dictionaries gain on chunks of several sizes and on single events."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgpack
import zstandard

from bridge.jetstream.dictionaries import train
from bridge.snapshot.formats.chunks import ChunkHead

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_ROWS = (10_000, 1_000, 100, 10)
EVENTS = 5_000
NAMES = [
    "anna",
    "ben",
    "carla",
    "dmitri",
    "elif",
    "farid",
    "grace",
    "hugo",
    "ines",
    "jonas",
    "keiko",
    "liam",
    "mara",
    "nils",
    "olga",
]
CITIES = ("Berlin", "Paris", "Lagos", "Lima", "Osaka", "Quito", "Oslo", "Perth", "Turin", "Delhi")
STATES = ("new", "paid", "shipped", "delivered", "returned")

Row = dict[str, Any]


def _time(rng: random.Random) -> str:
    return (
        f"2025-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}T{rng.randrange(24):02d}:"
        f"{rng.randrange(60):02d}:{rng.randrange(60):02d}.{rng.randrange(10**6):06d}Z"
    )


def _user(rng: random.Random, number: int) -> Row:
    name = rng.choice(NAMES)
    return {
        "id": number,
        "name": f"{name.title()} {rng.choice(NAMES).title()}son",
        "email": f"{name}.{rng.randrange(10**6)}@example.com",
        "balance": f"{rng.randrange(10**6) / 100:.2f}",
        "active": rng.random() < 0.7,
        "created": _time(rng),
    }


def _order(rng: random.Random, _number: int) -> Row:
    return {
        "order_id": f"{rng.getrandbits(128):032x}",
        "customer_id": rng.randrange(10**6),
        "status": rng.choice(STATES),
        "total": f"{rng.randrange(10**5) / 100:.2f}",
        "placed_at": _time(rng),
        "shipping": {
            "street": f"{rng.choice(NAMES).title()} Street {rng.randrange(200)}",
            "city": rng.choice(CITIES),
            "zip": f"{rng.randrange(10**5):05d}",
        },
        "lines": [
            {"sku": f"SKU-{rng.randrange(5000):05d}", "quantity": rng.randrange(1, 5)}
            for _ in range(rng.randrange(1, 4))
        ],
        "note": None,
    }


TABLES: dict[str, Callable[[random.Random, int], Row]] = {"users": _user, "orders": _order}


def _chunk(table: str, rows: list[Row]) -> bytes:
    head = ChunkHead("tailrace", 1_794_800_000, table, "public", "1a1e27e8f96-ae6312d89191", 2**25)
    packed: bytes = msgpack.packb({**head.fields(3), "data": rows})
    return packed


def _event(table: str, number: int, row: Row) -> bytes:
    lsn = 2**25 + number * 312
    packed: bytes = msgpack.packb(
        {
            "v": 1, "source": "tailrace", "epoch": 1_794_800_000, "table": table,
            "schema": "public", "operation": "INSERT", "relation_id": 16400, "schema_version": 1,
            "msg_id": f"{lsn:x}-{table}-insert-0-6afa6700", "subject": f"cdc.{table}.insert",
            "lsn": lsn, "xid": 7000 + number, "seq": 0, "ts": 1_794_800_000_000_000 + number * 999,
            "data": row, "last": True, "end_lsn": lsn + 48,
        }
    )  # fmt: skip
    return packed


def measure() -> list[dict[str, Any]]:
    """Sizes as fractions of the uncompressed message."""
    results = []
    for table, make in TABLES.items():
        rng = random.Random(7)
        learned = [make(rng, number) for number in range(2000)]
        rows = [make(rng, number) for number in range(10_000, 20_000)]
        for_rows = train([msgpack.packb(row) for row in learned])
        for_events = train([_event(table, n, row) for n, row in enumerate(learned)])
        for size in CHUNK_ROWS:
            starts = range(0, min(len(rows), size * 50), size)
            chunks = [_chunk(table, rows[start : start + size]) for start in starts]
            results.append(_compare(table, f"chunk of {size} rows", chunks, for_rows))
        events = [_event(table, number, row) for number, row in enumerate(rows[:EVENTS])]
        results.append(_compare(table, "single event", events, for_events))
    return results


def _compare(
    table: str, what: str, messages: list[bytes], dictionary: bytes | None
) -> dict[str, Any]:
    assert dictionary is not None
    plain = zstandard.ZstdCompressor(level=3)
    shared = zstandard.ZstdCompressionDict(dictionary)
    trained = zstandard.ZstdCompressor(level=3, dict_data=shared)
    total = sum(map(len, messages))
    return {
        "table": table,
        "message": what,
        "bytes": total / len(messages),
        "zstd": sum(len(plain.compress(message)) for message in messages) / total,
        "zstd + dictionary": sum(len(trained.compress(message)) for message in messages) / total,
    }


if __name__ == "__main__":
    from tests.bench.report import print_table

    measured = measure()
    print_table("compression", list(measured[0]), [list(row.values()) for row in measured])
