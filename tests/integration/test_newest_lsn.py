"""How far the stream is known to have come, where nothing of the wanted tables flows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumer_sdk import connect
from consumer_sdk.reading.progress import newest_lsn
from tests.fixtures.publisher import Publisher

if TYPE_CHECKING:
    from nats.aio.client import Client

    from bridge.embedded import NatsServer


async def test_positions_of_another_epoch_say_nothing_of_this_one(
    nats_client: Client, nats_server: NatsServer, prefix: str
) -> None:
    """A database restored from a backup goes on with smaller positions than it had."""
    before = Publisher(nats_client, prefix, epoch=1)
    await before.create_streams()
    await before.put_schema("users")
    await before.send(
        before.event("users", "INSERT", lsn=0x9000, data={"id": 1}, last=True, end_lsn=0x9001)
    )
    await before.progress(lsn=0x9000)
    async with connect(nats_server.reader_url, prefix=prefix) as client:
        assert await newest_lsn(client.deployment, "shop", 1, 0x1200) == 0x9000
        assert await newest_lsn(client.deployment, "shop", 2, 0x1200) == 0
        after = Publisher(nats_client, prefix, epoch=2)
        await after.progress(lsn=0x1100)
        # The newest message of the table is still one of the epoch before.
        assert await newest_lsn(client.deployment, "shop", 2, 0x1200) == 0x1100
        await after.send(
            after.event("users", "INSERT", lsn=0x1300, data={"id": 2}, last=True, end_lsn=0x1301)
        )
        assert await newest_lsn(client.deployment, "shop", 2, 0x1200) == 0x1300
