"""`format("nats_snapshot")`: a table as of its newest snapshot, read in parallel from INIT."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from consumer_sdk.errors import NotAvailable, SnapshotFailed
from consumer_sdk.wire.subjects import format_table_name
from spark_consumer.changes.column_mapping import spark_schema
from spark_consumer.changes.table_shape import shape_of
from spark_consumer.runtime.nats_thread import NatsThread
from spark_consumer.source.options import SnapshotOptions
from spark_consumer.source.snapshot_chunks import ChunkDecoder, read_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from consumer_sdk.client import Client
    from consumer_sdk.snapshot.request import SnapshotProgress
    from consumer_sdk.snapshot.snapshot import SnapshotMeta
    from consumer_sdk.wire.column_types import TableSchema

_ATTEMPTS = 5


async def take_snapshot(
    client: Client,
    table: tuple[str, str],
    *,
    fresh: bool = False,
    progress: Callable[[SnapshotProgress], None] | None = None,
) -> tuple[SnapshotMeta, TableSchema]:
    """A complete snapshot and the schema that its rows have.

    Arrow chunks where the bridge can write them, else whatever it writes.
    """
    chunk_format: str | None = "arrow"
    for _ in range(_ATTEMPTS):
        try:
            snapshot = await client.snapshot(
                table, fresh=fresh, format=chunk_format, progress=progress
            )
        except SnapshotFailed as error:
            if chunk_format is None or "arrow" not in str(error).lower():
                raise
            chunk_format = None
            continue
        schema = await client.schema(table)
        if schema.schema_version == snapshot.meta.schema_version:
            return snapshot.meta, schema
    name = format_table_name(*table)
    raise NotAvailable(f"the columns of {name} keep changing while it is read; try again later")


def split_chunks(count: int, parts: int) -> list[range]:
    """Chunk numbers in contiguous runs of about the same length."""
    parts = max(1, min(parts, count))
    cuts = [count * index // parts for index in range(parts + 1)]
    return [range(low, high) for low, high in pairwise(cuts) if low < high]


@dataclass
class ChunkRange(InputPartition):
    """Some chunks of one snapshot."""

    meta: SnapshotMeta
    schema: TableSchema
    first: int
    end: int


class SnapshotSource(DataSource):
    """One table; see `SnapshotOptions` for the options."""

    @classmethod
    def name(cls) -> str:
        return "nats_snapshot"

    def schema(self) -> StructType:
        options = SnapshotOptions.parse(self.options)
        with NatsThread(options.settings) as nats:
            schema = nats.run(lambda client: client.schema(options.table))
        return spark_schema(shape_of(schema, options.policy).columns)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return SnapshotReader(SnapshotOptions.parse(self.options))


class SnapshotReader(DataSourceReader):
    """Plans ranges of chunks on the driver, reads them in executors."""

    def __init__(self, options: SnapshotOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        with NatsThread(options.settings) as nats:
            meta, schema = nats.run(
                lambda client: take_snapshot(client, options.table, fresh=options.fresh)
            )
        return [
            ChunkRange(meta, schema, chunks.start, chunks.stop)
            for chunks in split_chunks(meta.batch_count, options.partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChunkRange)
        shape = shape_of(partition.schema, self.options.policy)
        decoder = ChunkDecoder(shape, partition.schema, self.options.policy)
        numbers = range(partition.first, partition.end)
        for _, _, batch in read_chunks(self.options.settings, partition.meta, numbers, decoder):
            yield batch
