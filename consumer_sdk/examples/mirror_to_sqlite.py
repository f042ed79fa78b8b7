"""Keep tables in an SQLite file: python -m consumer_sdk.examples.mirror_to_sqlite shop.db users"""

import asyncio

from consumer_sdk import connect
from consumer_sdk.examples.command_line import arguments
from consumer_sdk.mirror import mirror


async def keep(path: str, tables: list[str]) -> None:
    """Load the tables, or all if none is named, then apply each transaction as a whole."""
    async with connect() as client:
        await mirror(client, tables or None, into=f"sqlite:///{path}")


if __name__ == "__main__":
    with arguments(__doc__, 1) as given:
        asyncio.run(keep(given[0], given[1:]))
