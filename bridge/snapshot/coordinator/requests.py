"""Requests on `snapshot.request.>`: their options, and their answer within a second."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgpack
import nats.errors

from bridge.config import Settings
from bridge.errors import BridgeError, ForeignTable, Refused, Retryable
from bridge.jetstream.connection import options_of
from bridge.postgres.errors import LockTimeout, StatementFailed
from bridge.snapshot.coordinator.admission import (
    ReplySubjects,
    TokenBucket,
    TooMany,
    requester_of,
)
from bridge.snapshot.keys import parse_where
from consumer_sdk.transport.api import parse_headers
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.connection import NatsConnection
from consumer_sdk.transport.logfmt import event
from consumer_sdk.transport.refusals import one_line
from consumer_sdk.wire import envelope
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import parse_table_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from nats.aio.client import Client
    from nats.aio.subscription import Subscription

    from bridge.snapshot.coordinator.jobs import JobState
    from bridge.snapshot.keys import Where
    from bridge.snapshot.messages import ChunkFormat
    from bridge.source import Source
    from bridge.telemetry.stats import BridgeStats

    Admit = Callable[[str, str, "SnapshotRequest"], Awaitable["Admission"]]

FORMATS: Final = ("msgpack", "json", "arrow")
KNOWN: Final = ("columns", "format", "zstd", "fresh", "where", "pieces")
# Fields that a client library adds; they do not change the snapshot.
IGNORED: Final = ("v",)
# So many hold the longest list of keys of ordinary length.
MOST_BYTES: Final = 128 * 1024
# The first byte of a MessagePack map is one of these.
MAP_BYTES: Final = frozenset(bytes([byte]) for byte in (*range(0x80, 0x90), 0xDE, 0xDF))


logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 0.9
OPEN_SECONDS: Final = 5.0
REOPEN_SECONDS: Final = 2.0
DRAIN_POLL_SECONDS: Final = 0.01
LOG_SECONDS: Final = 60.0
LONGEST_SHOWN: Final = 100
TOO_LONG: Final = "the request is too long; send an empty body or a small map of options"
# PostgreSQL allows no table more columns.
MOST_COLUMNS: Final = 1600
# Beyond these, requests are turned away: some with an answer that says so, the others without one.
MOST_WAITING: Final = 256
MOST_ANSWERS: Final = 256
MOST_HELD_BYTES: Final = 4 * 1024 * 1024
# How many requests are begun at once, and how long each further one waits.
START_BURST: Final = 128
START_SECONDS: Final = 0.002
BUSY_BURST: Final = 50
BUSY_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """The operator's settings for all snapshots; `zstd` is the default for requests."""

    workers: int = 2
    chunk_rows: int = 10_000
    wait_limit: float = 300.0
    zstd: bool = False
    most_running: int = 64
    most_of_table: int = 8
    interval: float = 10.0
    """After a burst, a new snapshot of a table may begin so often."""
    export_limit: float = 600.0
    """A table with a key that takes longer is copied in groups."""


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The options of a snapshot; requests with equal options for a table share a snapshot."""

    columns: tuple[str, ...] | None
    format: ChunkFormat
    zstd: bool
    pieces: bool = True
    """Whether the snapshot may have several consistent points."""
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A parsed request: `asked` is copied to the meta, `fresh` forbids a finished snapshot.

    Equal requests are parsed to equal ones, whatever the order of their columns.
    """

    options: CopyOptions
    asked: dict[str, Any]
    fresh: bool
    requester: str = ""

    def resolved(self, where: Where) -> SnapshotRequest:
        """The same request with a `where` whose values were checked."""
        options = replace(self.options, where=where)
        return replace(self, options=options, asked={**self.asked, "where": where.document})


class Admission(NamedTuple):
    """The snapshot that answers a request, and its state at this moment."""

    snapshot_id: str
    state: JobState


def body_is_json(body: bytes, headers: Mapping[str, str] | None, default: bool) -> bool:
    """Whether a body is JSON, by its Content-Type or first byte; `default` if it is not a map."""
    kind = (headers or {}).get(envelope.CONTENT_TYPE)
    if kind in (envelope.JSON, envelope.MSGPACK):
        return kind == envelope.JSON
    first = body.lstrip()[:1]
    return first == b"{" or (first not in MAP_BYTES and default)


def parse_request(
    body: bytes, headers: Mapping[str, str] | None, *, as_json: bool, zstd: bool
) -> SnapshotRequest:
    """Parse a request; `as_json` and `zstd` are the defaults of its options."""
    asked = _read_map(body, headers)
    unknown = sorted(set(asked) - {*KNOWN, *IGNORED})
    if unknown:
        raise Refused(f"unknown option {_shown(unknown[0])}; known are {', '.join(KNOWN)}")
    columns = _columns(asked.get("columns"))
    kind = asked.get("format")
    if kind is None:
        kind = "json" if as_json else "msgpack"
    elif kind not in FORMATS:
        raise Refused(f"option format must be one of {', '.join(FORMATS)}")
    if kind == "arrow" and importlib.util.find_spec("pyarrow") is None:
        raise Refused(
            "format arrow needs pyarrow on the bridge's side; run: pip install 'tailrace[arrow]'"
        )
    compressed = _flag(asked, "zstd", zstd)
    fresh = _flag(asked, "fresh", False)
    kept = {key: asked[key] for key in ("format", "zstd") if asked.get(key) is not None}
    if columns is not None:
        kept["columns"] = list(columns)
    where = parse_where(asked.get("where"))
    options = CopyOptions(
        columns,
        cast("ChunkFormat", kind),
        compressed,
        # A snapshot of some rows has one point in any case.
        _flag(asked, "pieces", True) or where is not None,
        where,
    )
    return SnapshotRequest(options, kept, fresh)


def _read_map(body: bytes, headers: Mapping[str, str] | None) -> dict[str, Any]:
    if not body.strip():
        return {}
    if len(body) > MOST_BYTES:
        raise Refused(TOO_LONG)
    try:
        if body_is_json(body, headers, default=False):
            asked = json.loads(body)
        else:
            asked = msgpack.unpackb(body, strict_map_key=True)
    except Exception as error:  # decoders raise many kinds for foreign bytes
        raise Refused("the request is neither JSON nor MessagePack; leave it empty") from error
    if not isinstance(asked, dict) or not all(isinstance(key, str) for key in asked):
        raise Refused("the request is not a map of options")
    return asked


def _columns(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise Refused("option columns must be a list of column names")
    if not all(isinstance(name, str) for name in value):
        raise Refused("option columns must be a list of column names")
    if len(value) > MOST_COLUMNS:
        raise Refused(f"option columns names more than {MOST_COLUMNS} columns")
    if len(set(value)) != len(value):
        raise Refused("option columns names a column twice")
    # A snapshot has its columns in the order of the table, so their order here means nothing.
    return tuple(sorted(value))


def _shown(text: str) -> str:
    """A text of the requester for an answer, not longer than needed to recognise it."""
    return repr(text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "…")


def _flag(asked: Mapping[str, Any], name: str, default: bool) -> bool:
    value = asked.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refused(f"option {name} must be true or false")
    return value


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A request as it arrived; of a body that is too long only the first bytes are kept."""

    subject: str
    reply: str
    body: bytes
    headers: dict[str, str] | None
    is_too_long: bool
    deadline: float


class RequestListener:
    """Receives requests, passes them to `admit`, and answers in the encoding of the request.

    `admit` returns the snapshot for a request, or raises Refused. Requests have a connection of
    their own, which is read slowly: no number of them delays an acknowledgement of the CDC stream.
    """

    def __init__(
        self,
        client: Client,
        source: Source,
        nats_settings: Mapping[str, Any],
        admit: Admit,
        *,
        zstd: bool,
        stats: BridgeStats,
    ) -> None:
        self._subjects = source.subjects
        self._as_json = source.as_json
        self._nats_settings = nats_settings
        self._admit = admit
        self._zstd = zstd
        self._counts = stats.snapshot_requests
        self._stats = stats
        self._replies = ReplySubjects(
            source.subjects, lambda: [one.subject for one in client._subs.values()]
        )
        self._connection = NatsConnection(is_paced=True)
        self._subscription: Subscription | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: deque[_Arrived] = deque()
        self._held_bytes = 0
        self._has_work = asyncio.Event()
        self._answers: set[asyncio.Task[None]] = set()
        self._starts = TokenBucket(START_BURST, START_SECONDS)
        self._busy_answers = TokenBucket(BUSY_BURST, BUSY_SECONDS)
        self._log_lines = TokenBucket(1, LOG_SECONDS)

    async def open(self) -> None:
        """Begin to receive requests; if NATS does not accept the connection yet, do so later."""
        opening = asyncio.create_task(self._open(), name="snapshot requests")
        self._tasks = [opening, asyncio.create_task(self._start_answers(), name="snapshot answers")]
        await asyncio.wait([opening], timeout=OPEN_SECONDS)
        if opening.done():
            opening.result()

    @property
    def answering(self) -> asyncio.Task[None]:
        """The task without which no request is answered."""
        return self._tasks[1]

    async def close(self) -> None:
        """Stop receiving requests; those already received are still answered."""
        opening, starting = self._tasks or (None, None)
        if opening is not None:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        if self._subscription is not None:
            await self._connection.untap(self._subscription)
        if starting is not None:
            while self._waiting or self._answers:
                # Requests that wait become answers one by one.
                await asyncio.wait(self._answers or [starting], timeout=DRAIN_POLL_SECONDS)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        try:
            await self._connection.close()
        except (nats.errors.Error, OSError):
            logger.debug("closing the connection for requests failed", exc_info=True)

    async def _open(self) -> None:
        async def ignore(_: Exception) -> None:
            """The connection is restored by itself."""

        while True:
            await stay_cancelled()
            try:
                await self._connection.connect(
                    **{
                        **options_of(Settings(**self._nats_settings)),
                        "name": "tailrace snapshot requests",
                        "max_reconnect_attempts": -1,
                        "error_cb": ignore,
                    }
                )
                self._subscription = await self._connection.tap(
                    self._subjects.snapshot_request(">"), self._receive
                )
                await self._connection.flush()
            # A file of the settings may be missing for a moment.
            except (nats.errors.Error, OSError, TimeoutError, BridgeError) as error:
                self._stats.warn(
                    "snapshot-requests",
                    f"snapshot requests are not received: {one_line(error)}",
                    "see whether NATS limits the connections of the bridge's user or account",
                )
                with suppress(nats.errors.Error, OSError):
                    await self._connection.close()
                self._connection, self._subscription = NatsConnection(is_paced=True), None
                await asyncio.sleep(REOPEN_SECONDS)
            else:
                self._stats.clear_warning("snapshot-requests")
                return

    def _receive(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        """Keep a request until its turn, or turn it away at the least cost.

        Runs for every request of a flood: it decodes nothing before it has found room.
        """
        size = min(len(body), MOST_BYTES)
        if len(self._waiting) >= MOST_WAITING or self._held_bytes + size > MOST_HELD_BYTES:
            self._turn_away(reply, body, headers)
            return
        if reply and not self._replies.allow(reply):
            self._counts["ignored"] += 1
            if self._log_lines.take():
                event(
                    logger,
                    "snapshot request ignored",
                    level=logging.WARNING,
                    reason="its reply subject is no inbox, or one of the bridge",
                    reply=reply[:LONGEST_SHOWN].decode(errors="replace"),
                    ignored=self._counts["ignored"],
                )
            return
        is_too_long = len(body) > MOST_BYTES
        arrived = _Arrived(
            subject.decode(errors="replace"),
            reply.decode(errors="replace"),
            body[:LONGEST_SHOWN] if is_too_long else body,
            parse_headers(headers[:MOST_BYTES]) if headers else None,
            is_too_long,
            asyncio.get_running_loop().time() + ANSWER_SECONDS,
        )
        self._held_bytes += len(arrived.body)
        self._waiting.append(arrived)
        self._has_work.set()

    def _turn_away(self, reply: bytes, body: bytes, headers: bytes | None) -> None:
        if not reply or not self._busy_answers.take() or not self._replies.allow(reply):
            self._counts["dropped"] += 1
            return
        self._counts["busy"] += 1
        known = parse_headers(headers[:MOST_BYTES]) if headers else None
        as_json = body_is_json(body[:LONGEST_SHOWN], known, default=self._as_json)
        self._keep(self._reply(reply.decode(), as_json, _later("the bridge has too many requests")))

    def _keep(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answer)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _start_answers(self) -> None:
        """Start to answer one request at a time, at a bounded rate.

        Each request has its own task: a slow catalog query must not delay the next request.
        """
        while True:
            await stay_cancelled()
            if not self._waiting:
                self._has_work.clear()
                await self._has_work.wait()
            elif len(self._answers) >= MOST_ANSWERS:
                await asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED)
            else:
                self._starts.spend()
                self._keep(self._answer(self._waiting.popleft()))
                # Also without a pause, the CDC pipeline has its turn between two requests.
                await asyncio.sleep(self._starts.wait_seconds())

    async def _answer(self, arrived: _Arrived) -> None:
        answer: dict[str, Any]
        try:
            async with asyncio.timeout_at(arrived.deadline):
                admission = await self._grant(arrived)
            answer = {
                "ok": True,
                "snapshot_id": admission.snapshot_id,
                "state": admission.state.value,
            }
        except ForeignTable:
            # The bridge of that source answers; a refusal from here could arrive first.
            return
        except TooMany as refusal:
            answer = {"ok": False, "error": str(refusal), "retry": True}
        except Refused as refusal:
            answer = {"ok": False, "error": str(refusal)}
        except TimeoutError:
            answer = _later("PostgreSQL or NATS answers too slowly")
        except LockTimeout:
            answer = _later("another session has locked this or another published table")
        except StatementFailed:
            answer = _later("PostgreSQL cannot answer at the moment")
        except (BridgeError, Retryable) as error:
            answer = {"ok": False, "error": str(error)}
        except (nats.errors.Error, OSError):
            answer = _later("JetStream does not answer the bridge")
        except Exception:
            logger.exception("snapshot request failed")
            answer = {"ok": False, "error": "the bridge could not handle the request; see its log"}
        finally:
            self._held_bytes -= len(arrived.body)
        self._counts["granted" if answer["ok"] else "busy" if "retry" in answer else "refused"] += 1
        if arrived.reply:
            as_json = body_is_json(arrived.body, arrived.headers, default=self._as_json)
            await self._reply(arrived.reply, as_json, answer)

    async def _grant(self, arrived: _Arrived) -> Admission:
        token = arrived.subject.removeprefix(self._subjects.snapshot_request(""))
        try:
            schema, table = parse_table_token(token)
        except WireError as error:
            raise Refused(f"{_shown(token)} is not a table; see the subjects in WIRE.md") from error
        if arrived.is_too_long:
            raise Refused(TOO_LONG)
        request = parse_request(
            arrived.body, arrived.headers, as_json=self._as_json, zstd=self._zstd
        )
        requester = requester_of(arrived.reply, arrived.headers)
        return await self._admit(schema, table, replace(request, requester=requester))

    async def _reply(self, reply: str, as_json: bool, answer: dict[str, Any]) -> None:
        headers = {envelope.CONTENT_TYPE: envelope.JSON if as_json else envelope.MSGPACK}
        body = envelope.encode({"v": envelope.WIRE_VERSION, **answer}, as_json=as_json)
        try:
            # Where the user may only respond, only the connection of the request may do so.
            await self._connection.publish(reply, body, headers=headers)
        except (nats.errors.Error, OSError):
            logger.debug("a snapshot request was not answered", exc_info=True)


def _later(why: str) -> dict[str, Any]:
    """A refusal of a valid request, which may succeed later."""
    return {"ok": False, "error": f"{why}; ask again", "retry": True}
