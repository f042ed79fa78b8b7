"""A source in memory that commits transactions and says what each table held at every LSN."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from consumer_sdk.mirror.decisions import RowAnswer, WantedRows
from consumer_sdk.reading.decoder import Stored
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.targets.incomplete import key_text
from consumer_sdk.targets.target import CopyState, MirrorCopy, SnapshotRow, TableName
from consumer_sdk.wire.column_types import Column, TableSchema
from consumer_sdk.wire.envelope import Event
from consumer_sdk.wire.oids import INT4, INT8, TEXT

Row = dict[str, Any]

CREATED = 1_700_000_000_000_000


def column(name: str, position: int, type_oid: int = TEXT, **options: Any) -> Column:
    """A column with everything but its name and type left at a plain value."""
    facts: dict[str, Any] = {
        "data_type": {INT4: "integer", INT8: "bigint", TEXT: "text"}.get(type_oid, "text"),
        "type_modifier": -1,
        "is_nullable": True,
        "column_default": None,
        "is_key": False,
        "base_type_oid": type_oid,
        "element_oid": 0,
        "backfilled": False,
    }
    return Column(name=name, position=position, type_oid=type_oid, **(facts | options))


def table_schema(
    table: str,
    *,
    source: str = "slot",
    schema: str = "public",
    epoch: int = 1,
    version: int = 1,
    columns: tuple[Column, ...] | None = None,
    primary_key: tuple[str, ...] = ("id",),
    identity: str = "default",
    filenode: int | None = 7,
) -> TableSchema:
    """A table with key `id`, a plain column and one that may be TOASTed, unless told otherwise."""
    if columns is None:
        columns = (
            column("id", 1, INT4, is_key=True, is_nullable=False),
            column("name", 2),
            column("body", 3),
        )
    return TableSchema(
        source=source,
        epoch=epoch,
        table=table,
        schema=schema,
        timestamp=0,
        schema_version=version,
        lsn=0,
        primary_key=primary_key,
        replica_identity=identity,
        columns=columns,
        filenode=filenode,
    )


@dataclass
class ModelStream:
    """The CDC stream: every message gets the next sequence."""

    stored: list[Stored] = field(default_factory=list)
    last: int = 0

    def append(self, event: Event) -> int:
        self.last += 1
        self.stored.append(Stored(self.last, event))
        return self.last

    def since(self, sequence: int, tables: set[TableName] | None = None) -> list[Stored]:
        """What a feed from `sequence` on delivers, of some tables or of all."""
        return [
            item
            for item in self.stored
            if item.stream_seq >= sequence
            and (
                tables is None
                or (item.event.schema, item.event.table) in tables
                or item.event.operation == "PROGRESS"
            )
        ]


class ModelSource:
    """Tables, their whole history, and the messages a bridge would publish about it."""

    def __init__(
        self, stream: ModelStream, schemas: list[TableSchema], *, name: str = "slot", epoch: int = 1
    ) -> None:
        self.stream = stream
        self.name = name
        self.epoch = epoch
        self.lsn = 1000
        self.schemas = {(schema.schema, schema.table): schema for schema in schemas}
        self.rows: dict[TableName, list[Row]] = {table: [] for table in self.schemas}
        self.history: list[tuple[int, dict[TableName, list[Row]]]] = []
        self._open: list[Event] = []
        self._touched: list[TableName] = []

    # changes, collected until `commit`

    def insert(self, table: TableName, row: Row) -> None:
        self.rows[table].append(dict(row))
        self._add(table, "INSERT", dict(row))

    def update(self, table: TableName, old: Row, new: Row, unchanged: tuple[str, ...] = ()) -> None:
        """Change one row that equals `old`; `unchanged` columns are left out of the event."""
        schema = self.schemas[table]
        index = self.rows[table].index(old)
        full = {**new, **{name: old[name] for name in unchanged}}
        self.rows[table][index] = full
        data = {name: value for name, value in full.items() if name not in unchanged}
        before = None
        if schema.replica_identity == "full":
            before = dict(old)
        elif any(old[name] != full[name] for name in key_columns(schema)):
            before = {name: old[name] for name in key_columns(schema)}
        self._add(table, "UPDATE", data, before, unchanged)

    def delete(self, table: TableName, row: Row) -> None:
        schema = self.schemas[table]
        self.rows[table].remove(row)
        names = list(row) if schema.replica_identity == "full" else key_columns(schema)
        self._add(table, "DELETE", {name: row[name] for name in names})

    def truncate(self, table: TableName) -> None:
        self.rows[table].clear()
        self._add(table, "TRUNCATE", None)

    def change_schema(self, schema: TableSchema, *, rows: list[Row] | None = None) -> None:
        """Announce another version, in order with the changes; `rows` replace those there."""
        table = (schema.schema, schema.table)
        self.schemas[table] = schema
        if rows is not None:
            self.rows[table] = [dict(row) for row in rows]
        event = self._event(table, "SCHEMA", len(self._open), None)
        event.document = schema.to_document() | {"operation": "SCHEMA"}
        self._open.append(event)

    def events(self) -> list[Event]:
        """Commit without storing: the messages of the transaction, in order."""
        self.lsn += 10
        counted = [event for event in self._open if event.operation != "SCHEMA"]
        for seq, event in enumerate(counted):
            event.seq = seq
        for event in self._open:
            event.commit_lsn = self.lsn
        events = list(self._open)
        if counted:
            final = counted[-1]
            final.last = True
            others = [table for table in self._touched if table != (final.schema, final.table)]
            for offset, table in enumerate(others, start=len(counted)):
                events.append(self._event(table, "COMMIT", offset, None))
        for event in events:
            event.commit_lsn = self.lsn
        self.history.append((self.lsn, copy.deepcopy(self.rows)))
        self._open, self._touched = [], []
        return events

    def commit(self) -> int:
        """Store the transaction; returns its commit LSN."""
        for event in self.events():
            self.stream.append(event)
        return self.lsn

    def progress(self, *, gap: Any = None) -> None:
        """Store a progress message: everything committed so far is in the stream."""
        self.lsn += 10
        event = self._event(("", ""), "PROGRESS", 0, None)
        event.commit_lsn = self.lsn
        event.document = {"lsn": self.lsn, "gap": gap}
        self.stream.append(event)

    # what was true when

    def at(self, commit_lsn: int) -> dict[TableName, list[Row]]:
        """Every table with all transactions up to this commit LSN."""
        state: dict[TableName, list[Row]] = {table: [] for table in self.schemas}
        for lsn, rows in self.history:
            if lsn > commit_lsn:
                break
            state = rows
        return state

    def snapshot(
        self, table: TableName, snapshot_lsn: int, cdc_seq: int
    ) -> tuple[MirrorCopy, list[SnapshotRow]]:
        """A next copy to be loaded, and its rows."""
        made = MirrorCopy(
            schema=self.schemas[table],
            state=CopyState.LOADING,
            epoch=self.epoch,
            snapshot_id=f"{table[1]}-{snapshot_lsn}",
            snapshot_lsn=snapshot_lsn,
            stream_seq=cdc_seq - 1,
            stream_created=CREATED,
        )
        rows = self.at(snapshot_lsn - 1)[table]
        return made, [SnapshotRow(dict(row), ()) for row in rows]

    def pieces(
        self, table: TableName, groups: list[tuple[int, set[Any]]], cdc_seq: int, exact_lsn: int = 0
    ) -> tuple[MirrorCopy, list[SnapshotRow]]:
        """The same from several consistent points, each with the values of `id` copied there."""
        points = [lsn for lsn, _ in groups]
        made, _ = self.snapshot(table, min(points), cdc_seq)
        made = replace(made, exact_lsn=max(exact_lsn, *points))
        rows = [
            SnapshotRow(dict(row), ())
            for lsn, keys in groups
            for row in self.at(lsn - 1)[table]
            if row["id"] in keys
        ]
        return made, rows

    def answer(self, wanted: WantedRows, lsn: int) -> RowAnswer:
        """The wanted rows as of an LSN."""
        key = key_columns(wanted.copy.schema)
        rows = {key_text(key, row): row for row in self.at(lsn - 1)[wanted.copy.name]}
        found = {text: SnapshotRow(dict(rows[text]), ()) for text in wanted.keys if text in rows}
        return RowAnswer(wanted, lsn, found)

    def _add(
        self,
        table: TableName,
        operation: str,
        data: Any,
        old: Row | None = None,
        unchanged: tuple[str, ...] = (),
    ) -> None:
        event = self._event(table, operation, 0, data)
        event.old = old
        event.unchanged = unchanged
        self._open.append(event)
        if table not in self._touched:
            self._touched.append(table)

    def _event(self, table: TableName, operation: str, seq: int, data: Any) -> Event:
        version = self.schemas[table].schema_version if table in self.schemas else 0
        return Event(
            source=self.name,
            epoch=self.epoch,
            table=table[1],
            schema=table[0],
            operation=operation,
            commit_lsn=0,
            seq=seq,
            xid=1,
            ts=0,
            schema_version=version,
            relation_id=1,
            msg_id="",
            subject="",
            data=data,
        )


def normalized(rows: list[Row]) -> list[Row]:
    """Rows in an order of their own, for comparison."""
    return sorted(rows, key=lambda row: repr(sorted(row.items())))
