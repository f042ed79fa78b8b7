"""The records of active snapshots in the KV bucket `bridge`.

A record is written before the id of its snapshot is published, and removed after its meta or error.
A record that exists when a bridge becomes active was left by a bridge that died. If it has a
division, the snapshot goes on after the last group that the record names. Each change of a record
names the revision before it, so that a bridge that was replaced can change nothing more.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import nats.js.errors

from bridge.errors import SnapshotError
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue

    from bridge.snapshot.coordinator.jobs import SnapshotJob
    from bridge.snapshot.keys import Key
    from bridge.source import Source

SNAPSHOT_ID: Final = re.compile(r"[0-9A-Za-z_-]+\Z")
OVERTAKEN: Final = "another bridge has taken over; ask again"


class Overtaken(SnapshotError):
    """Another bridge has taken the snapshot over; it must not be touched any more."""

    def __init__(self) -> None:
        super().__init__(OVERTAKEN)


@dataclass(frozen=True, slots=True)
class Group:
    """A finished group: its consistent point, its chunks, and the attempt that stored them."""

    snapshot_lsn: int
    first_chunk: int
    next_chunk: int
    attempt: str


@dataclass(frozen=True, slots=True)
class DivisionRecord:
    """Everything that is needed to go on with a snapshot in groups."""

    epoch: int
    asked: dict[str, Any]
    columns: tuple[str, ...] | None
    format: str
    zstd: bool
    fingerprint: str
    """Of the table's description; another one means that DDL ran."""
    schema_version: int
    stream_created_us: int
    cdc_seq: int
    groups: tuple[Group, ...] = ()
    rows: int = 0
    start: Key | None = None
    """Where the next group starts; None: at the beginning, or nowhere if it is done."""
    is_done: bool = False

    @property
    def next_chunk(self) -> int:
        return self.groups[-1].next_chunk if self.groups else 0

    def to_document(self) -> dict[str, Any]:
        """Its form in JSON."""
        groups = [[g.snapshot_lsn, g.first_chunk, g.next_chunk, g.attempt] for g in self.groups]
        names = [name for name in self.__dataclass_fields__ if name != "groups"]
        return {**{name: getattr(self, name) for name in names}, "groups": groups}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> DivisionRecord:
        """Read it again; one of MISFITS if it is none."""
        columns, start = document["columns"], document["start"]
        return cls(
            epoch=int(document["epoch"]),
            asked=dict(document["asked"]),
            columns=None if columns is None else tuple(map(str, columns)),
            format=str(document["format"]),
            zstd=bool(document["zstd"]),
            fingerprint=str(document["fingerprint"]),
            schema_version=int(document["schema_version"]),
            stream_created_us=int(document["stream_created_us"]),
            cdc_seq=int(document["cdc_seq"]),
            groups=tuple(
                Group(int(lsn), int(first), int(following), str(attempt))
                for lsn, first, following, attempt in document["groups"]
            ),
            rows=int(document["rows"]),
            start=None if start is None else tuple(map(str, start)),
            is_done=bool(document["is_done"]),
        )


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """The record of a snapshot that has begun; complete once every chunk is stored."""

    schema: str
    table: str
    snapshot_id: str
    is_complete: bool = False
    division: DivisionRecord | None = None
    revision: int = 0

    @property
    def token(self) -> str:
        return table_token(self.schema, self.table)

    @property
    def meta_id(self) -> str:
        """The message id of its meta."""
        return f"{self.snapshot_id}-meta"

    @property
    def error_id(self) -> str:
        """The message id of its error."""
        return f"{self.snapshot_id}-error"

    @property
    def object_prefix(self) -> str:
        """Common prefix of the names of its objects."""
        return f"snapshot-{self.snapshot_id}-"


class RecordStore:
    """Reads and changes the records of one source."""

    def __init__(self, js: JetStreamContext, bucket: KeyValue, source: Source) -> None:
        self._js = js
        self._bucket = bucket
        self._source = source
        self._owner = secrets.token_hex(8)

    async def put(self, job: SnapshotJob) -> None:
        """Write the record of a new snapshot."""
        job.record_revision = await self._bucket.put(_key(job.snapshot_id), self._value(job.record))

    async def update(self, job: SnapshotJob, record: SnapshotRecord | None = None) -> None:
        """Change the record; Overtaken if another bridge has changed or removed it."""
        value = self._value(record or job.record)
        key = _key(job.snapshot_id)
        try:
            job.record_revision = await self._bucket.update(key, value, last=job.record_revision)
        except nats.js.errors.KeyWrongLastSequenceError as error:
            revision = await self._own_revision(key)
            if revision is None:
                raise Overtaken from error
            job.record_revision = await self._bucket.update(key, value, last=revision)

    async def _own_revision(self, key: str) -> int | None:
        """The revision of a record whose last change is ours, although its answer was lost."""
        try:
            entry = await self._bucket.get(key)
            if json.loads(entry.value or b"")["owner"] == self._owner:
                return entry.revision
        except (nats.js.errors.KeyNotFoundError, *MISFITS):
            pass
        return None

    async def complete(self, job: SnapshotJob) -> None:
        """Mark the record complete before the meta; Overtaken if another bridge took over."""
        await self.update(job, replace(job.record, is_complete=True))

    async def is_held(self, job: SnapshotJob) -> bool:
        """Whether no other bridge has changed or removed the record."""
        try:
            await self._bucket.get(_key(job.snapshot_id), revision=job.record_revision)
        except nats.js.errors.KeyNotFoundError:
            return False
        return True

    async def remove(self, snapshot_id: str) -> None:
        """Purge the key; deleting it would leave a marker for each snapshot."""
        name = self._source.subjects.bridge_bucket
        await self._js.purge_stream(f"KV_{name}", subject=f"$KV.{name}.{_key(snapshot_id)}")

    async def all(self) -> list[SnapshotRecord]:
        """The records of this source."""
        found = []
        for key in await self._keys():
            try:
                entry = await self._bucket.get(key)
            except nats.js.errors.KeyNotFoundError:
                continue
            record = read_record(entry.value, self._source.name)
            if record is not None:
                found.append(replace(record, revision=entry.revision or 0))
        return found

    async def _keys(self) -> list[str]:
        watcher = await self._bucket.watch(_key("*"), ignore_deletes=True, meta_only=True)
        try:
            keys = []
            async for entry in watcher:
                # None follows the last stored key.
                if entry is None:
                    break
                keys.append(entry.key)
            return keys
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]

    def _value(self, record: SnapshotRecord) -> bytes:
        document: dict[str, Any] = {
            "source": self._source.name,
            "owner": self._owner,
            "schema": record.schema,
            "table": record.table,
            "snapshot_id": record.snapshot_id,
            "is_complete": record.is_complete,
        }
        if record.division is not None:
            document["division"] = record.division.to_document()
        return json.dumps(document).encode()


def read_record(value: bytes | None, source: str) -> SnapshotRecord | None:
    """Read a record of this source; None for any other value.

    The id becomes part of a subject that is purged, so it must not hold a wildcard.
    """
    try:
        document = json.loads(value or b"")
        if document["source"] != source or SNAPSHOT_ID.match(document["snapshot_id"]) is None:
            return None
        division = document.get("division")
        return SnapshotRecord(
            str(document["schema"]),
            str(document["table"]),
            str(document["snapshot_id"]),
            document["is_complete"] is True,
            None if division is None else DivisionRecord.from_document(division),
        )
    except MISFITS:
        return None


def _key(snapshot_id: str) -> str:
    return f"snapshot.{snapshot_id}"
