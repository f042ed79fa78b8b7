"""A NATS connection for code without an event loop; a thread runs the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from consumer_sdk.client import connect
from consumer_sdk.sync import BlockingStream, LoopThread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from types import TracebackType
    from typing import Any

    from consumer_sdk.client import Client
    from consumer_sdk.transport.settings import NatsSettings

T = TypeVar("T")


class NatsThread:
    """Runs coroutines with one client; `close` ends the connection and the thread."""

    def __init__(self, settings: NatsSettings, timeout: float = 10.0) -> None:
        self.settings = settings
        self._loop = LoopThread("tailrace-nats")
        self._opening = connect(settings=settings, timeout=timeout)
        try:
            self.client = self._loop.run(self._opening.__aenter__())
        except BaseException:
            self._loop.stop()
            raise

    def run(self, call: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Run one coroutine and return its result."""
        return self._loop.run(call(self.client))

    def iterate(self, items: AsyncGenerator[T, None]) -> BlockingStream[T]:
        """Iterate over an asynchronous generator of the client; the caller closes the iterator."""
        return BlockingStream(items, self._loop)

    def close(self) -> None:
        """End the connection and the thread; idempotent."""
        if self._loop.is_running:
            try:
                self._loop.run(self._opening.__aexit__(None, None, None))
            finally:
                self._loop.stop()

    def __enter__(self) -> NatsThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
