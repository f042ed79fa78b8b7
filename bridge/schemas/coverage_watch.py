"""Compares what the publication covers with what it covered before, and reports gaps.

The coverage is kept in the KV bucket `bridge`, so that changes made while no bridge ran are noticed
at the next start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import nats.errors
from nats.js.errors import APIError, KeyNotFoundError

from bridge.errors import Retryable, SourceError
from bridge.jetstream.streams import api
from bridge.postgres.coverage import (
    Coverage,
    Covered,
    filled_partitions,
    has_older_row,
    read_coverage,
)
from bridge.schemas.coverage import rewritten, unlogged_changes
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.calls import ApiCall
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.position import parse_lsn
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from nats.aio.client import Client
    from nats.js.kv import KeyValue

    from bridge.postgres.catalog import Catalog
    from bridge.postgres.publication import PublicationReader
    from bridge.schemas.tables import PublishedTables
    from bridge.source import Source

log = logging.getLogger("bridge.coverage")

POLL_SECONDS = 5.0
SAVE_SECONDS = 600.0
"""An equal coverage is saved this often, with the transactions that have ended since."""
MOST_REASONS = 20
MOST_GONE = 20_000
"""How many tables that left the publication are saved; the newest are kept."""
LARGE_BYTES = 32 * 1024
MOST_BYTES = 64 * 1024 * 1024
"""A larger document is compressed, so that thousands of tables fit into one KV value."""
_POSITION = """
SELECT (CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
             ELSE pg_catalog.pg_current_wal_lsn() END)::text
"""


class GapWriter(Protocol):
    """Writes gaps to the stream."""

    async def report(self, lsn: int, gap: dict[str, object] | None) -> None:
        """Wait until everything up to `lsn` is stored, then write the gap, if there is one."""
        ...


class TruncationLog(Protocol):
    """The TRUNCATEs that were read from the log."""

    def has_truncated(self, token: str, xid: int) -> bool:
        """Whether the log contained a TRUNCATE of the whole table by this transaction."""
        ...


def _expanded(value: bytes) -> bytes:
    """What zlib compressed, up to MOST_BYTES; what is longer is cut off and no JSON any more."""
    return zlib.decompressobj().decompress(value, MOST_BYTES)


class CoverageStore:
    """The saved coverage of one source, and the snapshots that a gap makes useless."""

    def __init__(self, client: Client, bucket: KeyValue, source: Source) -> None:
        self._client = client
        self._bucket = bucket
        self._source = source

    async def load(self) -> Coverage | None:
        """The coverage saved in this epoch; None if there is none."""
        try:
            entry = await self._bucket.get(f"coverage.{self._source.name}")
            value = entry.value or b""
            document = json.loads(value if value[:1] == b"{" else _expanded(value))
            if document["epoch"] != self._source.epoch:
                return None
            tables = document["tables"].items()
            coverage = {token: Covered.from_document(one) for token, one in tables}
            if document["publication"] != self._source.publication:
                for covered in coverage.values():
                    covered.publication = 0
        except (KeyNotFoundError, zlib.error, *MISFITS):
            return None
        return coverage

    async def save(self, coverage: Coverage) -> None:
        """Save the coverage for the next comparison, even after a restart."""
        document = {
            "v": 1,
            "source": self._source.name,
            "epoch": self._source.epoch,
            "publication": self._source.publication,
            "tables": {token: covered.document for token, covered in coverage.items()},
        }
        value = json.dumps(document).encode()
        if len(value) > LARGE_BYTES:
            value = zlib.compress(value)
        await self._bucket.put(f"coverage.{self._source.name}", value)

    async def discard_snapshots(self, token: str) -> None:
        """Remove the metas of a table's snapshots, so that no reader uses one from before a gap."""
        subjects = self._source.subjects
        with suppress(ApiError):
            await api(
                self._client,
                ApiCall.STREAM_PURGE.of(subjects.init_stream),
                {"filter": subjects.meta(token)},
            )


class _Evidence:
    """Looks into the partitions and into the log that was read."""

    def __init__(self, catalog: Catalog, log: TruncationLog) -> None:
        self._catalog = catalog
        self.has_truncated = log.has_truncated

    async def is_filled(self, leaves: Collection[str], parts: Collection[str]) -> bool:
        return bool(await filled_partitions(self._catalog, leaves, parts))

    async def is_copied(self, before: Covered, leaf: str) -> bool:
        return await has_older_row(self._catalog, before.relation_id, leaf, before.finished_xid)


class CoverageWatch:
    """Compares the coverage with the one before, `known`, and reports gaps."""

    def __init__(
        self,
        *,
        source: Source,
        publication: PublicationReader,
        store: CoverageStore,
        tables: PublishedTables,
        writer: GapWriter,
        log: TruncationLog,
        known: Coverage,
    ) -> None:
        self._source = source
        self._publication = publication
        self._store = store
        self._tables = tables
        self._writer = writer
        self._evidence = _Evidence(publication.catalog, log)
        self._known = known
        self._saved: Coverage | None = None
        self._saved_at = 0.0

    async def run(self, interval: float) -> None:
        """Compare every `interval` or POLL_SECONDS, whichever is shorter; retry after failures."""
        while True:
            await stay_cancelled()
            try:
                await self._compare()
            except (Retryable, SourceError, nats.errors.Error, APIError, TimeoutError) as error:
                event(log, "coverage not compared", level=logging.DEBUG, reason=str(error))
            await asyncio.sleep(min(interval, POLL_SECONDS))

    async def _compare(self) -> None:
        known, stored = self._known, self._tables.stored_tokens()
        found = await read_coverage(self._publication)
        if any(rewritten(known[token], found[token]) for token in known.keys() & found.keys()):
            # A TRUNCATE of the whole table creates new files too, and the log contains it: wait
            # until the log has been read up to here.
            await self._writer.report(await self._position(), None)
        changes = await unlogged_changes(known, found, self._evidence)
        gone = {
            token
            for token in known.keys() | stored
            if token not in found and not (token in known and known[token].is_gone)
        }
        if changes or gone:
            await self._announce(changes, found, await self._position())
        for token in gone:
            await self._tables.release(token)
        for token in known.keys() & found.keys():
            found[token].remember(known[token])
        before = [token for token, one in known.items() if one.is_gone and token not in found]
        for token in [*before, *sorted(gone)][-MOST_GONE:]:
            version = self._tables.newest_version(token)
            if token in known:
                version = max(version, known[token].schema_version)
            found[token] = Covered.gone(version)
        self._known = found
        now = time.monotonic()
        if found != self._saved or now - self._saved_at > SAVE_SECONDS:
            await self._store.save(found)
            self._saved = {token: Covered(**one.document) for token, one in found.items()}
            self._saved_at = now

    async def _position(self) -> int:
        """The end of the log."""
        (row,) = await self._publication.catalog.rows(_POSITION)
        return parse_lsn(row[0])

    async def _announce(self, changes: dict[str, str], found: Coverage, lsn: int) -> None:
        """Write a gap for the changes; return when it and everything before it is stored."""
        if not changes:
            await self._writer.report(lsn, None)
            return
        names = {
            token: format_table_name(found[token].schema, found[token].table) for token in changes
        }
        reasons = [f"table {names[token]}: {why}" for token, why in changes.items()]
        if len(reasons) > MOST_REASONS:
            reasons[MOST_REASONS:] = [f"{len(reasons) - MOST_REASONS} other tables"]
        reason = "; ".join(reasons)
        event(log, "gap", level=logging.WARNING, reason=reason)
        gap = {
            "reason": reason,
            "tables": sorted(changes),
            "previous_epoch": self._source.epoch,
            "previous_lsn": lsn,
            "resumes_at": lsn,
        }
        await self._writer.report(lsn, gap)
        for token in changes:
            await self._store.discard_snapshots(token)
