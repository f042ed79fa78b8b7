"""Building next copies from snapshots, several at a time, beside whatever else the mirror does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from consumer_sdk.errors import CorruptData, NotAvailable, SnapshotFailed
from consumer_sdk.mirror.notices import MirrorStatus, Notice
from consumer_sdk.targets.target import Lane, MirrorCopy, SnapshotRow
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.mirror.writer import Writer
    from consumer_sdk.snapshot.snapshot import Snapshot, SnapshotMeta
    from consumer_sdk.wire.column_types import TableSchema

# Snapshots asked for together share one export in the source.
REQUESTS = 32
LOADS = 4
ATTEMPTS = 3
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)


class Loader:
    """Fills planned copies; each is complete in the target, or not loaded at all.

    `write` runs a step on the target between two transactions. With `patient`, a bridge that does
    not answer is waited for.
    """

    def __init__(
        self,
        client: Client,
        writer: Writer,
        write: Callable[[Callable[[], None]], Awaitable[None]],
        status: MirrorStatus,
        tell: Callable[[Notice], None],
        *,
        fresh: bool,
        patient: bool,
    ) -> None:
        self._client = client
        self._writer = writer
        self._write = write
        self._status = status
        self._tell = tell
        self._fresh = fresh
        self._patient = patient
        self._requests = asyncio.Semaphore(REQUESTS)
        self._loads = asyncio.Semaphore(LOADS)

    async def run(self, copies: Sequence[MirrorCopy]) -> None:
        """Load all of them; the first error ends the others."""
        self._status.tables_loading = len(copies)

        async def load(copy: MirrorCopy) -> None:
            async with self._requests:
                await self._load(copy)
            self._status.tables_loading -= 1

        try:
            async with asyncio.TaskGroup() as group:
                for copy in copies:
                    group.create_task(load(copy))
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _load(self, planned: MirrorCopy) -> None:
        table = format_table_name(*planned.name)
        fresh = self._fresh
        failures = 0
        while True:
            await stay_cancelled()
            try:
                await self._load_once(planned, fresh)
            except NotAvailable as error:
                if not self._patient:
                    raise
                problem: Exception = error
            except (SnapshotFailed, CorruptData) as error:
                # What is stored may be damaged or trimmed; a new snapshot is neither.
                if failures + 1 >= ATTEMPTS and not (
                    self._patient and isinstance(error, SnapshotFailed)
                ):
                    raise
                problem, fresh = error, True
            else:
                return
            pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
            failures += 1
            self._tell(
                Notice(
                    "snapshot failed",
                    {"table": table, "reason": str(problem), "retry_seconds": pause},
                    warning=True,
                )
            )
            await asyncio.sleep(pause)

    async def _load_once(self, planned: MirrorCopy, fresh: bool) -> None:
        table = format_table_name(*planned.name)
        snapshot = await self._client.snapshot(planned.name, fresh=fresh)
        if _is_older(snapshot.meta, planned):
            snapshot = await self._client.snapshot(planned.name, fresh=True)
        if _is_older(snapshot.meta, planned):
            raise SnapshotFailed(f"snapshot of {table} is older than the gap it shall repair")
        async with self._loads:
            await self._fill(planned, snapshot)

    async def _fill(self, planned: MirrorCopy, snapshot: Snapshot) -> None:
        meta = snapshot.meta
        table = format_table_name(*planned.name)
        copy = MirrorCopy(
            schema=await self._schema_of(snapshot),
            lane=Lane.NEXT,
            epoch=meta.epoch,
            snapshot_id=meta.snapshot_id,
            snapshot_lsn=meta.snapshot_lsn,
            stream_seq=meta.cdc_seq - 1,
            stream_created=meta.stream_created,
            relation_id=meta.relation_id,
        )
        self._tell(
            Notice(
                "loading",
                {
                    "table": table,
                    "rows": meta.row_count,
                    "snapshot": meta.snapshot_id,
                    "reused": int(snapshot.reused),
                },
            )
        )
        self._status.rows_expected += meta.row_count
        # Should this end half way, the next start must still ask for a snapshot that will do.
        same_history = (planned.source, planned.epoch) == (meta.source, meta.epoch)
        wanted_lsn = planned.snapshot_lsn if same_history else 0
        started = replace(copy, snapshot_lsn=wanted_lsn)
        await self._write(partial(self._writer.start_load, started))
        async with aclosing(snapshot.chunks()) as chunks:
            async for chunk in chunks:
                rows = [SnapshotRow(row, chunk.raw(index)) for index, row in enumerate(chunk)]
                await self._write(partial(self._writer.load, copy, rows))
                self._status.rows_loaded += len(rows)
        await self._write(partial(self._writer.finish_load, copy))
        self._status.bootstraps += 1
        self._tell(Notice("loaded", {"table": table, "rows": meta.row_count}))

    async def _schema_of(self, snapshot: Snapshot) -> TableSchema:
        meta = snapshot.meta
        schema = await self._client.schema((meta.schema, meta.table))
        if schema.schema_version != meta.schema_version or schema.source != meta.source:
            raise SnapshotFailed(
                f"table {format_table_name(meta.schema, meta.table)} changed its structure "
                "while the snapshot was taken"
            )
        return schema


def _is_older(meta: SnapshotMeta, planned: MirrorCopy) -> bool:
    """Whether a snapshot is from before what it shall repair.

    Positions are an epoch's own, and epochs a source's: of another source any snapshot will do.
    """
    return meta.source == planned.source and (meta.epoch, meta.snapshot_lsn) < (
        planned.epoch,
        planned.snapshot_lsn,
    )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the group."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
