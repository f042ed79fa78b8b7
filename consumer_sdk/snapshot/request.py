"""Requests a snapshot from the bridge and waits until it is complete."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import nats.errors

from consumer_sdk.errors import (
    CorruptData,
    GapError,
    NotAvailable,
    SnapshotFailed,
    UsageError,
    VersionTooNew,
)
from consumer_sdk.reading.proof import Selection, Trimming
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.reading.schemas import TableName, resolve_table
from consumer_sdk.snapshot.snapshot import (
    PIECES,
    Snapshot,
    SnapshotMeta,
    count_chunks,
    decode_meta,
    is_reusable,
    newest_metas,
)
from consumer_sdk.transport.api import parse_headers, stream_bounds
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.wire.envelope import CONTENT_TYPE, MSGPACK, decode_payload
from consumer_sdk.wire.errors import WireError, WireVersionError
from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from consumer_sdk.reading.deployment import Deployment
    from consumer_sdk.transport.api import Frame
    from consumer_sdk.wire.column_types import TableSchema

ANSWER_SECONDS = 3.0
# A bridge that has too many requests leaves some unanswered: so often they are repeated.
SILENT_ATTEMPTS = 4
# While a bridge is too busy for a request, the request is repeated for this long: hundreds of
# tables may be asked for at once, and a bridge copies some of them at a time.
BUSY_SECONDS = 900.0
BUSY_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
FORMATS = ("msgpack", "json", "arrow")
MOST_KEYS = 1000


class RequestRefused(SnapshotFailed):
    """The bridge cannot do what the request asks for; nothing was copied for it."""


class SnapshotAbandoned(SnapshotFailed):
    """The bridge stopped or was replaced during the copy; the same request may succeed now."""


class SnapshotStalled(SnapshotFailed):
    """The snapshot made no progress for too long; the same request may find it complete later."""


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """What the bridge reports about a running snapshot; `document` is its whole message."""

    snapshot_id: str
    state: str
    rows: int
    estimated_rows: int | None
    document: dict[str, Any]

    @property
    def waiting_for(self) -> list[str]:
        """The transactions or snapshots that must end before the first row is copied."""
        named = self.document.get("waiting_for")
        return [str(one) for one in named] if isinstance(named, list) else []


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a snapshot request; for None the bridge uses its default."""

    columns: Sequence[str] | None = None
    format: str | None = None
    zstd: bool | None = None
    pieces: bool = False
    """Whether the snapshot may have several consistent points."""
    where: Mapping[str, Any] | None = None
    """Only the rows with these keys: `keys`, a list of keys, or `from` and `to`, of which the first
    is included and the second is not. A key is a list of wire values."""

    def to_document(self, schema: TableSchema) -> dict[str, Any]:
        """The options as the bridge expects them; UsageError for an unknown column or format."""
        document: dict[str, Any] = {}
        if self.columns is not None:
            for name in self.columns:
                if schema.column(name) is None:
                    table = format_table_name(schema.schema, schema.table)
                    raise UsageError(f"table {table} has no column {name!r}")
            # The meta names them in this order, whatever the order of the request.
            document["columns"] = sorted(self.columns)
        if self.format is not None:
            if self.format not in FORMATS:
                known = ", ".join(FORMATS)
                raise UsageError(f"no snapshot format {self.format!r}; there are {known}")
            document["format"] = self.format
        if self.zstd is not None:
            document["zstd"] = self.zstd
        if not self.pieces:
            document[PIECES] = False
        if self.where is not None:
            document["where"] = _where(self.where, schema)
        return document


def _where(where: Mapping[str, Any], schema: TableSchema) -> dict[str, list[Any]]:
    """The rows as the bridge expects them; UsageError for what it would refuse anyway."""
    table = format_table_name(schema.schema, schema.table)
    width = len(schema.row_key)
    if not width:
        raise UsageError(f"table {table} has no key, so `where` cannot select rows of it")
    if not where or not (where.keys() == {"keys"} or where.keys() <= {"from", "to"}):
        raise UsageError("`where` has either `keys`, or `from` and `to`, or one of these two")
    keys = where["keys"] if "keys" in where else list(where.values())
    if len(keys) > MOST_KEYS:
        raise UsageError(f"`where` names {len(keys)} keys; at most {MOST_KEYS} are allowed")
    if any(isinstance(key, (str, bytes)) or len(key) != width for key in keys):
        named = ", ".join(schema.row_key)
        raise UsageError(f"a key of table {table} is a list of {width} values: {named}")
    if "keys" in where:
        return {"keys": [list(key) for key in keys]}
    return {name: list(key) for name, key in where.items()}


async def take_snapshot(
    deployment: Deployment,
    table: TableName,
    options: RequestOptions,
    *,
    fresh: bool,
    progress: Callable[[SnapshotProgress], None] | None,
    stall_timeout: float,
) -> Snapshot:
    """See `Client.snapshot`."""
    schema = await deployment.schemas.get(table)
    document = options.to_document(schema)
    token = table_token(schema.schema, schema.table)
    if not fresh:
        retained = await find_retained(deployment, token, document)
        if retained is not None:
            return retained
    pending = _Pending(deployment, token, _display(table), progress, stall_timeout)
    meta = await pending.run(document, fresh)
    if meta.exact_lsn and not options.pieces:
        raise SnapshotFailed(
            f"{meta.describe()} has several consistent points, although one was requested; "
            "upgrade the bridge"
        )
    return Snapshot(deployment, meta, reused=False)


async def find_retained(
    deployment: Deployment, token: str, document: dict[str, Any]
) -> Snapshot | None:
    """A retained snapshot with these options that is still valid; None if there is none."""
    # A damaged meta, or one of another table, is not used: a new snapshot replaces it.
    with suppress(CorruptData):
        async with aclosing(newest_metas(deployment, token)) as frames:
            async for frame in frames:
                meta = decode_meta(frame)
                if await is_reusable(deployment, meta, document):
                    return Snapshot(deployment, meta, reused=True)
    return None


def _display(table: TableName) -> str:
    return format_table_name(*resolve_table(table))


class _Pending:
    """One request, until the meta of the complete snapshot is stored."""

    def __init__(
        self,
        deployment: Deployment,
        token: str,
        table: str,
        progress: Callable[[SnapshotProgress], None] | None,
        stall_timeout: float,
    ) -> None:
        self._deployment = deployment
        self._token = token
        self._table = table
        self._progress = progress
        self._stall_timeout = stall_timeout
        self._progress_at = 0.0
        self._counts: tuple[Any, ...] = ()
        self._state = "requested"
        self._snapshot_id = ""

    async def run(self, options: dict[str, Any], fresh: bool) -> SnapshotMeta:
        subjects = self._deployment.subjects
        bounds = await stream_bounds(self._deployment.nc, subjects.init_stream)
        outcomes = Selection(
            subjects.init_stream,
            [subjects.meta(self._token), subjects.error(self._token)],
            bounds.last + 1,
            trimming=Trimming.ALLOWED,
        )
        consumer = PullConsumer(self._deployment.nc, outcomes, window=64)
        watching: Subscription | None = None
        try:
            watching = await self._deployment.nc.subscribe(
                subjects.snapshot_progress(self._token, "*"), cb=self._on_progress
            )
            answer = await self._ask({**options, "fresh": True} if fresh else options)
            self._snapshot_id = str(answer.get("snapshot_id", ""))
            self._state = str(answer.get("state", "running"))
            # The bridge may answer with a snapshot that was complete before the request.
            async with aclosing(newest_metas(self._deployment, self._token)) as frames:
                async for frame in frames:
                    if (meta := self._outcome(frame)) is not None:
                        return meta
            return await self._wait(consumer)
        except nats.errors.Error as error:
            raise NotAvailable(
                f"NATS does not answer: {self._deployment.nc.explain(error)}"
            ) from error
        except GapError as error:
            raise SnapshotFailed(
                f"snapshot {self._snapshot_id} of {self._table}: stream {subjects.init_stream} was "
                "deleted or recreated meanwhile"
            ) from error
        finally:
            await consumer.close()
            if watching is not None and not self._deployment.nc.is_closed:
                try:
                    await watching.unsubscribe()
                except nats.errors.Error:
                    pass

    async def _ask(self, options: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BUSY_SECONDS
        pause, silent = BUSY_PAUSE_SECONDS, 0
        while True:
            await stay_cancelled()
            answer = await self._ask_once(options)
            if answer is None:
                silent += 1
                if silent == SILENT_ATTEMPTS:
                    raise self._no_answer()
                continue
            silent = 0
            if answer.get("ok") is True:
                return answer
            is_busy = answer.get("retry") is True
            if not is_busy or loop.time() > deadline:
                reason = answer.get("error") or "the bridge gave no reason"
                kind = SnapshotFailed if is_busy else RequestRefused
                raise kind(f"snapshot of {self._table} refused: {reason}")
            # Requests that were turned away together do not come back together.
            await asyncio.sleep(random.uniform(BUSY_PAUSE_SECONDS, pause))  # noqa: S311
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _ask_once(self, options: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one request; None if there is a bridge and it does not answer."""
        subject = self._deployment.subjects.snapshot_request(self._token)
        body = msgpack.packb(options) if options else b""
        headers = {CONTENT_TYPE: MSGPACK} if options else None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER_SECONDS
        while True:
            await stay_cancelled()
            try:
                reply = await self._deployment.nc.request(
                    subject, body, timeout=max(0.1, deadline - loop.time()), headers=headers
                )
                break
            except nats.errors.NoRespondersError:
                # No bridge is subscribed now; a standby may be about to take over.
                if loop.time() + 0.25 >= deadline:
                    raise self._no_answer() from None
                await asyncio.sleep(0.25)
            except (nats.errors.TimeoutError, TimeoutError):
                return None
        return _read_map(reply.data)

    def _no_answer(self) -> NotAvailable:
        return NotAvailable(
            f"no bridge answers for table {self._table}; is the bridge that publishes it running?"
        )

    async def _wait(self, consumer: PullConsumer) -> SnapshotMeta:
        loop = asyncio.get_running_loop()
        self._progress_at = loop.time()
        chunks: int | None = None
        while True:
            for frame in await consumer.take(16, wait=min(1.0, self._stall_timeout)):
                meta = self._outcome(frame)
                if meta is not None:
                    return meta
            if loop.time() - self._progress_at < self._stall_timeout:
                continue
            stored = await count_chunks(self._deployment, self._token, self._snapshot_id)
            if chunks is not None and stored <= chunks:
                raise SnapshotStalled(
                    f"snapshot {self._snapshot_id} of {self._table} made no progress for "
                    f"{self._stall_timeout:g} s (last state: {self._state})"
                )
            chunks = stored
            self._progress_at = loop.time()

    def _outcome(self, frame: Frame) -> SnapshotMeta | None:
        try:
            document = decode_payload(parse_headers(frame.headers), frame.payload)
        except WireVersionError as error:
            raise VersionTooNew(f"snapshot of {self._table}: {error}") from error
        except WireError:
            return None
        if document.get("snapshot_id") != self._snapshot_id:
            return None
        if frame.subject.decode("utf-8", "replace") == self._deployment.subjects.meta(self._token):
            return decode_meta(frame)
        reason = document.get("error") or "the bridge gave no reason"
        kind = SnapshotAbandoned if document.get("retry") is True else SnapshotFailed
        raise kind(f"snapshot of {self._table} failed: {reason}")

    async def _on_progress(self, message: Msg) -> None:
        snapshot_id = message.subject.rpartition(".")[2]
        if self._snapshot_id and snapshot_id != self._snapshot_id:
            return
        document = _read_map(message.data)
        self._state = str(document.get("state", self._state))
        # Before the bridge copies rows, it limits its waiting itself. While it copies, a message is
        # progress only if its numbers have changed.
        counts = tuple(document.get(key) for key in ("state", "rows", "chunks", "pieces_left"))
        if self._state != "copying" or counts != self._counts:
            self._progress_at = asyncio.get_running_loop().time()
            self._counts = counts
        if self._progress is not None:
            self._progress(
                SnapshotProgress(
                    snapshot_id,
                    self._state,
                    _count(document, "rows") or 0,
                    _count(document, "estimated_rows"),
                    document,
                )
            )


def _count(document: dict[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if isinstance(value, int) and value >= 0 else None


def _read_map(data: bytes) -> dict[str, Any]:
    """Decode a map in either encoding; {} for anything else."""
    try:
        value = json.loads(data) if data[:1] == b"{" else msgpack.unpackb(data)
    except Exception:  # decoders raise many kinds of errors for foreign bytes  # noqa: BLE001
        return {}
    return value if isinstance(value, dict) else {}
