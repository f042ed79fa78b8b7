"""How far a stream has been read for a source, where nothing of the wanted tables flows."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from consumer_sdk.reading.stream import get_message
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.reading.stream import Frame


async def is_read_through(
    client: Client, filters: Sequence[str], next_sequence: int, through: int, created: int
) -> bool:
    """Whether nothing that passes the filters is stored from `next_sequence` up to `through`."""
    if next_sequence > through:
        return True
    log = client.log()
    bounds = await log.bounds()
    first = max(next_sequence, bounds.first)
    if first > through:
        return False
    async with aclosing(log.read(first, through + 1, filters, created=created)) as batches:
        async for _ in batches:
            return False
    return True


async def newest_lsn(client: Client, source: str, epoch: int, wanted_lsn: int) -> int:
    """The largest commit LSN of a source known to be stored; looks no further than `wanted_lsn`.

    Every transaction of the epoch with a smaller one is stored before it. Positions of other
    epochs say nothing of this one: a database put back in time has smaller ones than before.
    """
    progress = await client.progress(source)
    newest = progress.lsn if progress is not None and progress.epoch == epoch else 0
    if newest >= wanted_lsn:
        return newest
    bounds = await client.log().bounds()
    requests: list[dict[str, object]] = (
        [{"seq": bounds.last}] if bounds.last >= bounds.first else []
    )
    subjects = client.subjects
    requests += [
        {"last_by_subj": subjects.table_filter(table_token(schema.schema, schema.table))}
        for schema in await client.tables()
        if schema.source == source
    ]
    decoder = client.decoder()
    for request in requests:
        frame: Frame | None = await get_message(client.nc, subjects.cdc_stream, request)
        if frame is None:
            continue
        for stored in await decoder.decode([frame]):
            event = stored.event
            ours = event.source == source and event.epoch == epoch
            if ours and event.operation not in ("SCHEMA", "MESSAGE"):
                newest = max(newest, event.commit_lsn)
        if newest >= wanted_lsn:
            break
    return newest
