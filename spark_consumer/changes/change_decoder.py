"""HOT PATH: converts the events of one table to typed changes; the SDK decodes the messages.

Each schema version has its own row writer; all of them write the lake's columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from consumer_sdk.errors import GapError
from consumer_sdk.reading.decoder import read_self_contained, restore_row
from consumer_sdk.reading.references import damaged_message
from consumer_sdk.wire.envelope import JSON
from consumer_sdk.wire.errors import MISFITS, WireError
from consumer_sdk.wire.position import format_lsn
from spark_consumer.changes.change_rows import OLD, ChangeFacts, changes_schema
from spark_consumer.lake.column_values import RowWriter
from spark_consumer.lake.table_definition import TEXT_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event
    from spark_consumer.lake.column_values import Unrepresentable
    from spark_consumer.lake.lake_table import LakePosition
    from spark_consumer.lake.table_definition import TableDefinition

Row = dict[str, Any]
Head = tuple[int, int, str, list[str] | None]
"""Commit LSN, seq, operation and unchanged columns of a change."""
_ROW_OPERATIONS: Final = {"INSERT": "insert", "UPDATE": "update", "DELETE": "delete"}
BATCH_ROWS: Final = 10_000


class ChangeDecoder:
    """Decodes the messages of one table after a position into batches of `changes_schema`.

    `schemas` holds every schema version that may occur. Messages up to the position are dropped; an
    event of another epoch raises GapError, a damaged one CorruptData.
    """

    def __init__(
        self,
        definition: TableDefinition,
        schemas: Mapping[int, TableSchema],
        position: LakePosition,
        policy: Unrepresentable = "error",
    ) -> None:
        self._definition = definition
        self._schemas = schemas
        self._position = position
        self._policy = policy
        self._writers: dict[int, RowWriter] = {}
        self._version: int | None = None
        self._arrow_schema = changes_schema(definition)
        self._plain = definition.plain_names
        self._rows: list[Row] = []
        self._olds: list[Row | None] = []
        self._heads: list[Head] = []
        self.facts = ChangeFacts()
        self.commit_lsn = 0

    def add(self, stream_seq: int, kind: str, payload: bytes) -> Iterator[pa.RecordBatch]:
        """Decode one message; yields a batch when enough rows have been collected."""
        if stream_seq <= self._position.stream_seq:
            return
        try:
            yield from self._add(stream_seq, kind, payload)
        except WireError as error:
            raise damaged_message(stream_seq, error) from error
        except (pa.ArrowException, *MISFITS) as error:
            raise damaged_message(stream_seq, WireError(repr(error)[:200])) from error

    def _add(self, stream_seq: int, kind: str, payload: bytes) -> Iterator[pa.RecordBatch]:
        events = read_self_contained(kind, payload)
        first = events[0]
        if first.epoch != self._position.epoch:
            raise GapError(
                f"source {self._position.source} began epoch {first.epoch}", stream_seq, 0
            )
        if first.commit_lsn <= self._position.commit_lsn:
            return
        if (first.commit_lsn | events[-1].seq) >> 63:
            raise WireError("a position is too large for a 64-bit integer")
        if first.operation == "TRUNCATE":
            self._take(first, "truncate", {}, None, ())
            return
        name = _ROW_OPERATIONS.get(first.operation)
        if name is None:
            return
        writer = self._writer(first.schema_version)
        if writer.schema.schema_version != self._version:
            yield from self.flush()
            self._version = writer.schema.schema_version
        for event in events:
            self._row(event, name, writer, kind)
        if len(self._rows) >= BATCH_ROWS:
            yield from self.flush()

    def _row(self, event: Event, operation: str, writer: RowWriter, kind: str) -> None:
        row, old, raw, unchanged = event.data, event.old, event.raw, event.unchanged
        if row is None:
            raise WireError("a row change without a row")
        if operation != "delete" and len(row) + len(unchanged) < len(writer.schema.columns):
            raise WireError(f"a row of {self._definition.name} lacks columns")
        if kind == JSON:
            restore_row(row, raw, writer.schema)
            if old is not None:
                restore_row(old, raw, writer.schema)
        writer.write_json_as_text(row, raw)
        if old is not None:
            writer.write_json_as_text(old, raw)
        if unchanged and old is not None:
            # With REPLICA IDENTITY FULL the old row has the values that were left out.
            row.update({name: old[name] for name in unchanged if name in old})
            unchanged = tuple(name for name in unchanged if name not in old)
        if operation != "update":
            old = None
        elif self._definition.is_bag:
            if old is None or unchanged:
                raise WireError(f"an UPDATE of {self._definition.name} without the old row")
        elif old is not None and all(
            old.get(name) == row.get(name) for name in self._definition.key
        ):
            old = None
        self._take(event, operation, row, old, unchanged)

    def _take(
        self, event: Event, operation: str, row: Row, old: Row | None, unchanged: Sequence[str]
    ) -> None:
        names: list[str] | None = None
        if unchanged:
            texts = (name + TEXT_SUFFIX for name in unchanged)
            names = [self._plain[n] for n in (*unchanged, *texts) if n in self._plain]
        commit_lsn, seq = event.commit_lsn, event.seq
        self._heads.append((commit_lsn, seq, operation, names))
        self._rows.append(row)
        self._olds.append(old)
        left_out = frozenset(names or ())
        if operation == "truncate" or old is not None or left_out:
            self.facts |= ChangeFacts(
                truncated_at=(commit_lsn, seq) if operation == "truncate" else None,
                moves=old is not None,
                unchanged=left_out,
                moved_unchanged=left_out if old is not None else frozenset(),
            )
        self.commit_lsn = max(self.commit_lsn, commit_lsn)

    def flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows collected so far, if there are any."""
        if not self._rows:
            return
        rows, olds, heads = self._rows, self._olds, self._heads
        self._rows, self._olds, self._heads = [], [], []
        self.facts |= ChangeFacts(count=len(rows))
        writer = None if self._version is None else self._writers[self._version]
        names = self._definition.columns.names
        if writer is None:
            arrays = {n: pa.nulls(len(rows), self._definition.columns.field(n).type) for n in names}
        else:
            arrays = writer.arrays(rows, names, lambda index: _position(heads[index]))
        lsns, seqs, operations, unchanged = zip(*heads, strict=True)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(lsns, pa.int64()),
                pa.array(seqs, pa.int64()),
                pa.array(operations, pa.string()),
                self._old_array(olds, heads, writer),
                pa.array(unchanged, pa.list_(pa.string())),
                *(arrays[name] for name in names),
            ],
            schema=self._arrow_schema,
        )

    def _old_array(
        self, olds: Sequence[Row | None], heads: Sequence[Head], writer: RowWriter | None
    ) -> pa.Array:
        type_ = self._arrow_schema.field(OLD).type
        present = pa.array([old is not None for old in olds])
        if writer is None or not any(old is not None for old in olds):
            return pa.nulls(len(olds), type_)
        names = self._definition.identity
        rows = [old or {} for old in olds]
        arrays = writer.arrays(rows, names, lambda index: _position(heads[index]))
        return pa.StructArray.from_arrays(
            [arrays[name] for name in names], fields=list(type_), mask=pc.invert(present)
        )

    def _writer(self, version: int) -> RowWriter:
        found = self._writers.get(version)
        if found is None:
            schema = self._schemas.get(version)
            if schema is None:
                raise WireError(f"schema version {version} of {self._definition.name} is not known")
            definition = self._definition
            found = RowWriter(definition, schema, self._policy, definition.key)
            self._writers[version] = found
        return found


def _position(head: Head) -> str:
    """A change for error messages, which show no values."""
    return f"of change {head[1]} at {format_lsn(head[0])}"
