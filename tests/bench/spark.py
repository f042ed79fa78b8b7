"""Spark: bootstrap, apply and steady state, as ratios to what Spark itself does with the rows."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import psycopg

from bridge.embedded import free_port
from consumer_sdk.errors import UnknownTable
from consumer_sdk.transport.settings import NatsSettings
from spark_consumer.changes.staging import DecodingPlan, stage_changes
from spark_consumer.job.job import JobSettings, SparkJob
from spark_consumer.job.table_setup import TableSetup
from spark_consumer.job.table_writer import TableWriter
from spark_consumer.lake.embedded import EmbeddedDeltaLake
from spark_consumer.lake.records import Manifest, SchemaArchive
from spark_consumer.lake.table_definition import TableOptions
from spark_consumer.runtime.nats_thread import NatsThread
from spark_consumer.runtime.session import open_session
from spark_consumer.source.cdc_source import CdcSource
from tests.bench.rig import fresh_name
from tests.fixtures.bridge_process import BridgeProcess, clean_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.job.table_writer import KeptTable
    from spark_consumer.lake.records import ManifestEntry
    from tests.bench.rig import Rig

ROWS = 2_000_000
EVENTS = 1_000_000
KEYS = 700_000
STEADY_RATE = 2_000
STEADY_SECONDS = 40
TABLE = "accounts"

_COLUMNS = "id bigint PRIMARY KEY, name text, email text, balance numeric(12,2), active boolean"
_FILL = (
    "SELECT g, 'user ' || g, 'user' || g || '@example.com', (g % 100000) / 100.0, g % 3 = 0,"
    " now() - g * interval '1 second' FROM generate_series(1, {rows}) g"
)


def measure(rig: Rig, repeats: int, rows: int = ROWS, events: int = EVENTS) -> list[dict[str, Any]]:
    """One row for each of the three goals, and one for decoding."""
    spark = open_session("local[*]", "bench", {"spark.ui.enabled": "false"})
    spark.dataSource.register(CdcSource)
    try:
        with _published(rig, rows) as place:
            results = [_bootstrap(spark, place, max(1, repeats // 2), rows)]
            results += _apply(spark, place, max(1, repeats // 2), rows, events)
            results.append(_steady(spark, place, rows))
    finally:
        spark.stop()
    return results


class _Place:
    """One published table, its bridge, and a lake."""

    def __init__(self, dsn: str, nats: NatsSettings, directory: Path) -> None:
        self.dsn = dsn
        self.nats = nats
        self.directory = directory
        self.lake = str(directory / "lake")

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]


@contextmanager
def _published(rig: Rig, rows: int) -> Iterator[_Place]:
    name = fresh_name("bench")
    rig.postgres.create_database(name)
    directory = rig.directory / name
    directory.mkdir()
    nats = NatsSettings.resolve(rig.nats.url, prefix=name, environment={})
    place = _Place(rig.postgres.dsn(name), nats, directory)
    place.execute(f"CREATE TABLE {TABLE} ({_COLUMNS}, created timestamptz)")
    place.execute(f"INSERT INTO {TABLE} {_FILL.format(rows=rows)}")
    place.execute(f"VACUUM ANALYZE {TABLE}")
    place.execute(f"CREATE PUBLICATION pub FOR TABLE {TABLE}")
    port = free_port()
    arguments = ["--slot", name, "--pub", "pub", "--port", str(port), "--prefix", name]
    environment = clean_environment(DATABASE_URL=place.dsn, NATS_URL=rig.nats.url)
    bridge = BridgeProcess(arguments, environment, port, directory / "bridge.log")
    try:
        bridge.wait_ready(60)
        yield place
    finally:
        bridge.kill()
        rig.postgres.drop_database(name)


@contextmanager
def _kept(spark: SparkSession, place: _Place) -> Iterator[tuple[KeptTable, NatsThread]]:
    """The table in the lake, bootstrapped if it is not there."""
    with NatsThread(place.nats) as nats:
        setup = TableSetup(
            spark,
            nats,
            EmbeddedDeltaLake(place.lake),
            SchemaArchive(place.lake),
            TableOptions(),
        )
        yield setup.prepare([_schema(nats)])[0], nats


def _schema(nats: NatsThread) -> TableSchema:
    """The table's schema; a bridge that has just started may still be publishing it."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return nats.run(lambda client: client.schema(TABLE))
        except UnknownTable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _files(place: _Place) -> list[str]:
    table = EmbeddedDeltaLake(place.lake).find("public", TABLE)
    assert table is not None
    return table.log.data_files()


def _timed(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _copy_parquet(spark: SparkSession, source: list[str], target: str) -> float:
    """Spark's own copy of the same rows, Parquet to Parquet."""
    return _timed(lambda: spark.read.parquet(*source).write.mode("overwrite").parquet(target))


def _bootstrap(spark: SparkSession, place: _Place, repeats: int, rows: int) -> dict[str, Any]:
    """From chunks in INIT to a committed table, against Spark copying those rows."""
    copies, loads = [], []
    for attempt in range(repeats + 1):
        shutil.rmtree(place.lake, ignore_errors=True)
        began = time.perf_counter()
        with _kept(spark, place):
            load = time.perf_counter() - began
            copy = _copy_parquet(spark, _files(place), str(place.directory / "copy"))
        # The first attempt takes the snapshot and warms everything up.
        if attempt:
            loads.append(load)
            copies.append(copy)
    return _result("bootstrap from INIT / copy by Spark", median(copies) / median(loads), ">= 0.4",
                   median(loads), median(copies), rows / median(loads))  # fmt: skip


def _apply(
    spark: SparkSession, place: _Place, repeats: int, rows: int, events: int
) -> list[dict[str, Any]]:
    """Decoded events onto the table, against a plain rewrite of it by Spark."""
    keys = min(KEYS, rows, events)
    place.execute(f"UPDATE {TABLE} SET balance = balance + 1 WHERE id <= {keys}")
    place.execute(f"UPDATE {TABLE} SET active = NOT active WHERE id <= {events - keys}")
    staging = str(place.directory / "staging")
    with _kept(spark, place) as (kept, nats):
        _wait_for(nats, kept, events)
        position = kept.position
        messages = (
            spark.read.format("nats_cdc")
            .option("form", "message")
            .option("servers", place.nats.address)
            .option("prefix", place.nats.prefix)
            .option("tables", TABLE)
            .option("startingPosition", json.dumps({position.source: position.stream_seq}))
            .option("partitions", str(2 * (os.cpu_count() or 2)))
            .load()
        )
        plan = DecodingPlan(kept.token, kept.definition, kept.schemas, position, "error")
        began = time.perf_counter()
        staged = stage_changes(messages, [plan], staging)[kept.token]
        decode = time.perf_counter() - began
        assert staged.facts.count == events, staged.facts
        writer = TableWriter(spark, TableOptions())
        rewrites, applies = [], []
        for attempt in range(repeats + 1):
            # Each time onto the same version of the table.
            lake = EmbeddedDeltaLake(str(place.directory / f"lake-{uuid.uuid4().hex}"))
            shutil.copytree(place.lake, lake.directory)
            table = lake.find("public", TABLE)
            assert table is not None
            kept.table, kept.position = table, position
            target = str(place.directory / "copy")
            rewrite = _copy_parquet(spark, table.log.data_files(), target)
            there = position.moved_to(position.stream_seq + events, staged.commit_lsn)
            began = time.perf_counter()
            writer.apply(kept, staged, there, time.time_ns() // 1000)
            if attempt:
                applies.append(time.perf_counter() - began)
                rewrites.append(rewrite)
            shutil.rmtree(lake.directory)
    shutil.rmtree(staging, ignore_errors=True)
    apply, rewrite = median(applies), median(rewrites)
    return [
        _result("apply 1 M events / plain rewrite", apply / rewrite, "<= 2", apply, rewrite,
                events / apply),
        _result("read and decode 1 M events", decode / rewrite, "reported", decode, rewrite,
                events / decode),
    ]  # fmt: skip


def _wait_for(nats: NatsThread, kept: KeptTable, events: int) -> None:
    deadline = time.monotonic() + 300
    wanted = kept.position.stream_seq + events
    while nats.run(lambda client: client.log().bounds()).last < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError("the bridge has not published everything")
        time.sleep(0.2)


def _steady(spark: SparkSession, place: _Place, rows: int) -> dict[str, Any]:
    """A steady rate of updates of random rows with a 2 s trigger: how old the lake gets."""
    nats = NatsSettings.resolve(place.nats.address, prefix=place.nats.prefix, environment={})
    job = SparkJob(spark, JobSettings(nats=nats, tables=(("public", TABLE),), lake=place.lake))
    follower = threading.Thread(target=job.run)
    follower.start()
    manifest = Manifest(place.lake)
    samples: list[tuple[float, int]] = []
    try:
        with psycopg.connect(place.dsn, autocommit=True) as connection:
            # What was published before is no part of it.
            behind = _current_lsn(connection)
            _update(connection, 1)
            while _reached(manifest.latest()) <= behind:
                if not follower.is_alive():
                    raise RuntimeError("the job has ended")
                time.sleep(0.5)
            began = time.time()
            for step in range(STEADY_SECONDS * 10):
                _update(connection, step * 15_485_863 % (rows - STEADY_RATE), STEADY_RATE // 10)
                samples.append((time.time(), _current_lsn(connection)))
                time.sleep(max(0.0, began + (step + 1) / 10 - time.time()))
        ended = time.time()
        time.sleep(4)
    finally:
        job.stop()
        follower.join()
    # Between two commits the lake ages: each is as old as it gets when the next one comes.
    entries = [one for one in manifest.entries() if one.written_at / 1e6 > began]
    lags = []
    for entry, following in pairwise(entries):
        if following.written_at / 1e6 <= ended:
            seen = [at for at, lsn in samples if lsn <= _reached(entry)]
            lags.append(following.written_at / 1e6 - max(seen, default=began))
    worst = max(lags, default=float("inf"))
    rate = len(samples) * (STEADY_RATE // 10) / (ended - began)
    what = f"lag in s at {STEADY_RATE:,} events/s, 2 s trigger"
    return _result(what, worst, "< 10", worst, 2.0, rate)


def _update(connection: psycopg.Connection[Any], first: int, count: int = 1) -> None:
    connection.execute(
        f"UPDATE {TABLE} SET balance = balance + 1 WHERE id > %s AND id <= %s",
        [first, first + count],
    )


def _current_lsn(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])


def _reached(entry: ManifestEntry | None) -> int:
    return max((mark.commit_lsn for mark in entry.sources.values()), default=0) if entry else 0


def _result(
    what: str, ratio: float, goal: str, seconds: float, reference: float, rate: float
) -> dict[str, Any]:
    return {
        "what": what,
        "ratio": round(ratio, 2),
        "goal": goal,
        "seconds": round(seconds, 2),
        "reference": round(reference, 2),
        "events/s": round(rate),
    }
