"""Applies one batch of the stream to all tables; `foreachBatch` calls it.

Tables are committed one after another, each with its own position. If the job ends in between, the
next batch gives each table exactly the changes that it lacks.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark import StorageLevel
from pyspark.sql import functions as fn

from consumer_sdk.errors import GapError
from consumer_sdk.reading.progress import Progress, gap_of
from consumer_sdk.reading.references import damaged_message
from consumer_sdk.transport.holds import hold
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.column_types import TableSchema
from consumer_sdk.wire.envelope import CONTENT_TYPE, decode_payload
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import table_token
from spark_consumer.changes.staging import DecodingPlan, StagedChanges, stage_changes
from spark_consumer.errors import LakeError, SchemaChangeError
from spark_consumer.lake.records import ManifestEntry, ManifestPosition
from spark_consumer.lake.table_definition import evolve
from spark_consumer.source.message_rows import BATCH, PROGRESS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from spark_consumer.job.table_writer import KeptTable, TableWriter
    from spark_consumer.lake.column_values import Unrepresentable
    from spark_consumer.lake.records import LakeRecords
    from spark_consumer.runtime.nats_thread import NatsThread

logger = logging.getLogger(__name__)

_ADVANCE_MESSAGES: Final = 100_000
_ADVANCE_SECONDS: Final = 600.0


class RebuildNeeded(Exception):
    """A table needs a new snapshot to continue; the job then loads it again."""

    def __init__(self, table: KeptTable, reason: str) -> None:
        super().__init__(f"table {table.name}: {reason}")
        self.table = table
        self.reason = reason


class BatchApplier:
    """Applies batches of `nats_cdc` in form `message` to the tables of a lake.

    With `rebootstrap`, RebuildNeeded is raised for a gap, an incompatible schema change, and a
    table that others have changed or that lacks a row.
    """

    def __init__(
        self,
        tables: Sequence[KeptTable],
        writer: TableWriter,
        nats: NatsThread,
        records: LakeRecords,
        policy: Unrepresentable,
        *,
        rebootstrap: bool,
    ) -> None:
        self._tables = list(tables)
        self._writer = writer
        self._nats = nats
        self._records = records
        self._policy = policy
        self._rebootstrap = rebootstrap
        self._reached: dict[str, int] = {}
        self._manifest_versions: Mapping[str, int] = {}
        self._advanced_at = time.monotonic()
        for kept in self._tables:
            self._advance_reached(kept.position.source, kept.position.commit_lsn)
        self.end: dict[str, int] = {}
        self.events = 0

    def apply(self, frame: DataFrame, batch_id: int) -> None:
        """Apply one batch; when this returns, every table has it."""
        started = time.monotonic()
        messages = frame.persist(StorageLevel.DISK_ONLY)
        directory = f"{self._records.staging}/batch-{uuid.uuid4().hex}"
        try:
            end = self._read_control_messages(messages)
            for kept in self._tables:
                with self._rebuilding(kept):
                    kept.table.require_unchanged()
            hold("spark-before-staging")
            staged = stage_changes(messages, self._plans(), directory)
            count = self._commit(staged, end)
        finally:
            messages.unpersist()
            shutil.rmtree(directory, ignore_errors=True)
        self.end = end
        self.events += count
        self._append_to_manifest(end)
        hold("spark-before-checkpoint")
        for kept in self._tables:
            kept.table.maintain()
        if count:
            seconds = time.monotonic() - started
            reached = max(end.values(), default=0)
            event(
                logger,
                "batch applied",
                batch=batch_id,
                events=count,
                seconds=round(seconds, 2),
                stream_seq=reached,
                behind=max(0, self._last_stored() - reached),
            )

    def advance_idle_tables(self) -> None:
        """At a graceful end, commit the reached position also to tables without changes."""
        for kept in self._tables:
            end = self.end.get(kept.position.source, 0)
            if end > kept.position.stream_seq:
                # The position is past the newest schema message, so it has that version.
                position = kept.position.moved_to(end, schema_version=kept.schema.schema_version)
                self._writer.apply(kept, StagedChanges(), position, 0)
        self._append_to_manifest(self.end)

    def _read_control_messages(self, messages: DataFrame) -> dict[str, int]:
        """Handle the messages that are not changes; return the end of the batch for each source."""
        token, operation = fn.col("token"), fn.col("operation")
        control = messages.where(token.startswith("$") | (operation == "schema")).collect()
        end: dict[str, int] = {}
        for row in sorted(control, key=lambda row: int(row["stream_seq"])):
            try:
                if row["token"] == BATCH:
                    end = {k: int(v) for k, v in json.loads(row["payload"])["end"].items()}
                    continue
                document = decode_payload(
                    {CONTENT_TYPE: row["content_type"]}, bytes(row["payload"])
                )
                if row["token"] == PROGRESS:
                    self._follow_progress(row["stream_seq"], Progress.from_document(document))
                elif row["operation"] == "schema":
                    self._follow_schema(row["stream_seq"], TableSchema.from_document(document))
            except WireError as error:
                raise damaged_message(row["stream_seq"], error) from error
        return end

    def _follow_progress(self, stream_seq: int, progress: Progress) -> None:
        for kept in self._tables:
            position = kept.position
            if position.source != progress.source or stream_seq <= position.stream_seq:
                continue
            gap = gap_of(progress.document)
            if progress.epoch != position.epoch:
                reason = f"source {progress.source} began epoch {progress.epoch}"
                if gap is not None:
                    reason += f": {gap.reason}"
                raise GapError(reason, position.stream_seq + 1, stream_seq)
            if gap is None or not gap.concerns(kept.definition.schema, kept.definition.table):
                continue
            if progress.lsn < position.complete_at:
                continue
            if self._rebootstrap:
                raise RebuildNeeded(kept, gap.reason)
            raise GapError(gap.reason, position.stream_seq + 1, stream_seq)
        self._advance_reached(progress.source, progress.lsn)

    def _advance_reached(self, source: str, commit_lsn: int) -> None:
        self._reached[source] = max(self._reached.get(source, 0), commit_lsn)

    def _follow_schema(self, stream_seq: int, schema: TableSchema) -> None:
        """Apply a new schema version to a table before its first row arrives."""
        wanted = table_token(schema.schema, schema.table)
        for kept in self._tables:
            position = kept.position
            if kept.token != wanted or stream_seq <= position.stream_seq:
                continue
            if schema.epoch != position.epoch:
                raise GapError(
                    f"source {schema.source} began epoch {schema.epoch}",
                    position.stream_seq + 1,
                    stream_seq,
                )
            self._records.schemas.keep(schema)
            kept.schemas[schema.schema_version] = schema
            # Versions increase along the log; a snapshot may already have a later version.
            if schema.schema_version > kept.schema.schema_version:
                self._evolve(kept, schema)

    def _evolve(self, kept: KeptTable, schema: TableSchema) -> None:
        with self._rebuilding(kept):
            evolution = evolve(kept.definition, kept.schema, schema, self._policy)
        if evolution.change == "rebuild":
            raise RebuildNeeded(kept, evolution.reason)
        event(
            logger,
            "schema changed",
            table=kept.name,
            version=schema.schema_version,
            change=evolution.change,
        )
        # Version and columns are committed together, so that a new column can be distinguished from
        # one that was dropped and added again.
        kept.position = kept.position.moved_to(schema_version=schema.schema_version)
        if evolution.change == "rewrite":
            self._writer.rewrite(kept, evolution.definition)
        elif evolution.change == "add":
            kept.table.evolve(evolution.definition.columns, kept.position)
        kept.definition, kept.schema = evolution.definition, schema

    @contextmanager
    def _rebuilding(self, kept: KeptTable) -> Iterator[None]:
        """With `rebootstrap`, an error of the table in a block means that it is rebuilt."""
        try:
            yield
        except (LakeError, SchemaChangeError) as error:
            if self._rebootstrap:
                raise RebuildNeeded(kept, str(error)) from error
            raise

    def _plans(self) -> list[DecodingPlan]:
        return [
            DecodingPlan(
                kept.token, kept.definition, dict(kept.schemas), kept.position, self._policy
            )
            for kept in self._tables
        ]

    def _commit(self, staged: Mapping[str, StagedChanges], end: Mapping[str, int]) -> int:
        now_us = time.time_ns() // 1000
        idle = time.monotonic() - self._advanced_at > _ADVANCE_SECONDS
        count = 0
        for kept in self._tables:
            changes = staged[kept.token]
            stop = end.get(kept.position.source, kept.position.stream_seq)
            behind = stop - kept.position.stream_seq
            if not changes.facts.count and (
                behind <= 0 or not (idle or behind > _ADVANCE_MESSAGES)
            ):
                continue
            version = kept.schema.schema_version
            position = kept.position.moved_to(stop, changes.commit_lsn, version)
            with self._rebuilding(kept):
                self._writer.apply(kept, changes, position, now_us)
            self._advance_reached(position.source, position.commit_lsn)
            count += changes.facts.count
        if idle:
            self._advanced_at = time.monotonic()
        return count

    def _progress(self, source: str) -> Progress | None:
        return self._nats.run(lambda client: client.progress(source))

    def _last_stored(self) -> int:
        return self._nats.run(lambda client: client.log().bounds()).last

    def _append_to_manifest(self, end: Mapping[str, int]) -> None:
        """Append an entry if all tables are at the same position and any has a new version."""
        for kept in self._tables:
            position = kept.position
            source = position.source
            if source not in end or position.stream_seq > end[source]:
                return
            if position.complete_at > self._reached[source]:
                progress = self._progress(source)
                if (
                    progress is not None
                    and progress.epoch == position.epoch
                    and progress.stream_seq <= end[source]
                ):
                    self._advance_reached(source, progress.lsn)
            if position.complete_at > self._reached[source]:
                return
        versions = {kept.name: kept.table.version for kept in self._tables}
        if versions == self._manifest_versions:
            return
        epochs = {kept.position.source: kept.position.epoch for kept in self._tables}
        self._records.manifest.append(
            ManifestEntry(
                written_at=time.time_ns() // 1000,
                sources={
                    source: ManifestPosition(epoch, end[source], self._reached[source])
                    for source, epoch in epochs.items()
                },
                tables=versions,
            )
        )
        self._manifest_versions = versions
