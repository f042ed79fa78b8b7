"""Stored messages of one table to typed changes: the decoding that every batch pays for.

Each schema version has a projection of its own; all of them end in the columns the lake has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgpack
import pyarrow as pa
import pyarrow.compute as pc

from consumer_sdk.errors import CorruptData, GapError, VersionTooNew
from consumer_sdk.reading.decoder import restore_row
from consumer_sdk.wire.envelope import (
    CONTENT_TYPE,
    JSON,
    MSGPACK,
    WIRE_VERSION,
    decode_payload,
    unsigned,
)
from consumer_sdk.wire.errors import MISFITS, WireError, WireVersionError
from consumer_sdk.wire.jsonb import jsonb_text
from spark_consumer.changes.change_rows import (
    OLD,
    ChangeFacts,
    changes_schema,
)
from spark_consumer.errors import SchemaChangeError
from spark_consumer.lake.column_mapping import arrow_type, is_text, widened
from spark_consumer.lake.column_values import ColumnWriter
from spark_consumer.lake.table_definition import TEXT_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from consumer_sdk.wire.column_types import TableSchema
    from spark_consumer.lake.column_values import Unrepresentable
    from spark_consumer.lake.lake_table import LakePosition
    from spark_consumer.lake.table_definition import TableDefinition

Row = dict[str, Any]
_ROW_OPERATIONS: Final = {"INSERT": "insert", "UPDATE": "update", "DELETE": "delete"}
BATCH_ROWS: Final = 10_000


class _Projection:
    """Rows of one schema version as the lake's columns."""

    def __init__(
        self, definition: TableDefinition, schema: TableSchema, policy: Unrepresentable
    ) -> None:
        self._writers: dict[str, ColumnWriter] = {}
        for column in schema.columns:
            place = (
                definition.columns.field(column.name)
                if column.name in definition.columns.names
                else None
            )
            if place is None or widened(place.type, column) != place.type:
                raise SchemaChangeError(
                    f"table {definition.name}: the lake has no place for column {column.name} of "
                    f"schema version {schema.schema_version}; rebuild it with --rebootstrap"
                )
            # Text stays PostgreSQL's own: Arrow would write small decimals with an exponent.
            type_ = place.type if is_text(place.type) else arrow_type(column)
            self._writers[column.name] = ColumnWriter(
                definition.name,
                column.name,
                type_,
                policy=policy,
                is_key=column.name in definition.key,
            )
        self.schema = schema
        self.json_columns = tuple(
            column.name for column in schema.columns if column.family in ("json", "jsonb")
        )
        self._definition = definition
        self.key = definition.key or tuple(column.name for column in schema.columns)

    def arrays(self, rows: Sequence[Row], names: Sequence[str]) -> dict[str, pa.Array]:
        """Arrays for some of the lake's columns; what the version does not have is null."""
        arrays: dict[str, pa.Array] = {}
        for name in names:
            if name in arrays:
                continue
            type_ = self._definition.columns.field(name).type
            writer = self._writers.get(name)
            if writer is None:
                arrays[name] = pa.nulls(len(rows), type_)
                continue
            array, texts = writer.write(
                [row.get(name) for row in rows], lambda index: self.describe(rows[index])
            )
            arrays[name] = array if array.type == type_ else array.cast(type_)
            if texts is not None:
                arrays[name + TEXT_SUFFIX] = texts
        return arrays

    def describe(self, row: Row) -> str:
        """A row by its key."""
        return "(" + ", ".join(f"{name}={row.get(name)}" for name in self.key) + ")"


class ChangeDecoder:
    """Decodes the messages of one table after a position into batches of `changes_schema`.

    `schemas` holds every schema version that may occur. What the position covers is dropped; an
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
        self._projections: dict[int, _Projection] = {}
        self._version = -1
        self._arrow_schema = changes_schema(definition)
        self._plain = definition.plain_names
        self._rows: list[Row] = []
        self._olds: list[Row | None] = []
        self._heads: list[tuple[int, int, str, list[str] | None]] = []
        self.facts = ChangeFacts()
        self.commit_lsn = 0

    def add(self, stream_seq: int, kind: str, payload: bytes) -> Iterator[pa.RecordBatch]:
        """Decode one message; batches come out when enough rows are there."""
        if stream_seq <= self._position.stream_seq:
            return
        try:
            yield from self._add(stream_seq, kind, payload)
        except (WireError, pa.ArrowException, *MISFITS) as error:
            raise _damaged(stream_seq, repr(error)[:200]) from error

    def _add(self, stream_seq: int, kind: str, payload: bytes) -> Iterator[pa.RecordBatch]:
        document = _document(stream_seq, kind, payload)
        commit_lsn = document["lsn"]
        if document["epoch"] != self._position.epoch:
            raise GapError(
                f"source {self._position.source} began epoch {document['epoch']}", stream_seq, 0
            )
        if commit_lsn <= self._position.commit_lsn:
            return
        operation = document["operation"]
        seq = unsigned(document, "seq", 0)
        if (commit_lsn | seq) >> 63:
            raise _damaged(stream_seq, "a position beyond what a long holds")
        if operation == "TRUNCATE":
            self._take(commit_lsn, seq, "truncate", {}, None, None)
            return
        name = _ROW_OPERATIONS.get(operation)
        if name is None:
            return
        projection = self._projection(stream_seq, document.get("schema_version", 0))
        if projection.schema.schema_version != self._version:
            yield from self.flush()
            self._version = projection.schema.schema_version
        rows = document.get("rows", [document])
        if not isinstance(rows, list) or not all(isinstance(one, dict) for one in rows):
            raise _damaged(stream_seq, "rows is not a list of rows")
        for index, holder in enumerate(rows):
            self._row(stream_seq, commit_lsn, seq + index, name, holder, projection, kind)
        if len(self._rows) >= BATCH_ROWS:
            yield from self.flush()

    def _row(
        self,
        stream_seq: int,
        commit_lsn: int,
        seq: int,
        operation: str,
        holder: Row,
        projection: _Projection,
        kind: str,
    ) -> None:
        row, old = holder.get("data"), holder.get("old")
        if not isinstance(row, dict) or not (old is None or isinstance(old, dict)):
            raise _damaged(stream_seq, "a row change without a row")
        raw = holder.get("raw") or ()
        unchanged = holder.get("unchanged")
        left_out = len(unchanged) if unchanged else 0
        if operation != "delete" and len(row) + left_out < len(projection.schema.columns):
            raise _damaged(stream_seq, f"a row of {self._definition.name} lacks columns")
        try:
            if kind == JSON:
                restore_row(row, raw, projection.schema)
                if old is not None:
                    restore_row(old, raw, projection.schema)
        except WireError as error:
            raise _damaged(stream_seq, str(error)) from error
        for name in projection.json_columns:
            if name not in raw:
                for values in (row, old) if old is not None else (row,):
                    if values.get(name) is not None:
                        values[name] = jsonb_text(values[name])
        if unchanged and old is not None:
            # REPLICA IDENTITY FULL: the old row is whole, so nothing is really left out.
            row.update({name: old[name] for name in unchanged if name in old})
            unchanged = [name for name in unchanged if name not in old]
        if operation != "update":
            old = None
        elif self._definition.is_bag:
            if old is None or unchanged:
                raise _damaged(
                    stream_seq, f"an UPDATE of {self._definition.name} without the old row"
                )
        elif old is not None and all(
            old.get(name) == row.get(name) for name in self._definition.key
        ):
            old = None
        self._take(commit_lsn, seq, operation, row, old, unchanged or None)

    def _take(
        self,
        commit_lsn: int,
        seq: int,
        operation: str,
        row: Row,
        old: Row | None,
        unchanged: list[str] | None,
    ) -> None:
        if unchanged:
            texts = (name + TEXT_SUFFIX for name in unchanged)
            unchanged = [self._plain[n] for n in (*unchanged, *texts) if n in self._plain]
        self._heads.append((commit_lsn, seq, operation, unchanged))
        self._rows.append(row)
        self._olds.append(old)
        left_out = frozenset(unchanged or ())
        if operation == "truncate" or old is not None or left_out:
            self.facts |= ChangeFacts(
                truncated_at=(commit_lsn, seq) if operation == "truncate" else None,
                moves=old is not None,
                unchanged=left_out,
                moved_unchanged=left_out if old is not None else frozenset(),
            )
        self.commit_lsn = max(self.commit_lsn, commit_lsn)

    def flush(self) -> Iterator[pa.RecordBatch]:
        """What is left, if anything."""
        if not self._rows:
            return
        rows, olds, heads = self._rows, self._olds, self._heads
        self._rows, self._olds, self._heads = [], [], []
        self.facts |= ChangeFacts(count=len(rows))
        projection = self._projections.get(self._version)
        names = self._definition.columns.names
        if projection is None:
            arrays = {n: pa.nulls(len(rows), self._definition.columns.field(n).type) for n in names}
        else:
            arrays = projection.arrays(rows, names)
        lsns, seqs, operations, unchanged = zip(*heads, strict=True)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(lsns, pa.int64()),
                pa.array(seqs, pa.int64()),
                pa.array(operations, pa.string()),
                self._old_array(olds, projection),
                pa.array(unchanged, pa.list_(pa.string())),
                *(arrays[name] for name in names),
            ],
            schema=self._arrow_schema,
        )

    def _old_array(self, olds: Sequence[Row | None], projection: _Projection | None) -> pa.Array:
        type_ = self._arrow_schema.field(OLD).type
        present = pa.array([old is not None for old in olds])
        if projection is None or not any(old is not None for old in olds):
            return pa.nulls(len(olds), type_)
        names = self._definition.identity
        arrays = projection.arrays([old or {} for old in olds], names)
        return pa.StructArray.from_arrays(
            [arrays[name] for name in names], fields=list(type_), mask=pc.invert(present)
        )

    def _projection(self, stream_seq: int, version: int) -> _Projection:
        found = self._projections.get(version)
        if found is None:
            schema = self._schemas.get(version)
            if schema is None:
                raise _damaged(
                    stream_seq, f"schema version {version} of {self._definition.name} is not known"
                )
            found = self._projections[version] = _Projection(self._definition, schema, self._policy)
        return found


def _document(stream_seq: int, kind: str, payload: bytes) -> Row:
    document: Row
    try:
        if kind == MSGPACK:
            document = msgpack.unpackb(payload)
            if type(document) is not dict or document.get("v") != WIRE_VERSION:
                document = decode_payload(None, payload)
        else:
            document = decode_payload({CONTENT_TYPE: kind}, payload)
            for name in ("lsn", "epoch", "seq", "schema_version"):
                if name in document:
                    document[name] = int(document[name])
        if not isinstance(document["lsn"], int) or not isinstance(document["operation"], str):
            raise WireError("no position")
        if not isinstance(document["epoch"], int):
            raise WireError("no epoch")
    except WireVersionError as error:
        raise VersionTooNew(f"message {stream_seq} of the change stream: {error}") from error
    except (WireError, *MISFITS, msgpack.UnpackException) as error:
        raise _damaged(stream_seq, repr(error)) from error
    return document


def _damaged(stream_seq: int, what: str) -> CorruptData:
    return CorruptData(f"message {stream_seq} of the change stream: {what}")
