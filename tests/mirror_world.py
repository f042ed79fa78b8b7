"""Sources, stream, buckets and snapshots in memory, behind the client that a mirror asks.

Everything that a mirror may meet happens while it runs, at random: transactions of several tables,
schema changes, gaps, new epochs, streams trimmed and made anew, tables that leave and come back.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from consumer_sdk.errors import GapError, UnknownTable
from consumer_sdk.targets.evolution import key_columns
from consumer_sdk.transport.api import StreamBounds
from consumer_sdk.wire.subjects import table_token
from tests.mirror_model import CREATED, ModelSource, ModelStream, Row, column, table_schema

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from random import Random

    from consumer_sdk.mirror.notices import Notice
    from consumer_sdk.reading.decoder import Stored
    from consumer_sdk.targets.target import TableName
    from consumer_sdk.wire.column_types import TableSchema
    from consumer_sdk.wire.envelope import Event

KEYS = 6
TEXTS = ["x", "y", "z", None]


class WorldSource(ModelSource):
    """A source whose log is ahead of the stream, and whose history may break."""

    def __init__(self, stream: ModelStream, schemas: list[TableSchema], name: str) -> None:
        super().__init__(stream, schemas, name=name)
        self.under_way: list[Event] = []
        self.relations: dict[TableName, int] = {}
        self.epochs = {1: self.history}
        self.note()

    def note(self) -> None:
        """The rows of now are those of the newest LSN."""
        self.history.append((self.lsn, copy.deepcopy(self.rows)))

    def rows_at(self, epoch: int, commit_lsn: int, table: TableName) -> list[Row]:
        found: list[Row] = []
        for lsn, rows in self.epochs[epoch]:
            if lsn <= commit_lsn:
                found = rows.get(table, found)
        return found

    def _event(self, table: TableName, operation: str, seq: int, data: Any) -> Event:
        event = super()._event(table, operation, seq, data)
        event.relation_id = self.relations.get(table, 1)
        return event


class Chunk(list[Row]):
    """Rows of a snapshot, none of them raw."""

    def raw(self, index: int) -> tuple[str, ...]:
        return ()


class World:
    """All of it, driven by one random generator; also the client of a mirror."""

    def __init__(self, data: Random, tables: dict[str, list[TableName]]) -> None:
        self.data = data
        self.steps = 0
        self.stream = ModelStream()
        self.first = 1
        self.created = CREATED
        self.version = 1
        self.sources: dict[str, WorldSource] = {}
        self.owners: dict[TableName, str] = {}
        self.kv: dict[TableName, TableSchema] = {}
        self.hidden: set[TableName] = set()
        self.moved: set[TableName] = set()
        self.newest: dict[str, dict[str, Any]] = {}
        self.metas: dict[TableName, Any] = {}
        self.watchers: list[asyncio.Queue[TableSchema]] = []
        self.trace: list[str] = []
        self.subjects = SimpleNamespace(progress=lambda source: source)
        for name, listed in tables.items():
            schemas = [self._first_schema(name, table) for table in listed]
            source = self.sources[name] = WorldSource(self.stream, schemas, name)
            for table in listed:
                self.owners[table] = name
                self.kv[table] = source.schemas[table]
            self._progress(source)

    def _first_schema(self, source: str, table: TableName) -> TableSchema:
        options: dict[str, Any] = {}
        if table[1].startswith("full"):
            options = {"identity": "full"}
        elif table[1].lower().startswith("bag"):
            options = {"identity": "full", "primary_key": ()}
        return table_schema(table[1], source=source, schema=table[0], **options)

    # what happens

    def step(self) -> None:
        """Let one thing happen, while there are steps left."""
        if self.steps <= 0:
            return
        self.steps -= 1
        data = self.data
        source = self.sources[data.choice(sorted(self.sources))]
        kind = data.choices(
            ["commit", "publish", "progress", "gap", "epoch", "trim", "recreate", "hide", "move",
             "again"],
            [40, 40, 10, 3, 2, 2, 0.5, 3, 1, 1.5],
        )[0]  # fmt: skip
        self.trace.append(f"{self.stream.last}: {source.name} {kind}")
        if kind == "commit":
            self._transaction(source)
        elif kind == "publish":
            self.publish(source, data.randint(1, 6))
        elif kind == "progress":
            self._progress(source)
        elif kind == "gap":
            self._gap(source)
        elif kind == "epoch":
            self.new_epoch(source)
        elif kind == "trim":
            self.first = data.randint(self.first, self.stream.last + 1)
        elif kind == "recreate":
            self._recreate()
        elif kind == "hide":
            self.hide(source)
        elif kind == "move":
            self.move(source)
        else:
            self._create_again(source)

    def settle(self) -> None:
        """Let everything that has happened reach the stream."""
        for source in self.sources.values():
            self._progress(source)

    def publish(self, source: WorldSource, count: int) -> None:
        for event in source.under_way[:count]:
            if event.operation == "SCHEMA":
                table = (event.schema, event.table)
                if table not in self.hidden and self.owners[table] == source.name:
                    self._put(type(source.schemas[table]).from_document(event.document))
            self.stream.append(event)
        del source.under_way[:count]

    def _put(self, schema: TableSchema) -> None:
        self.kv[schema.schema, schema.table] = schema
        for queue in self.watchers:
            queue.put_nowait(schema)

    def _progress(self, source: WorldSource, gap: Any = None) -> None:
        self.publish(source, len(source.under_way))
        source.progress(gap=gap)
        source.note()
        self.newest[source.name] = {"epoch": source.epoch, "lsn": source.lsn}

    def tables_of(self, source: WorldSource) -> list[TableName]:
        return [
            table
            for table, owner in self.owners.items()
            if owner == source.name and table not in self.hidden
        ]

    def _transaction(self, source: WorldSource) -> None:
        tables = self.tables_of(source)
        if not tables:
            return
        for _ in range(self.data.randint(1, 5)):
            table = self.data.choice(tables)
            self._change(source, table)
            if self.data.random() < 0.08:
                self._alter(source, table)
        if source._open:
            source.under_way += source.events()

    def _row(self, source: WorldSource, table: TableName) -> Row:
        names = [column.name for column in source.schemas[table].columns]
        row: Row = {name: self.data.choice(TEXTS) for name in names}
        return row | {"id": self.data.randrange(KEYS)}

    def _free(self, source: WorldSource, table: TableName, key: int) -> bool:
        keyed = bool(key_columns(source.schemas[table]))
        return not keyed or key not in {row["id"] for row in source.rows[table]}

    def _change(self, source: WorldSource, table: TableName) -> None:
        data, rows = self.data, source.rows[table]
        kind = data.choice(["insert", "insert", "update", "move", "delete", "swap", "truncate"])
        if kind == "insert" or not rows:
            row = self._row(source, table)
            if self._free(source, table, row["id"]):
                source.insert(table, row)
            return
        old = dict(data.choice(rows))
        others = [name for name in old if name != "id"]
        unchanged = tuple(data.sample(others, data.randint(0, min(1, len(others)))))
        if kind == "truncate" and data.random() < 0.3:
            source.truncate(table)
        elif kind == "delete":
            source.delete(table, old)
        elif kind == "update":
            new = {**self._row(source, table), "id": old["id"]}
            source.update(table, old, new, unchanged)
        elif kind == "move":
            key = data.randrange(KEYS)
            if self._free(source, table, key):
                source.update(table, old, {**old, "id": key}, unchanged)
        elif kind == "swap" and source.schemas[table].replica_identity == "full":
            before = [dict(row) for row in rows]
            for row, other in zip(before, before[1:] + before[:1], strict=True):
                source.update(table, row, {**row, "id": other["id"]}, unchanged)

    def _alter(self, source: WorldSource, table: TableName) -> None:
        """Another schema version of any effect, and a change that needs it."""
        data, old = self.data, source.schemas[table]
        self.version += 1
        rows = [dict(row) for row in source.rows[table]]
        rest = [one for one in old.columns if one.name != "id"]
        place, name = len(old.columns) + 1, f"c{self.version}"
        kind = data.choice(["none", "identity", "add", "add", "drop", "rename", "fill", "key"])
        new = replace(old, schema_version=self.version)
        if kind == "identity" and key_columns(old):
            flipped = "default" if old.replica_identity == "full" else "full"
            new = replace(new, replica_identity=flipped)
        elif kind == "add":
            new = replace(new, columns=(*old.columns, column(name, place)))
            rows = [row | {name: None} for row in rows]
        elif kind == "fill":
            new = replace(new, columns=(*old.columns, column(name, place, backfilled=True)))
            rows = [row | {name: "filled"} for row in rows]
        elif kind == "drop" and len(rest) > 1:
            gone = data.choice(rest)
            new = replace(new, columns=tuple(one for one in old.columns if one is not gone))
            rows = [{n: v for n, v in row.items() if n != gone.name} for row in rows]
        elif kind == "rename":
            gone = data.choice(rest)
            renamed = tuple(replace(c, name=name) if c is gone else c for c in old.columns)
            new = replace(new, columns=renamed)
            rows = [{(name if n == gone.name else n): v for n, v in row.items()} for row in rows]
        elif kind == "key" and (key_columns(old) or len({r["id"] for r in rows}) == len(rows)):
            key = () if key_columns(old) else ("id",)
            columns = tuple(replace(c, is_key=c.name in key) for c in old.columns)
            new = replace(new, primary_key=key, replica_identity="full", columns=columns)
        self.trace.append(f"  alter {table[1]} {kind} v{self.version}")
        source.change_schema(new, rows=rows)
        row = self._row(source, table)
        if self._free(source, table, row["id"]):
            source.insert(table, row)
        else:
            source.truncate(table)

    def _unseen(self, source: WorldSource, table: TableName) -> None:
        """Change rows without a word."""
        counted, touched = list(source._open), list(source._touched)
        for _ in range(3):
            self._change(source, table)
        source._open, source._touched = counted, touched

    def _gap(self, source: WorldSource) -> None:
        tables = self.tables_of(source)
        if tables:
            named = self.data.sample(tables, self.data.randint(1, len(tables)))
            self.publish(source, len(source.under_way))
            for table in named:
                self._unseen(source, table)
            tokens = [table_token(*table) for table in named]
            self._progress(source, {"reason": "lost", "tables": tokens})

    def new_epoch(self, source: WorldSource) -> None:
        # What was under way is lost, perhaps in the middle of a transaction.
        source.under_way.clear()
        source.epoch += 1
        source.history = source.epochs[source.epoch] = []
        source.lsn = self.data.choice([source.lsn, 500])
        for table, schema in source.schemas.items():
            source.schemas[table] = replace(schema, epoch=source.epoch)
        for table in self.tables_of(source):
            self._put(source.schemas[table])
            if self.data.random() < 0.5:
                self._unseen(source, table)
        source.note()
        self._progress(source, {"reason": "new epoch"})

    def _recreate(self) -> None:
        self.stream.stored.clear()
        self.stream.last, self.first = 0, 1
        self.created += 1
        for source in self.sources.values():
            self.new_epoch(source)

    def hide(self, source: WorldSource) -> None:
        """A table leaves the publication, or comes back to it."""
        away = [table for table in sorted(self.hidden) if self.owners[table] == source.name]
        if away:
            table = away[0]
            self.hidden.discard(table)
            self._unseen(source, table)
        else:
            tables = self.tables_of(source)
            if len(tables) < 2:
                return
            table = self.data.choice(tables)
        self.publish(source, len(source.under_way))
        if not away:
            self.hidden.add(table)
            del self.kv[table]
        self.trace.append(f"  {'back' if away else 'away'} {table[1]}")
        self._progress(source, {"reason": "absent", "tables": [table_token(*table)]})
        if away:
            self._put(source.schemas[table])

    def move(self, source: WorldSource) -> None:
        """Another source publishes a table from now on, once: what shows stays behind meanwhile."""
        tables = [table for table in self.tables_of(source) if table not in self.moved]
        if not tables or len(self.tables_of(source)) < 2:
            return
        table = self.data.choice(tables)
        self.moved.add(table)
        other = self.data.choice([s for s in self.sources.values() if s is not source])
        self.publish(source, len(source.under_way))
        self.trace.append(f"  {table[1]} to {other.name}")
        self.version += 1
        other.schemas[table] = replace(
            source.schemas[table], source=other.name, epoch=other.epoch,
            schema_version=self.version,
        )  # fmt: skip
        other.rows[table] = [dict(row) for row in source.rows[table]]
        other.relations[table] = other.relations.get(table, 1) + 1
        other.note()
        self.owners[table] = other.name
        self.metas.pop(table, None)
        self._put(other.schemas[table])
        other.truncate(table)
        other.under_way += other.events()
        self.publish(other, len(other.under_way))

    def _create_again(self, source: WorldSource) -> None:
        tables = self.tables_of(source)
        if tables:
            table = self.data.choice(tables)
            self.publish(source, len(source.under_way))
            source.relations[table] = source.relations.get(table, 1) + 1
            source.rows[table] = []
            self.trace.append(f"  {table[1]} again")
            self._progress(source, {"reason": "another", "tables": [table_token(*table)]})

    # the client

    def notice(self, notice: Notice) -> None:
        """Keep what the mirror tells, among what happens."""
        self.trace.append(f"    {notice.event} {notice.fields}")

    async def tables(self) -> list[TableSchema]:
        return list(self.kv.values())

    async def schema(self, table: TableName) -> TableSchema:
        if table not in self.kv:
            raise UnknownTable(table[1])
        return self.kv[table]

    async def watch_schemas(self) -> AsyncGenerator[TableSchema, None]:
        queue: asyncio.Queue[TableSchema] = asyncio.Queue()
        self.watchers.append(queue)
        try:
            for schema in list(self.kv.values()):
                yield schema
            while True:
                yield await queue.get()
        finally:
            self.watchers.remove(queue)

    async def progress(self, source: str) -> Any:
        return SimpleNamespace(**self.newest[source])

    def log(self) -> World:
        return self

    async def bounds(self) -> StreamBounds:
        return StreamBounds(self.first, self.stream.last, self.created)

    async def snapshot(self, table: TableName, *, fresh: bool, pieces: bool) -> Any:
        del pieces  # every snapshot of the model has one point
        schema = await self.schema(table)
        source = self.sources[self.owners[table]]
        stored = self.metas.get(table)
        usable = stored is not None and (
            (stored.meta.epoch, stored.meta.stream_created) == (source.epoch, self.created)
            and stored.meta.schema_version == schema.schema_version
            and stored.meta.cdc_seq >= self.first
        )
        if usable and not fresh:
            return stored
        cdc_seq = self.stream.last + 1
        self.step()
        if table not in self.kv:
            raise UnknownTable(table[1])
        if self.owners[table] != source.name:
            cdc_seq = self.stream.last + 1
        source = self.sources[self.owners[table]]
        schema = source.schemas[table]
        if self.kv[table] != schema:
            self._put(schema)
        source.lsn += 10
        made = self.metas[table] = SimpleNamespace(
            reused=False,
            chunks=partial(self._chunks, copy.deepcopy(source.rows[table])),
            meta=SimpleNamespace(
                snapshot_id=f"{table[1]}-{self.stream.last}-{source.lsn}", source=source.name,
                epoch=source.epoch, table=table[1], schema=table[0], snapshot_lsn=source.lsn,
                row_count=len(source.rows[table]), schema_version=schema.schema_version,
                stream_created=self.created, cdc_seq=min(cdc_seq, self.stream.last + 1),
                relation_id=source.relations.get(table, 1), exact_lsn=0,
            ),
        )  # fmt: skip
        self.trace.append(f"  snapshot {made.meta.snapshot_id} cdc_seq {cdc_seq}")
        return made

    async def _chunks(self, rows: list[Row]) -> AsyncGenerator[Chunk, None]:
        for start in range(0, len(rows), 3):
            yield Chunk(dict(row) for row in rows[start : start + 3])
            await asyncio.sleep(0)
            self.step()

    def filters(
        self, tables: list[TableName] | None, progress: list[str]
    ) -> Callable[[Event], bool]:
        def wanted(event: Event) -> bool:
            if event.operation == "PROGRESS":
                return tables is None or event.source in progress
            return tables is None or (event.schema, event.table) in tables

        return wanted

    def feed(self, tables: Any, start: int, *, extra_subjects: Any, created: int, **_: Any) -> Any:
        return WorldFeed(self, self.filters(tables, list(extra_subjects)), start, created)

    # in place of what asks NATS about idle streams

    deployment = None

    async def is_read_through(
        self, wanted: Callable[[Event], bool], after: int, through: int, created: int
    ) -> bool:
        assert created <= self.created
        return not any(
            wanted(item.event) for item in self.stream.stored if after <= item.stream_seq <= through
        )

    async def newest_lsn(self, _: Any, name: str, epoch: int, wanted_lsn: int) -> int:
        source = self.sources[name]
        behind = source.epoch == epoch and self.newest[name]["lsn"] < wanted_lsn
        if behind and (self.steps <= 0 or self.data.random() < 0.3):
            # Taking a snapshot writes to the log, so that an idle source reports progress past it.
            self._progress(source)
        known = self.newest[name]
        return known["lsn"] if known["epoch"] == epoch else 0


class WorldFeed:
    """What a consumer of the stream gets."""

    def __init__(
        self, world: World, wanted: Callable[[Event], bool], start: int, created: int
    ) -> None:
        self._world = world
        self._wanted = wanted
        self._created = created
        self.next_sequence = start
        self.caught_up = False

    async def __aenter__(self) -> WorldFeed:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def next(self, wait: float) -> list[Stored]:
        world = self._world
        await asyncio.sleep(0)
        for _ in range(world.data.randint(0, 3)):
            world.step()
        if world.steps <= 0:
            for source in world.sources.values():
                world.publish(source, len(source.under_way))
        if world.created != self._created:
            raise GapError("the stream was recreated", self.next_sequence, 0)
        if self.next_sequence < world.first:
            raise GapError("trimmed", self.next_sequence, world.first)
        end = min(world.stream.last + 1, self.next_sequence + world.data.randint(1, 25))
        batch = [
            item
            for item in world.stream.stored
            if self.next_sequence <= item.stream_seq < end and self._wanted(item.event)
        ]
        self.next_sequence = end
        self.caught_up = end > world.stream.last
        return batch
