"""What a power cut does to nats-server's store: its last messages were never synced."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.demo.servers import NatsServer


def drop_last_messages(server: NatsServer, stream: str, count: int) -> None:
    """Cut messages off the end of a stopped server's stream, and the index that knows them."""
    directory = server.directory / "jetstream" / "jetstream" / "$G" / "streams" / stream / "msgs"
    (directory / "index.db").unlink(missing_ok=True)
    block = max(directory.glob("*.blk"), key=lambda path: int(path.stem))
    content = block.read_bytes()
    place, starts = 0, []
    while place < len(content):
        starts.append(place)
        # A record begins with its length; the highest bit says that it has headers.
        place += int.from_bytes(content[place : place + 4], "little") & 0x7FFFFFFF
    block.write_bytes(content[: starts[-min(count, len(starts))]])
