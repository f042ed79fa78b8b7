"""`format("nats_cdc")`: the change stream as a Spark source, batch and streaming.

An offset holds a stream sequence for each source, and the stream's creation time. Batches end where
no transaction is open. Messages are not acknowledged: the sink stores the position.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from consumer_sdk.errors import UnknownTable
from consumer_sdk.reading.proof import require_same_stream
from consumer_sdk.wire.subjects import Subjects, format_table_name, table_token
from spark_consumer.lake.column_mapping import spark_schema
from spark_consumer.lake.table_definition import define
from spark_consumer.runtime.nats_thread import NatsThread
from spark_consumer.source.message_rows import (
    BATCH,
    ENVELOPE_SCHEMA,
    MESSAGE_SCHEMA,
    envelope_batches,
    read_messages,
    typed_batches,
    typed_schema,
)
from spark_consumer.source.options import CdcOptions
from spark_consumer.source.transaction_ends import BatchEnds

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from pyspark.sql.types import StructType

    from consumer_sdk.client import Client
    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.reading.log import LogBounds
    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.source.transaction_ends import ReadRange


_LEAST_PER_PARTITION = 2_000


@dataclass
class MessageRange(InputPartition):
    """Messages of one source at the sequences [first, end)."""

    source: str
    subjects: tuple[str, ...]
    first: int
    end: int
    created: int


@dataclass
class BatchMark(InputPartition):
    """One row with the range of the batch, for the sink."""

    document: str


class CdcSource(DataSource):
    """Events of the given tables, or of all; see `CdcOptions` for the options."""

    @classmethod
    def name(cls) -> str:
        return "nats_cdc"

    def schema(self) -> StructType:
        options = CdcOptions.parse(self.options)
        if options.form == "message":
            return spark_schema(MESSAGE_SCHEMA)
        if options.form == "envelope":
            return spark_schema(ENVELOPE_SCHEMA)
        table = _typed_table(options)
        assert table is not None
        return spark_schema(typed_schema(define(table, options.policy)))

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        options = CdcOptions.parse(self.options)
        return CdcBatchReader(options, _typed_table(options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        options = CdcOptions.parse(self.options)
        return CdcStreamReader(options, _typed_table(options))


def _typed_table(options: CdcOptions) -> TableSchema | None:
    if options.form != "typed":
        return None
    with NatsThread(options.settings) as nats:
        return nats.run(lambda client: client.schema(options.tables[0]))


async def _sources(client: Client, options: CdcOptions) -> dict[str, list[TableSchema]]:
    """The requested tables, by the source that publishes them."""
    schemas = await client.tables()
    if options.tables:
        known = {(one.schema, one.table): one for one in schemas}
        for table in options.tables:
            if table not in known:
                raise UnknownTable(format_table_name(*table))
        schemas = [known[table] for table in options.tables]
    found: dict[str, list[TableSchema]] = {}
    for schema in schemas:
        found.setdefault(schema.source, []).append(schema)
    return found


def _subjects(names: Subjects, tables: Sequence[TableSchema]) -> tuple[str, ...]:
    return tuple(names.table_filter(table_token(one.schema, one.table)) for one in tables)


class _RangeReader:
    """Common base of both readers: the driver plans ranges of messages, executors read them."""

    def __init__(self, options: CdcOptions, table: TableSchema | None = None) -> None:
        self.options = options
        self.table = table

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, BatchMark):
            yield _mark(partition.document)
            return
        assert isinstance(partition, MessageRange)
        messages = read_messages(
            self.options.settings,
            partition.source,
            partition.subjects,
            partition.first,
            partition.end,
            partition.created,
        )
        if self.options.form == "message":
            yield from messages
        elif self.table is not None:
            yield from typed_batches(messages, self.table, self.options.policy)
        else:
            yield from envelope_batches(messages)

    def ranges(
        self,
        sources: Mapping[str, Sequence[TableSchema]],
        start: Mapping[str, int],
        end: Mapping[str, int],
        created: int,
    ) -> list[InputPartition]:
        """Partitions of about equal size for the messages of each source between two offsets."""
        names = Subjects(self.options.settings.prefix)
        found: list[InputPartition] = []
        for source, tables in sources.items():
            first, stop = start[source] + 1, end[source] + 1
            length = stop - first
            if length <= 0:
                continue
            count = min(self.options.partitions, -(-length // _LEAST_PER_PARTITION))
            subjects = _subjects(names, tables)
            if self.options.form == "message":
                subjects = (*subjects, names.progress(source))
            cuts = [first + length * index // count for index in range(count + 1)]
            found.extend(
                MessageRange(source, subjects, low, high, created) for low, high in pairwise(cuts)
            )
        return found


class CdcBatchReader(_RangeReader, DataSourceReader):
    """Reads everything that the stream holds now, or the messages between two sequences."""

    def partitions(self) -> Sequence[InputPartition]:
        with NatsThread(self.options.settings) as nats:
            bounds = nats.run(lambda client: client.log().bounds())
            sources = nats.run(lambda client: _sources(client, self.options))
        end = self.options.range.end
        if end is None:
            end = bounds.last
        start = {source: self.options.range.first_after(bounds, source) for source in sources}
        return self.ranges(sources, start, dict.fromkeys(sources, end), bounds.created)


class CdcStreamReader(_RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows the stream; runs in a Python process beside the driver, and `read` in executors."""

    def __init__(self, options: CdcOptions, table: TableSchema | None = None) -> None:
        super().__init__(options, table)
        self._nats: NatsThread | None = None
        self._sources: dict[str, list[TableSchema]] = {}
        self._ends: dict[str, BatchEnds] = {}
        self._tables_found_at: int | None = None
        self._created = 0
        self._target: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Executors need only these.
        return {"options": self.options, "table": self.table}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        bounds = self._bounds()
        first = {}
        for source in self._ends:
            first[source] = self.options.range.first_after(bounds, source)
            if self.options.range.start.word == "latest":
                # The first batch must not begin in the middle of a transaction.
                first[source] = self._find_end(source, bounds.first - 1, bounds.last, bounds.last)
        return self._offset(first)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        bounds = self._bounds()
        self._require_same_stream(start, bounds)
        last = bounds.last if self._target is None else min(bounds.last, self._target)
        reached = {}
        for source in self._sources:
            after = self._after(start, source, bounds)
            goal = last
            if isinstance(limit, ReadMaxRows):
                messages = limit.max_rows / self._ends[source].rows_per_message
                goal = min(last, after + max(1, int(messages)))
            reached[source] = self._find_end(source, after, goal, max(last, goal))
        return self._offset(reached)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.rows_per_batch)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        last = self._bounds().last
        return self._offset(dict.fromkeys(self._sources, last))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._bounds().last

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        bounds = self._bounds()
        self._require_same_stream(end, bounds)
        low = {source: self._after(start, source, bounds) for source in self._sources}
        high = {source: int(end["sequences"].get(source, low[source])) for source in low}
        found = self.ranges(self._sources, low, high, self._created)
        if self.options.form == "message":
            mark = {"created": self._created, "start": low, "end": high}
            found.insert(0, BatchMark(json.dumps(mark)))
        return found

    def stop(self) -> None:
        if self._nats is not None:
            self._nats.close()
            self._nats = None

    def _find_end(self, source: str, after: int, goal: int, last: int) -> int:
        """The end of a batch of a source; see `BatchEnds.find`."""
        assert self._nats is not None
        return self._nats.run(lambda _: self._ends[source].find(after, goal, last))

    def _bounds(self) -> LogBounds:
        if self._nats is None:
            self._nats = NatsThread(self.options.settings)
        bounds = self._nats.run(lambda client: client.log().bounds())
        if self._tables_found_at is None:
            self._created = bounds.created
        if self._tables_found_at is None or (
            not self.options.tables and self._tables_found_at != bounds.last
        ):
            # Read after the bounds, because the schema of a table is stored before its first row.
            self._find_tables()
            self._tables_found_at = bounds.last
        return bounds

    def _find_tables(self) -> None:
        """Find the requested tables; keep unpublished ones, as the stream has their rows."""
        assert self._nats is not None
        for source, tables in self._nats.run(lambda client: _sources(client, self.options)).items():
            known = {(one.schema, one.table): one for one in self._sources.get(source, ())}
            known.update({(one.schema, one.table): one for one in tables})
            self._sources[source] = list(known.values())
            if source not in self._ends:
                self._ends[source] = BatchEnds(self._range_reader(source))

    def _range_reader(self, source: str) -> ReadRange:
        names = Subjects(self.options.settings.prefix)

        def read(first: int, end: int) -> AsyncGenerator[list[Stored], None]:
            assert self._nats is not None
            subjects = _subjects(names, self._sources[source])
            return self._nats.client.log().read(
                first, end, subjects, created=self._created, timeout=60.0
            )

        return read

    def _after(self, offset: dict[str, Any], source: str, bounds: LogBounds) -> int:
        after = offset["sequences"].get(source)
        if after is None and self.options.range.start.word == "latest":
            # A new source has stored nothing before the position of the other sources.
            after = min(offset["sequences"].values(), default=None)
        if after is None:
            return self.options.range.first_after(bounds, source)
        return self.options.range.continued_after(bounds, int(after))

    def _require_same_stream(self, offset: dict[str, Any], bounds: LogBounds) -> None:
        first = min(offset["sequences"].values(), default=0)
        require_same_stream(bounds, int(first) + 1, int(offset["created"]))

    def _offset(self, sequences: Mapping[str, int]) -> dict[str, Any]:
        stream = Subjects(self.options.settings.prefix).cdc_stream
        ordered = dict(sorted(sequences.items()))
        return {"stream": stream, "created": self._created, "sequences": ordered}


def _mark(document: str) -> pa.RecordBatch:
    row = [0, "", BATCH, "batch", "application/json", document.encode()]
    return pa.RecordBatch.from_arrays(
        [pa.array([value], field.type) for value, field in zip(row, MESSAGE_SCHEMA, strict=True)],
        schema=MESSAGE_SCHEMA,
    )
