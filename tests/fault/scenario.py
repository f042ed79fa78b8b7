"""One bridge under load on real servers, the faults of a test, and the checks at the end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import nats
import nats.errors
import psycopg

from consumer_sdk.wire import Subjects, parse_lsn
from tests.fault.stream_oracle import (
    StreamHistory,
    check_confirmed,
    compare_with_source,
    read_history,
)
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.client import Client

    from tests.fault.workload import Workload
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

LONG = bool(os.environ.get("TAILRACE_LONG"))
ROUNDS = 20 if LONG else 3
DRAIN_SECONDS = 60
API_ATTEMPTS = 10
NOT_FOUND, UNAVAILABLE = 404, 503


def chosen_seed() -> int:
    """The seed of this run: TAILRACE_SEED, or a new one; printed, so that it can be repeated."""
    seed = int(os.environ.get("TAILRACE_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"seed {seed}: repeat with TAILRACE_SEED={seed}")
    return seed


@dataclass
class Scenario:
    """The servers, bridge and checks of a fault test; `verdict` ends it."""

    database: Database
    prefix: str
    nats_url: str
    client: Client
    start: Callable[..., BridgeProcess]
    slot: str = ""
    flags: tuple[str, ...] = ()
    samples: list[tuple[int, int]] = field(default_factory=list)
    seed: int = -1

    def __post_init__(self) -> None:
        self.subjects = Subjects(self.prefix)
        self.slot = self.slot or f"slot_{self.database.name}"
        if self.seed < 0:
            self.seed = chosen_seed()
        self.rng = random.Random(self.seed)

    def bridge(self, *flags: str, **options: Any) -> BridgeProcess:
        """Start a bridge; by default it is ready when this returns."""
        options = {"slot": self.slot, "nats_url": self.nats_url, **options}
        return self.start(*self.flags, *flags, **options)

    async def api(self, subject: str, body: Any = None) -> dict[str, Any]:
        """One request to the JetStream API, which must succeed."""
        answer = await self._ask(subject, body)
        assert "error" not in answer, answer["error"]
        return answer

    async def _ask(self, subject: str, body: Any = None) -> dict[str, Any]:
        """The answer to a request, repeated while a cluster elects a leader."""
        payload = b"" if body is None else json.dumps(body).encode()
        for left in reversed(range(API_ATTEMPTS)):
            try:
                reply = await self.client.request(f"$JS.API.{subject}", payload, timeout=5)
                answer: dict[str, Any] = json.loads(reply.data)
                if answer.get("error", {}).get("code") != UNAVAILABLE:
                    break
            except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
                if not left:
                    raise
            await asyncio.sleep(1)
        return answer

    async def purge(self, stream: str, *, keep: int = 0) -> None:
        """Purge a stream except for its last messages."""
        await self.api(f"STREAM.PURGE.{stream}", {"keep": keep} if keep else None)

    async def delete(self, stream: str) -> None:
        """Delete a stream; if it does not exist, the answer to an earlier request was lost."""
        answer = await self._ask(f"STREAM.DELETE.{stream}")
        assert answer.get("error", {}).get("code") in (None, NOT_FOUND), answer

    async def last_sequence(self) -> int:
        """The last sequence of the CDC stream."""
        info = await self.api(f"STREAM.INFO.{self.subjects.cdc_stream}")
        last: int = info["state"]["last_seq"]
        return last

    async def grown(self, by: int = 1, timeout: float = 30) -> None:
        """Wait until the stream has grown by a number of messages."""
        try:
            wanted = await self.last_sequence() + by
        except AssertionError:
            wanted = by

        async def reached() -> bool:
            try:
                return await self.last_sequence() >= wanted
            except (AssertionError, nats.errors.Error):
                return False

        await eventually(reached, timeout, f"{by} more messages")

    def confirmed_lsn(self) -> int:
        """The position that PostgreSQL has as confirmed."""
        slot = self.database.slot(self.slot)
        assert slot is not None
        return parse_lsn(slot["confirmed_flush_lsn"])

    async def drained(self, timeout: float = DRAIN_SECONDS) -> None:
        """Wait until everything written so far is confirmed."""
        target = parse_lsn(self.database.current_lsn())
        await eventually(
            lambda: self.confirmed_lsn() >= target, timeout, "everything published and confirmed"
        )

    async def history(self) -> StreamHistory:
        """The history in the stream, after checking every rule."""
        return await read_history(self.client, self.prefix)

    async def verdict(self, workload: Workload | None = None, *, tables: Any = ()) -> StreamHistory:
        """Wait until all is published, then check the stream against the rules and the source."""
        await self.drained()
        history = await self.history()
        source = history.sources[self.slot]
        compare_with_source(
            self.database.dsn, source.events, workload.tables if workload else tables
        )
        check_confirmed(source, self.samples)
        return history

    def sampling(self) -> Sampler:
        """Sample the confirmed position and the stream's end while the context is open."""
        return Sampler(self)


async def create_stream(scenario: Scenario, **config: Any) -> None:
    """Create the CDC stream as an operator might have, without fast-ingest batches."""
    subjects = scenario.subjects
    body = {
        "name": subjects.cdc_stream,
        "subjects": [subjects.cdc_all],
        "storage": "file",
        "duplicate_window": int(1e9),
        **config,
    }
    await scenario.api(f"STREAM.CREATE.{subjects.cdc_stream}", body)


async def ignore(_error: Exception) -> None:
    """Ignore the errors of a client while its server is stopped on purpose."""


class Sampler:
    """Repeatedly reads the confirmed position, then the end of the stream."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._sample()))

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _sample(self) -> None:
        scenario = self._scenario
        client = await nats.connect(
            scenario.nats_url.split(","),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=ignore,
        )
        while not self._stop.is_set():
            try:
                confirmed = await asyncio.to_thread(scenario.confirmed_lsn)
                answer = await client.request(
                    f"$JS.API.STREAM.INFO.{scenario.subjects.cdc_stream}", timeout=1
                )
                last = json.loads(answer.data)["state"]["last_seq"]
                scenario.samples.append((confirmed, last))
            except (AssertionError, KeyError, OSError, psycopg.Error, nats.errors.Error):
                pass
            await asyncio.sleep(0.05)
        await client.close()
