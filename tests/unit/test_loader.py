"""How many snapshots a mirror asks for at once: all that the bridge can copy from one export."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from consumer_sdk.errors import NotAvailable
from consumer_sdk.mirror.bootstrap import Loader
from consumer_sdk.mirror.notices import MirrorStatus
from consumer_sdk.targets.target import MirrorCopy
from consumer_sdk.wire.column_types import TableSchema

TABLES = 50


class Requests:
    """In the place of a client: answers no request before all tables are asked for."""

    def __init__(self) -> None:
        self.waiting = 0
        self._all_asked = asyncio.Event()

    async def schema(self, table: tuple[str, str]) -> TableSchema:
        return described(table[1])

    async def snapshot(self, _table: Any, *, fresh: bool, pieces: bool) -> Any:
        assert not fresh
        assert pieces
        self.waiting += 1
        if self.waiting == TABLES:
            self._all_asked.set()
        await self._all_asked.wait()
        raise NotAvailable("all tables were asked for")


def described(table: str) -> TableSchema:
    column = {"name": "id", "position": 1, "data_type": "integer", "type_oid": 23, "is_key": True}
    return TableSchema.from_document(
        {
            "v": 1, "source": "s", "epoch": 1, "schema": "public", "table": table,
            "timestamp": 0, "schema_version": 1, "lsn": 1, "primary_key": ["id"],
            "replica_identity": "default", "columns": [column],
        }
    )  # fmt: skip


async def test_fifty_tables_are_requested_together() -> None:
    client: Any = Requests()
    target: Any = None
    loader = Loader(
        client, target, MirrorStatus(), lambda _notice: None, fresh=False, keep_trying=False
    )
    async with asyncio.timeout(10):
        with pytest.raises(NotAvailable, match="all tables"):
            await loader.run([MirrorCopy(described(f"t{n}")) for n in range(TABLES)])
