"""Keep a table in memory, always current: python -m consumer_sdk.examples.cache_in_a_dict users"""

import asyncio
from typing import Any

from consumer_sdk import Event, connect
from consumer_sdk.examples.command_line import arguments

Cache = dict[tuple[Any, ...], dict[str, Any]]


def apply(cache: Cache, key: tuple[str, ...], event: Event) -> None:
    """Apply one change; `old` holds a changed key, `unchanged` names values that were left out."""
    if event.operation == "TRUNCATE":
        cache.clear()
    elif event.data is not None and event.operation in ("INSERT", "UPDATE", "DELETE"):
        before = {**event.data, **(event.old or {})}
        row = cache.pop(tuple(before[name] for name in key), {})
        if event.operation != "DELETE":
            kept = {name: row[name] for name in event.unchanged}
            cache[tuple(event.data[name] for name in key)] = {**event.data, **kept}


async def keep(table: str) -> None:
    """Load a snapshot, then apply the transactions that are not in it."""
    async with connect() as client:
        key = (await client.schema(table)).row_key
        snapshot = await client.snapshot(table)
        cache = {tuple(row[name] for name in key): row async for row in snapshot.rows()}
        async for transaction in client.changes([table], after=snapshot.meta.cdc_seq - 1):
            if transaction.commit_lsn >= snapshot.meta.snapshot_lsn:
                for event in transaction.events:
                    apply(cache, key, event)
                print(f"{len(cache)} rows", flush=True)


if __name__ == "__main__":
    with arguments(__doc__, 1) as given:
        asyncio.run(keep(given[0]))
