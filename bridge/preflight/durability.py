"""What an acknowledgement of JetStream is worth: replicas, and when the server writes to disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp

from bridge.preflight.findings import Finding, ok, warning
from bridge.telemetry.wal_warnings import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

ALWAYS = "jetstream { sync_interval: always }"
MONITOR_TIMEOUT_SECONDS = 5


async def read_monitor(url: str) -> dict[str, Any]:
    """`/varz` of the server's monitoring port; OSError or ValueError if it is not one."""
    timeout = aiohttp.ClientTimeout(total=MONITOR_TIMEOUT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/varz") as answer,
        ):
            document: dict[str, Any] = await answer.json()
            return document
    except (TimeoutError, aiohttp.ClientError) as error:
        raise OSError(str(error) or type(error).__name__) from error


def check_durability(replicas: int, varz: dict[str, Any] | None) -> Iterator[Finding]:
    """Say plainly what survives what."""
    if varz is None:
        if replicas >= 3:
            yield ok(
                "nats",
                "durability",
                f"{replicas} replicas: acknowledged changes survive the loss of one server",
            )
            return
        yield warning(
            "nats",
            "durability",
            "sync_interval cannot be seen through a client connection; the default is 2 minutes",
            "with one replica, acknowledged changes survive a killed server but not a power cut: "
            "up to 2 minutes of them can be lost, which the bridge then announces as a gap",
            f"in nats-server.conf: {ALWAYS}\n"
            "# and let this check see it: set BRIDGE_NATS_MONITOR=http://host:8222",
        )
        return
    config = (varz.get("jetstream") or {}).get("config") or {}
    interval = config.get("sync_interval", 0) / 1e9
    if config.get("sync_always"):
        copies = f"{replicas} replicas" if replicas > 1 else "one replica"
        yield ok("nats", "durability", f"each acknowledged change is on disk, in {copies}")
    elif replicas >= 3:
        yield ok(
            "nats",
            "durability",
            f"{replicas} replicas, written to disk every {format_duration(interval)}: "
            "acknowledged changes survive the loss of one server, not a power cut of all",
        )
    else:
        yield warning(
            "nats",
            "durability",
            f"one replica, written to disk every {format_duration(interval)}",
            "acknowledged changes survive a killed server but not a power cut: up to "
            f"{format_duration(interval)} of them can be lost, which the bridge announces as a gap",
            f"in nats-server.conf: {ALWAYS}",
        )
