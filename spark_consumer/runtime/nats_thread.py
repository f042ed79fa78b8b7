"""A connection to NATS for code without an event loop, kept alive by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, TypeVar

from consumer_sdk.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType
    from typing import Any

    from consumer_sdk.client import Client
    from consumer_sdk.transport.settings import NatsSettings

T = TypeVar("T")


class NatsThread:
    """Runs coroutines on one client; closing it ends the thread and the connection."""

    def __init__(self, settings: NatsSettings, timeout: float = 10.0) -> None:
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tailrace-nats", daemon=True
        )
        self._thread.start()
        self._opening = connect(settings=settings, timeout=timeout)
        try:
            self.client = self._wait(self._opening.__aenter__())
        except BaseException:
            self._end()
            raise

    def run(self, ask: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Wait for the answer of one coroutine."""
        return self._wait(ask(self.client))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the connection and the thread."""
        if self._thread.is_alive():
            try:
                self._wait(self._opening.__aexit__(None, None, None))
            finally:
                self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> NatsThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
