"""Compares source and replica row by row at one position, while both continue to change.

The source is read in an exported snapshot, which holds exactly the transactions below a known LSN.
The replica is read in one transaction, which holds exactly those up to its saved position. The
changes between the two are read from the log and applied to the side that is behind.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from consumer_sdk.errors import NotAvailable, TargetError
from consumer_sdk.reading.progress import newest_lsn
from consumer_sdk.reading.schemas import resolve_table
from consumer_sdk.targets.target import Lane
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.verify.fold import Fold
from consumer_sdk.verify.pairing import OrdersDiffer, Pairing
from consumer_sdk.verify.source_snapshot import SourceSnapshot
from consumer_sdk.verify.table_side import SLICE_ROWS, Replica, TableLayout, reading_errors
from consumer_sdk.wire.position import format_lsn
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.reading.schemas import TableName as TableSpelling
    from consumer_sdk.targets.target import MirrorCopy, MirrorPosition, TableName, TargetState
    from consumer_sdk.verify.table_side import Row, Side
    from consumer_sdk.wire.envelope import Event

POLL_SECONDS = 0.2
# Each table that has changed needs an open file.
MOST_AT_ONCE = 100
# A waiting row takes about 200 bytes, whatever its width.
MOST_WAITING = 200_000
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
    published = {(schema.schema, schema.table) for schema in await client.tables()}
    for name in names:
        if name not in published:
            await client.schema(name)
    log_end = (await client.log().bounds()).last + 1
    reader = Replica(replica)
    snapshot = await asyncio.to_thread(SourceSnapshot.take, source, timeout, on_wait)
    try:
        state = await asyncio.to_thread(reader.open)
        copies: dict[MirrorPosition, list[MirrorCopy]] = {}
        for name in dict.fromkeys(names):
            copy, position = _live(state, name, reader.name)
            copies.setdefault(position, []).append(copy)
        reports: dict[TableName, TableReport] = {}
        for position, own in copies.items():
            between = _Between(client, snapshot, position, log_end)
            await between.check_source(own[0])
            for start in range(0, len(own), MOST_AT_ONCE):
                group = own[start : start + MOST_AT_ONCE]
                for report in await _compare(between, reader, group, timeout):
                    reports[report.table] = report
        return [reports[name] for name in names]
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


async def _compare(
    between: _Between, replica: Replica, copies: Sequence[MirrorCopy], timeout: float
) -> list[TableReport]:
    """Compare tables of one source; their changes are read from the log together."""
    reports = []
    with tempfile.TemporaryDirectory(prefix="tailrace-verify-") as directory, ExitStack() as folds:
        comparisons: dict[TableName, _Comparison] = {}
        for copy in copies:
            comparison = _Comparison(between, replica, copy, Path(directory))
            folds.enter_context(comparison.fold)
            comparisons[copy.name] = comparison
        await between.spool(comparisons, timeout)
        for comparison in comparisons.values():
            with reading_errors(comparison.table):
                reports.append(await asyncio.to_thread(comparison.compare))
    return reports


class _Between:
    """The changes of one source that only the side ahead holds: the replica or the snapshot."""

    def __init__(
        self, client: Client, snapshot: SourceSnapshot, position: MirrorPosition, log_end: int
    ) -> None:
        self._client = client
        self.snapshot = snapshot
        self._position = position
        self._log_end = log_end
        self.replica_is_ahead = position.commit_lsn >= snapshot.lsn

    async def check_source(self, copy: MirrorCopy) -> None:
        """Raise an error unless the snapshot is of the history that the replica has copied."""
        progress = await self._client.progress(copy.source)
        if progress is None:
            raise NotAvailable(f"source {copy.source} has never reported progress")
        if progress.epoch != self._position.epoch:
            raise NotAvailable(
                f"the replica of {format_table_name(*copy.name)} belongs to an earlier epoch of "
                f"source {copy.source}; let the mirror rebuild it first"
            )
        with reading_errors(format_table_name(*copy.name)):
            await asyncio.to_thread(self.snapshot.require_same_database, progress.document)

    async def spool(self, comparisons: Mapping[TableName, _Comparison], timeout: float) -> None:
        """Store the changes of these tables in their folds."""
        position, snapshot_lsn = self._position, self.snapshot.lsn
        if self.replica_is_ahead:
            first, end = self._log_end, position.stream_seq + 1
        else:
            await self._wait_for_log(timeout)
            bounds = await self._client.log().bounds()
            first, end = position.stream_seq + 1, bounds.last + 1
        if end <= first:
            return
        batches = self._client.log().read(
            first, end, self._client.filters(list(comparisons)), created=position.stream_created
        )
        async with aclosing(batches):
            async for batch in batches:
                for stored in batch:
                    event = stored.event
                    if event.source != position.source or event.epoch != position.epoch:
                        continue
                    lsn = event.commit_lsn
                    between = (
                        snapshot_lsn <= lsn <= position.commit_lsn
                        if self.replica_is_ahead
                        else position.commit_lsn < lsn < snapshot_lsn
                    )
                    if not between or event.operation not in _CHANGES:
                        continue
                    comparisons[event.schema, event.table].spool(event)

    async def _wait_for_log(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        wanted, source = self.snapshot.lsn, self._position.source
        while True:
            await stay_cancelled()
            newest = await newest_lsn(self._client.deployment, source, self._position.epoch, wanted)
            if newest >= wanted:
                return
            if time.monotonic() > deadline:
                raise NotAvailable(
                    f"the stream has reached {format_lsn(newest)} of source {source}, "
                    f"the snapshot is at {format_lsn(wanted)}; is the bridge running?"
                )
            await asyncio.sleep(POLL_SECONDS)


class _Comparison:
    """The comparison of one table, whose rows are fixed on both sides."""

    def __init__(
        self, between: _Between, replica: Replica, copy: MirrorCopy, directory: Path
    ) -> None:
        self._snapshot = between.snapshot
        self._replica = replica
        self._copy = copy
        self._replica_is_ahead = between.replica_is_ahead
        self._layout = TableLayout(copy.schema)
        self._changes = 0
        self.table = format_table_name(*copy.name)
        self.fold = Fold(self._layout, directory)

    def spool(self, event: Event) -> None:
        """Store a change that only the side ahead holds."""
        if event.schema_version != self._copy.schema.schema_version:
            raise NotAvailable(
                f"{self.table} changed its structure in the meantime; run verify again"
            )
        self.fold.spool(event)
        self._changes += 1

    def compare(self) -> TableReport:
        """Read both sides and report how they differ; blocks."""
        source = self._snapshot.side(self._layout)
        replica = self._replica.side(self._layout)
        sides = (source, replica) if self._replica_is_ahead else (replica, source)
        if not self._layout.key:
            return self._compare_by_count(*sides)
        try:
            return self._compare_in_order(*sides)
        except OrdersDiffer:
            self.fold.remove_added()
            return self._compare_by_lookup(*sides)

    def _begin(self) -> tuple[TableReport, list[str], list[str]]:
        """A report, and its lists for rows found only on the side behind and only on that ahead."""
        report = TableReport(self._copy.name, changes_folded=self._changes)
        # If the replica is ahead, it lacks the rows found only on the side behind.
        if self._replica_is_ahead:
            return report, report.missing, report.extra
        return report, report.extra, report.missing

    def _compare_in_order(self, behind: Side, ahead: Side) -> TableReport:
        """Read both sides once; OrdersDiffer unless they come in about the same order."""
        report, only_behind, only_ahead = self._begin()
        pairing = Pairing(
            self._layout.key_of, lambda key: report.note(report.different, key), MOST_WAITING
        )
        with (
            closing(self._untouched(behind, add=True)) as left,
            closing(self._untouched(ahead, add=False)) as right,
        ):
            pairing.read(() if self.fold.truncated else left, right)
        report.rows = pairing.rows
        for kind, keys in (
            (only_behind, (*pairing.left, *pairing.twice_left)),
            (only_ahead, (*pairing.right, *pairing.twice_right)),
        ):
            for key in keys:
                report.note(kind, key)
        self._compare_touched(ahead, report, only_behind, only_ahead)
        return report

    def _untouched(self, side: Side, *, add: bool) -> Generator[list[Row], None, None]:
        """The rows of a side that no change has touched; `add` gives the others to the fold."""
        key_of, fold = self._layout.key_of, self.fold
        with closing(side.slices()) as slices:
            for rows in slices:
                touched = set() if fold.is_empty else fold.touched([key_of(row) for row in rows])
                if not touched:
                    yield rows
                    continue
                untouched = []
                for row in rows:
                    if key_of(row) not in touched:
                        untouched.append(row)
                    elif add:
                        fold.add(row)
                yield untouched

    def _compare_touched(
        self, ahead: Side, report: TableReport, only_behind: list[str], only_ahead: list[str]
    ) -> int:
        """Compare the rows that changes have touched; returns how many the side ahead has."""
        fold = self.fold
        if fold.is_empty:
            return 0
        found = 0
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
        return found

    def _compare_by_lookup(self, behind: Side, ahead: Side) -> TableReport:
        """Look up each row of the side behind in the other, then search for surplus rows there."""
        report, only_behind, only_ahead = self._begin()
        layout, fold = self._layout, self.fold
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
        found += self._compare_touched(ahead, report, only_behind, only_ahead)
        if ahead.count() != found:
            self._find_surplus(behind, ahead, report, only_ahead)
        return report

    def _find_surplus(
        self, behind: Side, ahead: Side, report: TableReport, only_ahead: list[str]
    ) -> None:
        """Report the rows of the side ahead that neither the side behind nor a change explains."""
        fold = self.fold
        for rows in ahead.slices():
            keys = [self._layout.key_of(row) for row in rows]
            touched = fold.touched(keys)
            others = [key for key in keys if key not in touched]
            known = behind.find(others) if others and not fold.truncated else {}
            for key in others:
                if key not in known:
                    report.note(only_ahead, key)

    def _compare_by_count(self, behind: Side, ahead: Side) -> TableReport:
        report, only_behind, only_ahead = self._begin()
        fold = self.fold
        if not fold.truncated:
            for rows in behind.slices():
                fold.count(rows, 1)
        fold.count_changes(1)
        for rows in ahead.slices():
            report.rows += len(rows)
            fold.count(rows, -1)
        for content, surplus in fold.uneven():
            for _ in range(abs(surplus)):
                report.note(only_behind if surplus > 0 else only_ahead, content)
        return report
