"""Faults in nats-server's store: a power cut, a full disk."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bridge.embedded import NatsServer

NO_LIMIT = resource.RLIM_INFINITY


def drop_last_messages(server: NatsServer, stream: str, count: int) -> None:
    """Remove the last messages of a stopped server's stream, and the index of them."""
    block = _newest_block(server, stream)
    (block.parent / "index.db").unlink(missing_ok=True)
    content = block.read_bytes()
    place, starts = 0, []
    while place < len(content):
        starts.append(place)
        # A record begins with its length; the highest bit says that it has headers.
        place += int.from_bytes(content[place : place + 4], "little") & 0x7FFFFFFF
    block.write_bytes(content[: starts[-min(count, len(starts))]])


@contextmanager
def full_disk(server: NatsServer, stream: str, spare_bytes: int) -> Iterator[None]:
    """Make writes of a running server fail beyond the size of the stream's newest file.

    The system refuses them as on a full disk, also in the middle of a record. nats-server 2.15 then
    accepts no more messages for the stream until it is restarted, even if there is room.
    """
    most = _newest_block(server, stream).stat().st_size + spare_bytes
    pid = server.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, NO_LIMIT))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (NO_LIMIT, NO_LIMIT))


def _newest_block(server: NatsServer, stream: str) -> Path:
    store = server.directory / "jetstream" / "jetstream"
    blocks = store.glob(f"*/streams/{stream}/msgs/*.blk")  # in the directory of its account
    return max(blocks, key=lambda path: int(path.stem))
