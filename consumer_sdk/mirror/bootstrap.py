"""Loads next copies from snapshots, several at a time, while the mirror follows other tables."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from consumer_sdk.errors import CorruptData, NotAvailable, SnapshotFailed
from consumer_sdk.mirror.decisions import RepairNeeded, RowAnswer
from consumer_sdk.mirror.notices import MirrorStatus, Notice
from consumer_sdk.snapshot.request import RequestRefused, SnapshotAbandoned, SnapshotStalled
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.targets.incomplete import key_text, key_values, takes_pieces
from consumer_sdk.targets.target import CopyState, SnapshotRow
from consumer_sdk.transport.cancellation import errors_of, stay_cancelled
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.mirror.decisions import WantedRows
    from consumer_sdk.mirror.writer import TargetThread
    from consumer_sdk.snapshot.snapshot import Snapshot, SnapshotMeta
    from consumer_sdk.targets.target import MirrorCopy, TableName
    from consumer_sdk.wire.column_types import TableSchema

# Snapshots requested together share one export in the source. The bridge runs 64 at most.
REQUESTS = 56
LOADS = 4
ATTEMPTS = 3
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)


class Loader:
    """Loads planned copies; a copy that is only partly loaded is loaded again from the start.

    With `keep_trying`, requests are repeated until a bridge answers. The snapshots of the tables
    `at_one_point` have one consistent point.
    """

    def __init__(
        self,
        client: Client,
        target: TargetThread,
        status: MirrorStatus,
        notify: Callable[[Notice], None],
        *,
        fresh: bool,
        keep_trying: bool,
        at_one_point: Container[TableName] = (),
    ) -> None:
        self._client = client
        self._at_one_point = at_one_point
        self._target = target
        self._status = status
        self._notify = notify
        self._fresh = fresh
        self._keep_trying = keep_trying
        self._requests = asyncio.Semaphore(REQUESTS)
        self._loads = asyncio.Semaphore(LOADS)

    async def run(self, copies: Sequence[MirrorCopy]) -> None:
        """Load all copies; the first error cancels the other loads."""
        self._status.tables_loading = len(copies)

        async def load(copy: MirrorCopy) -> None:
            async with self._requests:
                await self._load(copy)
            self._status.tables_loading -= 1

        try:
            async with asyncio.TaskGroup() as group:
                for copy in copies:
                    group.create_task(load(copy))
        except BaseExceptionGroup as group:
            # The first error ended the other loads.
            raise errors_of(group)[0] from group

    async def _load(self, planned: MirrorCopy) -> None:
        table = format_table_name(*planned.name)
        fresh = self._fresh
        failures = 0
        while True:
            await stay_cancelled()
            try:
                await self._load_once(planned, fresh)
            except NotAvailable as error:
                if not self._keep_trying:
                    raise
                problem: Exception = error
            except (SnapshotFailed, CorruptData) as error:
                # The stored snapshot may be damaged or trimmed, so a new one is requested; but one
                # that a stopped bridge left unfinished may be finished by the next bridge.
                unfinished = isinstance(error, (SnapshotAbandoned, SnapshotStalled))
                if failures + 1 >= ATTEMPTS and not (
                    self._keep_trying and isinstance(error, SnapshotFailed)
                ):
                    raise
                problem, fresh = error, fresh or not unfinished
            else:
                return
            pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
            failures += 1
            self._notify(
                Notice(
                    "snapshot failed",
                    {"table": table, "reason": str(problem), "retry_seconds": pause},
                    warning=True,
                )
            )
            await asyncio.sleep(pause)

    async def _load_once(self, planned: MirrorCopy, fresh: bool) -> None:
        table = format_table_name(*planned.name)
        pieces = planned.name not in self._at_one_point and takes_pieces(
            await self._client.schema(planned.name)
        )
        snapshot = await self._client.snapshot(planned.name, fresh=fresh, pieces=pieces)
        if _is_older(snapshot.meta, planned):
            snapshot = await self._client.snapshot(planned.name, fresh=True, pieces=pieces)
        if _is_older(snapshot.meta, planned):
            raise SnapshotFailed(f"snapshot of {table} is older than the gap that it must repair")
        async with self._loads:
            await self._fill(planned, snapshot)

    async def _fill(self, planned: MirrorCopy, snapshot: Snapshot) -> None:
        meta = snapshot.meta
        table = format_table_name(*planned.name)
        schema = await self._schema_of(snapshot)
        if meta.exact_lsn and not takes_pieces(schema):
            raise SnapshotFailed(f"{meta.describe()} has several points, and rows without a key")
        copy = replace(
            planned.become(CopyState.LOADING),
            schema=schema,
            epoch=meta.epoch,
            snapshot_id=meta.snapshot_id,
            snapshot_lsn=meta.snapshot_lsn,
            stream_seq=meta.cdc_seq - 1,
            stream_created=meta.stream_created,
            applied_lsn=0,
            relation_id=meta.relation_id,
            exact_lsn=meta.exact_lsn,
            incomplete={},
        )
        self._notify(
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
        # If this load is interrupted, the next one must know the oldest snapshot that it may use.
        same_history = (planned.source, planned.epoch) == (meta.source, meta.epoch)
        oldest_lsn = planned.snapshot_lsn if same_history else 0
        target, writer = self._target, self._target.writer
        await target.write(writer.start_load, replace(copy, snapshot_lsn=oldest_lsn))
        async with aclosing(snapshot.chunks()) as chunks:
            async for chunk in chunks:
                rows = [SnapshotRow(row, chunk.raw(index)) for index, row in enumerate(chunk)]
                await target.write(writer.load, copy, rows)
                self._status.rows_loaded += len(rows)
        await target.write(writer.finish_load, copy)
        self._status.bootstraps += 1
        self._notify(Notice("loaded", {"table": table, "rows": meta.row_count}))

    async def _schema_of(self, snapshot: Snapshot) -> TableSchema:
        meta = snapshot.meta
        schema = await self._client.schema((meta.schema, meta.table))
        if schema.schema_version != meta.schema_version or schema.source != meta.source:
            raise SnapshotFailed(
                f"table {format_table_name(meta.schema, meta.table)} changed its structure "
                "while the snapshot was taken"
            )
        return schema


async def fetch_rows(
    client: Client, wanted: WantedRows, notify: Callable[[Notice], None]
) -> RowAnswer:
    """Ask the bridge for rows by key, until one answers; RepairNeeded if the rows cannot be had."""
    copy = wanted.copy
    table = format_table_name(*copy.name)
    where = {"keys": [key_values(copy.schema, text) for text in sorted(wanted.keys)]}
    notify(Notice("completing rows", {"table": table, "rows": len(wanted.keys)}))
    failures = 0
    while True:
        await stay_cancelled()
        try:
            snapshot = await client.snapshot(copy.name, fresh=True, where=where)
            return await _read_answer(snapshot, wanted)
        except NotAvailable as error:
            problem: Exception = error
        except (SnapshotFailed, CorruptData) as error:
            if failures + 1 >= ATTEMPTS or isinstance(error, RequestRefused):
                raise RepairNeeded(str(error), [copy.name], at_one_point=True) from error
            problem = error
        pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
        failures += not isinstance(problem, NotAvailable)
        notify(
            Notice(
                "rows not completed",
                {"table": table, "reason": str(problem), "retry_seconds": pause},
                warning=True,
            )
        )
        await asyncio.sleep(pause)


async def _read_answer(snapshot: Snapshot, wanted: WantedRows) -> RowAnswer:
    meta, copy = snapshot.meta, wanted.copy
    if (meta.source, meta.epoch, meta.schema_version) != (
        copy.source,
        copy.epoch,
        copy.schema.schema_version,
    ):
        raise RepairNeeded("it changed before its snapshot was exact", [copy.name])
    key = key_columns(copy.schema)
    rows: dict[str, SnapshotRow] = {}
    async with aclosing(snapshot.chunks()) as chunks:
        async for chunk in chunks:
            for index, row in enumerate(chunk):
                rows[key_text(key, row)] = SnapshotRow(row, chunk.raw(index))
    return RowAnswer(wanted, meta.snapshot_lsn, rows)


def _is_older(meta: SnapshotMeta, planned: MirrorCopy) -> bool:
    """Whether a snapshot is older than the oldest one that may be loaded.

    LSNs and epochs are comparable only within a source, so a snapshot of another source never is.
    """
    return meta.source == planned.source and (meta.epoch, meta.snapshot_lsn) < (
        planned.epoch,
        planned.snapshot_lsn,
    )
