"""The ends of snapshots that failed: announced at once, cleaned up once no worker can write."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from bridge.snapshot.coordinator.init_stream import BROKER_TROUBLE
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bridge.snapshot.coordinator.job import Job
    from bridge.snapshot.coordinator.ledger import Ledger

logger = logging.getLogger(__name__)

STOPPED: Final = "the bridge stopped while the snapshot was under way; ask again"
RETRY_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 5.0


class Farewells:
    """Sees failed snapshots off in the background, for as long as NATS is away if need be."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, job: Job, error: str) -> None:
        """Announce a failure; what was stored goes when the job is released."""
        task = asyncio.create_task(self._bid(job, error), name="snapshot farewell")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait a little; what cannot be announced now is announced by the next active bridge."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=PATIENCE_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def bid_left_over(self) -> None:
        """End the snapshots that an earlier bridge left under way."""
        for record, objects in await self._ledger.left_over():
            table = (record.schema, record.table, record.snapshot_id)
            await self._ledger.announce_failure(*table, STOPPED)
            await self._ledger.clean_up(*table, objects)
            event(logger, "snapshot of an earlier bridge ended", snapshot_id=record.snapshot_id)

    async def _bid(self, job: Job, error: str) -> None:
        table = (job.schema, job.table, job.snapshot_id)
        await _until_taken(lambda: self._ledger.announce_failure(*table, error))
        # A chunk that arrives after the purge would stay.
        await job.released.wait()
        await _until_taken(lambda: self._ledger.clean_up(*table, job.objects))


async def _until_taken(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await stay_cancelled()
        try:
            await work()
        except BROKER_TROUBLE:
            logger.debug("end of a snapshot not recorded yet", exc_info=True)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            return
