"""Compares what the publication covers with what it covered before, and reports gaps.

The coverage is kept in the KV bucket `bridge`, so that changes made while no bridge ran are noticed
at the next start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import nats.errors
from nats.js.errors import APIError, KeyNotFoundError

from bridge.errors import Retryable, SourceError
from bridge.jetstream.streams import api
from bridge.postgres.coverage import Coverage, Covered, has_attached_rows, read_coverage
from bridge.schemas.coverage import rewritten, unlogged_changes
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.calls import ApiCall
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.errors import MISFITS
from consumer_sdk.wire.position import parse_lsn
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.kv import KeyValue

    from bridge.postgres.publication import PublicationReader
    from bridge.schemas.tables import PublishedTables
    from bridge.source import Source

log = logging.getLogger("bridge.coverage")

POLL_SECONDS = 5.0
MOST_REASONS = 20
MOST_GONE = 20_000
"""How many tables that left the publication are saved; the newest are kept."""
LARGE_BYTES = 32 * 1024
MOST_BYTES = 64 * 1024 * 1024
"""A larger document is compressed, so that thousands of tables fit into one KV value."""
PART_MARGIN = 4 * 1024
"""What a message has beside the part of a document: its subject and headers."""
READ_ATTEMPTS = 3
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


def _parts(value: bytes) -> list[str]:
    """The keys of the parts that a value names; none if it is a document itself."""
    if value[:1] != b"{":
        return []
    try:
        parts = json.loads(value).get("parts", ())
        return [part for part in parts if isinstance(part, str)]
    except MISFITS:
        return []


class CoverageStore:
    """The saved coverage of one source, and the snapshots that a gap makes useless."""

    def __init__(self, client: Client, bucket: KeyValue, source: Source) -> None:
        self._client = client
        self._bucket = bucket
        self._source = source
        self._key = f"coverage.{source.name}"

    async def load(self) -> Coverage | None:
        """The coverage saved in this epoch; None if there is none."""
        try:
            value = await self._read()
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
        await self._write(value)

    async def _read(self) -> bytes:
        """The saved document, joined from its parts; KeyNotFoundError if there is none."""
        for _ in range(READ_ATTEMPTS):
            entry = await self._bucket.get(self._key)
            value = entry.value or b""
            try:
                return b"".join(
                    [(await self._bucket.get(part)).value or b"" for part in _parts(value)]
                    or [value]
                )
            except KeyNotFoundError:
                # Another bridge has just replaced the document.
                continue
        event(log, "the saved coverage lacks a part", level=logging.WARNING, key=self._key)
        raise KeyNotFoundError

    async def _write(self, value: bytes) -> None:
        """Write the document, in parts if it is too large for one message.

        The parts have new keys and the key that names them is written last, so that a reader
        finds a whole document at any moment.
        """
        try:
            before = _parts((await self._bucket.get(self._key)).value or b"")
        except KeyNotFoundError:
            before = []
        room = self._client.max_payload - PART_MARGIN
        if len(value) > room:
            unique, parts = secrets.token_hex(4), []
            for start in range(0, len(value), room):
                parts.append(f"{self._key}.{unique}-{start}")
                await self._bucket.put(parts[-1], value[start : start + room])
            value = json.dumps({"v": 1, "parts": parts}).encode()
        await self._bucket.put(self._key, value)
        for part in before:
            await self._bucket.purge(part)

    async def discard_snapshots(self, token: str) -> None:
        """Remove the metas of a table's snapshots, so that no reader uses one from before a gap."""
        subjects = self._source.subjects
        with suppress(ApiError):
            await api(
                self._client,
                ApiCall.STREAM_PURGE.of(subjects.init_stream),
                {"filter": subjects.meta(token)},
            )


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
        self._log = log
        self._known = known
        self._saved: Coverage | None = None

    async def run(self, interval: float) -> None:
        """Compare every `interval` or POLL_SECONDS, whichever is shorter; retry after failures."""
        is_failing = False
        while True:
            await stay_cancelled()
            try:
                await self._compare()
                is_failing = False
            except (Retryable, SourceError, nats.errors.Error, APIError, TimeoutError) as error:
                level = logging.DEBUG if is_failing else logging.WARNING
                event(log, "coverage not compared", level=level, reason=str(error))
                is_failing = True
            await asyncio.sleep(min(interval, POLL_SECONDS))

    async def _compare(self) -> None:
        known, stored = self._known, self._tables.stored_tokens()
        found = await read_coverage(self._publication)
        if any(rewritten(known[token], found[token]) for token in known.keys() & found.keys()):
            # A TRUNCATE of the whole table creates new files too, and the log contains it: wait
            # until the log has been read up to here.
            await self._writer.report(await self._position(), None)
        changes = await unlogged_changes(
            known,
            found,
            is_filled=lambda leaf: has_attached_rows(self._publication.catalog, leaf),
            has_truncated=self._log.has_truncated,
        )
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
        if found != self._saved:
            await self._store.save(found)
            self._saved = {token: Covered(**one.document) for token, one in found.items()}

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
