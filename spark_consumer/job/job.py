"""The job: it loads tables from snapshots where needed, then applies the change stream."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from consumer_sdk.errors import AccessDenied, GapError, NotAvailable
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.subjects import format_table_name
from spark_consumer.errors import LakeConflictError
from spark_consumer.job.batch_applier import BatchApplier, RebuildNeeded
from spark_consumer.job.table_setup import TableSetup, find_schemas
from spark_consumer.job.table_writer import TableWriter
from spark_consumer.lake.directory import lake_lock
from spark_consumer.lake.embedded import EmbeddedDeltaLake
from spark_consumer.lake.records import LakeRecords
from spark_consumer.lake.table_definition import TableOptions
from spark_consumer.runtime.failures import SlowStartError, explain
from spark_consumer.runtime.nats_thread import NatsThread
from spark_consumer.source.cdc_source import CdcSource
from spark_consumer.source.snapshot_source import SnapshotSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from consumer_sdk.transport.settings import NatsSettings
    from spark_consumer.job.table_writer import KeptTable

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.5
_CATCH_UP_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 2.0
_CONFLICTS: Final = 5
_SLOW_START_SECONDS: Final = 300.0


@dataclass(frozen=True)
class JobSettings:
    """The settings of a job; `trigger_seconds` is the time between batches unless `once`."""

    nats: NatsSettings
    tables: tuple[tuple[str, str], ...]
    lake: str
    options: TableOptions = field(default_factory=TableOptions)
    once: bool = False
    trigger_seconds: float = 2.0
    rebootstrap: bool = False
    rows_per_batch: int = 200_000


class SparkJob:
    """Runs until everything is applied (`once`), it is stopped, or an error ends it."""

    def __init__(self, spark: SparkSession, settings: JobSettings) -> None:
        self._spark = spark
        self._settings = settings
        self._lake = EmbeddedDeltaLake(settings.lake)
        self._records = LakeRecords(self._lake.directory)
        self._writer = TableWriter(spark, settings.options)
        self._stopping = threading.Event()
        self._batch_lock = threading.Lock()
        self._failure: BaseException | None = None
        self._applied_any = False
        self._conflicts = 0
        self.rows_loaded = 0
        self.events = 0

    def run(self) -> None:
        """Run the job; CdcError gives the reason of a failure in one line."""
        with lake_lock(self._lake.directory):
            started = time.monotonic()
            try:
                self._run()
            except (Py4JError, PySparkException, OSError) as error:
                raise explain(error) from error
            event(
                logger,
                "done" if self._settings.once and not self._stopping.is_set() else "stopped",
                tables=len(self._settings.tables),
                rows_loaded=self.rows_loaded,
                events=self.events,
                seconds=round(time.monotonic() - started, 2),
            )

    def _run(self) -> None:
        self._records.clear_leftovers()
        for source in (CdcSource, SnapshotSource):
            self._spark.dataSource.register(source)
        rebuild: set[tuple[str, str]] = set()
        slow_start_deadline = time.monotonic() + _SLOW_START_SECONDS
        with NatsThread(self._settings.nats) as nats:
            while not self._stopping.is_set():
                try:
                    tables = self._prepare(nats, rebuild)
                    rebuild.clear()
                    self._follow(nats, tables)
                except RebuildNeeded as needed:
                    event(logger, "table is rebuilt", table=needed.table.name, reason=needed.reason)
                    rebuild.add((needed.table.definition.schema, needed.table.definition.table))
                except GapError as gap:
                    if not self._settings.rebootstrap:
                        raise
                    event(logger, "gap", level=logging.WARNING, reason=str(gap))
                except (NotAvailable, AccessDenied) as error:
                    # Credentials that worked may be renewed, or a user revoked for a while.
                    if self._settings.once or not self._applied_any:
                        raise
                    event(logger, "waiting", level=logging.WARNING, reason=str(error))
                    self._stopping.wait(_RETRY_SECONDS)
                except LakeConflictError as error:
                    self._conflicts += 1
                    if self._conflicts > _CONFLICTS:
                        raise
                    event(logger, "trying again", level=logging.WARNING, reason=str(error))
                except SlowStartError:
                    if time.monotonic() > slow_start_deadline:
                        raise
                else:
                    return

    def stop(self) -> None:
        """Request a graceful end: the current batch is finished, and no other is started."""
        self._stopping.set()

    def _prepare(self, nats: NatsThread, rebuild: set[tuple[str, str]]) -> list[KeptTable]:
        settings = self._settings
        setup = TableSetup(
            self._spark,
            nats,
            self._lake,
            self._records.schemas,
            settings.options,
            rebootstrap=settings.rebootstrap,
        )
        try:
            schemas = nats.run(lambda client: find_schemas(client, settings.tables))
            return setup.prepare(schemas, rebuild)
        except Exception as error:
            raise explain(error) from error
        finally:
            self.rows_loaded += setup.rows_loaded

    def _follow(self, nats: NatsThread, tables: Sequence[KeptTable]) -> None:
        if self._settings.once:
            self._wait_for_snapshot_lsn(nats, tables)
        applier = BatchApplier(
            tables,
            self._writer,
            nats,
            self._records,
            self._settings.options.unrepresentable,
            rebootstrap=self._settings.rebootstrap,
        )
        self._failure = None
        query = self._start(tables, applier)
        try:
            while not query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]
                if self._stopping.is_set():
                    with self._batch_lock:
                        query.stop()
                    break
        except Exception as error:
            raise self._batch_failure() or explain(error) from error
        finally:
            self.events += applier.events
            if query.isActive:
                query.stop()
        failure = self._batch_failure()
        if failure is not None:
            raise failure
        applier.advance_idle_tables()

    def _batch_failure(self) -> BaseException | None:
        """The error of the last batch as it was raised; Spark passes on only its text."""
        failure = self._failure
        return (
            failure if failure is None or isinstance(failure, RebuildNeeded) else explain(failure)
        )

    def _start(self, tables: Sequence[KeptTable], applier: BatchApplier) -> StreamingQuery:
        settings = self._settings
        start: dict[str, int] = {}
        for kept in tables:
            position = kept.position
            start[position.source] = min(
                start.get(position.source, position.stream_seq), position.stream_seq
            )
        stream = (
            self._spark.readStream.format("nats_cdc")
            .option("form", "message")
            .option("tables", ", ".join(format_table_name(*table) for table in settings.tables))
            .option("startingPosition", json.dumps(start))
            .option("streamCreated", str(tables[0].position.stream_created))
            .option("rowsPerBatch", str(settings.rows_per_batch))
            .option("partitions", str(max(1, self._spark.sparkContext.defaultParallelism)))
            .option("prefix", settings.nats.prefix)
        )
        # Spark shows options, so an address with a password is passed in the environment.
        if not any("@" in server for server in settings.nats.servers):
            stream = stream.option("servers", settings.nats.address)

        def apply(frame: DataFrame, batch_id: int) -> None:
            with self._batch_lock:
                if self._stopping.is_set():
                    return
                try:
                    applier.apply(frame, batch_id)
                    self._applied_any = True
                    self._conflicts = 0
                except BaseException as error:
                    self._failure = error
                    raise

        # Spark requires a checkpoint, but the tables hold the position: each run uses a new one.
        checkpoint = f"{self._records.checkpoints}/{uuid.uuid4().hex}"
        writer = (
            stream.load().writeStream.foreachBatch(apply).option("checkpointLocation", checkpoint)
        )
        if settings.once:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{settings.trigger_seconds} seconds")
        return writer.start()

    def _wait_for_snapshot_lsn(self, nats: NatsThread, tables: Sequence[KeptTable]) -> None:
        """Wait until the stream has reached the newest snapshot, which all tables must reach."""
        wanted: dict[str, int] = {}
        for kept in tables:
            source = kept.position.source
            wanted[source] = max(wanted.get(source, 0), kept.position.complete_at)
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        for source, lsn in wanted.items():
            while not self._stopping.is_set() and time.monotonic() < deadline:
                progress = nats.run(lambda client, source=source: client.progress(source))  # type: ignore[misc]
                if progress is not None and progress.lsn >= lsn:
                    break
                self._stopping.wait(_POLL_SECONDS)
