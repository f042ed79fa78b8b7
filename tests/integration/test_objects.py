"""Rows beyond the payload limit: their objects last as long as the messages that refer to them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bridge.jetstream import buckets
from bridge.jetstream.buckets import ObjectWriter

if TYPE_CHECKING:
    import pytest
    from nats.aio.client import Client

LIFETIME_SECONDS = 3


async def test_an_object_from_long_ago_is_stored_anew(
    nats_client: Client, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "NEW_SECONDS", 1.0)
    js = nats_client.jetstream()
    store = await js.create_object_store(f"{prefix}_objects", ttl=LIFETIME_SECONDS)
    writer = ObjectWriter(store, nats_client)
    await writer.put("row", b"content")
    first = await store.get_info("row")
    await writer.put("row", b"content")
    assert (await store.get_info("row")).nuid == first.nuid
    # Past the first one's life, within that of the second.
    await asyncio.sleep(2)
    await writer.put("row", b"content")
    await asyncio.sleep(2)
    assert (await store.get("row")).data == b"content"
