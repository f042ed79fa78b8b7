"""Reads the stream, the mirror, the source and the bridge for the demonstration."""

from __future__ import annotations

import asyncio
import http.client
import json
import sqlite3
import time
from collections import Counter, deque
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final, Self

import nats
import psycopg
from nats.errors import Error as NatsError
from psycopg import sql

from bridge.demo import shop
from bridge.embedded import LOOPBACK
from bridge.errors import BrokerError
from consumer_sdk.wire import Event, Subjects, encode, read_events

if TYPE_CHECKING:
    from pathlib import Path

    from nats.aio.client import Client
    from nats.aio.msg import Msg

CHANGES: Final = frozenset({"insert", "update", "delete", "truncate"})
EVENTS_KEPT: Final = 12
LATENCIES_KEPT: Final = 400
TIMEOUT_SECONDS: Final = 2.0
POLL_SECONDS: Final = 0.05

END_MARK: Final = "shop-closed"
# Changes arrive in commit order: when this message is stored, so is everything before it.
END_MARK_STATEMENT: Final = f"SELECT pg_logical_emit_message(true, '{END_MARK}', '{shop.SLOT}')"


class StreamReader:
    """Follows the CDC stream from its first message: counts, newest events, time since commit."""

    def __init__(self, nats_url: str) -> None:
        self.stored: Counter[str] = Counter()
        self.newest: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self.last_sequence = 0
        self._url = nats_url
        self._subjects = Subjects()
        self._client: Client

    async def __aenter__(self) -> Self:
        try:
            self._client = await nats.connect(
                self._url, name="demo view", max_reconnect_attempts=-1, error_cb=_ignore
            )
            await self._client.jetstream().subscribe(
                self._subjects.cdc_all,
                stream=self._subjects.cdc_stream,
                cb=self._receive,
                ordered_consumer=True,
            )
        except (NatsError, OSError) as error:
            raise BrokerError(f"cannot read the CDC stream: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def request_snapshots(self, options: dict[str, str]) -> None:
        """Ask the bridge for snapshots of all tables."""
        for token in shop.tokens():
            await self._client.publish(
                self._subjects.snapshot_request(token), encode(options, as_json=True)
            )

    async def counts(self) -> Counter[tuple[str, str]]:
        """Numbers of events, as nats-server counts them, by table and operation."""
        found: Counter[tuple[str, str]] = Counter()
        for subject, count in (await self._held(self._subjects.cdc_all)).items():
            change = self._subjects.split_change(subject)
            if change is not None and change[1] in CHANGES:
                found[change] = count
        return found

    async def holds_end_mark(self, timeout: float) -> bool:
        """Wait for the message that `END_MARK_STATEMENT` sends after the last change."""
        deadline = time.monotonic() + timeout
        subject = self._subjects.message(END_MARK)
        while time.monotonic() < deadline:
            if subject in await self._held(subject):
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def _held(self, subjects: str) -> dict[str, int]:
        info = await self._client.jetstream().stream_info(
            self._subjects.cdc_stream, subjects_filter=subjects
        )
        return info.state.subjects or {}

    async def _receive(self, message: Msg) -> None:
        self.last_sequence = message.metadata.sequence.stream
        change = self._subjects.split_change(message.subject)
        if change is None or change[1] not in CHANGES:
            return
        events = read_events(message.headers, message.data)
        self.stored[change[0]] += len(events)
        self.newest.extend(events)
        self.latencies.append(max(0.0, time.time() - events[-1].ts / 1e6))


class Observer:
    """Row counts of source and mirror, and the bridge's status, as of the last `refresh`.

    While the mirror has no tables yet, `mirror_loaded` is the number of copied tables.
    """

    def __init__(self, dsn: str, http_port: int, mirror_path: Path) -> None:
        self.source_rows: dict[str, int] = {}
        self.mirror_rows: dict[str, int] = {}
        self.mirror_loaded = 0
        self.mirror_behind = 0
        self.bridge_status: dict[str, Any] = {}
        self._dsn = dsn
        self._http_port = http_port
        self._mirror_path = mirror_path

    def refresh(self, stream_sequence: int = 0) -> None:
        """Read everything again; blocking. The values of a part that does not answer stay.

        The mirror's position is compared with `stream_sequence`.
        """
        with suppress(psycopg.Error):
            self._read_source()
        with suppress(sqlite3.Error):
            self._read_mirror(stream_sequence)
        status, body = http_get(self._http_port, "/status")
        if status == http.client.OK:
            self.bridge_status = json.loads(body)

    def _read_source(self) -> None:
        counts = sql.SQL(", ").join(
            sql.SQL("(SELECT count(*) FROM {})").format(sql.Identifier(*name))
            for name in shop.TABLES
        )
        with psycopg.connect(self._dsn) as source:
            row = source.execute(sql.SQL("SELECT {}").format(counts)).fetchone()
        self.source_rows = dict(zip(shop.tokens(), row or (), strict=True))

    def _read_mirror(self, stream_sequence: int) -> None:
        if not self._mirror_path.exists():
            return
        address = f"{self._mirror_path.as_uri()}?mode=ro"
        with closing(
            sqlite3.connect(address, uri=True, timeout=TIMEOUT_SECONDS, isolation_level=None)
        ) as mirror:
            # One transaction: everything is read at one moment.
            mirror.execute("BEGIN")
            present = {name for (name,) in mirror.execute("SELECT name FROM sqlite_master")}
            rows = {
                token: _number(mirror, f'SELECT count(*) FROM "{token}"')
                for token in shop.tokens()
                if token in present
            }
            if "_tailrace_copies" in present:
                loaded = "SELECT count(*) FROM _tailrace_copies WHERE loaded"
                self.mirror_loaded = _number(mirror, loaded)
            if "_tailrace_positions" in present:
                position = "SELECT max(stream_seq) FROM _tailrace_positions"
                self.mirror_behind = max(0, stream_sequence - _number(mirror, position))
        self.mirror_rows = rows


def _number(mirror: sqlite3.Connection, query: str) -> int:
    ((value,),) = mirror.execute(query)
    return value or 0


def bridge_is_ready(http_port: int) -> bool:
    """Whether the bridge answers /ready with 200."""
    return http_get(http_port, "/ready")[0] == http.client.OK


def http_get(http_port: int, path: str) -> tuple[int | None, bytes]:
    """Status and body of the bridge's answer; the status is None if it does not answer."""
    connection = http.client.HTTPConnection(LOOPBACK, http_port, timeout=TIMEOUT_SECONDS)
    with closing(connection):
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return None, b""


async def _ignore(_error: Exception) -> None:
    """The client reconnects by itself; until then the counts do not change."""
