"""Prepares the tables before the stream is read: checks those in the lake, loads the others."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from consumer_sdk.errors import GapError, NotAvailable, UnknownTable
from consumer_sdk.reading.proof import StreamBreak, find_break
from consumer_sdk.transport.holds import hold
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.subjects import format_table_name
from spark_consumer.errors import LakeError, SchemaChangeError
from spark_consumer.job.progress_bar import JobWatch, ProgressBar
from spark_consumer.job.snapshot_load import load_snapshot, position_of
from spark_consumer.job.table_writer import KeptTable
from spark_consumer.lake.directory import require_usable_table_root
from spark_consumer.lake.table_definition import (
    DELETED,
    SYNCED_AT,
    TableDefinition,
    define,
    evolve,
    lake_columns,
    require_same_options,
    row_key,
)
from spark_consumer.source.snapshot_source import take_snapshot

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from pyspark.sql import SparkSession

    from consumer_sdk.client import Client
    from consumer_sdk.reading.log import LogBounds
    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.lake.lake_table import Lake, LakePosition, LakeTable
    from spark_consumer.lake.records import SchemaArchive
    from spark_consumer.lake.table_definition import TableOptions
    from spark_consumer.runtime.nats_thread import NatsThread

logger = logging.getLogger(__name__)

_SCHEMA_SECONDS: Final = 5.0
_SCHEMA_POLL_SECONDS: Final = 0.1


async def find_schemas(client: Client, tables: Sequence[tuple[str, str]]) -> list[TableSchema]:
    """The newest schema of each table; waits a few seconds for a missing one.

    A bridge that has just started publishes the schemas of its tables one by one.
    """
    deadline = time.monotonic() + _SCHEMA_SECONDS
    found = []
    for table in tables:
        while True:
            try:
                found.append(await client.schema(table))
                break
            except (UnknownTable, NotAvailable):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_SCHEMA_POLL_SECONDS)
    return found


def require_usable_tables(
    lake: Lake, schemas: Sequence[TableSchema], options: TableOptions, *, rebootstrap: bool
) -> None:
    """Raise an error if a table, or its directory in the lake, cannot be used; writes nothing."""
    for schema in schemas:
        row_key(schema)
        require_usable_table_root(lake.table_root(schema.schema, schema.table))
        table = lake.find(schema.schema, schema.table)
        if table is not None and not rebootstrap:
            require_same_options(schema, table.columns, options)


class TableSetup:
    """Prepares tables for reading the stream.

    If a table cannot continue, its error is raised and nothing is written; with `rebootstrap` the
    table is loaded again instead.
    """

    def __init__(
        self,
        spark: SparkSession,
        nats: NatsThread,
        lake: Lake,
        archive: SchemaArchive,
        options: TableOptions,
        *,
        rebootstrap: bool = False,
    ) -> None:
        self._spark = spark
        self._nats = nats
        self._lake = lake
        self._archive = archive
        self._options = options
        self._rebootstrap = rebootstrap
        self.rows_loaded = 0

    def prepare(
        self, schemas: Sequence[TableSchema], rebuild: Container[tuple[str, str]] = ()
    ) -> list[KeptTable]:
        """Find each table in the lake or load it; always load those in `rebuild`.

        All tables are checked before the first one is written.
        """
        ready: dict[int, KeptTable] = {}
        to_load: dict[int, LakeTable | None] = {}
        for index, schema in enumerate(schemas):
            row_key(schema)
            table = self._lake.find(schema.schema, schema.table)
            if table is None or (schema.schema, schema.table) in rebuild:
                to_load[index] = table
                continue
            try:
                ready[index] = self._continue(schema, table)
            except (GapError, LakeError, SchemaChangeError) as error:
                if not self._rebootstrap:
                    raise
                name = format_table_name(schema.schema, schema.table)
                reason = str(error)
                event(logger, "table is rebuilt", level=logging.WARNING, table=name, reason=reason)
                to_load[index] = table
        for index, table in to_load.items():
            schema = schemas[index]
            # A retained snapshot may be older than the reason to rebuild.
            fresh = (schema.schema, schema.table) in rebuild
            ready[index] = self._bootstrap(schema, table, fresh=fresh)
        return [ready[index] for index in range(len(schemas))]

    def _continue(self, schema: TableSchema, table: LakeTable) -> KeptTable:
        name = format_table_name(schema.schema, schema.table)
        position = table.position(schema.source)
        if position is None:
            raise LakeError(
                f"lake table {name} has no position of source {schema.source}; "
                "rebuild it with --rebootstrap, or choose another --lake directory"
            )
        table.require_unchanged()
        require_same_options(schema, table.columns, self._options)
        bounds = self._nats.run(lambda client: client.log().bounds())
        progress = self._nats.run(lambda client: client.progress(schema.source))
        epoch = schema.epoch if progress is None else progress.epoch
        _require_continuity(name, position, bounds, epoch)
        versions = self._archive.versions(schema.schema, schema.table, position.epoch)
        current = versions.get(position.schema_version)
        if current is None:
            raise SchemaChangeError(
                f"schema version {position.schema_version} of table {name} is not in the lake's "
                "_tailrace directory; rebuild the table with --rebootstrap"
            )
        if schema.epoch == position.epoch:
            self._archive.keep(schema)
            versions[schema.schema_version] = schema
        own = (DELETED, SYNCED_AT)
        columns = [field for field in table.columns if field.name not in own]
        definition = TableDefinition(
            schema.schema,
            schema.table,
            pa.schema(columns),
            row_key(current),
        )
        # Another policy for unrepresentable values may need further columns.
        evolution = evolve(definition, current, current, self._options.unrepresentable)
        if evolution.change == "add":
            table.evolve(evolution.definition.columns, position)
        return KeptTable(table, evolution.definition, current, position, versions)

    def _bootstrap(self, schema: TableSchema, table: LakeTable | None, *, fresh: bool) -> KeptTable:
        name = format_table_name(schema.schema, schema.table)
        started = time.monotonic()
        bar = ProgressBar(name)
        wanted = (schema.schema, schema.table)
        meta, schema = self._nats.run(
            lambda client: take_snapshot(client, wanted, fresh=fresh, progress=bar.snapshot)
        )
        definition = define(schema, self._options.unrepresentable)
        root = self._lake.table_root(schema.schema, schema.table)
        with JobWatch(self._spark, f"bootstrap-{uuid.uuid4().hex}", bar.loading):
            files = load_snapshot(
                self._spark, self._nats.settings, meta, schema, self._options, root
            )
        position = position_of(meta, schema)
        columns = lake_columns(definition, self._options)
        self._archive.keep(schema)
        hold("spark-before-load-commit")
        if table is None:
            table = self._lake.create(schema.schema, schema.table, files, columns, position)
        else:
            # Another process may have optimized the table while the snapshot was read.
            table = self._lake.find(schema.schema, schema.table) or table
            table.load(files, columns, position)
        self.rows_loaded += meta.row_count
        bar.finish(meta.row_count)
        event(
            logger,
            "table bootstrapped",
            table=name,
            rows=meta.row_count,
            snapshot=meta.snapshot_id,
            seconds=round(time.monotonic() - started, 2),
        )
        versions = self._archive.versions(schema.schema, schema.table, position.epoch)
        return KeptTable(table, definition, schema, position, versions)


def _require_continuity(name: str, position: LakePosition, bounds: LogBounds, epoch: int) -> None:
    wanted = position.stream_seq + 1
    found = find_break(bounds, wanted, position.stream_created)
    if found is StreamBreak.RECREATED:
        reason = f"the stream that table {name} followed was recreated"
    elif position.epoch != epoch:
        reason = f"source {position.source} began epoch {epoch} after table {name} was written"
    elif found is StreamBreak.ENDS_BEFORE:
        reason = f"table {name} is at a newer position than the stream"
    elif found is StreamBreak.TRIMMED:
        reason = f"the messages after the position of table {name} were trimmed or purged"
    else:
        return
    raise GapError(reason, wanted, bounds.first)
