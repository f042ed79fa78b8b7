"""Snapshots against `COPY … TO STDOUT` to /dev/null of the same columns, in the same run."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgpack
import nats
from nats.js.api import StreamConfig

from bridge.snapshot.coordinator.requests import SnapshotSettings
from bridge.snapshot.coordinator.service import SnapshotService
from bridge.snapshot.messages import ServerAccess
from bridge.source import Source
from bridge.telemetry.stats import BridgeStats
from consumer_sdk.wire import Subjects
from tests.bench.rig import cpu_seconds, fresh_name, peak_rss_mb, tool

if TYPE_CHECKING:
    from nats.aio.client import Client

    from tests.bench.rig import Rig

ROWS = 2_000_000
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("msgpack", {"format": "msgpack"}),
    ("arrow", {"format": "arrow"}),
    ("msgpack zstd", {"format": "msgpack", "zstd": True}),
    ("arrow zstd", {"format": "arrow", "zstd": True}),
    ("json", {"format": "json"}),
)


def measure(rig: Rig, repeats: int, rows: int = ROWS) -> list[dict[str, Any]]:
    """Rows a second from request to meta, as a fraction of COPY's; medians of interleaved runs."""
    table = fresh_name("snapshot")
    rig.execute(
        f"CREATE TABLE {table} (id bigint PRIMARY KEY, name text, email text,"
        " balance numeric(12,2), active boolean, created timestamptz)"
    )
    rig.execute(
        f"INSERT INTO {table} SELECT g, 'user ' || g, 'user' || g || '@example.com',"
        " (g % 100000) / 100.0, g % 3 = 0, now() - g * interval '1 second'"
        f" FROM generate_series(1, {rows}) g"
    )
    rig.execute(f"VACUUM ANALYZE {table}")
    rig.execute(f"CREATE PUBLICATION {table} FOR TABLE {table}")
    try:
        return asyncio.run(_measure(rig, table, rows, max(1, repeats // 2)))
    finally:
        rig.execute(f"DROP PUBLICATION {table}")
        rig.execute(f"DROP TABLE {table}")


async def _measure(rig: Rig, table: str, rows: int, repeats: int) -> list[dict[str, Any]]:
    client = await nats.connect(rig.nats.url)
    subjects = Subjects(fresh_name("bench").replace("_", ""))
    own = await nats.connect(rig.nats.url)
    service = await _service(rig, own, subjects, table)
    # Workers are started and warm when the measuring begins, as in a bridge that is used.
    await _snapshot(client, subjects, table, {"format": "arrow"})
    copies: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name, _ in CASES}
    largest: dict[str, float] = {name: 0.0 for name, _ in CASES}
    worked: dict[str, list[float]] = {name: [] for name, _ in CASES}
    sizes: dict[str, int] = {}
    try:
        for _ in range(repeats):
            for name, options in CASES:
                copies.append(await asyncio.to_thread(_copy, rig, table))
                before = sum(map(cpu_seconds, _worker_pids()))
                taken, peak, sizes[name] = await _snapshot(client, subjects, table, options)
                worked[name].append(sum(map(cpu_seconds, _worker_pids())) - before)
                seconds[name].append(taken)
                largest[name] = max(largest[name], peak)
    finally:
        await service.stop()
        await own.close()
        await _delete(client, subjects)
        await client.close()
    copy = median(copies)
    return [
        {
            "format": name,
            "ratio": copy / median(taken),
            "rows/s": rows / median(taken),
            "COPY rows/s": rows / copy,
            "worker µs a row": 1e6 * median(worked[name]) / rows,
            "worker RSS MB": largest[name],
            "bytes a row": sizes[name] / rows,
        }
        for name, taken in seconds.items()
    ]


class _Schemas:
    """One version for every table, in the place of the bridge's own tables."""

    async def ensure_schema(self, _schema: str, _table: str) -> dict[str, Any]:
        return {"schema_version": 1, "columns": []}


async def _service(rig: Rig, client: Client, subjects: Subjects, table: str) -> SnapshotService:
    manager = client.jsm()
    js = client.jetstream()
    for name, subject in (
        (subjects.cdc_stream, subjects.cdc_all),
        (subjects.init_stream, subjects.init_all),
    ):
        await manager.add_stream(StreamConfig(name=name, subjects=[subject]))
    for bucket in (subjects.schemas_bucket, subjects.bridge_bucket, subjects.dicts_bucket):
        await js.create_key_value(bucket=bucket)
    await js.create_object_store(subjects.objects_bucket)

    service = SnapshotService(
        client,
        Source("bench", 1, table, subjects, as_json=False),
        ServerAccess(rig.postgres.dsn(), {"nats_url": rig.nats.url}),
        SnapshotSettings(interval=0),
        schemas=_Schemas(),  # type: ignore[arg-type]
        stats=BridgeStats(),
    )
    await service.start()
    return service


def _copy(rig: Rig, table: str) -> float:
    """COPY by psql, as fast as PostgreSQL hands it out."""
    began = time.perf_counter()
    subprocess.run(
        [tool(rig, "psql"), "-qc", f"COPY {table} TO STDOUT", rig.postgres.dsn()],
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - began


async def _snapshot(
    client: Client, subjects: Subjects, table: str, options: dict[str, Any]
) -> tuple[float, float, int]:
    """Seconds until the meta, peak memory of a worker, bytes stored."""
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def note(message: Any) -> None:
        if message.subject == subjects.error(table):
            done.set_exception(RuntimeError(str(msgpack.unpackb(message.data)["error"])))
        elif not done.done():
            done.set_result(time.perf_counter())

    watches = [
        await client.subscribe(subject, cb=note)
        for subject in (subjects.meta(table), subjects.error(table))
    ]
    await client.jsm().purge_stream(subjects.init_stream)
    began = time.perf_counter()
    await client.request(
        subjects.snapshot_request(table), msgpack.packb({"fresh": True, **options}), timeout=5
    )
    peak = 0.0
    while not done.done():
        peak = max([peak, *map(peak_rss_mb, _worker_pids())])
        await asyncio.wait({done}, timeout=0.05)
    for watch in watches:
        await watch.unsubscribe()
    state = (await client.jsm().stream_info(subjects.init_stream)).state
    return done.result() - began, peak, state.bytes


def _worker_pids() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"bridge.snapshot.worker.process" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def _delete(client: Client, subjects: Subjects) -> None:
    manager = client.jsm()
    for info in await manager.streams_info():
        name = info.config.name or ""
        if name.removeprefix("KV_").removeprefix("OBJ_").startswith(f"{subjects.prefix}_"):
            await manager.delete_stream(name)
