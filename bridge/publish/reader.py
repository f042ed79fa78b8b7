"""The producer of the ring: reads the log, assembles messages, and waits while the ring is full."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from bridge.errors import ProtocolError
from bridge.postgres.errors import DriverError, connection_lost
from bridge.wal.framing import KEEPALIVE, XLOG_DATA, XLOG_DATA_HEADER_BYTES, Keepalive, parse_frame
from bridge.wal.messages import Relation
from bridge.wal.pgoutput import decode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from bridge.events.assembler import Assembler
    from bridge.events.messages import Item
    from bridge.events.relations import CompiledRelation
    from bridge.postgres.connection import ReplicationConnection
    from bridge.publish.ring import Ring
    from bridge.telemetry.stats import BridgeStats

# How many messages are read at a time. With packed rows, every turn of the event loop is costly.
# With single messages, a long slice delays the next batch after an acknowledgement.
SLICE_MESSAGES = 500
SLICE_BYTES = 32 * 1024
STATUS_BYTES = 1024 * 1024
SILENCE_SECONDS = 2.0
_RELATION = ord("R")


class WalReader:
    """Reads until stopped; sends status updates to the walsender even while the ring is full."""

    def __init__(
        self,
        *,
        connection: ReplicationConnection,
        assembler: Assembler,
        ring: Ring[Item],
        stats: BridgeStats,
        compile_relation: Callable[[Relation, int], Awaitable[CompiledRelation]],
        confirmed_lsn: Callable[[], int],
        status_interval: float,
    ) -> None:
        self._connection = connection
        self._assembler = assembler
        self._ring = ring
        self._stats = stats
        self._compile_relation = compile_relation
        self._confirmed_lsn = confirmed_lsn
        self._status_interval = status_interval
        self._keepalive_lsn = 0
        self._received_lsn = 0
        self._status_lsn = 0
        self._waiting_since: float | None = None
        """When the current wait for the server began."""
        self._stopping = asyncio.Event()
        self._item_count = 0
        """How many items were assembled."""
        self._received: deque[tuple[int, int]] = deque()
        """Of the items that are not published: the count after each read, and when it began."""

    def stop(self) -> None:
        """Stop reading; the items in the ring stay."""
        self._stopping.set()
        self._connection.wake()

    @property
    def silent_seconds(self) -> float:
        """For how many seconds the reader has waited for the server."""
        return 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since

    @property
    def received_lsn(self) -> int:
        """The newest position that the server has sent."""
        return self._received_lsn

    @property
    def idle_lsn(self) -> int | None:
        """The position up to which everything is in the ring; None inside a transaction."""
        assembler = self._assembler
        if assembler.in_transaction or len(assembler.outbox):
            return None
        return max(assembler.complete_lsn, self._keepalive_lsn)

    def has_truncated(self, token: str, xid: int) -> bool:
        """Whether the log contained a TRUNCATE of the table by this transaction."""
        return self._assembler.has_truncated(token, xid)

    async def run(self) -> None:
        """Move changes from the socket to the ring until stopped."""
        outbox = self._assembler.outbox
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                if len(outbox) and not await self._move_outbox(stopping):
                    break
                received_ns, waiting = time.perf_counter_ns(), len(outbox)
                exhausted = await self._slice()
                self._note_received(len(outbox) - waiting, received_ns)
                if not outbox.move_into(self._ring):
                    continue
                if exhausted and not self._stopping.is_set():
                    self._waiting_since = time.monotonic()
                    await self._connection.wait_readable()
                    self._waiting_since = None
                    self._connection.consume_input()
                else:
                    await asyncio.sleep(0)
        finally:
            stopping.cancel()

    def _note_received(self, items: int, received_ns: int) -> None:
        if items:
            self._item_count += items
            self._received.append((self._item_count, received_ns))

    def received_ns(self, number: int) -> int:
        """When the WAL of the item of this number, counted from 1, was read; forgets those before.

        The time is that of `perf_counter_ns`; now, for an item that did not come from the log.
        """
        received = self._received
        while received and received[0][0] < number:
            received.popleft()
        return received[0][1] if received else time.perf_counter_ns()

    async def report(self) -> None:
        """Report the confirmed position to PostgreSQL at intervals; runs beside `run`."""
        while True:
            self.send_status()
            deadline = time.monotonic() + self._status_interval
            while time.monotonic() < deadline:
                await asyncio.sleep(min(0.1, self._status_interval))
                if self._confirmed_lsn() - self._status_lsn >= STATUS_BYTES:
                    break

    def send_status(self) -> None:
        """Report the confirmed position to PostgreSQL now."""
        confirmed = self._confirmed_lsn()
        self._status_lsn = confirmed
        self._stats.ring_depth = len(self._ring)
        self._stats.ring_bytes = self._ring.bytes_held
        # While nothing arrives, ask the server for its position: an idle slot must not hold WAL
        # back, and a server that does not answer is detected as lost.
        idle = not self._assembler.in_transaction and not len(self._ring)
        ask = idle or self.silent_seconds > SILENCE_SECONDS
        self._connection.send_status(self._received_lsn, confirmed, reply_requested=ask)

    async def _move_outbox(self, stopping: asyncio.Future[Any]) -> bool:
        """Wait until all assembled items are in the ring; False if stopped before."""
        outbox = self._assembler.outbox
        while len(outbox):
            if not await _first(self._ring.wait_for_space(outbox.next_size), stopping):
                return False
            outbox.move_into(self._ring)
        return True

    async def _slice(self) -> bool:
        """Process a bounded number of buffered messages; True when none is left."""
        get_copy_data = self._connection.get_copy_data
        assembler = self._assembler
        outbox, feed = assembler.outbox, assembler.feed
        stats = self._stats
        taken = received = 0
        frame = b""
        try:
            for _ in range(SLICE_MESSAGES):
                try:
                    length, view = get_copy_data(1)
                except DriverError as error:
                    self._connection.unwatch()
                    raise connection_lost(error) from error
                if length <= 0:
                    if length == 0:
                        return True
                    raise self._connection.end_of_stream()
                frame = bytes(view)
                # Free libpq's copy now, not with the next message: a row may be large.
                del view
                if frame[0] == XLOG_DATA:
                    if length <= XLOG_DATA_HEADER_BYTES:
                        raise ProtocolError(f"XLogData frame of {length} bytes is too short")
                    taken += 1
                    received += length
                    if frame[XLOG_DATA_HEADER_BYTES] == _RELATION:
                        await self._take_relation(frame)
                    else:
                        feed(frame, XLOG_DATA_HEADER_BYTES)
                    if outbox.bytes_held > SLICE_BYTES:
                        return False
                elif frame[0] == KEEPALIVE:
                    self._take_keepalive(frame)
                else:
                    raise ProtocolError(f"unknown replication frame type 0x{frame[0]:02x}")
            return False
        finally:
            stats.wal_messages_received += taken
            stats.wal_bytes_received += received
            if taken and frame[0] == XLOG_DATA:
                # The LSN of the WAL record; 0 for messages without a WAL record.
                self._received_lsn = max(self._received_lsn, int.from_bytes(frame[1:9], "big"))
            stats.received_lsn = self._received_lsn
            stats.current_lsn = max(stats.current_lsn, assembler.complete_lsn)

    async def _take_relation(self, frame: bytes) -> None:
        message = decode(frame[XLOG_DATA_HEADER_BYTES:])
        assert isinstance(message, Relation)
        self._assembler.describe(await self._compile_relation(message, self._assembler.commit_lsn))

    def _take_keepalive(self, frame: bytes) -> None:
        message = parse_frame(frame)
        assert isinstance(message, Keepalive)
        self._received_lsn = max(self._received_lsn, message.end_lsn)
        if not self._assembler.in_transaction:
            self._assembler.expect_history(message.end_lsn)
            self._keepalive_lsn = max(self._keepalive_lsn, message.end_lsn)
            self._stats.current_lsn = max(self._stats.current_lsn, message.end_lsn)
        if message.reply_requested:
            self._connection.send_status(self._received_lsn, self._confirmed_lsn())


async def _first(work: Coroutine[Any, Any, None], stopping: asyncio.Future[Any]) -> bool:
    """Do the work; False if stopped before its end. It no longer runs when this returns."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if task.cancelled():
        return False
    task.result()
    return True
