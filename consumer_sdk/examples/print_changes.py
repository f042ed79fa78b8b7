"""Print every change as it happens: python -m consumer_sdk.examples.print_changes users orders"""

import asyncio
import sys

from consumer_sdk import connect, format_lsn


async def print_changes(tables: list[str]) -> None:
    """Follow the tables, or all of them, transaction by transaction."""
    async with connect() as client:
        async for transaction in client.changes(tables or None):
            print(
                f"transaction {transaction.xid}, committed at {format_lsn(transaction.commit_lsn)}"
            )
            for event in transaction.events:
                print(" ", event.operation, f"{event.schema}.{event.table}", event.data, flush=True)


if __name__ == "__main__":
    asyncio.run(print_changes(sys.argv[1:]))
