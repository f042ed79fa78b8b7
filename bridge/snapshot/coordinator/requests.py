"""Requests on `snapshot.request.>`: their options, and their answer within a second."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import msgpack
import nats.errors

from bridge.errors import BridgeError, ForeignTable, Refused, Retryable
from bridge.postgres.errors import LockTimeout, StatementFailed
from consumer_sdk.wire import envelope
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import parse_table_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from bridge.snapshot.coordinator.jobs import JobState
    from bridge.snapshot.messages import ChunkFormat
    from bridge.source import Source

    Admit = Callable[[str, str, "SnapshotRequest"], Awaitable[tuple[str, JobState]]]

FORMATS: Final = ("msgpack", "json", "arrow")
KNOWN: Final = ("columns", "format", "zstd", "fresh")
# Fields that a client library adds; they do not change the snapshot.
IGNORED: Final = ("v",)
MOST_BYTES: Final = 64 * 1024
# The first byte of a MessagePack map is one of these.
MAP_BYTES: Final = frozenset(bytes([byte]) for byte in (*range(0x80, 0x90), 0xDE, 0xDF))


logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 0.9


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """The operator's settings for all snapshots; `zstd` is the default for requests."""

    workers: int = 2
    chunk_rows: int = 10_000
    wait_limit: float = 300.0
    zstd: bool = False
    most_running: int = 64


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The options of a snapshot; requests with equal options for a table share a snapshot."""

    columns: tuple[str, ...] | None
    format: ChunkFormat
    zstd: bool


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A parsed request: `asked` is copied to the meta, `fresh` forbids a finished snapshot."""

    options: CopyOptions
    asked: dict[str, Any]
    fresh: bool


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
        raise Refused(f"unknown option {unknown[0]!r}; known are {', '.join(KNOWN)}")
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
    kept = {
        key: asked[key]
        for key in ("columns", "format", "zstd")
        if asked.get(key) is not None
    }  # fmt: skip
    return SnapshotRequest(CopyOptions(columns, cast("ChunkFormat", kind), compressed), kept, fresh)


def _read_map(body: bytes, headers: Mapping[str, str] | None) -> dict[str, Any]:
    if not body.strip():
        return {}
    if len(body) > MOST_BYTES:
        raise Refused("the request is too long; send an empty body or a small map of options")
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
    if len(set(value)) != len(value):
        raise Refused("option columns names a column twice")
    return tuple(value)


def _flag(asked: Mapping[str, Any], name: str, default: bool) -> bool:
    value = asked.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refused(f"option {name} must be true or false")
    return value


class RequestListener:
    """Receives requests, passes them to `admit`, and answers in the encoding of the request.

    `admit` returns snapshot id and state, or raises Refused.
    """

    def __init__(self, client: Client, source: Source, admit: Admit, *, zstd: bool) -> None:
        self._client = client
        self._subjects = source.subjects
        self._as_json = source.as_json
        self._admit = admit
        self._zstd = zstd
        self._subscription: Subscription | None = None
        self._answers: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begin to receive requests."""
        self._subscription = await self._client.subscribe(
            self._subjects.snapshot_request(">"), cb=self._receive
        )
        await self._client.flush()

    async def close(self) -> None:
        """Stop receiving requests; those already received are still answered."""
        if self._subscription is not None:
            try:
                await self._subscription.unsubscribe()
            except nats.errors.Error:
                logger.debug("unsubscribing from requests failed", exc_info=True)
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def _receive(self, message: Msg) -> None:
        # Each request has its own task: a slow catalog query must not delay the next request.
        task = asyncio.create_task(self._answer(message))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, message: Msg) -> None:
        answer: dict[str, Any]
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                snapshot_id, state = await self._grant(message)
            answer = {"ok": True, "snapshot_id": snapshot_id, "state": state.value}
        except ForeignTable:
            # The bridge of that source answers; a refusal from here could arrive first.
            return
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
        await self._reply(message, answer)

    async def _grant(self, message: Msg) -> tuple[str, JobState]:
        token = message.subject.removeprefix(self._subjects.snapshot_request(""))
        try:
            schema, table = parse_table_token(token)
        except WireError as error:
            raise Refused(f"{token!r} is not a table; see the subjects in WIRE.md") from error
        request = parse_request(
            message.data, message.headers, as_json=self._as_json, zstd=self._zstd
        )
        return await self._admit(schema, table, request)

    async def _reply(self, message: Msg, answer: dict[str, Any]) -> None:
        if not message.reply:
            return
        as_json = body_is_json(message.data, message.headers, default=self._as_json)
        headers = {envelope.CONTENT_TYPE: envelope.JSON if as_json else envelope.MSGPACK}
        body = envelope.encode({"v": envelope.WIRE_VERSION, **answer}, as_json=as_json)
        try:
            await self._client.publish(message.reply, body, headers=headers)
        except (nats.errors.Error, OSError):
            logger.debug("a snapshot request was not answered", exc_info=True)


def _later(why: str) -> dict[str, Any]:
    """A refusal of a valid request, which may succeed later."""
    return {"ok": False, "error": f"{why}; ask again", "retry": True}
