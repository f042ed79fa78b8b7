"""Stores a worker's chunks and wide rows in JetStream; few are unacknowledged at a time.

The COPY runs in the worker's main thread. The store runs an event loop in another thread, so that
reading rows does not wait for acknowledgements.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import ObjectMeta, ObjectMetaOptions

from bridge.config import Settings
from bridge.errors import Retryable, SnapshotError
from bridge.jetstream.connection import options_of
from bridge.jetstream.streams import stream_state
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.connection import NatsConnection
from consumer_sdk.wire.checksums import object_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from nats.aio.client import Client
    from nats.js.client import JetStreamContext

    from bridge.snapshot.formats.chunks import ChunkMessage
    from consumer_sdk.wire.subjects import Subjects

    Result = TypeVar("Result")

WINDOW: Final = 4
ACK_SECONDS: Final = 10.0
GIVE_UP_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 0.25
CONNECT_SECONDS: Final = 30.0
OBJECT_PART_BYTES: Final = 128 * 1024
STORE_FAILED: Final = 10077
"""The error code of a stream that cannot store a message, also because it is full."""
WRONG_LAST_SEQUENCE: Final = (10071, 10164)
"""The error codes of a stream that already holds a message of the subject."""


class NatsUnavailable(SnapshotError):
    """NATS did not store something in time; another attempt may succeed."""


class ChunkStore:
    """Publishes to the INIT stream from a thread of its own; all methods are blocking."""

    def __init__(self, nats_settings: Mapping[str, Any], subjects: Subjects) -> None:
        self._nats_settings = nats_settings
        self._stream = subjects.init_stream
        self._bucket = subjects.objects_bucket
        self.max_payload = 0
        """The largest message that the server accepts; set by `open`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="nats")
        self._window = threading.Semaphore(WINDOW)
        self._client: Client | None = None
        self._js: JetStreamContext | None = None
        self._failure: SnapshotError | None = None

    def open(self) -> None:
        """Connect to NATS."""
        self._thread.start()
        self.max_payload = self._run(self._connect())

    def close(self) -> None:
        """Disconnect without waiting for acknowledgements."""
        if self._client is not None:
            with suppress(Exception):
                self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def publish(self, subject: str, message: ChunkMessage, stored: Callable[[], None]) -> None:
        """Send a chunk; the other thread calls `stored` once it is acknowledged."""
        self._window.acquire()
        self._raise_failure()
        asyncio.run_coroutine_threadsafe(self._store(subject, message, stored), self._loop)

    def drain(self) -> None:
        """Wait until everything sent is acknowledged."""
        for _ in range(WINDOW):
            self._window.acquire()
        for _ in range(WINDOW):
            self._window.release()
        self._raise_failure()

    def put_object(self, name: str, payload: bytes) -> dict[str, Any]:
        """Store a row that is too large for a message; return the reference to it."""
        self._raise_failure()
        self._run(self._put(name, payload))
        return object_reference(self._bucket, name, payload)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _connect(self) -> int:
        options = {
            **options_of(Settings(**self._nats_settings)),
            "name": "tailrace snapshot worker",
            "reconnect_time_wait": 0.5,
            "max_reconnect_attempts": -1,
            "error_cb": _ignore,
        }
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                self._client = NatsConnection()
                await self._client.connect(**options)
        except (OSError, nats.errors.Error, TimeoutError) as error:
            raise SnapshotError(f"a snapshot worker cannot connect to NATS: {error}") from error
        self._js = self._client.jetstream(timeout=ACK_SECONDS)
        return self._client.max_payload

    async def _store(self, subject: str, message: ChunkMessage, stored: Callable[[], None]) -> None:
        assert self._js is not None
        deadline = time.monotonic() + GIVE_UP_SECONDS
        try:
            while self._failure is None:
                try:
                    # A chunk sent twice keeps its id, so the stream stores it once.
                    await self._js.publish(
                        subject, message.payload, stream=self._stream, headers=dict(message.headers)
                    )
                except (nats.errors.Error, OSError, TimeoutError) as error:
                    full = await self._full(len(message.payload), error)
                    if full or not _may_pass(error) or time.monotonic() > deadline:
                        self._failure = (
                            SnapshotError(full)
                            if full
                            else _failure(error, f"stream {self._stream} does not accept a chunk")
                        )
                        return
                    await asyncio.sleep(RETRY_SECONDS)
                else:
                    stored()
                    return
        except Exception as error:  # noqa: BLE001 - the task is not awaited; `drain` raises it
            self._failure = SnapshotError(f"storing a chunk failed: {type(error).__name__}")
        finally:
            self._window.release()

    async def _full(self, size: int, error: Exception) -> str | None:
        """What to say if a chunk was refused because the stream is full; None if it was not."""
        assert self._client is not None
        if not isinstance(error, nats.js.errors.APIError) or error.err_code != STORE_FAILED:
            return None
        try:
            state = await stream_state(self._client, self._stream)
        except (ApiError, Retryable):
            return None
        if state is None or state.has_room_for(size):
            return None
        return (
            f"stream {self._stream} is full: it holds {state.held_bytes} of at most "
            f"{state.config['max_bytes']} bytes; raise its max_bytes, or ask again when older "
            "snapshots have expired"
        )

    async def _put(self, name: str, payload: bytes) -> None:
        assert self._js is not None
        assert self._client is not None
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while True:
            try:
                objects = await self._js.object_store(self._bucket)
                # The default part size of an object can exceed the server's max_payload.
                part = min(OBJECT_PART_BYTES, self._client.max_payload // 2)
                options = ObjectMetaOptions(max_chunk_size=part)
                await objects.put(name, payload, ObjectMeta(name=name, options=options))
            except (nats.errors.Error, OSError, TimeoutError) as error:
                if not _may_pass(error) or time.monotonic() > deadline:
                    raise _failure(
                        error, f"object store {self._bucket} does not accept a wide row"
                    ) from error
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return


async def _ignore(_: Exception) -> None:
    """Connection errors are reported by the publishes that fail."""


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, nats.js.errors.ServiceUnavailableError):
        return True
    return not isinstance(error, (nats.js.errors.APIError, nats.errors.MaxPayloadError))


def _failure(error: Exception, what: str) -> SnapshotError:
    if isinstance(error, nats.js.errors.APIError) and error.err_code in WRONG_LAST_SEQUENCE:
        return NatsUnavailable("another bridge has stored a chunk of the same number")
    kind = NatsUnavailable if _may_pass(error) else SnapshotError
    return kind(f"{what}: {_text(error)}")


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
