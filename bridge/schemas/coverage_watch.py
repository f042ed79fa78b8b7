"""Compares what the publication covers with what it covered before, and reports gaps.

The coverage is kept in the KV bucket `bridge`, so that changes made while no bridge ran are noticed
at the next start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import nats.errors
from nats.js.errors import APIError, KeyNotFoundError

from bridge.errors import Retryable, SourceError
from bridge.jetstream.streams import api, stored_message, stream_state
from bridge.postgres.coverage import (
    Coverage,
    Covered,
    filled_partitions,
    has_older_row,
    read_coverage,
)
from bridge.schemas.coverage import rewritten, unlogged_changes
from consumer_sdk.transport.api import ApiError, parse_headers
from consumer_sdk.transport.calls import ApiCall
from consumer_sdk.transport.cancellation import stay_cancelled
from consumer_sdk.transport.holds import hold_async
from consumer_sdk.transport.logfmt import event
from consumer_sdk.wire.envelope import decode_payload
from consumer_sdk.wire.errors import MISFITS, WireError
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
MOST_FAILED_SAVES = 3
"""After so many failures a gap is announced although a restart would announce it again."""
_FAILURES = (Retryable, SourceError, nats.errors.Error, APIError, ApiError, TimeoutError, OSError)
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


@dataclass(slots=True)
class Announcement:
    """A gap, from its discovery until it is in the stream and old snapshots are forgotten."""

    gap: dict[str, Any]
    after_seq: int
    """A sequence of the stream before the gap."""
    is_announced: bool = False

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Announcement:
        gap = document["gap"]
        if not isinstance(gap["id"], str) or not isinstance(gap["resumes_at"], int):
            raise TypeError("not a gap")
        tables = [str(token) for token in gap["tables"]]
        return cls(
            {**gap, "tables": tables}, int(document["after_seq"]), document["is_announced"] is True
        )

    @property
    def document(self) -> dict[str, Any]:
        return {"gap": self.gap, "after_seq": self.after_seq, "is_announced": self.is_announced}


@dataclass(slots=True)
class SavedCoverage:
    """The coverage of the last comparison, and the gaps that it found and that are unfinished."""

    tables: Coverage
    unfinished: list[Announcement] = field(default_factory=list)


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

    async def load(self) -> SavedCoverage | None:
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
            unfinished = [Announcement.from_document(one) for one in document.get("gaps", ())]
        except (KeyNotFoundError, zlib.error, *MISFITS):
            return None
        return SavedCoverage(coverage, unfinished)

    async def save(self, saved: SavedCoverage) -> None:
        """Save the coverage for the next comparison, even after a restart."""
        document = {
            "v": 1,
            "source": self._source.name,
            "epoch": self._source.epoch,
            "publication": self._source.publication,
            "tables": {token: covered.document for token, covered in saved.tables.items()},
        }
        if saved.unfinished:
            document["gaps"] = [one.document for one in saved.unfinished]
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

    async def newest_seq(self) -> int:
        """The sequence of the newest message in the stream; 0 if it cannot be read now."""
        try:
            state = await stream_state(self._client, self._source.subjects.cdc_stream)
        except (ApiError, Retryable):
            return 0
        return 0 if state is None else state.last_seq

    async def is_in_stream(self, announcement: Announcement) -> bool:
        """Whether the stream holds the gap."""
        subjects, sequence = self._source.subjects, announcement.after_seq + 1
        subject = subjects.progress(self._source.name)
        while message := await stored_message(
            self._client, subjects.cdc_stream, {"seq": sequence, "next_by_subj": subject}
        ):
            await stay_cancelled()
            sequence = message.stream_seq + 1
            try:
                record = decode_payload(parse_headers(message.headers), message.payload)
            except WireError:
                continue
            gap = record.get("gap")
            if isinstance(gap, dict) and gap.get("id") == announcement.gap["id"]:
                return True
        return False

    async def discard_snapshots(self, token: str) -> None:
        """Remove the metas of a table's snapshots, so that no reader uses one from before a gap."""
        subjects = self._source.subjects
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
    """Compares the coverage with the one before, `known`, and reports gaps.

    A gap is saved before it is announced, and saved as finished after everything that follows from
    it. Whatever fails or dies in between, it is announced once.
    """

    def __init__(
        self,
        *,
        source: Source,
        publication: PublicationReader,
        store: CoverageStore,
        tables: PublishedTables,
        writer: GapWriter,
        log: TruncationLog,
        known: SavedCoverage,
    ) -> None:
        self._source = source
        self._publication = publication
        self._store = store
        self._tables = tables
        self._writer = writer
        self._evidence = _Evidence(publication.catalog, log)
        self._known = known.tables
        self._unfinished = known.unfinished
        self._unsure = {id(one) for one in known.unfinished}
        """Announcements of an earlier session, which may be in the stream already."""
        self._saved: Coverage | None = None
        self._saved_at = 0.0
        self._failed_saves = 0
        self._is_failure_logged = False

    async def run(self, interval: float) -> None:
        """Compare every `interval` or POLL_SECONDS, whichever is shorter; retry after failures."""
        failing: set[str] = set()
        while True:
            await stay_cancelled()
            for step in (self._finish, self._compare):
                try:
                    await step()
                    failing.discard(step.__name__)
                except _FAILURES as error:
                    level = logging.DEBUG if step.__name__ in failing else logging.WARNING
                    event(log, "coverage not compared", level=level, reason=str(error))
                    failing.add(step.__name__)
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
        if gone:
            # All rows of a table come before the end of its schema.
            await self._writer.report(await self._position(), None)
        for token in gone:
            await self._tables.release(token)
        gap = self._gap(changes, found, await self._position()) if changes else None
        for token in known.keys() & found.keys():
            found[token].remember(known[token])
        before = [token for token, one in known.items() if one.is_gone and token not in found]
        for token in [*before, *sorted(gone)][-MOST_GONE:]:
            version = self._tables.newest_version(token)
            if token in known:
                version = max(version, known[token].schema_version)
            found[token] = Covered.gone(version)
        if gap is not None:
            await self._note_gap(gap, found)
            await self._finish()
        elif found != self._saved or time.monotonic() - self._saved_at > SAVE_SECONDS:
            self._known = found
            await self._save()
        else:
            self._known = found

    async def _note_gap(self, gap: dict[str, Any], found: Coverage) -> None:
        """Save a gap, so that it is announced also after a crash; from here on it is known."""
        announcement = Announcement(gap, await self._store.newest_seq())
        unfinished = [*self._unfinished, announcement]
        try:
            await self._store.save(SavedCoverage(found, unfinished))
        except _FAILURES:
            self._failed_saves += 1
            if self._failed_saves < MOST_FAILED_SAVES:
                raise
        self._failed_saves = 0
        self._known, self._unfinished = found, unfinished
        await hold_async("gap-saved")

    async def _finish(self) -> None:
        """Announce the gaps that are not in the stream, and do what follows from each."""
        for one in tuple(self._unfinished):
            if not one.is_announced:
                await self._announce(one)
                await hold_async("gap-announced")
            try:
                await self._save()
                for token in one.gap["tables"]:
                    await self._store.discard_snapshots(token)
                await hold_async("gap-snapshots-discarded")
                await self._save(without=one)
            except _FAILURES as error:
                if not self._is_failure_logged:
                    self._is_failure_logged = True
                    reason = str(error) or type(error).__name__
                    event(log, "gap not finished", level=logging.WARNING, reason=reason)
                raise
            self._unfinished.remove(one)
            self._is_failure_logged = False

    async def _announce(self, one: Announcement) -> None:
        """Write a gap to the stream; return when it and everything before it is stored."""
        if id(one) in self._unsure and await self._store.is_in_stream(one):
            one.is_announced = True
            return
        event(log, "gap", level=logging.WARNING, reason=one.gap["reason"])
        await self._writer.report(one.gap["resumes_at"], one.gap)
        one.is_announced = True

    async def _save(self, without: Announcement | None = None) -> None:
        """Save what is known now; `without` is finished."""
        unfinished = [one for one in self._unfinished if one is not without]
        await self._store.save(SavedCoverage(self._known, unfinished))
        self._saved = {token: Covered(**one.document) for token, one in self._known.items()}
        self._saved_at = time.monotonic()

    async def _position(self) -> int:
        """The end of the log."""
        (row,) = await self._publication.catalog.rows(_POSITION)
        return parse_lsn(row[0])

    def _gap(self, changes: dict[str, str], found: Coverage, lsn: int) -> dict[str, Any]:
        names = {
            token: format_table_name(found[token].schema, found[token].table) for token in changes
        }
        reasons = [f"table {names[token]}: {why}" for token, why in changes.items()]
        if len(reasons) > MOST_REASONS:
            reasons[MOST_REASONS:] = [f"{len(reasons) - MOST_REASONS} other tables"]
        return {
            "id": secrets.token_hex(8),
            "reason": "; ".join(reasons),
            "tables": sorted(changes),
            "previous_epoch": self._source.epoch,
            "previous_lsn": lsn,
            "resumes_at": lsn,
        }
