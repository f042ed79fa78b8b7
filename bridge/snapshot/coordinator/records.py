"""Records of snapshots under way, in the bridge's KV bucket.

Whoever ends a snapshot removes its record. One that is still there when a bridge becomes active
belongs to a bridge that died.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import nats.js.errors

from consumer_sdk.wire.errors import MISFITS

if TYPE_CHECKING:
    from nats.js.client import JetStreamContext
    from nats.js.kv import KeyValue

    from bridge.snapshot.coordinator.job import Job


@dataclass(frozen=True, slots=True)
class Record:
    """A snapshot that a bridge of this source has begun."""

    schema: str
    table: str
    snapshot_id: str
    is_complete: bool

    @property
    def object_prefix(self) -> str:
        """What the names of its objects begin with."""
        return f"snapshot-{self.snapshot_id}-"


class Records:
    """One key per snapshot under way."""

    def __init__(self, js: JetStreamContext, bucket: KeyValue, name: str, source: str) -> None:
        self._js = js
        self._bucket = bucket
        self._name = name
        self._source = source

    async def put(self, job: Job) -> None:
        """Remember that a snapshot is under way."""
        job.record_revision = await self._bucket.put(_key(job.snapshot_id), self._value(job, False))

    async def is_ours(self, job: Job) -> bool:
        """Whether nobody has ended this snapshot meanwhile."""
        try:
            await self._bucket.get(_key(job.snapshot_id), revision=job.record_revision)
        except nats.js.errors.KeyNotFoundError:
            return False
        return True

    async def mark_complete(self, job: Job) -> bool:
        """Claim the right to publish the meta; False if another bridge has ended the snapshot."""
        try:
            await self._bucket.update(
                _key(job.snapshot_id), self._value(job, True), last=job.record_revision
            )
        except nats.js.errors.KeyWrongLastSequenceError:
            return False
        return True

    async def forget(self, snapshot_id: str) -> None:
        """Remove a record without a trace: a KV delete would leave a marker for each."""
        subject = f"$KV.{self._name}.{_key(snapshot_id)}"
        await self._js.purge_stream(f"KV_{self._name}", subject=subject)

    async def all(self) -> list[Record]:
        """The records of this source."""
        found = []
        for key in await self._keys():
            try:
                value = json.loads((await self._bucket.get(key)).value or b"")
                if value["source"] == self._source:
                    found.append(
                        Record(
                            str(value["schema"]),
                            str(value["table"]),
                            str(value["snapshot_id"]),
                            value["is_complete"] is True,
                        )
                    )
            except (nats.js.errors.KeyNotFoundError, *MISFITS):
                continue
        return found

    async def _keys(self) -> list[str]:
        watcher = await self._bucket.watch(_key("*"), ignore_deletes=True, meta_only=True)
        try:
            keys = []
            async for entry in watcher:
                # None says that everything stored has been seen.
                if entry is None:
                    break
                keys.append(entry.key)
            return keys
        finally:
            await watcher.stop()  # type: ignore[no-untyped-call]

    def _value(self, job: Job, is_complete: bool) -> bytes:
        document = {
            "source": self._source,
            "schema": job.schema,
            "table": job.table,
            "snapshot_id": job.snapshot_id,
            "is_complete": is_complete,
        }
        return json.dumps(document).encode()


def _key(snapshot_id: str) -> str:
    return f"snapshot.{snapshot_id}"
