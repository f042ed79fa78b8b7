"""What reading and mirroring cost, against what limits them.

Reading: events decoded to the caller, against nats-py's ordered consumer whose callback does
nothing. Mirroring: `mirror` into SQLite, against plain batched upserts of the same rows.
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats

from consumer_sdk import connect
from consumer_sdk.mirror import mirror
from consumer_sdk.transport.settings import NatsSettings
from consumer_sdk.wire.envelope import MSGPACK, encode
from tests.bench.rig import fresh_name
from tests.fixtures.nats import READER_ENVIRONMENT
from tests.fixtures.publisher import COLUMNS, Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nats.aio.msg import Msg

    from tests.bench.rig import Rig

EVENTS = 200_000
ROWS_IN_A_TRANSACTION = 100
WINDOW = 4_000
BATCH = 1_000
TEXT = {"data_type": "text", "type_oid": 25, "base_type_oid": 25, "is_key": False}
TABLE_COLUMNS = [
    COLUMNS[0],
    *[
        {**COLUMNS[0], **TEXT, "name": name, "position": place, "is_nullable": True}
        for place, name in enumerate(("name", "email", "city"), start=2)
    ],
]


def measure(rig: Rig, repeats: int) -> list[dict[str, Any]]:
    """Ratios of one run, each the median over `repeats`."""
    return asyncio.run(_measure(rig, repeats))


async def _measure(rig: Rig, repeats: int) -> list[dict[str, Any]]:
    single, packed = fresh_name("p"), fresh_name("p")
    rows = [_row(number) for number in range(EVENTS)]
    connection = await nats.connect(rig.nats.url)
    try:
        await _fill(Publisher(connection, single), rows, pack=False)
        await _fill(Publisher(connection, packed), rows, pack=True)
    finally:
        await connection.close()
    reading, imported, mirroring, mirroring_packed = [], [], [], []
    rig.nats.grant(single)
    for _ in range(repeats):
        ordered = await _ordered(rig, single)
        reading.append((ordered, await _decoded(rig.nats.url, single)))
        imported.append((ordered, await _decoded(rig.nats.reader_url, single)))
        upserts = _upserted(rows)
        mirroring.append((upserts, await _mirrored(rig, single)))
        mirroring_packed.append((upserts, await _mirrored(rig, packed)))
    return [
        _result("decoded / ordered consumer doing nothing", reading, 0.6),
        _result("decoded in a reader's account / ordered consumer", imported, None),
        _result("mirror into SQLite, packed / batched upserts", mirroring_packed, 0.4),
        _result("mirror into SQLite, one message a row / batched upserts", mirroring, None),
    ]


async def _fill(publisher: Publisher, rows: Sequence[dict[str, Any]], *, pack: bool) -> None:
    """An empty snapshot, then every row as an insert."""
    await publisher.create_streams()
    await publisher.put_schema(columns=TABLE_COLUMNS)
    await publisher.progress(lsn=1)
    await publisher.snapshot([], lsn=1, meta_changes={"columns": TABLE_COLUMNS})
    await _publish(publisher, list(_messages(publisher, rows, pack)))
    await publisher.progress(lsn=2**40)


def _messages(
    publisher: Publisher, rows: Sequence[dict[str, Any]], pack: bool
) -> Iterator[dict[str, Any]]:
    for start in range(0, len(rows), ROWS_IN_A_TRANSACTION):
        lsn = 0x1000 + start
        inside = rows[start : start + ROWS_IN_A_TRANSACTION]
        end = {"last": True, "end_lsn": lsn + 1}
        if pack:
            packed = [{"data": row} for row in inside]
            yield publisher.event("users", "INSERT", lsn=lsn, rows=packed, **end)
            continue
        for seq, row in enumerate(inside):
            last = end if seq == len(inside) - 1 else {}
            yield publisher.event("users", "INSERT", lsn=lsn, seq=seq, data=row, **last)


def _result(name: str, pairs: Sequence[tuple[float, float]], floor: float | None) -> dict[str, Any]:
    ratios = [ours / reference for reference, ours in pairs]
    return {
        "what": name,
        "ratio": statistics.median(ratios),
        "floor": "" if floor is None else floor,
        "spread": max(ratios) - min(ratios),
        "per second": statistics.median(ours for _, ours in pairs),
        "reference/s": statistics.median(reference for reference, _ in pairs),
    }


def _row(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "name": f"user number {number}",
        "email": f"user{number}@example.org",
        "city": "Springfield",
    }


async def _publish(publisher: Publisher, events: Sequence[dict[str, Any]]) -> None:
    """Store messages, with a bounded number of them unacknowledged."""
    client = publisher.client
    acknowledged = 0

    async def count(_: Msg) -> None:
        nonlocal acknowledged
        acknowledged += 1

    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=count)
    for number, event in enumerate(events):
        headers = {"Nats-Msg-Id": event["msg_id"], "Content-Type": MSGPACK}
        await client.publish(event["subject"], encode(event), reply=inbox, headers=headers)
        while number - acknowledged > WINDOW:
            await asyncio.sleep(0.001)
    while acknowledged < len(events):
        await asyncio.sleep(0.001)


async def _ordered(rig: Rig, prefix: str) -> float:
    client = await nats.connect(rig.nats.url)
    received = 0
    finished = asyncio.Event()

    async def ignore(_: Msg) -> None:
        nonlocal received
        received += 1
        if received == EVENTS:
            finished.set()

    begun = time.perf_counter()
    subscription = await client.jetstream().subscribe(
        f"{prefix}.cdc.users.*", stream=f"{prefix}_CDC", ordered_consumer=True, cb=ignore
    )
    await finished.wait()
    elapsed = time.perf_counter() - begun
    await subscription.unsubscribe()
    await client.close()
    return EVENTS / elapsed


async def _decoded(url: str, prefix: str) -> float:
    settings = NatsSettings.resolve(url, prefix=prefix, environment=READER_ENVIRONMENT)
    async with connect(settings=settings) as client:
        received = 0
        begun = time.perf_counter()
        async with client.feed(["users"], 1) as feed:
            async for batch in feed:
                received += len(batch)
                if received == EVENTS:
                    break
        return EVENTS / (time.perf_counter() - begun)


def _upserted(rows: Sequence[dict[str, Any]]) -> float:
    statement = (
        "INSERT INTO users VALUES (:id, :name, :email, :city) ON CONFLICT (id) DO UPDATE SET "
        "name = excluded.name, email = excluded.email, city = excluded.city"
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(sqlite3.connect(Path(directory) / "plain.db")) as replica,
    ):
        replica.execute("PRAGMA journal_mode = WAL")
        replica.execute(
            "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, email TEXT, city TEXT)"
        )
        begun = time.perf_counter()
        for start in range(0, len(rows), BATCH):
            with replica:
                replica.executemany(statement, rows[start : start + BATCH])
        return len(rows) / (time.perf_counter() - begun)


async def _mirrored(rig: Rig, prefix: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mirror.db"
        async with connect(rig.nats.url, prefix=prefix) as client:
            begun = time.perf_counter()
            await mirror(client, ["users"], into=f"sqlite:///{path}", once=True)
            elapsed = time.perf_counter() - begun
        with closing(sqlite3.connect(path)) as replica:
            [(found,)] = replica.execute("SELECT count(*) FROM users").fetchall()
        assert found == EVENTS, f"{found} rows arrived, {EVENTS} were sent"
        return EVENTS / elapsed
