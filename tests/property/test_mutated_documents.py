"""Valid messages spoilt in one field: every reader takes them, or refuses them with its own error.

Nothing else comes out, and nothing that is printed can steer a terminal.
"""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import settings

from bridge.jetstream.record import StreamRecord, load_progress
from bridge.schemas.coverage_watch import CoverageStore
from bridge.schemas.store import read_document
from bridge.snapshot.coordinator.records import read_record
from bridge.source import Source
from consumer_sdk.commands import schemas, tail
from consumer_sdk.commands.files import open_row_file
from consumer_sdk.commands.terminal import Paint
from consumer_sdk.errors import CdcError
from consumer_sdk.mirror.decisions import Alter, Apply, RepairNeeded
from consumer_sdk.mirror.handoff import HandOff
from consumer_sdk.reading.decoder import EventDecoder
from consumer_sdk.reading.progress import decode_progress
from consumer_sdk.reading.references import References
from consumer_sdk.reading.schemas import read_schema
from consumer_sdk.reading.transactions import TransactionBuilder
from consumer_sdk.snapshot.chunks import ChunkReader
from consumer_sdk.snapshot.snapshot import Snapshot, decode_meta
from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import CopyState, MirrorCopy, MirrorPosition, SnapshotRow
from consumer_sdk.transport.api import Frame
from consumer_sdk.verify.fold import Fold
from consumer_sdk.verify.table_side import TableLayout
from consumer_sdk.wire import Subjects
from consumer_sdk.wire.column_types import Column, TableSchema
from spark_consumer.changes.change_decoder import ChangeDecoder
from spark_consumer.lake.lake_table import LakePosition
from spark_consumer.lake.table_definition import define
from spark_consumer.source.message_rows import envelope_batches, typed_batches
from spark_consumer.source.snapshot_source import ChunkDecoder
from tests.property import mutated_documents as valid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from consumer_sdk.reading.decoder import Stored

USERS = TableSchema.from_document(valid.SCHEMA)
REFUSALS = (CdcError, RepairNeeded)
# All of them in `make fuzz`; the suite takes some, of every field others: coprime to their number.
STRIDE = 9 if settings().max_examples <= 100 else 1
CHANGES = frozenset({"INSERT", "UPDATE", "DELETE", "TRUNCATE"})

encodings = pytest.mark.parametrize("as_json", [False, True], ids=["msgpack", "json"])


def _complete(work: Any) -> Any:
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a reader waited")


def _headers(as_json: bool) -> bytes:
    return (
        f"NATS/1.0\r\nContent-Type: application/{'json' if as_json else 'msgpack'}\r\n\r\n".encode()
    )


class Store(References):
    """What a client would fetch; it is the references, the schemas and the deployment in one."""

    nc: Any = None
    subjects = Subjects("")

    def __init__(self, as_json: bool) -> None:
        super().__init__(self.nc, self.subjects)
        self.references = self
        self._as_json = as_json

    async def fetch_object(self, _reference: dict[str, Any]) -> bytes:
        row = valid.row(3, as_json=self._as_json)
        return valid.encoded({"data": row, **row}, as_json=self._as_json)

    async def fetch_dictionary(self, _name: str) -> bytes:
        return b""

    async def of_version(self, _token: str, _version: int) -> TableSchema:
        return USERS


class Replica:
    """A mirror in SQLite with one row; whatever is done to it is undone."""

    def __init__(self, directory: Path) -> None:
        self.target = SqliteTarget(directory / "replica.db")
        self.target.open()
        self.copy = MirrorCopy(
            USERS, CopyState.CATCHING_UP, epoch=100, snapshot_id="s", snapshot_lsn=50,
            applied_lsn=50, stream_seq=1, stream_created=1, relation_id=7,
        )  # fmt: skip
        self.target.begin()
        self.target.create(self.copy)
        self.target.load(self.copy, [SnapshotRow(valid.row(as_json=False), ())])
        self.target.promote([self.copy])
        self.target.save_position(MirrorPosition("shop", 100, 60, 0, 1, 1))
        self.target.commit()
        self._state = self.target.read_state()

    def follow(self, stored: list[Stored]) -> None:
        actions = HandOff(self._state, 1).advance(stored)
        self.target.begin()
        try:
            for action in actions:
                if isinstance(action, Apply):
                    self.target.apply(action.copy, action.events)
                elif isinstance(action, Alter):
                    self.target.alter(action.copy, action.schema)
        finally:
            self.target.rollback()

    def load(self, schema: TableSchema, rows: list[SnapshotRow]) -> None:
        copy = MirrorCopy(schema)
        self.target.begin()
        try:
            self.target.require_room([copy])
            self.target.create(copy)
            self.target.save_copy(copy)
            self.target.load(copy, rows)
        finally:
            self.target.rollback()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    replica = Replica(tmp_path)
    yield replica
    replica.target.close()


def _shown(lines: str) -> None:
    for line in lines.split("\n"):
        assert line.isprintable(), ascii(line)


def _each(
    document: valid.Document, as_json: bool, read: Callable[[bytes], None], start: str = ""
) -> None:
    """Let a reader have the mutations; what it may not raise is told with the mutation."""
    for what, payload in islice(valid.mutated(document, as_json=as_json), 0, None, STRIDE):
        try:
            with suppress(*REFUSALS):
                read(payload)
        except Exception as error:
            raise AssertionError(f"{start} {what}: {error!r:.300}") from error


def _tried(work: Callable[[], Any]) -> None:
    with suppress(*REFUSALS):
        work()


@encodings
def test_a_change_may_be_spoilt_anywhere(as_json: bool, replica: Replica) -> None:
    store = Store(as_json)
    definition = define(USERS, "text")
    kind = "application/json" if as_json else "application/msgpack"
    here = LakePosition("shop", 100, 1, 1, 60, 50, 1)

    def read(subject: bytes, payload: bytes) -> None:
        batch = pa.RecordBatch.from_pydict(
            {"stream_seq": [9], "content_type": [kind], "payload": pa.array([payload], pa.binary())}
        )
        if not subject.startswith(b"cdc.$"):
            _tried(lambda: list(envelope_batches(iter([batch]))))
            _tried(lambda: list(typed_batches(iter([batch]), USERS, "text")))
            changes = ChangeDecoder(definition, {1: USERS}, here, "text")
            _tried(lambda: [*changes.add(9, kind, payload), *changes.flush()])
        decoder = EventDecoder(store.subjects, store, store)
        stored = _complete(decoder.decode([Frame(9, subject, _headers(as_json), payload)]))
        for item in stored:
            if tail._is_shown(item.event):
                for write in (tail._json_line, tail._text_line(Paint(io.StringIO()))):
                    _tried(lambda item=item, write=write: _shown(tail._line(write, item)))
        transactions = TransactionBuilder()
        _tried(lambda: [transactions.push(item) for item in stored])
        replica.follow(stored)

    for subject, document in valid.messages(as_json=as_json):
        _each(document, as_json, lambda payload, at=subject: read(at, payload), str(subject))


def test_a_change_to_be_verified_may_be_spoilt_anywhere(tmp_path: Path) -> None:
    store = Store(as_json=False)
    keyless = TableSchema.from_document(
        {**valid.SCHEMA, "primary_key": [], "replica_identity": "full"}
    )
    decoder = EventDecoder(store.subjects, store, store)

    for schema in (USERS, keyless):
        with Fold(TableLayout(schema), tmp_path) as fold:

            def read(payload: bytes, fold: Fold = fold) -> None:
                frame = Frame(9, b"cdc.users.update", _headers(False), payload)
                for stored in _complete(decoder.decode([frame])):
                    if stored.event.operation in CHANGES:
                        fold.spool(stored.event)

            for subject, document in valid.messages(as_json=False):
                if subject.rpartition(b".")[2] in (b"insert", b"update", b"delete"):
                    _each(document, False, read, str(subject))
            if schema.primary_key:
                fold.apply()
            else:
                fold.count_changes(1)


@encodings
def test_a_schema_may_be_spoilt_anywhere(
    as_json: bool, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Schemas:
        def __init__(self, schema: TableSchema) -> None:
            self._schema = schema

        async def __aenter__(self) -> Schemas:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def schema(self, _table: str) -> TableSchema:
            return self._schema

        async def tables(self) -> list[TableSchema]:
            return [self._schema]

    def read(payload: bytes) -> None:
        schema = read_schema("users", payload)
        monkeypatch.setattr(schemas, "open_client", lambda _: Schemas(schema))
        for show in (schemas.show_schema, schemas.show_tables):
            for json in (False, True):
                with redirect_stdout(io.StringIO()) as shown:
                    _complete(show(argparse.Namespace(table="users", json=json)))
                _shown(shown.getvalue())
        _tried(lambda: define(schema, "text"))
        replica.load(schema, [])

    _each(valid.SCHEMA, as_json, read)


@encodings
def test_progress_may_be_spoilt_anywhere(as_json: bool) -> None:
    _each(
        valid.PROGRESS,
        as_json,
        lambda payload: decode_progress(Frame(1, b"", _headers(as_json), payload)) and None,
    )


@encodings
def test_a_snapshot_may_be_spoilt_anywhere(as_json: bool, replica: Replica, tmp_path: Path) -> None:
    store: Any = Store(as_json)
    spark = ChunkDecoder(define(USERS, "text"), USERS, "text")

    def write(name: str, meta: Any, chunks: list[Any]) -> None:
        writer = open_row_file(name)
        try:
            writer.begin([Column.from_document(one) for one in meta.columns])
            for one in chunks:
                writer.write(one)
            writer.finish()
        finally:
            writer.abandon()

    def describe(payload: bytes) -> None:
        meta = decode_meta(Frame(1, b"init.meta.users", _headers(as_json), payload))
        Snapshot(store, meta, reused=True)
        write(str(tmp_path / "out.parquet"), meta, [])

    _each(valid.META, as_json, describe, "meta")
    whole = decode_meta(
        Frame(1, b"init.meta.users", _headers(as_json), valid.encoded(valid.META, as_json=as_json))
    )
    reader = ChunkReader(store, whole)

    def read(payload: bytes) -> None:
        frame = Frame(1, b"init.snap.users.a.0", _headers(as_json), payload)
        chunk = _complete(reader.rows(0, frame))
        rows = [SnapshotRow(row, chunk.raw(index)) for index, row in enumerate(chunk)]
        _tried(lambda: replica.load(USERS, rows))
        for ending in ("csv", "jsonl", "parquet"):
            _tried(lambda ending=ending: write(str(tmp_path / f"out.{ending}"), whole, [chunk]))
        with redirect_stdout(io.StringIO()) as shown:
            _tried(lambda: write("-", whole, [chunk]))
        _shown(shown.getvalue())
        spark.from_rows(chunk)

    _each(valid.chunk(as_json=as_json), as_json, read, "chunk")


class Bucket:
    """A KV bucket in which every key holds the same."""

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.revision = 1

    async def get(self, _key: str) -> Bucket:
        return self


@encodings
def test_what_a_bridge_keeps_in_kv_may_be_spoilt_anywhere(as_json: bool) -> None:
    position = {"lsn": 5, "seq": 0, "ordinal": 0, "ts": 1}

    def read(payload: bytes) -> None:
        bucket: Any = Bucket(payload)
        read_document(payload)
        found = _complete(load_progress(bucket, "shop"))
        if found is not None:
            record = StreamRecord()
            for _ in range(2):
                record.note_progress(found)
            assert record.recorded_lsn >= 0

    _each({**valid.PROGRESS, "position": position}, as_json, read, "progress")
    _each(valid.SCHEMA, as_json, read, "schema")


@pytest.mark.parametrize("value", [b"[" * 100_000, b"{" * 100_000, b'{"epoch":1,"tables":[]}', b""])
def test_what_a_bridge_remembers_may_be_anything(value: bytes) -> None:
    bucket: Any = Bucket(value)
    client: Any = None
    source = Source("shop", 1, "pub", Subjects(), as_json=False)
    store = CoverageStore(client, bucket, source)
    assert _complete(store.load()) is None
    assert read_record(value, "shop") is None
