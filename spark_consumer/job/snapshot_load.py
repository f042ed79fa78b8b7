"""Loads a table from a snapshot: executors write the files, the driver commits them."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_consumer.lake.lake_table import LakePosition
from spark_consumer.lake.parquet_files import DataFile, ParquetWriter
from spark_consumer.lake.table_definition import DELETED, SYNCED_AT, define, lake_columns
from spark_consumer.source.snapshot_source import ChunkDecoder, read_chunks, split_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from consumer_sdk.snapshot.snapshot import SnapshotMeta
    from consumer_sdk.transport.settings import NatsSettings
    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.lake.table_definition import TableOptions


@dataclass(frozen=True)
class LoadPlan:
    """All that an executor needs to write its part of a snapshot; `chunks` has those of each part.

    Files go to `directory` below the table's root; `_synced_at` takes `loaded_at_us`.
    """

    nats: NatsSettings
    meta: SnapshotMeta
    schema: TableSchema
    options: TableOptions
    loaded_at_us: int
    root: str
    directory: str
    chunks: tuple[range, ...]


def load_snapshot(
    spark: SparkSession,
    nats: NatsSettings,
    meta: SnapshotMeta,
    schema: TableSchema,
    options: TableOptions,
    root: str,
) -> list[DataFile]:
    """Write all rows of a snapshot below the table's root and return the files.

    Every attempt uses a new directory, so that files of a failed one are never committed. The load
    is verified: every chunk once, the number of rows, the checksum.
    """
    parts = 4 * max(1, spark.sparkContext.defaultParallelism)
    chunks = tuple(split_chunks(meta.batch_count, parts))
    if not chunks:
        return []
    directory = f"load-{meta.snapshot_id}-{uuid.uuid4().hex[:8]}"
    now_us = time.time_ns() // 1000
    plan = LoadPlan(nats, meta, schema, options, now_us, root, directory, chunks)
    reports = (
        spark.range(0, len(chunks), 1, len(chunks))
        .mapInArrow(_loader(plan), "report STRING")
        .collect()
    )
    files: list[DataFile] = []
    digests: dict[int, str] = {}
    for row in reports:
        report = json.loads(row["report"])
        files.extend(DataFile(**file) for file in report["files"])
        digests.update({int(number): digest for number, digest in report["digests"].items()})
    meta.verify(digests, sum(file.rows for file in files))
    return files


def _loader(
    plan: LoadPlan,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def load(parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        policy = plan.options.unrepresentable
        definition = define(plan.schema, policy)
        columns = lake_columns(definition, plan.options)
        writer = ParquetWriter(plan.root, plan.directory, columns)
        digests: dict[int, str] = {}
        try:
            for batch in parts:
                for part in batch.column(0).to_pylist():
                    decoder = ChunkDecoder(definition, plan.schema, policy, definition.key)
                    found = read_chunks(plan.nats, plan.meta, plan.chunks[part], decoder)
                    for number, digest, rows in found:
                        digests[number] = digest
                        writer.write(_with_own_columns(rows, columns, plan.loaded_at_us))
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        report = {"files": [vars(file) for file in writer.files], "digests": digests}
        yield pa.RecordBatch.from_pydict({"report": pa.array([json.dumps(report)])})

    return load


def _with_own_columns(
    rows: pa.RecordBatch, columns: pa.Schema, loaded_at_us: int
) -> pa.RecordBatch:
    own: dict[str, Any] = {DELETED: False, SYNCED_AT: loaded_at_us}
    extra = [
        pa.array([own[field.name]] * rows.num_rows, field.type)
        for field in list(columns)[rows.num_columns :]
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *extra], schema=columns)


def position_of(meta: SnapshotMeta, schema: TableSchema) -> LakePosition:
    """The position of a table that holds exactly the snapshot.

    An event is in the snapshot if and only if its commit LSN is below that of the snapshot.
    """
    return LakePosition(
        source=meta.source,
        epoch=meta.epoch,
        stream_created=meta.stream_created,
        stream_seq=meta.cdc_seq - 1,
        commit_lsn=meta.snapshot_lsn - 1,
        complete_at=meta.snapshot_lsn,
        schema_version=schema.schema_version,
    )
