"""What happens to nats-server's store beneath it: a power cut, a disk that takes no more."""

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
    """Cut messages off the end of a stopped server's stream, and the index that knows them."""
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
    """Let writes of a running server fail where a file would outgrow the stream's newest one.

    The system refuses them as it does on a full disk, in the middle of a record too. nats-server
    2.15 then takes no more messages for the stream, with room or without, until it is restarted.
    """
    most = _newest_block(server, stream).stat().st_size + spare_bytes
    pid = server.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, NO_LIMIT))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (NO_LIMIT, NO_LIMIT))


def _newest_block(server: NatsServer, stream: str) -> Path:
    directory = server.directory / "jetstream" / "jetstream" / "$G" / "streams" / stream / "msgs"
    return max(directory.glob("*.blk"), key=lambda path: int(path.stem))
