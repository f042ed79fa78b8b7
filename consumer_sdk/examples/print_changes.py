"""Print every change as it happens: python -m consumer_sdk.examples.print_changes users orders"""

import asyncio

from consumer_sdk import connect, format_lsn
from consumer_sdk.examples.command_line import arguments


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
    with arguments(__doc__) as given:
        asyncio.run(print_changes(given))
