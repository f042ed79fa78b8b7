"""Many tables and partitions: the work grows with their number and no faster."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nats

from bridge.embedded import NatsServer
from bridge.jetstream.buckets import ensure_bucket
from bridge.jetstream.readback import RecordReader
from bridge.jetstream.record import load_progress
from bridge.postgres.catalog import Catalog
from bridge.postgres.coverage import Covered
from bridge.postgres.publication import PublicationReader, read_publication
from bridge.preflight.findings import Finding
from bridge.preflight.postgres import connect_for_check
from bridge.schemas.coverage_watch import CoverageStore, SavedCoverage
from bridge.source import Source
from consumer_sdk.wire import Subjects
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from consumer_sdk import Client
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.postgres import Database
    from tests.fixtures.tcp_proxy import TcpProxy

TABLES, PARTITIONS = 600, 400
TICKS = os.sysconf("SC_CLK_TCK")


def create_many(database: Database) -> None:
    tables = [
        f"CREATE TABLE t{n} (id bigint PRIMARY KEY, name text DEFAULT 'n{n}', at timestamptz)"
        for n in range(TABLES)
    ]
    parts = [
        f"CREATE TABLE root_{n} PARTITION OF root FOR VALUES FROM ({n}) TO ({n + 1})"
        for n in range(PARTITIONS)
    ]
    root = "CREATE TABLE root (id bigint PRIMARY KEY, name text) PARTITION BY RANGE (id)"
    database.execute(";".join([*tables, root]))
    database.execute(";".join(parts))
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    database.execute(
        "CREATE PUBLICATION by_root FOR ALL TABLES WITH (publish_via_partition_root = true)"
    )


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@both_versions
async def test_a_publication_of_many_tables_and_partitions_is_read_at_once(
    database: Database,
) -> None:
    create_many(database)
    connection = await connect_for_check(database.dsn)
    assert not isinstance(connection, Finding)
    async with connection:
        before = cpu_seconds(connection.info.backend_pid)
        for name, count in (("pub", TABLES + PARTITIONS), ("by_root", TABLES + 1)):
            found = await read_publication(connection, name, connection.info.server_version)
            assert found is not None
            assert len(found.tables) == count
            assert sum(len(table.identities) for table in found.tables) == TABLES + PARTITIONS
            (leaves,) = {len(t.identities) for t in found.tables if t.table == "root"} or {0}
            assert leaves == (PARTITIONS if name == "by_root" else 0)
        assert cpu_seconds(connection.info.backend_pid) - before < 2


async def test_schemas_of_many_tables_take_few_queries_and_ready_waits_for_all(
    database: Database,
    cdc: CdcLog,
    bridge_process: Callable[..., BridgeProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_many(database)
    bridge = bridge_process()
    bucket = await cdc.client.jetstream().key_value(cdc.subjects.schemas_bucket)
    assert len(await bucket.keys()) == TABLES + PARTITIONS
    schema = await cdc.schema("t7")
    assert schema is not None
    assert [column["column_default"] for column in schema["columns"]] == [None, "'n7'::text", None]
    assert schema["primary_key"] == ["id"]
    bridge.terminate()
    assert bridge.wait() == 0
    asked: list[str] = []
    rows = Catalog.rows

    async def counted(self: Catalog, query: str, *rest: Any) -> Any:
        asked.append(query)
        return await rows(self, query, *rest)

    monkeypatch.setattr(Catalog, "rows", counted)
    catalog = Catalog(database.dsn)
    try:
        with database.connect() as connection:
            version = connection.info.server_version
        published = await PublicationReader(catalog, "pub", version).published()
        found = await catalog.tables_by_id({one.relation_id: "d" for one in published})
    finally:
        await catalog.close()
    assert len(found) == len(published) == TABLES + PARTITIONS
    assert len(asked) == 3


async def test_a_coverage_beyond_the_largest_message_is_kept_in_parts() -> None:
    with NatsServer(config="max_payload: 64KB\n") as server:
        client = await nats.connect(server.url)
        bucket = await ensure_bucket(client.jetstream(), "bridge", history=1, replicas=1)
        source = Source("shop", 7, "pub", Subjects(""), as_json=False)
        store = CoverageStore(client, bucket, source)
        coverage = {
            f"t{n}": Covered(
                "public", f"t{n}", 1, "iudt", n, shapes={str(hash(("s", n))): [hash(n / 7), n, n]}
            )
            for n in range(8000)
        }
        await store.save(SavedCoverage(coverage))
        assert await store.load() == SavedCoverage(coverage)
        parts = [key for key in await bucket.keys() if key != "coverage.shop"]
        assert len(parts) > 1
        coverage["t1"].relation_id = 5
        await store.save(SavedCoverage(coverage))
        assert await CoverageStore(client, bucket, source).load() == SavedCoverage(coverage)
        assert not set(parts) & set(await bucket.keys())
        small = {"t1": coverage["t1"]}
        await store.save(SavedCoverage(small))
        assert await store.load() == SavedCoverage(small)
        assert await bucket.keys() == ["coverage.shop"]
        await client.close()


@both_versions
async def test_the_first_start_waits_for_open_transactions_and_names_them(
    database: Database, cdc: CdcLog, bridge_process: Callable[..., BridgeProcess]
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    with database.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO t VALUES (1)")
        pid = writer.info.backend_pid
        bridge = bridge_process(wait=False)
        bridge.wait_logged("slot creation waits", 60)
        assert f"pid {pid} " in bridge.log_text()

        def age() -> int:
            said = bridge.status()["waiting_for"] or ""
            found = re.search(rf"pid {pid} \(.*open for (\d+) s\)", said)
            return int(found[1]) if found else 0

        # An answer of the catalog may take 10 s, the checks of a start 15 s.
        wait_until(lambda: age() > 17, 60)
        answer = bridge.http("/ready")
        assert answer.status == 503
        assert answer.json()["waiting_for"] == "transactions that run, to create the slot"
        assert bridge.log_text().count("creating slot") == 1
    bridge.wait_ready()
    database.execute("INSERT INTO t VALUES (2)")

    async def arrived() -> list[Any]:
        return [event.data["id"] for event in await cdc.changes("t")]

    assert await eventually(arrived) == [2]
    assert bridge.status()["waiting_for"] is None


async def test_a_stop_while_the_slot_waits_leaves_no_slot(
    database: Database, bridge_process: Callable[..., BridgeProcess]
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    with database.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO t VALUES (1)")
        bridge = bridge_process(wait=False)
        bridge.wait_logged("slot creation waits", 60)
        bridge.terminate()
        assert bridge.wait() == 0

        def slots() -> int:
            return database.value(
                "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
            )

        wait_until(lambda: slots() == 0)


async def test_a_start_reads_the_end_of_the_stream_and_not_every_subject(
    database: Database,
    cdc: CdcLog,
    bridge_process: Callable[..., BridgeProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    bridge = bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    database.execute(
        "SELECT pg_logical_emit_message(true, 'prefix ' || n, 'x') FROM generate_series(1, 500) n"
    )
    source = f"slot_{database.name}"
    await eventually(lambda: bridge.status()["transactions_published"] >= 2)
    bridge.terminate()
    assert bridge.wait() == 0
    fence = await cdc.client.jetstream().publish(cdc.subjects.fence(source), b"")
    bucket = await cdc.client.jetstream().key_value(cdc.subjects.bridge_bucket)
    kept = await load_progress(bucket, source)
    taken: list[str] = []
    take = RecordReader._take

    async def counted(self: RecordReader, record: Any, subject: str, *rest: Any) -> None:
        taken.append(subject)
        await take(self, record, subject, *rest)

    monkeypatch.setattr(RecordReader, "_take", counted)
    reader = RecordReader(cdc.client, cdc.subjects, source, lambda _: False, None)
    record = await reader.read(fence.seq, kept)
    assert len(taken) < 20
    assert f"{cdc.subjects.cdc}.t.schema" in taken
    monkeypatch.setattr(RecordReader, "_has_short_tail", _no)
    whole = await reader.read(fence.seq, kept)
    assert len(taken) > 500
    for name in ("epoch", "commit_lsn", "next_seq", "next_ordinal", "recorded_lsn", "schemas"):
        assert getattr(record, name) == getattr(whole, name)
    assert record.progress == whole.progress


async def _no(*_: object) -> bool:
    return False


async def test_the_processing_time_begins_with_the_receipt_of_the_wal(
    database: Database,
    nats_server: NatsServer,
    tcp_proxy: Callable[[int], TcpProxy],
    bridge_process: Callable[..., BridgeProcess],
) -> None:
    """Changes that wait in the ring, while NATS acknowledges nothing, have been received."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    proxy = tcp_proxy(nats_server.port)
    bridge = bridge_process(nats_url=proxy.through(nats_server.bridge_url))
    database.execute("INSERT INTO t VALUES (0)")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)
    proxy.deaf()
    for number in (1, 2, 3):
        before = bridge.status()["wal_messages_received"]
        database.execute("INSERT INTO t VALUES (%s)", [number])
        wait_until(lambda before=before: bridge.status()["wal_messages_received"] >= before + 3)
    started = time.monotonic()
    wait_until(lambda: time.monotonic() - started > 2)
    proxy.hear()
    wait_until(lambda: bridge.status()["cdc_events_published"] == 4)
    wait_until(lambda: bridge.status()["last_processing_time_us"] >= 2_000_000)


async def test_snapshots_of_hundreds_of_tables_asked_for_at_once_finish(
    database: Database, client: Client, bridge_process: Callable[..., BridgeProcess]
) -> None:
    count = 500
    rows = "SELECT g AS id FROM generate_series(1, 10) g"
    database.execute(";".join(f"CREATE TABLE t{n} AS {rows}" for n in range(count)))
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    bridge = bridge_process()
    async with asyncio.timeout(100):
        found = await asyncio.gather(*(client.snapshot(f"t{n}") for n in range(count)))
    assert {snapshot.meta.row_count for snapshot in found} == {10}
    assert bridge.status()["reconnect_count"] == 0
