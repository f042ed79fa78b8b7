"""Staging: executors decode the changes of all tables into Parquet files, which are then folded.

One pass over a batch serves all tables. Each task returns a report with its finished files and
facts about the changes; the files of failed tasks are in no report.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_consumer.changes.change_decoder import ChangeDecoder
from spark_consumer.changes.change_rows import ChangeFacts, changes_schema
from spark_consumer.lake.parquet_files import ParquetWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame

    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.lake.column_values import Unrepresentable
    from spark_consumer.lake.lake_table import LakePosition
    from spark_consumer.lake.table_definition import TableDefinition

REPORT_DDL = "report STRING"
_CHANGES = frozenset({"insert", "update", "delete", "truncate"})


@dataclass(frozen=True)
class DecodingPlan:
    """All that an executor needs to decode the changes of one table."""

    token: str
    definition: TableDefinition
    schemas: dict[int, TableSchema]
    position: LakePosition
    policy: Unrepresentable


@dataclass
class StagedChanges:
    """The changes of one table in one batch: the files, and facts about the changes in them."""

    files: list[str] = field(default_factory=list)
    facts: ChangeFacts = field(default_factory=ChangeFacts)
    commit_lsn: int = 0


def stage_changes(
    messages: DataFrame, plans: Sequence[DecodingPlan], directory: str
) -> dict[str, StagedChanges]:
    """Decode the messages of the planned tables into files below `directory`.

    Returns the staged changes by token. `messages` is a DataFrame of `message_rows.MESSAGE_SCHEMA`.
    """
    staged = {plan.token: StagedChanges() for plan in plans}
    for row in messages.mapInArrow(_stager(plans, directory), REPORT_DDL).collect():
        report = json.loads(row["report"])
        one = staged[report["token"]]
        one.files.extend(f"{directory}/{path}" for path in report["files"])
        one.facts |= _facts(report["facts"])
        one.commit_lsn = max(one.commit_lsn, report["commit_lsn"])
    return staged


def _stager(
    plans: Sequence[DecodingPlan], directory: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    by_token = {plan.token: plan for plan in plans}

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        decoders: dict[str, ChangeDecoder] = {}
        writers: dict[str, ParquetWriter] = {}
        try:
            for batch in batches:
                columns = [
                    batch.column(name).to_pylist()
                    for name in ("stream_seq", "token", "operation", "content_type", "payload")
                ]
                for stream_seq, token, operation, kind, payload in zip(*columns, strict=True):
                    plan = by_token.get(token)
                    if plan is None or operation not in _CHANGES:
                        continue
                    decoder = decoders.get(token)
                    if decoder is None:
                        decoder = decoders[token] = ChangeDecoder(
                            plan.definition, plan.schemas, plan.position, plan.policy
                        )
                        writers[token] = ParquetWriter(
                            directory, token, changes_schema(plan.definition)
                        )
                    for changes in decoder.add(stream_seq, kind, payload):
                        writers[token].write(changes)
            for token, decoder in decoders.items():
                for changes in decoder.flush():
                    writers[token].write(changes)
                writers[token].finish()
        except BaseException:
            for writer in writers.values():
                writer.discard()
            raise
        reports = [
            json.dumps(
                {
                    "token": token,
                    "files": [file.path for file in writers[token].files],
                    "facts": _document(decoder.facts),
                    "commit_lsn": decoder.commit_lsn,
                }
            )
            for token, decoder in decoders.items()
        ]
        yield pa.RecordBatch.from_pydict({"report": pa.array(reports, pa.string())})

    return stage


def _document(facts: ChangeFacts) -> dict[str, Any]:
    document = asdict(facts)
    for name in ("unchanged", "moved_unchanged"):
        document[name] = sorted(document[name])
    return document


def _facts(document: dict[str, Any]) -> ChangeFacts:
    at = document["truncated_at"]
    return ChangeFacts(
        count=document["count"],
        truncated_at=None if at is None else (at[0], at[1]),
        moves=document["moves"],
        unchanged=frozenset(document["unchanged"]),
        moved_unchanged=frozenset(document["moved_unchanged"]),
    )
