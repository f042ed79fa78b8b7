"""`format("nats_snapshot")`: a table as of its newest snapshot, read in parallel from INIT."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from consumer_sdk.errors import CorruptData, NotAvailable
from consumer_sdk.snapshot.chunks import ChunkRows
from consumer_sdk.snapshot.request import RequestRefused, SnapshotAbandoned
from consumer_sdk.snapshot.snapshot import Snapshot
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.subjects import format_table_name
from spark_consumer.lake.column_mapping import spark_schema
from spark_consumer.lake.column_values import RowWriter, wire_text
from spark_consumer.lake.table_definition import TEXT_SUFFIX, define
from spark_consumer.runtime.nats_thread import NatsThread
from spark_consumer.source.options import SnapshotOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from pyspark.sql.types import StructType

    from consumer_sdk.client import Client
    from consumer_sdk.snapshot.chunks import ArrowChunk, StoredChunk
    from consumer_sdk.snapshot.request import SnapshotProgress
    from consumer_sdk.snapshot.snapshot import SnapshotMeta
    from consumer_sdk.transport.settings import NatsSettings
    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.lake.column_values import Unrepresentable
    from spark_consumer.lake.table_definition import TableDefinition


_ATTEMPTS = 5


async def take_snapshot(
    client: Client,
    table: tuple[str, str],
    *,
    fresh: bool = False,
    progress: Callable[[SnapshotProgress], None] | None = None,
) -> tuple[SnapshotMeta, TableSchema]:
    """Request a snapshot, wait for it, and return its meta and the schema of its rows.

    Chunks are requested as Arrow; if the bridge refuses the request, in its default format, because
    it may lack pyarrow.
    """
    chunk_format: str | None = "arrow"
    for attempt in range(_ATTEMPTS):
        try:
            snapshot = await client.snapshot(
                table,
                fresh=fresh,
                format=chunk_format,
                # A load is one commit, which shows one state of the table.
                pieces=False,
                progress=progress,
            )
        except RequestRefused:
            if chunk_format is None:
                raise
            chunk_format = None
            continue
        except SnapshotAbandoned:
            if attempt + 1 == _ATTEMPTS:
                raise
            continue
        schema = await client.schema(table)
        if schema.schema_version == snapshot.meta.schema_version:
            return snapshot.meta, schema
    name = format_table_name(*table)
    raise NotAvailable(f"the columns of {name} keep changing while it is read; try again later")


def split_chunks(count: int, parts: int) -> list[range]:
    """Contiguous ranges of chunk numbers, of about equal length."""
    parts = max(1, min(parts, count))
    cuts = [count * index // parts for index in range(parts + 1)]
    return [range(low, high) for low, high in pairwise(cuts) if low < high]


@dataclass
class ChunkRange(InputPartition):
    """The chunks [first, end) of one snapshot."""

    meta: SnapshotMeta
    schema: TableSchema
    first: int
    end: int


class SnapshotSource(DataSource):
    """A snapshot of one table; see `SnapshotOptions` for the options."""

    @classmethod
    def name(cls) -> str:
        return "nats_snapshot"

    def schema(self) -> StructType:
        options = SnapshotOptions.parse(self.options)
        with NatsThread(options.settings) as nats:
            schema = nats.run(lambda client: client.schema(options.table))
        return spark_schema(define(schema, options.policy).columns)

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
        definition = define(partition.schema, self.options.policy)
        decoder = ChunkDecoder(definition, partition.schema, self.options.policy)
        numbers = range(partition.first, partition.end)
        for _, _, batch in read_chunks(self.options.settings, partition.meta, numbers, decoder):
            yield batch


class ChunkDecoder:
    """Converts the chunks of one snapshot to batches of the lake's columns.

    `key` names the columns that identify rows in the lake; a reader that needs none gives ().
    """

    def __init__(
        self,
        definition: TableDefinition,
        schema: TableSchema,
        policy: Unrepresentable,
        key: Container[str] = (),
    ) -> None:
        self._definition = definition
        self._writer = RowWriter(definition, schema, policy, key)

    def decode(self, chunk: ChunkRows | ArrowChunk) -> pa.RecordBatch:
        """Convert a chunk of either format."""
        if isinstance(chunk, ChunkRows):
            return self.from_rows(chunk)
        try:
            return self.from_arrow(chunk.batch, chunk.odd)
        except (pa.ArrowException, *MISFITS) as error:
            # The text of the error may quote a value.
            raise CorruptData(
                f"chunk {chunk.number}: damaged Arrow chunk: {type(error).__name__}"
            ) from None

    def from_rows(self, chunk: ChunkRows) -> pa.RecordBatch:
        """Convert a chunk of rows."""
        wanted = self._writer.writers.keys()
        if not all(wanted <= row.keys() for row in chunk):
            raise CorruptData(f"a chunk of table {self._definition.name} does not have its columns")
        try:
            for index, row in enumerate(chunk):
                self._writer.write_json_as_text(row, chunk.raw(index))
        except MISFITS as error:
            raise CorruptData(
                f"a chunk of table {self._definition.name} is damaged: {type(error).__name__}"
            ) from None
        names = self._definition.columns.names
        arrays = self._writer.arrays(chunk, names, _describe)
        return self._batch(arrays, len(chunk))

    def from_arrow(self, batch: pa.RecordBatch, odd: dict[str, dict[str, Any]]) -> pa.RecordBatch:
        """Convert an Arrow chunk; `odd` has the values that its columns cannot represent."""
        arrays: dict[str, pa.Array] = {}

        for name, writer in self._writer.writers.items():
            if name not in batch.schema.names:
                raise CorruptData(f"a chunk of table {self._definition.name} lacks column {name}")
            array = batch.column(name)
            if array.type != writer.type:
                array, texts = writer.write(array.to_pylist(), _describe)
                if texts is not None:
                    arrays[name + TEXT_SUFFIX] = texts
            arrays[name] = array
            outliers = odd.get(name)
            if not outliers:
                continue
            if writer.policy == "error":
                raise writer.refused(_describe(int(next(iter(outliers)))))
            if writer.policy == "text":
                as_text: list[str | None] = [None] * batch.num_rows
                for row, value in outliers.items():
                    as_text[int(row)] = wire_text(value)
                arrays[name + TEXT_SUFFIX] = pa.array(as_text, pa.string())
        return self._batch(arrays, batch.num_rows)

    def _batch(self, arrays: dict[str, pa.Array], count: int) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [
                arrays.get(field.name, pa.nulls(count, field.type))
                for field in self._definition.columns
            ],
            schema=self._definition.columns,
        )


def _describe(index: int) -> str:
    """A row of a chunk for error messages, which show no values."""
    return f"{index + 1} of its chunk"


def read_chunks(
    settings: NatsSettings,
    meta: SnapshotMeta,
    numbers: Iterable[int],
    decoder: ChunkDecoder,
    timeout: float = 60.0,
) -> Iterator[tuple[int, str, pa.RecordBatch]]:
    """Number, sha256 and rows of the given chunks, verified; the iterator owns its connection."""
    with NatsThread(settings, timeout) as nats:
        snapshot = Snapshot(nats.client.deployment, meta, reused=True)
        for number in numbers:
            stored, chunk = nats.run(lambda _, number=number: _read(snapshot, number))  # type: ignore[misc]
            yield number, stored.sha256, decoder.decode(chunk)


async def _read(snapshot: Snapshot, number: int) -> tuple[StoredChunk, ChunkRows | ArrowChunk]:
    stored = await snapshot.raw_chunk(number)
    return stored, await snapshot.read_chunk(stored)
