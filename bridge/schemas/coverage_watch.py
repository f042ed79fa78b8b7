"""Keeps an eye on what the publication covers, and has gaps announced.

What was covered when it was last looked at is kept in the KV bucket `bridge`, so that changes made
while no bridge ran are noticed at the next start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import zlib
from typing import TYPE_CHECKING, Protocol

import nats.errors
from nats.js.errors import APIError, KeyNotFoundError

from bridge.errors import Retryable, SourceError
from bridge.schemas.coverage import (
    Coverage,
    Covered,
    has_attached_rows,
    read_coverage,
    rewritten,
    unlogged_changes,
)
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.lsn import parse_lsn
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.js.kv import KeyValue

    from bridge.postgres.catalog import Catalog
    from bridge.schemas.registry import SchemaRegistry
    from bridge.schemas.store import SchemaStore

log = logging.getLogger("bridge.coverage")

POLL_SECONDS = 5.0
MOST_REASONS = 20
MOST_GONE = 20_000
"""So many tables that are not published any more are remembered, those that went last."""
LARGE_BYTES = 32 * 1024
"""What is larger is compressed: thousands of tables must fit into one message."""
_POSITION = """
SELECT (CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
             ELSE pg_catalog.pg_current_wal_lsn() END)::text
"""


class GapWriter(Protocol):
    """Whoever writes to the stream."""

    async def report(self, lsn: int, gap: dict[str, object] | None) -> None:
        """Wait until everything up to `lsn` is stored, then write the gap, if there is one."""
        ...


async def load_coverage(
    bucket: KeyValue, source: str, epoch: int, publication: str
) -> Coverage | None:
    """What is remembered of an epoch; None where nothing is."""
    try:
        entry = await bucket.get(f"coverage.{source}")
        value = entry.value or b""
        document = json.loads(value if value[:1] == b"{" else zlib.decompress(value))
        if document["epoch"] != epoch:
            return None
        tables = document["tables"].items()
        coverage = {token: Covered.from_document(one) for token, one in tables}
        if document["publication"] != publication:
            for covered in coverage.values():
                covered.publication = 0
    except (KeyNotFoundError, zlib.error, *MISFITS):
        return None
    return coverage


class CoverageWatch:
    """Compares what is covered with what was; `known` is the latter."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        bucket: KeyValue,
        registry: SchemaRegistry,
        store: SchemaStore,
        writer: GapWriter,
        has_told: Callable[[str, int], bool],
        forget_snapshots: Callable[[str], Awaitable[None]],
        source: str,
        epoch: int,
        publication: str,
        server_version: int,
        known: Coverage,
    ) -> None:
        self._catalog = catalog
        self._bucket = bucket
        self._registry = registry
        self._store = store
        self._writer = writer
        self._has_told = has_told
        self._forget_snapshots = forget_snapshots
        self._source = source
        self._epoch = epoch
        self._publication = publication
        self._server_version = server_version
        self._known = known
        self._saved: Coverage | None = None

    async def run(self, interval: float) -> None:
        """Look every `interval` seconds, or every few; a look that fails is made again later."""
        while True:
            await stay_cancelled()
            try:
                await self._look()
            except (Retryable, SourceError, nats.errors.Error, APIError, TimeoutError) as error:
                event(log, "coverage not looked at", level=logging.DEBUG, reason=str(error))
            await asyncio.sleep(min(interval, POLL_SECONDS))

    async def _look(self) -> None:
        known, stored = self._known, self._registry.stored_tokens()
        found = await read_coverage(self._catalog, self._publication, self._server_version)
        if any(rewritten(known[token], found[token]) for token in known.keys() & found.keys()):
            # A TRUNCATE of the whole table does that too: see whether the log tells of one.
            await self._writer.report(await self._position(), None)
        changes = await unlogged_changes(
            known,
            found,
            is_filled=lambda leaf: has_attached_rows(self._catalog, leaf),
            has_told=self._has_told,
        )
        gone = {
            token
            for token in known.keys() | stored
            if token not in found and not (token in known and known[token].is_gone)
        }
        if changes or gone:
            await self._announce(changes, found, await self._position())
        for token in gone:
            await self._release(token)
        for token in known.keys() & found.keys():
            found[token].remember(known[token])
        before = [token for token, one in known.items() if one.is_gone and token not in found]
        for token in [*before, *sorted(gone)][-MOST_GONE:]:
            version = self._registry.newest_version(token)
            if token in known:
                version = max(version, known[token].schema_version)
            found[token] = Covered.gone(version)
        self._known = found
        if found != self._saved:
            await self._save(found)

    async def _position(self) -> int:
        """The end of the log."""
        (row,) = await self._catalog.rows(_POSITION)
        return parse_lsn(row[0])

    async def _announce(self, changes: dict[str, str], found: Coverage, lsn: int) -> None:
        """Tell readers; returns when the stream has it, and everything that came before."""
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
            "previous_epoch": self._epoch,
            "previous_lsn": lsn,
            "resumes_at": lsn,
        }
        await self._writer.report(lsn, gap)
        for token in changes:
            await self._forget_snapshots(token)

    async def _release(self, token: str) -> None:
        """A table that is not published any more has no schema; its last version is remembered."""
        if self._registry.is_stored(token):
            event(log, "table is not published any more", table=token)
            await self._store.remove(token)
            self._registry.note_removed(token)

    async def _save(self, coverage: Coverage) -> None:
        document = {
            "v": 1,
            "source": self._source,
            "epoch": self._epoch,
            "publication": self._publication,
            "tables": {token: covered.document for token, covered in coverage.items()},
        }
        value = json.dumps(document).encode()
        if len(value) > LARGE_BYTES:
            value = zlib.compress(value)
        await self._bucket.put(f"coverage.{self._source}", value)
        self._saved = {token: Covered(**one.document) for token, one in coverage.items()}
