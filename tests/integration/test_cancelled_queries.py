"""A task that is cancelled ends, also when its connection breaks at that moment."""

from __future__ import annotations

import asyncio

import pytest

from bridge.postgres.catalog import Catalog


async def test_a_cancelled_query_whose_connection_breaks_stays_cancelled(database, pg, tcp_proxy):
    proxy = tcp_proxy(pg.port)
    catalog = Catalog(proxy.through(database.dsn))
    assert await catalog.rows("SELECT 1") == [(1,)]
    query = asyncio.create_task(catalog.rows("SELECT pg_sleep(30)"))
    await asyncio.sleep(0.3)
    proxy.cut()
    query.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(query, 20)
    # The session is made anew for the next question.
    assert await catalog.rows("SELECT 2") == [(2,)]
    await catalog.close()
