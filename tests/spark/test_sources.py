"""The data sources by themselves, as anybody may use them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import nats
import nkeys
import pytest
from pyspark.errors import PySparkException

from consumer_sdk.wire.subjects import Subjects
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from nats.aio.client import Client as NatsClient
    from pyspark.sql import DataFrame, SparkSession

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

pytestmark = pytest.mark.timeout(600)

EVENTS = 4 + 30 + 2 + 1


@pytest.fixture
def options(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
) -> dict[str, str]:
    """A stream with some transactions on two tables, one of them large."""
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text, at timestamptz)")
    database.execute("CREATE TABLE other (id int PRIMARY KEY)")
    database.publish("users", "other")
    bridge = bridge_process("--snapshot-chunk-rows", "10")
    for number in range(4):
        database.execute("INSERT INTO users VALUES (%s, 'n', '2020-01-01 00:00+00')", [number])
    database.execute("INSERT INTO users SELECT n, 'bulk' FROM generate_series(100, 129) n")
    database.execute("INSERT INTO other VALUES (1); UPDATE users SET name = 'x' WHERE id = 1")
    database.execute("DELETE FROM users WHERE id = 2")
    wait_until(lambda: bridge.status()["cdc_events_published"] >= EVENTS)
    return {"servers": nats_server.url, "prefix": prefix}


def rows_of(frame: DataFrame) -> list[Any]:
    return sorted(frame.collect(), key=lambda row: row["stream_seq"])


def test_events_are_read_as_an_envelope(spark: SparkSession, options: dict[str, str]) -> None:
    frame = spark.read.format("nats_cdc").options(**options).load()
    rows = [row for row in rows_of(frame) if row["operation"] != "SCHEMA"]
    assert len(rows) == EVENTS
    assert [row["operation"] for row in rows[-3:]] == ["INSERT", "UPDATE", "DELETE"]
    update = rows[-2]
    assert (update["table"], json.loads(update["data"])["name"]) == ("users", "x")
    assert rows[-1]["last"]
    one = spark.read.format("nats_cdc").options(**options, tables="other").load()
    assert [row["table"] for row in one.where("operation = 'INSERT'").collect()] == ["other"]


def test_events_are_read_with_the_columns_of_a_table(
    spark: SparkSession, options: dict[str, str]
) -> None:
    frame = spark.read.format("nats_cdc").options(**options, form="typed", tables="users").load()
    assert dict(frame.dtypes)["at"] == "timestamp"
    first = frame.orderBy("_stream_seq").first()
    assert first is not None
    assert (first["_operation"], first["id"], first["name"]) == ("INSERT", 0, "n")
    assert frame.where("name = 'bulk'").count() == 30


def test_a_snapshot_is_read_in_parallel_parts(
    spark: SparkSession,
    options: dict[str, str],
    database: Database,
) -> None:
    source = spark.read.format("nats_snapshot").options(**options, table="users")
    frame = source.option("partitions", "3").load()
    assert frame.rdd.getNumPartitions() == 3
    assert [field.dataType.simpleString() for field in frame.schema] == [
        "int",
        "string",
        "timestamp",
    ]
    names = {row["id"]: row["name"] for row in frame.collect()}
    assert names == dict(database.execute("SELECT id, name FROM users"))


def batches_of(
    spark: SparkSession,
    options: dict[str, str],
    checkpoint: Path,
    progress: list[Any] | None = None,
    **more: str,
) -> list[list[Any]]:
    """The batches of a streaming query that takes all there is, and what it reports of each."""
    batches: list[list[Any]] = []

    def take(frame: DataFrame, _: int) -> None:
        batches.append(rows_of(frame))

    source = spark.readStream.format("nats_cdc").options(**{**options, **more}).load()
    query = (
        source.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    if progress is not None:
        progress.extend(query.recentProgress)
    return batches


def test_batches_hold_whole_transactions_and_go_on_from_a_checkpoint(
    spark: SparkSession, options: dict[str, str], database: Database, tmp_path: Path
) -> None:
    progress: list[Any] = []
    found = batches_of(spark, options, tmp_path / "c", progress, rowsPerBatch="10")
    # Notices of columns are of no transaction: they tell where a version was found.
    changes = [[row for row in batch if row["operation"] != "SCHEMA"] for batch in found]
    batches = [batch for batch in changes if batch]
    assert len(batches) > 2
    assert sum(map(len, batches)) == EVENTS
    for batch in batches:
        assert batch[-1]["last"]
    transactions = [{row["commit_lsn"] for row in batch} for batch in batches]
    assert sum(map(len, transactions)) == len(set().union(*transactions))
    assert max(len(batch) for batch in batches) >= 30
    lags = [_lag(report["sources"][0]) for report in progress if report["numInputRows"]]
    assert lags == sorted(lags, reverse=True)
    assert lags[0] > 30 > lags[-1]
    database.execute("INSERT INTO users VALUES (1000), (1001)")
    more: list[Any] = []

    def arrived() -> bool:
        more.extend(row for batch in batches_of(spark, options, tmp_path / "c") for row in batch)
        return bool(more)

    wait_until(arrived, 60)
    assert [json.loads(row["data"])["id"] for row in more] == [1000, 1001]


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_table_published_later_is_read_too(
    spark: SparkSession, options: dict[str, str], database: Database, tmp_path: Path, start: str
) -> None:
    found: list[tuple[str, str]] = []

    def take(frame: DataFrame, _: int) -> None:
        found.extend((row["table"], row["operation"]) for row in rows_of(frame))

    source = spark.readStream.format("nats_cdc").options(**options, startingPosition=start).load()
    query = (
        source.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        wait_until(lambda: query.lastProgress is not None, 60)
        database.execute("INSERT INTO other VALUES (2)")
        wait_until(lambda: ("other", "INSERT") in found, 60)
        database.execute("CREATE TABLE later (id int PRIMARY KEY)")
        database.execute("ALTER PUBLICATION pub ADD TABLE later")
        database.execute("INSERT INTO later VALUES (1)")
        database.execute("DELETE FROM other")
        wait_until(lambda: ("other", "DELETE") in found, 60)
        assert ("later", "INSERT") in found
    finally:
        query.stop()


def _lag(source: Any) -> int:
    """How many messages are stored behind those that a batch has taken."""
    reached, latest = json.loads(source["endOffset"]), json.loads(source["latestOffset"])
    assert reached["created"] == latest["created"] > 0
    ((name, sequence),) = reached["sequences"].items()
    return int(latest["sequences"][name]) - int(sequence)


def test_a_trimmed_stream_stops_the_query_unless_loss_is_accepted(
    spark: SparkSession,
    options: dict[str, str],
    database: Database,
    nats_server: NatsServer,
    tmp_path: Path,
) -> None:
    batches_of(spark, options, tmp_path / "c")

    def last_sequence() -> int:
        return _on_nats(nats_server, lambda client: _stream_state(client, options)).last_seq

    def purge() -> None:
        stream = Subjects(options["prefix"]).cdc_stream
        _on_nats(nats_server, lambda client: client.jsm().purge_stream(stream))

    for number, then in ((2000, purge), (2001, None)):
        before = last_sequence()
        database.execute("INSERT INTO users VALUES (%s)", [number])
        wait_until(lambda before=before: last_sequence() > before)
        if then is not None:
            then()
    with pytest.raises(PySparkException, match="it was trimmed or purged"):
        batches_of(spark, options, tmp_path / "c")
    early = spark.read.format("nats_cdc").options(**options, startingPosition="1").load()
    with pytest.raises(PySparkException, match="it was trimmed or purged"):
        early.collect()
    batches = batches_of(spark, options, tmp_path / "c", failOnDataLoss="false")
    inserted = [row for batch in batches for row in batch if row["operation"] == "INSERT"]
    assert [json.loads(row["data"])["id"] for row in inserted] == [2001]


def _on_nats(server: NatsServer, action: Callable[[NatsClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        client = await nats.connect(server.url)
        try:
            return await action(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def _stream_state(client: NatsClient, options: dict[str, str]) -> Any:
    return (await client.jsm().stream_info(Subjects(options["prefix"]).cdc_stream)).state


def test_executors_are_let_in_by_a_key_file(
    spark: SparkSession,
    database: Database,
    own_nats: Callable[..., NatsServer],
    bridge_process: Callable[..., BridgeProcess],
    prefix: str,
    tmp_path: Path,
) -> None:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    key = tmp_path / "user.nk"
    key.write_text(seed.decode() + "\n")
    server = own_nats(config=f"authorization {{ users = [ {{ nkey: {public} }} ] }}")
    database.execute("CREATE TABLE users (id int PRIMARY KEY); INSERT INTO users VALUES (7)")
    database.publish("users")
    bridge_process(nats_url=server.url, environment={"NATS_NKEY": str(key)})
    source = spark.read.format("nats_snapshot").option("table", "users").option("prefix", prefix)
    with_key = source.option("servers", server.url).option("nkey", str(key)).load()
    assert [row["id"] for row in with_key.collect()] == [7]
    with pytest.raises(PySparkException, match=r"(?i)authorization"):
        spark.read.format("nats_snapshot").options(
            table="users", prefix=prefix, servers=server.url
        ).load()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"tables": "nothing"}, "table nothing is not published"),
        ({"startingPosition": "100000"}, "gap in the change stream: the stream ends before it"),
        ({"streamCreated": "5"}, "gap in the change stream: the stream was recreated"),
        ({"form": "odd"}, "option form is 'odd'"),
    ],
)
def test_what_cannot_be_read_is_named(
    spark: SparkSession, options: dict[str, str], more: dict[str, str], complaint: str
) -> None:
    with pytest.raises(PySparkException, match=complaint):
        spark.read.format("nats_cdc").options(**options, **more).load().collect()
