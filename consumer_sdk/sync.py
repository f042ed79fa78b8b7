"""The SDK without `await`, for scripts and notebooks.

    with consumer_sdk.sync.connect() as cdc:
        for transaction in cdc.changes(["users"]):
            ...

Each client runs its own event loop in its own thread, so it also works where a loop is already
running, as in notebooks. Only one thread at a time may use a client and its iterators.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from consumer_sdk.client import Client
from consumer_sdk.client import connect as connect_async

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence

    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.reading.log import LogBounds
    from consumer_sdk.reading.progress import Progress
    from consumer_sdk.reading.schemas import TableName
    from consumer_sdk.reading.starting_point import After
    from consumer_sdk.reading.transactions import Transaction
    from consumer_sdk.snapshot.chunks import ChunkRows
    from consumer_sdk.snapshot.request import SnapshotProgress
    from consumer_sdk.snapshot.snapshot import Snapshot, SnapshotMeta
    from consumer_sdk.transport.settings import NatsSettings
    from consumer_sdk.wire.column_types import TableSchema

T = TypeVar("T")
CLOSE_SECONDS = 5.0


@contextmanager
def connect(
    servers: str | Sequence[str] | None = None,
    *,
    prefix: str | None = None,
    settings: NatsSettings | None = None,
    timeout: float | None = 10.0,
) -> Iterator[BlockingClient]:
    """Connect to NATS; settings that are not given are read from the environment."""
    loop = LoopThread()
    try:
        opening = connect_async(servers, prefix=prefix, settings=settings, timeout=timeout)
        client = loop.run(opening.__aenter__())
        try:
            yield BlockingClient(client, loop)
        finally:
            loop.run(opening.__aexit__(None, None, None))
    finally:
        loop.stop()


class BlockingClient:
    """`consumer_sdk.Client` without `await`."""

    def __init__(self, client: Client, loop: LoopThread) -> None:
        self._client = client
        self._loop = loop

    def schema(self, table: TableName) -> TableSchema:
        """The newest schema of a table."""
        return self._loop.run(self._client.schema(table))

    def tables(self) -> list[TableSchema]:
        """The newest schema of every published table."""
        return self._loop.run(self._client.tables())

    def watch_schemas(self) -> BlockingStream[TableSchema]:
        """Every schema now, then each new version; never ends."""
        return BlockingStream(self._client.watch_schemas(), self._loop)

    def progress(self, source: str) -> Progress | None:
        """The newest progress stored for a source; None if there is none."""
        return self._loop.run(self._client.progress(source))

    def snapshot(
        self,
        table: TableName,
        *,
        fresh: bool = False,
        columns: Sequence[str] | None = None,
        where: Mapping[str, Any] | None = None,
        progress: Callable[[SnapshotProgress], None] | None = None,
        stall_timeout: float = 60.0,
    ) -> BlockingSnapshot:
        """A complete snapshot: a retained one if still valid, else a new one.

        `where` selects rows by key, see `Client.snapshot`.
        """
        taking = self._client.snapshot(
            table,
            fresh=fresh,
            columns=columns,
            where=where,
            progress=progress,
            stall_timeout=stall_timeout,
        )
        return BlockingSnapshot(self._loop.run(taking), self._loop)

    @overload
    def changes(
        self,
        tables: Sequence[TableName] | None = None,
        *,
        after: After = "now",
        as_events: Literal[False] = False,
        messages: bool = False,
    ) -> BlockingStream[Transaction]: ...

    @overload
    def changes(
        self,
        tables: Sequence[TableName] | None = None,
        *,
        after: After = "now",
        as_events: Literal[True],
        messages: bool = False,
    ) -> BlockingStream[Stored]: ...

    def changes(
        self,
        tables: Sequence[TableName] | None = None,
        *,
        after: After = "now",
        as_events: bool = False,
        messages: bool = False,
    ) -> BlockingStream[Transaction] | BlockingStream[Stored]:
        """Changes as whole transactions or single events; never ends, see `Client.changes`."""
        if as_events:
            events = self._client.changes(tables, after=after, as_events=True, messages=messages)
            return BlockingStream(events, self._loop)
        return BlockingStream(
            self._client.changes(tables, after=after, messages=messages), self._loop
        )

    def messages(
        self, prefix: str | None = None, *, after: After = "now"
    ) -> BlockingStream[Stored]:
        """Logical messages with one prefix, or all of them; never ends."""
        return BlockingStream(self._client.messages(prefix, after=after), self._loop)

    def log_bounds(self) -> LogBounds:
        """The sequences that the change log holds."""
        return self._loop.run(self._client.log().bounds())

    def read_log(
        self, first: int, end: int, subjects: Sequence[str] | None = None
    ) -> BlockingStream[list[Stored]]:
        """The events stored at sequences [first, end)."""
        return BlockingStream(self._client.log().read(first, end, subjects), self._loop)


class BlockingSnapshot:
    """`consumer_sdk.Snapshot` without `await`."""

    def __init__(self, snapshot: Snapshot, loop: LoopThread) -> None:
        self._snapshot = snapshot
        self._loop = loop

    @property
    def meta(self) -> SnapshotMeta:
        """The description of the snapshot."""
        return self._snapshot.meta

    @property
    def reused(self) -> bool:
        """Whether it is a retained snapshot."""
        return self._snapshot.reused

    def chunks(self) -> BlockingStream[ChunkRows]:
        """Its rows, a chunk at a time; keep nothing unless the iteration ends without an error."""
        return BlockingStream(self._snapshot.chunks(), self._loop)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its rows one by one."""
        for chunk in self.chunks():
            yield from chunk


class BlockingStream(Generic[T]):
    """An iterator over an asynchronous generator; call `close`, or use it in a `with` statement.

    `next(timeout)` raises TimeoutError instead of waiting longer, and may be called again.
    """

    def __init__(self, source: AsyncGenerator[T, None], loop: LoopThread) -> None:
        self._source = source
        self._loop = loop
        self._pending: asyncio.Future[T] | None = None

    def __iter__(self) -> BlockingStream[T]:
        return self

    def __next__(self) -> T:
        return self.next(None)

    def __enter__(self) -> BlockingStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout: float | None) -> T:
        """The next item; StopIteration at the end."""
        try:
            return self._loop.run(self._next(timeout))
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the iteration and delete its consumer on the server."""
        self._loop.run(self._close())

    async def _next(self, timeout: float | None) -> T:
        # The step continues after a time-out, because cancelling it would end the generator.
        if self._pending is None:
            self._pending = asyncio.ensure_future(_step(self._source))
            self._pending.add_done_callback(_mark_retrieved)
        done, _ = await asyncio.wait({self._pending}, timeout=timeout)
        if not done:
            raise TimeoutError(f"nothing came within {timeout:g} s")
        finished, self._pending = self._pending, None
        return finished.result()

    async def _close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait({self._pending})
            self._pending = None
        await self._source.aclose()


def _mark_retrieved(step: asyncio.Future[Any]) -> None:
    """After an interrupt nothing awaits the step; keep asyncio from logging its error."""
    if not step.cancelled():
        step.exception()


async def _step(source: AsyncGenerator[T, None]) -> T:
    return await anext(source)


class LoopThread:
    """An event loop in its own thread, for code without a loop; `stop` ends both."""

    def __init__(self, name: str = "tailrace-sdk") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether `stop` has not been called yet."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result of a coroutine; an interrupt cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop, its tasks, its asynchronous generators and the thread."""
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_tasks(self) -> None:
        # An interrupt leaves a step of an iteration running, and a generator that runs cannot be
        # closed.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLOSE_SECONDS)
        await self._loop.shutdown_asyncgens()
