"""Runs a mirror: plans copies, loads them, follows the changes, repairs gaps.

The mirror continues from the state saved in the target, in the same way after a crash, after a
repair and after loading a table.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import GapError, NotAvailable, UnknownTable, UsageError
from consumer_sdk.mirror.bootstrap import Loader
from consumer_sdk.mirror.decisions import RepairNeeded
from consumer_sdk.mirror.follower import FollowEnd, Follower
from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.mirror.notices import MirrorPhase, MirrorStatus, Notice, table_list
from consumer_sdk.mirror.writer import TargetThread
from consumer_sdk.reading.proof import StreamBreak, find_break
from consumer_sdk.reading.schemas import resolve_table
from consumer_sdk.targets.target import Lane, MirrorCopy, TableName, TargetState
from consumer_sdk.targets.target_url import open_target
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from consumer_sdk.client import Client
    from consumer_sdk.reading.schemas import TableName as TableSpelling
    from consumer_sdk.targets.target import Target
    from consumer_sdk.transport.api import StreamBounds
    from consumer_sdk.wire.column_types import TableSchema

logger = logging.getLogger(__name__)

REPAIR_PAUSES = (0.0, 1.0, 5.0, 15.0, 30.0)
REPAIRS_RESET_SECONDS = 60.0
RETRY_SECONDS = 1.0


class Mirror:
    """Keeps tables in a target equal to the source; `run` it once.

    `tables` None means every published table, now and later. Tables that the target already holds
    are followed too. `fresh` builds new copies of all tables; `on_notice` receives log lines.
    """

    def __init__(
        self,
        client: Client,
        tables: Sequence[TableSpelling] | None,
        into: Target,
        *,
        fresh: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        self.status = MirrorStatus()
        self._client = client
        self._wanted = None if tables is None else [resolve_table(table) for table in tables]
        self._fresh = fresh
        self._notify = on_notice or _log
        self._target = TargetThread(into)
        self._writer = self._target.writer
        self._stop = asyncio.Event()
        self._skipped: set[TableName] = set()
        self._at_one_point: set[TableName] = set()
        self._repaired_at = 0.0
        self._repairs_in_a_row = 0

    def stop(self) -> None:
        """End `run` at the next transaction boundary."""
        self._stop.set()

    async def run(self, *, once: bool = False) -> None:
        """Mirror until stopped; with `once`, until everything stored at the start is applied.

        Raises CdcError if it cannot continue; the target then shows the last committed state.
        """
        try:
            state = await self._target.call(self._writer.open)
            try:
                await self._run(state, once)
            finally:
                self.status.state = MirrorPhase.STOPPED
                await self._target.call(self._writer.close)
        finally:
            self._target.close()

    async def _run(self, state: TargetState, once: bool) -> None:
        bounds = await self._client.log().bounds()
        await self._plan(state)
        started = any(copy.lane is Lane.LIVE for copy in state.copies)
        until = bounds.last if once else None
        while not self._stop.is_set():
            await stay_cancelled()
            keep_trying = started and not once
            try:
                if await self._continue(until, keep_trying=keep_trying) is FollowEnd.FINISHED:
                    return
                started = True
            except RepairNeeded as repair:
                await self._repair(repair)
            except GapError as gap:
                await self._repair(await self._broken_by(gap))
            except UnknownTable:
                # The table was dropped in the meantime; the next round leaves it out.
                if self._wanted is not None:
                    raise
                await self._pause(RETRY_SECONDS)
            except NotAvailable as error:
                if not keep_trying:
                    raise
                self._notify(Notice("waiting", {"reason": str(error)}, warning=True))
                await self._pause(RETRY_SECONDS)

    # planning

    async def _plan(self, state: TargetState) -> None:
        """Plan a next copy of every wanted table that the target does not have yet."""
        schemas = {(schema.schema, schema.table): schema for schema in await self._client.tables()}
        known = {copy.name for copy in state.copies if not copy.retired}
        back = [copy.name for copy in state.copies if copy.retired and copy.name in schemas]
        wanted = list(schemas) if self._wanted is None else [*self._wanted, *back]
        missing = []
        for name in dict.fromkeys(wanted):
            if name in known and not self._fresh:
                continue
            schema = schemas.get(name) or await self._client.schema(name)
            if self._has_columns(schema):
                missing.append(MirrorCopy(schema))
        for name in known - set(wanted) if self._wanted is not None else ():
            self._notify(Notice("also following", {"table": table_list([name])}))
        if missing:
            await self._target.write(self._writer.plan, missing)

    def _has_columns(self, schema: TableSchema) -> bool:
        """Whether a table has columns to mirror; UsageError if it was named and has none."""
        name = (schema.schema, schema.table)
        if schema.columns:
            return True
        if self._wanted is not None:
            raise UsageError(
                f"table {format_table_name(*name)} has no columns, so there is nothing to mirror; "
                "leave it out, or add a column"
            )
        if name not in self._skipped:
            self._skipped.add(name)
            self._notify(
                Notice(
                    "table skipped",
                    {"table": table_list([name]), "reason": "it has no columns"},
                    warning=True,
                )
            )
        return False

    async def _discover(self, names: frozenset[TableName]) -> bool:
        """Plan copies of newly published tables; returns whether there are any."""
        state = await self._target.write(self._writer.read_state)
        known = {copy.name for copy in state.copies if not copy.retired}
        schemas = [s for s in await self._client.tables() if (s.schema, s.table) in names - known]
        schemas = [schema for schema in schemas if self._has_columns(schema)]
        if schemas:
            new = [MirrorCopy(schema) for schema in schemas]
            self._notify(Notice("new tables", {"tables": table_list([copy.name for copy in new])}))
            await self._target.write(self._writer.plan, new)
        return bool(schemas)

    # loading and following

    async def _continue(self, until: int | None, *, keep_trying: bool) -> FollowEnd:
        """Continue from the state saved in the target, until it must be read again."""
        state = await self._target.write(self._writer.read_state)
        bounds = await self._bounds(keep_trying)
        await self._require_continuity(state, bounds)
        unloaded = [copy for copy in state.copies if not copy.loaded]
        if unloaded and await self._retire(state, unloaded):
            return FollowEnd.RESTART
        handoff = HandOff(state, bounds.created, discover=self._wanted is None)
        self.status.tables = len({copy.name for copy in state.copies if not copy.retired})
        self.status.positions = dict(state.positions)
        loading = asyncio.create_task(self._load(unloaded, keep_trying)) if unloaded else None
        try:
            if not handoff.following:
                if loading is None:
                    return await self._wait_for_tables(until)
                self.status.state = MirrorPhase.LOADING
                await self._unless_stopped(loading)
                return FollowEnd.RESTART
            follower = Follower(
                self._client,
                handoff,
                self._target,
                self.status,
                stop=self._stop,
                notify=self._notify,
                discover=self._discover if self._wanted is None else None,
            )
            self._notify(
                Notice(
                    "following",
                    {"tables": table_list(handoff.tables()), "sequence": handoff.start_sequence},
                )
            )
            return await follower.run(loading, None if loading else until)
        finally:
            if loading is not None and not loading.done():
                loading.cancel()
                await asyncio.wait([loading])

    async def _retire(self, state: TargetState, planned: list[MirrorCopy]) -> bool:
        """Retire tables that are no longer published, except those that the caller named."""
        published = {(schema.schema, schema.table) for schema in await self._client.tables()}
        names = frozenset(copy.name for copy in planned)
        gone = names - published - set(self._wanted or ())
        if gone:
            copies = [copy for copy in state.copies if copy.name in gone]
            await self._target.write(self._writer.retire, copies)
            reason = "not published any more, rows are kept"
            self._notify(
                Notice(
                    "tables left out", {"tables": table_list(gone), "reason": reason}, warning=True
                )
            )
        return bool(gone)

    async def _load(self, copies: list[MirrorCopy], keep_trying: bool) -> None:
        loader = Loader(
            self._client,
            self._target,
            self.status,
            self._notify,
            fresh=self._fresh,
            keep_trying=keep_trying,
            at_one_point=self._at_one_point,
        )
        await loader.run(copies)
        self._fresh = False

    async def _wait_for_tables(self, until: int | None) -> FollowEnd:
        """Wait until the first table is published."""
        if until is not None:
            return FollowEnd.FINISHED
        async with aclosing(self._client.watch_schemas()) as schemas:
            watch = asyncio.ensure_future(anext(schemas))
            await self._unless_stopped(watch)
            if not self._stop.is_set():
                schema = watch.result()
                await self._discover(frozenset({(schema.schema, schema.table)}))
            else:
                await asyncio.wait([watch])
        return FollowEnd.RESTART

    async def _pause(self, seconds: float) -> None:
        await self._unless_stopped(asyncio.ensure_future(asyncio.sleep(seconds)))

    async def _unless_stopped(self, task: asyncio.Future[Any]) -> None:
        """Wait for a task or for `stop`, whichever comes first."""
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if task.done():
            task.result()
        else:
            task.cancel()

    # repair

    async def _bounds(self, keep_trying: bool) -> StreamBounds:
        """The first and last sequence of the stream; with `keep_trying`, waits for the stream."""
        while True:
            await stay_cancelled()
            try:
                return await self._client.log().bounds()
            except NotAvailable as error:
                if not keep_trying or self._stop.is_set():
                    raise
                self._notify(Notice("waiting", {"reason": str(error)}, warning=True))
            await self._pause(RETRY_SECONDS)

    async def _require_continuity(self, state: TargetState, bounds: StreamBounds) -> None:
        """Raise RepairNeeded for tables whose history the stream no longer continues."""
        next_copies = state.lane(Lane.NEXT)
        for copy in next_copies.values():
            if copy.loaded and (reason := _break(copy.stream_seq, copy.stream_created, bounds)):
                raise RepairNeeded(reason, [copy.name])
        for source, position in state.positions.items():
            copies = [c for c in state.copies if c.source == source and not c.retired]
            tables = [copy.name for copy in copies]
            live = [copy for copy in copies if copy.lane is Lane.LIVE]
            if all(copy.name in next_copies for copy in live):
                continue
            reason = _break(position.stream_seq, position.stream_created, bounds)
            progress = await self._client.progress(source)
            if reason is None and progress is not None and progress.epoch > position.epoch:
                reason = f"source {source} began a new epoch {progress.epoch}"
            if reason:
                raise RepairNeeded(reason, tables)

    async def _broken_by(self, gap: GapError) -> RepairNeeded:
        state = await self._target.write(self._writer.read_state)
        try:
            await self._require_continuity(state, await self._bounds(keep_trying=True))
        except RepairNeeded as repair:
            return repair
        return RepairNeeded(gap.reason, [c.name for c in state.copies if not c.retired])

    async def _repair(self, repair: RepairNeeded) -> None:
        """Plan new copies of the broken tables; until they are ready, live copies stay visible."""
        self.status.repairs += 1
        if repair.at_one_point:
            self._at_one_point |= repair.tables
        self._notify(
            Notice(
                "gap", {"reason": repair.reason, "tables": table_list(repair.tables)}, warning=True
            )
        )
        now = time.monotonic()
        is_first = now - self._repaired_at > REPAIRS_RESET_SECONDS
        self._repairs_in_a_row = 0 if is_first else self._repairs_in_a_row + 1
        pause = REPAIR_PAUSES[min(self._repairs_in_a_row, len(REPAIR_PAUSES) - 1)]
        if pause:
            await self._pause(pause)
        self._repaired_at = time.monotonic()
        state = await self._target.write(self._writer.read_state)
        newest = state.lane(Lane.LIVE) | state.lane(Lane.NEXT)
        planned = [
            newest[name].plan_again(repair.snapshot_lsn) for name in repair.tables if name in newest
        ]
        await self._target.write(self._writer.plan, planned)


async def mirror(
    client: Client,
    tables: Sequence[TableSpelling] | None,
    into: Target | str,
    *,
    once: bool = False,
    fresh: bool = False,
    on_notice: Callable[[Notice], None] | None = None,
) -> MirrorStatus:
    """Keep tables in a target, which may be given by its address, equal to the source.

    Runs until cancelled; with `once`, until everything stored at the start is applied.
    """
    target = open_target(into) if isinstance(into, str) else into
    running = Mirror(client, tables, target, fresh=fresh, on_notice=on_notice)
    await running.run(once=once)
    return running.status


def _break(stream_seq: int, created: int, bounds: StreamBounds) -> str | None:
    found = find_break(bounds, stream_seq + 1, created)
    if found is StreamBreak.TRIMMED:
        return f"the stream was trimmed or purged up to sequence {bounds.first - 1}"
    if found is StreamBreak.ENDS_BEFORE:
        return f"the stream ends at sequence {bounds.last}, {stream_seq} had been read"
    return None if found is None else found.value


def _log(notice: Notice) -> None:
    fields = " ".join(f"{key}={value!r}" for key, value in notice.fields.items())
    logger.log(logging.WARNING if notice.warning else logging.INFO, "%s %s", notice.event, fields)
