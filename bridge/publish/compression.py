"""Compressed events (`--zstd-events`): small messages gain only from a dictionary.

The first messages of each table are published uncompressed, or as plain zstd if that is smaller,
and samples of them are collected. A dictionary is trained from the samples and stored in KV before
the first message that needs it, so that readers always find it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import nats.errors
import zstandard
from nats.js.errors import APIError

from bridge.jetstream.dictionaries import FEWEST_SAMPLES, train
from consumer_sdk.transport.logfmt import event

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from bridge.jetstream.dictionaries import DictionaryStore, ZstdDictionary

log = logging.getLogger("bridge.publish")

LEVEL: Final = 3
SAMPLES: Final = 2 * FEWEST_SAMPLES
LARGEST_SAMPLE: Final = 16 * 1024
FORM: Final = "events"


class _TableState:
    __slots__ = ("compressor", "headers", "samples")

    def __init__(self, headers: bytes) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.headers = headers
        self.samples: list[bytes] | None = []


class EventCompressor:
    """Compresses payloads, with a dictionary per table; `__call__` never waits (hot path)."""

    def __init__(self, store: DictionaryStore, headers: bytes) -> None:
        self._store = store
        self._plain_headers = headers
        self._zstd_headers = headers + b"Content-Encoding: zstd\r\n"
        self._tables: dict[str, _TableState] = {}
        self._training: set[asyncio.Task[None]] = set()

    def __call__(self, token: str, payload: bytes) -> tuple[bytes, bytes]:
        """Payload and headers to publish: compressed if that is smaller."""
        state = self._tables.get(token)
        if state is None:
            state = self._tables[token] = _TableState(self._zstd_headers)
            self._spawn(self._adopt(token, state))
        samples = state.samples
        if samples is not None and len(payload) <= LARGEST_SAMPLE:
            samples.append(payload)
            if len(samples) >= SAMPLES:
                state.samples = None
                self._spawn(self._train(token, state, samples))
        small = state.compressor.compress(payload)
        if len(small) + len(state.headers) < len(payload) + len(self._plain_headers):
            return small, state.headers
        return payload, self._plain_headers

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._training.add(task)
        task.add_done_callback(self._end_training)

    def _end_training(self, task: asyncio.Task[None]) -> None:
        self._training.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Without a dictionary, rows only take more room.
            reason = f"{type(error).__name__}: {error}"
            event(log, "dictionary not trained", level=logging.WARNING, reason=reason)

    async def _adopt(self, token: str, state: _TableState) -> None:
        """Use the dictionary that an earlier run trained."""
        try:
            found = await self._store.current(token, FORM)
        except (nats.errors.Error, APIError, TimeoutError, OSError):
            return
        if found is not None:
            self._use(state, found)

    async def _train(self, token: str, state: _TableState, samples: list[bytes]) -> None:
        content = await asyncio.to_thread(train, samples)
        if content is None:
            return
        try:
            dictionary = await self._store.add(token, FORM, content)
        except (nats.errors.Error, APIError, TimeoutError, OSError) as error:
            event(log, "dictionary not stored", level=logging.WARNING, reason=str(error))
            return
        self._use(state, dictionary)

    def _use(self, state: _TableState, dictionary: ZstdDictionary) -> None:
        shared = zstandard.ZstdCompressionDict(dictionary.content)
        shared.precompute_compress(level=LEVEL)
        state.compressor = zstandard.ZstdCompressor(level=LEVEL, dict_data=shared)
        state.headers = self._zstd_headers + f"Cdc-Dict: {dictionary.id}\r\n".encode()
        state.samples = None

    async def close(self) -> None:
        """Cancel the training tasks that still run."""
        for task in tuple(self._training):
            task.cancel()
        await asyncio.gather(*self._training, return_exceptions=True)
