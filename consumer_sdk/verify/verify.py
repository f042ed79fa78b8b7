"""Compares source and replica row by row at one position, while both continue to change.

The source is read in an exported snapshot, which holds exactly the transactions below a known LSN.
The replica is read in one transaction, which holds exactly those up to its saved position. The
changes between the two are read from the log and applied to the side that is behind.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from consumer_sdk.errors import NotAvailable, TargetError
from consumer_sdk.reading.progress import newest_lsn
from consumer_sdk.reading.schemas import resolve_table
from consumer_sdk.targets.target import Lane
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.verify.fold import Fold
from consumer_sdk.verify.source_snapshot import SourceSnapshot
from consumer_sdk.verify.table_side import SLICE_ROWS, Replica, TableLayout, reading_errors
from consumer_sdk.wire.position import format_lsn
from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.reading.schemas import TableName as TableSpelling
    from consumer_sdk.targets.target import MirrorCopy, MirrorPosition, TableName, TargetState
    from consumer_sdk.verify.table_side import Side

POLL_SECONDS = 0.2
KEPT_DIFFERENCES = 1000
_CHANGES = frozenset({"INSERT", "UPDATE", "DELETE", "TRUNCATE"})


@dataclass(slots=True)
class TableReport:
    """The result for one table; each list holds keys, as JSON lists of canonical texts."""

    table: TableName
    rows: int = 0
    changes_folded: int = 0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    differences: int = 0

    @property
    def equal(self) -> bool:
        """Whether source and replica agree."""
        return self.differences == 0

    def note(self, kind: list[str], key: str) -> None:
        """Count a difference, and keep its key unless the list is full."""
        self.differences += 1
        if len(kind) < KEPT_DIFFERENCES:
            kind.append(key)


async def verify(
    client: Client,
    tables: Sequence[TableSpelling],
    *,
    source: str,
    replica: str,
    timeout: float = 60.0,
    on_wait: Callable[[str], None] | None = None,
) -> list[TableReport]:
    """Compare tables of the source (a DSN) with a replica (an address); see the module.

    Waits up to `timeout` seconds for write transactions of the source, and for the stream to reach
    the snapshot, then raises NotAvailable. GapError if needed changes have been trimmed.
    """
    names = [resolve_table(table) for table in tables]
    for name in names:
        await client.schema(name)
    log_end = (await client.log().bounds()).last + 1
    reader = Replica(replica)
    snapshot = await asyncio.to_thread(SourceSnapshot.take, source, timeout, on_wait)
    try:
        state = await asyncio.to_thread(reader.open)
        reports = []
        for name in names:
            copy, position = _live(state, name, reader.name)
            with reading_errors(format_table_name(*name)):
                comparison = _Comparison(client, snapshot, reader, copy, position, log_end)
                reports.append(await comparison.run(timeout))
        return reports
    finally:
        await asyncio.to_thread(snapshot.close)
        await asyncio.to_thread(reader.close)


def _live(state: TargetState, name: TableName, replica: str) -> tuple[MirrorCopy, MirrorPosition]:
    copy = state.lane(Lane.LIVE).get(name)
    position = state.positions.get(copy.source) if copy is not None else None
    if copy is None or copy.retired or position is None:
        raise TargetError(
            f"replica {replica} does not hold {format_table_name(*name)}; let cdc mirror load it"
        )
    return copy, position


class _Comparison:
    """The comparison of one table, whose rows are fixed on both sides."""

    def __init__(
        self,
        client: Client,
        snapshot: SourceSnapshot,
        replica: Replica,
        copy: MirrorCopy,
        position: MirrorPosition,
        log_end: int,
    ) -> None:
        self._client = client
        self._snapshot = snapshot
        self._replica = replica
        self._copy = copy
        self._position = position
        self._log_end = log_end
        self._table = format_table_name(*copy.name)
        self._layout = TableLayout(copy.schema)
        self._replica_is_ahead = position.commit_lsn >= snapshot.lsn

    async def run(self, timeout: float) -> TableReport:
        await self._check_source()
        report = TableReport(self._copy.name)
        with (
            tempfile.TemporaryDirectory(prefix="tailrace-verify-") as directory,
            Fold(self._layout, Path(directory)) as fold,
        ):
            report.changes_folded = await self._spool(fold, timeout)
            await asyncio.to_thread(self._compare, fold, report)
        return report

    async def _check_source(self) -> None:
        progress = await self._client.progress(self._copy.source)
        if progress is None:
            raise NotAvailable(f"source {self._copy.source} has never reported progress")
        if progress.epoch != self._position.epoch:
            raise NotAvailable(
                f"the replica of {self._table} belongs to an earlier epoch of source "
                f"{self._copy.source}; let the mirror rebuild it first"
            )
        await asyncio.to_thread(self._snapshot.require_same_database, progress.document)

    async def _spool(self, fold: Fold, timeout: float) -> int:
        """Store the changes that only the side ahead holds; returns how many."""
        position, snapshot_lsn = self._position, self._snapshot.lsn
        if self._replica_is_ahead:
            first, end = self._log_end, position.stream_seq + 1
        else:
            await self._wait_for_log(timeout)
            bounds = await self._client.log().bounds()
            first, end = position.stream_seq + 1, bounds.last + 1
        if end <= first:
            return 0
        token = table_token(*self._copy.name)
        log = self._client.log()
        batches = log.read(
            first,
            end,
            [self._client.subjects.table_filter(token)],
            created=position.stream_created,
        )
        folded = 0
        async with aclosing(batches):
            async for batch in batches:
                for stored in batch:
                    event = stored.event
                    if event.source != position.source or event.epoch != position.epoch:
                        continue
                    lsn = event.commit_lsn
                    between = (
                        snapshot_lsn <= lsn <= position.commit_lsn
                        if self._replica_is_ahead
                        else position.commit_lsn < lsn < snapshot_lsn
                    )
                    if not between or event.operation not in _CHANGES:
                        continue
                    if event.schema_version != self._copy.schema.schema_version:
                        raise NotAvailable(
                            f"{self._table} changed its structure in the meantime; run verify again"
                        )
                    fold.spool(event)
                    folded += 1
        return folded

    async def _wait_for_log(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        wanted = self._snapshot.lsn
        while True:
            await stay_cancelled()
            newest = await newest_lsn(
                self._client.deployment, self._copy.source, self._position.epoch, wanted
            )
            if newest >= wanted:
                return
            if time.monotonic() > deadline:
                raise NotAvailable(
                    f"the stream has reached {format_lsn(newest)} of source {self._copy.source}, "
                    f"the snapshot is at {format_lsn(wanted)}; is the bridge running?"
                )
            await asyncio.sleep(POLL_SECONDS)

    def _compare(self, fold: Fold, report: TableReport) -> None:
        source = self._snapshot.side(self._layout)
        replica = self._replica.side(self._layout)
        behind, ahead = (source, replica) if self._replica_is_ahead else (replica, source)
        if self._layout.key:
            self._compare_by_key(behind, ahead, fold, report)
        else:
            self._compare_by_count(behind, ahead, fold, report)

    def _compare_by_key(self, behind: Side, ahead: Side, fold: Fold, report: TableReport) -> None:
        layout = self._layout
        # If the replica is ahead, it lacks the rows found only on the side behind.
        only_behind, only_ahead = (
            (report.missing, report.extra)
            if self._replica_is_ahead
            else (report.extra, report.missing)
        )
        found = 0
        for rows in () if fold.truncated else behind.slices():
            mine = {layout.key_of(row): row for row in rows}
            for key in fold.touched(list(mine)):
                fold.add(mine.pop(key))
            theirs = ahead.find(list(mine)) if mine else {}
            found += len(theirs)
            report.rows += len(mine)
            for key, row in mine.items():
                if key not in theirs:
                    report.note(only_behind, key)
                elif theirs[key] != row:
                    report.note(report.different, key)
        fold.apply()
        for key in sorted(fold.lost):
            report.note(only_ahead, key)
        for keys in fold.all_touched(SLICE_ROWS):
            expected, theirs = fold.expected(keys), ahead.find(keys)
            found += len(theirs)
            report.rows += len(expected)
            for key in keys:
                if key in expected and key not in theirs:
                    report.note(only_behind, key)
                elif key in theirs and key not in expected:
                    if key not in fold.lost:
                        report.note(only_ahead, key)
                elif theirs.get(key) != expected.get(key):
                    report.note(report.different, key)
        if ahead.count() != found:
            self._find_surplus(behind, ahead, fold, report, only_ahead)

    def _find_surplus(
        self, behind: Side, ahead: Side, fold: Fold, report: TableReport, only_ahead: list[str]
    ) -> None:
        """Report the rows of the side ahead that neither the side behind nor a change explains."""
        for rows in ahead.slices():
            keys = [self._layout.key_of(row) for row in rows]
            touched = fold.touched(keys)
            others = [key for key in keys if key not in touched]
            known = behind.find(others) if others and not fold.truncated else {}
            for key in others:
                if key not in known:
                    report.note(only_ahead, key)

    def _compare_by_count(self, behind: Side, ahead: Side, fold: Fold, report: TableReport) -> None:
        if not fold.truncated:
            for rows in behind.slices():
                fold.count(rows, 1)
        fold.count_changes(1)
        for rows in ahead.slices():
            report.rows += len(rows)
            fold.count(rows, -1)
        for content, surplus in fold.uneven():
            source_has_more = (surplus > 0) == self._replica_is_ahead
            for _ in range(abs(surplus)):
                report.note(report.missing if source_has_more else report.extra, content)
