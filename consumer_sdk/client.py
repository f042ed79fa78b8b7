"""The client: one connection to a deployment, and everything that consumers can read there."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from consumer_sdk.reading.changes import ChangeFeed
from consumer_sdk.reading.deployment import Deployment
from consumer_sdk.reading.log import LogReader
from consumer_sdk.reading.progress import Progress, find_progress
from consumer_sdk.reading.proof import Selection, Trimming
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.reading.starting_point import After, StartingPoint, find_starting_point
from consumer_sdk.reading.transactions import Transaction, TransactionBuilder
from consumer_sdk.snapshot.request import RequestOptions, take_snapshot
from consumer_sdk.transport.connection import NatsConnection, open_connection
from consumer_sdk.transport.settings import NatsSettings

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Mapping,
        Sequence,
    )

    from nats.js import JetStreamContext

    from consumer_sdk.reading.decoder import EventDecoder, Stored
    from consumer_sdk.reading.schemas import TableName
    from consumer_sdk.snapshot.request import SnapshotProgress
    from consumer_sdk.snapshot.snapshot import Snapshot
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.position import Position

DEFAULT_MAX_BATCH = 1000


@asynccontextmanager
async def connect(
    servers: str | Sequence[str] | None = None,
    *,
    prefix: str | None = None,
    settings: NatsSettings | None = None,
    timeout: float | None = 10.0,
) -> AsyncIterator[Client]:
    """Connect to NATS; settings that are not given are read from the environment.

    Waits up to `timeout` seconds for the server (None: without a limit), then raises NotAvailable.
    After a lost connection, the client tries to reconnect every 2 seconds, without a limit.
    """
    if settings is None:
        settings = NatsSettings.resolve(servers, prefix=prefix)
    connection = await open_connection(settings, timeout)
    try:
        yield Client(connection, settings)
    finally:
        await connection.close()


class Client:
    """Reads schemas, snapshots and changes of one deployment of tailrace."""

    def __init__(self, nc: NatsConnection, settings: NatsSettings) -> None:
        self.deployment = Deployment(nc, settings)
        self.nc = nc
        self.settings = settings
        self.subjects = self.deployment.subjects
        self.js: JetStreamContext = nc.jetstream()

    # schemas

    async def schema(self, table: TableName) -> TableSchema:
        """The newest schema of a table; UnknownTable with similar names if there is none."""
        return await self.deployment.schemas.get(table)

    async def tables(self) -> list[TableSchema]:
        """The newest schema of every published table, sorted by name."""
        return await self.deployment.schemas.all()

    def watch_schemas(self) -> AsyncGenerator[TableSchema, None]:
        """Every schema now, then each new version as it is published; never ends."""
        return self.deployment.schemas.watch()

    async def find_schema(self, token: str) -> TableSchema | None:
        """The newest schema of a table by its token in subjects, None if there is none."""
        return await self.deployment.schemas.find(token)

    async def progress(self, source: str) -> Progress | None:
        """The newest progress stored for a source; None if there is none."""
        return await find_progress(self.deployment, source)

    # snapshots

    async def snapshot(
        self,
        table: TableName,
        *,
        fresh: bool = False,
        columns: Sequence[str] | None = None,
        format: str | None = None,  # noqa: A002
        zstd: bool | None = None,
        pieces: bool = False,
        where: Mapping[str, Any] | None = None,
        progress: Callable[[SnapshotProgress], None] | None = None,
        stall_timeout: float = 60.0,
    ) -> Snapshot:
        """A complete snapshot of a table: a retained one if still valid, else a new one.

        `fresh` requests a new one in any case. `pieces` allows several consistent points, see
        SnapshotMeta. `where` selects rows by key: `{"keys": [[1], [2]]}`, or `{"from": [1],
        "to": [100]}`, without the row at `to`. Raises NotAvailable if no bridge answers, and
        SnapshotFailed if the bridge refuses, fails, or makes no progress for `stall_timeout`
        seconds.
        """
        return await take_snapshot(
            self.deployment,
            table,
            RequestOptions(columns, format, zstd, pieces, where),
            fresh=fresh,
            progress=progress,
            stall_timeout=stall_timeout,
        )

    # changes

    def feed(
        self,
        tables: Sequence[TableName] | None,
        start_sequence: int,
        *,
        extra_subjects: Sequence[str] = (),
        max_batch: int = DEFAULT_MAX_BATCH,
        created: int | None = None,
        lenient_start: bool = False,
        after: Mapping[tuple[str, int], Position] | None = None,
        timeout: float | None = None,
    ) -> ChangeFeed:
        """Events from a stream sequence on, of some tables or, with None, of everything.

        `created` is the creation time of the expected stream. `after` holds positions by source
        and epoch; events up to them are dropped. With `lenient_start`, messages at the start may be
        trimmed. `timeout` limits the wait for a lost connection. The feed does nothing before the
        first batch is requested.
        """
        selection = Selection(
            self.subjects.cdc_stream,
            self.filters(tables, extra_subjects),
            start_sequence,
            created,
            Trimming.ALLOWED_BEFORE_FIRST if lenient_start else Trimming.IS_A_GAP,
        )
        consumer = PullConsumer(self.nc, selection, timeout=timeout)
        return ChangeFeed(consumer, self.decoder(), max_batch=max_batch, after=after)

    @overload
    def changes(
        self,
        tables: Sequence[TableName] | None = None,
        *,
        after: After = "now",
        as_events: Literal[False] = False,
        messages: bool = False,
    ) -> AsyncGenerator[Transaction, None]: ...

    @overload
    def changes(
        self,
        tables: Sequence[TableName] | None = None,
        *,
        after: After = "now",
        as_events: Literal[True],
        messages: bool = False,
    ) -> AsyncGenerator[Stored, None]: ...

    def changes(
        self,
        tables: Sequence[TableName] | None = None,
        *,
        after: After = "now",
        as_events: bool = False,
        messages: bool = False,
    ) -> AsyncGenerator[Transaction, None] | AsyncGenerator[Stored, None]:
        """Changes of some tables, or of all, as whole transactions or as single events; never ends.

        `after` is "now", "start" (everything retained), a stream sequence, a datetime, or a mapping
        from source to the SourcePosition of the last event seen. `messages` adds the logical
        messages of pg_logical_emit_message. They have no position of their own, so a reader that
        continues after the position of a single event may see them again. A transaction is held in
        memory until it ends: read `as_events` if transactions may be too large.
        """
        if as_events:
            return self._change_events(tables, after, messages)
        return self._change_transactions(tables, after, messages)

    async def _change_transactions(
        self, tables: Sequence[TableName] | None, after: After, messages: bool
    ) -> AsyncGenerator[Transaction, None]:
        start = await find_starting_point(self.deployment, after, tables)
        builder = TransactionBuilder(start.cut)
        async with aclosing(self._stored(tables, start, messages, progress=messages)) as events:
            async for stored in events:
                for transaction in builder.push(stored):
                    yield transaction

    async def _change_events(
        self, tables: Sequence[TableName] | None, after: After, messages: bool
    ) -> AsyncGenerator[Stored, None]:
        start = await find_starting_point(self.deployment, after)
        async with aclosing(self._stored(tables, start, messages, progress=False)) as events:
            async for stored in events:
                yield stored

    async def messages(
        self, prefix: str | None = None, *, after: After = "now"
    ) -> AsyncGenerator[Stored, None]:
        """Logical messages with one prefix, or all of them; never ends."""
        subject = self.subjects.message_all if prefix is None else self.subjects.message(prefix)
        start = await find_starting_point(self.deployment, after)
        async with self._feed_from(start, [], [subject]) as feed:
            async for batch in feed:
                for stored in batch:
                    yield stored

    async def _stored(
        self,
        tables: Sequence[TableName] | None,
        start: StartingPoint,
        messages: bool,
        progress: bool,
    ) -> AsyncGenerator[Stored, None]:
        unwanted = set()
        if not messages:
            unwanted.add("MESSAGE")
        if not progress:
            unwanted.add("PROGRESS")
        extra = [self.subjects.message_all] if messages else []
        if progress:
            extra.append(self.subjects.progress_all)
        async with self._feed_from(start, tables, extra) as feed:
            async for batch in feed:
                for stored in batch:
                    if stored.event.operation not in unwanted:
                        yield stored

    def _feed_from(
        self, start: StartingPoint, tables: Sequence[TableName] | None, extra: Sequence[str]
    ) -> ChangeFeed:
        return self.feed(
            tables,
            start.sequence,
            extra_subjects=extra,
            created=start.created,
            lenient_start=start.lenient,
            after=start.after,
        )

    # the log by sequence

    def log(self) -> LogReader:
        """A reader of ranges of the change log."""
        return LogReader(self.deployment)

    # for custom readers

    def filters(
        self, tables: Sequence[TableName] | None, extra_subjects: Sequence[str] = ()
    ) -> list[str]:
        """Subjects that cover the tables and do not overlap; None means all tables."""
        return self.deployment.filters(tables, extra_subjects)

    def decoder(self) -> EventDecoder:
        """A decoder that fetches dictionaries, wide rows and schemas over this connection."""
        return self.deployment.decoder()

    async def fetch_object(self, ref: dict[str, Any]) -> bytes:
        """The verified content of a row that is stored as an object."""
        return await self.deployment.references.fetch_object(ref)

    async def dictionary(self, dictionary_id: str) -> bytes:
        """A zstd dictionary by its id; the client keeps it in memory."""
        return await self.deployment.references.dictionary(dictionary_id)
