"""Follows a feed: reads and decides one batch while the batch before it is written."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import NotAvailable
from consumer_sdk.mirror.bootstrap import fetch_rows
from consumer_sdk.mirror.decisions import Save
from consumer_sdk.mirror.notices import MirrorPhase
from consumer_sdk.reading.progress import newest_lsn
from consumer_sdk.transport.cancellation import stay_cancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from consumer_sdk.client import Client
    from consumer_sdk.mirror.decisions import Action, RowAnswer
    from consumer_sdk.mirror.handoff import HandOff
    from consumer_sdk.mirror.notices import MirrorStatus, Notice
    from consumer_sdk.mirror.writer import TargetThread
    from consumer_sdk.reading.changes import ChangeFeed
    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.targets.target import TableName

IDLE_SECONDS = 2.0
PROBE_SECONDS = 0.25
SAVE_SECONDS = 5.0
MAX_FILTERS = 64
MAX_BATCH = 2000


class FollowEnd(Enum):
    """Why following ended."""

    FINISHED = "finished"
    """The mirror was stopped, or has applied everything up to the wanted sequence."""
    RESTART = "restart"
    """The state of the target changed and must be read again."""


class Follower:
    """Applies the changes of a feed until it is stopped or finished, or a new table is planned.

    With `discover`, all tables are followed; it is called with the names of unknown tables.
    """

    def __init__(
        self,
        client: Client,
        handoff: HandOff,
        target: TargetThread,
        status: MirrorStatus,
        *,
        stop: asyncio.Event,
        notify: Callable[[Notice], None],
        discover: Callable[[frozenset[TableName]], Awaitable[bool]] | None,
    ) -> None:
        self._client = client
        self._notify = notify
        self._asking: dict[TableName, asyncio.Task[RowAnswer]] = {}
        self._handoff = handoff
        self._target = target
        self._status = status
        self._stop = stop
        self._discover = discover
        self._writing: asyncio.Task[None] | None = None
        self._applied_before = status.events_applied
        self._saved_at = time.monotonic()
        tables = handoff.tables()
        self._tables = None if discover or len(tables) > MAX_FILTERS else tables
        self._progress = [client.subjects.progress(source) for source in handoff.sources()]
        self._filters = client.filters(self._tables, self._progress)

    async def run(self, loading: asyncio.Task[None] | None, until: int | None) -> FollowEnd:
        """Follow until `loading` is done, or until everything up to sequence `until` is applied."""
        feed = self._client.feed(
            self._tables,
            self._handoff.start_sequence,
            extra_subjects=self._progress if self._tables is not None else (),
            created=self._handoff.stream_created,
            max_batch=MAX_BATCH,
        )
        stopping = asyncio.ensure_future(self._stop.wait())
        watching = asyncio.ensure_future(self._watch())
        signals = [task for task in (loading, stopping, watching) if task is not None]
        try:
            async with feed:
                return await self._follow(feed, signals, until)
        finally:
            ending = [stopping, watching, *self._asking.values()]
            for task in ending:
                task.cancel()
            await asyncio.wait(ending)
            if self._writing is not None:
                await asyncio.wait([self._writing])
            await self._target.call(self._target.writer.rollback)
            self._target.release()

    async def _follow(
        self, feed: ChangeFeed, signals: list[asyncio.Task[Any]], until: int | None
    ) -> FollowEnd:
        while True:
            await stay_cancelled()
            waiting = bool(self._handoff.waiting_for)
            self._status.state = MirrorPhase.CATCHING_UP if waiting else MirrorPhase.FOLLOWING
            wait = PROBE_SECONDS if until is not None or waiting else IDLE_SECONDS
            taking = asyncio.ensure_future(feed.next(wait))
            try:
                await asyncio.wait([taking, *signals], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not taking.done():
                    taking.cancel()
                    await asyncio.wait([taking])
            for task in signals:
                if task.done():
                    task.result()
                    await self._finish_writing()
                    return FollowEnd.FINISHED if self._stop.is_set() else FollowEnd.RESTART
            batch = taking.result()
            if batch:
                await self._apply(batch)
            else:
                # Without NATS nothing can be read; the feed waits for the connection.
                with suppress(NotAvailable):
                    await self._idle(feed)
            await self._complete_rows()
            if self._handoff.discovered and await self._add_discovered():
                return FollowEnd.RESTART
            may_be_all = feed.caught_up or not batch
            if until is not None and may_be_all and await self._reached(feed, until):
                return FollowEnd.FINISHED

    async def _add_discovered(self) -> bool:
        """Between two transactions, plan copies of unknown tables found in the stream."""
        await self._finish_writing()
        if self._target.reserved or self._discover is None:
            return False
        found = frozenset(self._handoff.discovered)
        self._handoff.discovered.clear()
        return await self._discover(found)

    async def _watch(self) -> None:
        """If all tables are wanted, return as soon as an unknown table is published."""
        if self._discover is None:
            await asyncio.Event().wait()
            return
        known = set(self._handoff.tables())
        async with aclosing(self._client.watch_schemas()) as schemas:
            async for schema in schemas:
                name = (schema.schema, schema.table)
                if name not in known:
                    known.add(name)
                    if await self._discover(frozenset({name})):
                        return

    async def _complete_rows(self) -> None:
        """Ask for the rows that the hand-off wants, and give it the answers that have come."""
        for wanted in self._handoff.wanted_rows():
            name = wanted.copy.name
            if name not in self._asking:
                asking = fetch_rows(self._client, wanted, self._notify)
                self._asking[name] = asyncio.ensure_future(asking)
        for name, task in list(self._asking.items()):
            if task.done():
                del self._asking[name]
                await self._perform(self._handoff.take_answer(task.result()))

    # writing, one batch behind reading

    async def _apply(self, batch: list[Stored]) -> None:
        actions = self._handoff.advance(batch)
        last = batch[-1].event
        if last.ts:
            self._status.last_event_us = last.ts
        self._status.caught_up = False
        await self._perform(actions)

    async def _perform(self, actions: list[Action]) -> None:
        await self._finish_writing()
        if actions:
            await self._target.reserve()
            self._writing = asyncio.ensure_future(self._write(actions))

    async def _write(self, actions: list[Action]) -> None:
        writer = self._target.writer
        await self._target.call(writer.perform, actions)
        if not writer.in_transaction:
            self._target.release()
        for action in actions:
            if isinstance(action, Save):
                self._status.commits += 1
                for position in action.positions:
                    self._status.positions[position.source] = position
        self._status.events_applied = self._applied_before + self._handoff.events_applied

    async def _finish_writing(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    # when no events come

    async def _idle(self, feed: ChangeFeed) -> None:
        await self._finish_writing()
        self._status.caught_up = feed.caught_up
        now = time.monotonic()
        if now - self._saved_at > SAVE_SECONDS:
            # Save a sequence after messages of other tables: trimming these is then not a gap.
            self._saved_at = now
            await self._perform(self._handoff.read_through(feed.next_sequence - 1))
        for source, (epoch, wanted_lsn) in self._handoff.waiting_for.items():
            newest = await newest_lsn(self._client.deployment, source, epoch, wanted_lsn)
            if newest < wanted_lsn:
                continue
            through = (await self._client.log().bounds()).last
            if await self._has_read(feed, through):
                await self._perform(self._handoff.passed(source, newest, through))

    async def _reached(self, feed: ChangeFeed, until: int) -> bool:
        await self._finish_writing()
        in_transaction = self._target.writer.in_transaction or self._handoff.is_open
        if self._handoff.waiting_for or in_transaction:
            return False
        return await self._has_read(feed, until)

    async def _has_read(self, feed: ChangeFeed, through: int) -> bool:
        return await self._client.log().is_read_through(
            self._filters, feed.next_sequence, through, self._handoff.stream_created
        )
