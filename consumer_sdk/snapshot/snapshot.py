"""A complete snapshot: its meta, its chunks, and whether it may be reused."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from consumer_sdk.errors import CorruptData, GapError, SnapshotFailed
from consumer_sdk.reading.progress import find_progress
from consumer_sdk.reading.proof import Selection, Trimming, find_break
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.snapshot.chunks import ArrowChunk, ChunkReader, ChunkRows, StoredChunk
from consumer_sdk.transport.api import Frame, get_message, parse_headers, probe_consumer
from consumer_sdk.wire.checksums import sha256_hex, snapshot_checksum
from consumer_sdk.wire.column_types import Column
from consumer_sdk.wire.envelope import CHUNK_SHA256, decode_payload, unsigned
from consumer_sdk.wire.errors import MISFITS, WireError
from consumer_sdk.wire.subjects import format_table_name, table_token

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from consumer_sdk.reading.deployment import Deployment

Row = dict[str, Any]
PIECES: Final = "pieces"
"""The option of a request that allows, or with False forbids, several consistent points."""


class SnapshotPiece(NamedTuple):
    """Chunks `first` to `last` of a snapshot, which were copied at consistent point `lsn`."""

    lsn: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SnapshotMeta:
    """The description of a complete snapshot.

    An event is in the snapshot iff its commit LSN is below `snapshot_lsn`. All events that are not
    in it are stored at sequence `cdc_seq` or later. `columns` and `options` are as published.

    If the snapshot has several consistent points, `snapshot_lsn` is the smallest and `exact_lsn`
    the largest. Its rows are then those of no single moment: load them by key, apply every event
    from `snapshot_lsn` on, and use nothing before all those below `exact_lsn` are applied.
    """

    snapshot_id: str
    source: str
    epoch: int
    table: str
    schema: str
    snapshot_lsn: int
    timestamp: int
    batch_count: int
    row_count: int
    schema_version: int
    columns: tuple[Any, ...]
    options: dict[str, Any]
    format: str
    stream: str
    stream_created: int
    cdc_seq: int
    checksum: str
    relation_id: int = 0
    """PostgreSQL's OID of the table, as in events; 0 if it is not known."""
    exact_lsn: int = 0
    """0 if the snapshot has one consistent point."""
    pieces: tuple[SnapshotPiece, ...] = ()
    """The chunks by consistent point; () if the snapshot has one."""

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> SnapshotMeta:
        """Read a meta message; CorruptData if it is damaged."""
        try:
            batch_count, lsn = unsigned(document, "batch_count"), unsigned(document, "lsn")
            return cls(
                snapshot_id=str(document["snapshot_id"]),
                source=str(document["source"]),
                epoch=unsigned(document, "epoch"),
                table=str(document["table"]),
                schema=str(document["schema"]),
                snapshot_lsn=lsn,
                timestamp=int(document["timestamp"]),
                batch_count=batch_count,
                row_count=unsigned(document, "row_count"),
                schema_version=unsigned(document, "schema_version"),
                columns=_columns(document["columns"]),
                options=dict(document["options"] or {}),
                format=str(document["format"]),
                stream=str(document["stream"]),
                stream_created=int(document["stream_created"]),
                cdc_seq=unsigned(document, "cdc_seq"),
                checksum=str(document["checksum"]),
                relation_id=int(document.get("relation_id", 0)),
                exact_lsn=_exact_lsn(document),
                pieces=_pieces(document, batch_count),
            )
        except (WireError, *MISFITS) as error:
            raise CorruptData(f"damaged snapshot meta: {error!r}") from error

    def lsn_of(self, chunk: int) -> int:
        """The consistent point at which a chunk was copied."""
        if not self.pieces:
            return self.snapshot_lsn
        # The pieces have all chunks in order, without holes.
        return self.pieces[bisect_left(self.pieces, chunk, key=attrgetter("last"))].lsn

    @property
    def token(self) -> str:
        """The table as written in subjects."""
        return table_token(self.schema, self.table)

    def describe(self) -> str:
        """The snapshot as error messages name it."""
        return f"snapshot {self.snapshot_id} of {format_table_name(self.schema, self.table)}"

    def verify(self, digests: Mapping[int, str], rows: int) -> None:
        """Raise CorruptData unless the checksum of all chunks and the number of rows match."""
        if snapshot_checksum(digests, self.batch_count) != self.checksum:
            raise CorruptData(f"{self.describe()}: its chunks do not match its checksum")
        if rows != self.row_count:
            raise CorruptData(f"{self.describe()}: {rows} rows read, {self.row_count} written")


def _columns(documents: list[Any]) -> tuple[Any, ...]:
    """The columns as published, after checking that each can be read."""
    for one in documents:
        Column.from_document(one)
    return tuple(documents)


def _exact_lsn(document: dict[str, Any]) -> int:
    has_pieces = document.get("pieces") is not None
    if has_pieces != (document.get("exact_lsn") is not None):
        raise WireError("damaged message: one of pieces and exact_lsn is missing")
    if not has_pieces:
        return 0
    exact_lsn = unsigned(document, "exact_lsn")
    if exact_lsn < unsigned(document, "lsn"):
        raise WireError("damaged message: exact_lsn is below lsn")
    return exact_lsn


def _pieces(document: dict[str, Any], batch_count: int) -> tuple[SnapshotPiece, ...]:
    """The pieces, after checking that they have each chunk once, in order."""
    listed = document.get("pieces")
    if listed is None:
        return ()
    if not isinstance(listed, list):
        raise WireError("damaged message: pieces is not a list")
    pieces: list[SnapshotPiece] = []
    lsns = range(unsigned(document, "lsn"), unsigned(document, "exact_lsn") + 1)
    for one in listed:
        lsn, (first, last) = unsigned(one, "lsn"), one["chunks"]
        expected = pieces[-1].last + 1 if pieces else 0
        if type(first) is not int or type(last) is not int or not expected == first <= last:
            raise WireError("damaged message: the chunks of pieces do not follow one another")
        if lsn not in lsns:
            raise WireError("damaged message: a piece is not between lsn and exact_lsn")
        pieces.append(SnapshotPiece(lsn, first, last))
    if batch_count != (pieces[-1].last + 1 if pieces else 0):
        raise WireError("damaged message: pieces do not have all chunks")
    return tuple(pieces)


class Snapshot:
    """A complete snapshot of one table, as stored in the INIT stream."""

    def __init__(self, deployment: Deployment, meta: SnapshotMeta, *, reused: bool) -> None:
        self._nc = deployment.nc
        self._subjects = deployment.subjects
        self.meta = meta
        self.reused = reused
        self._reader = ChunkReader(deployment.references, meta)

    async def chunks(self) -> AsyncGenerator[ChunkRows, None]:
        """Its rows, one chunk at a time; each chunk is verified by its own sha256 first.

        The whole snapshot (every chunk once, number of rows, checksum) is verified after the last
        chunk: keep nothing unless the iteration ends without an error.
        """
        async with aclosing(self.chunks_as_written()) as chunks:
            async for chunk in chunks:
                yield self.rows_of(chunk)

    async def chunks_as_written(self) -> AsyncGenerator[ChunkRows | ArrowChunk, None]:
        """Its chunks in the format of the snapshot, verified like `chunks`."""
        digests: dict[int, str] = {}
        rows = 0
        async with aclosing(self.raw_chunks()) as stored_chunks:
            async for stored in stored_chunks:
                digests[stored.number] = stored.sha256
                chunk = await self.read_chunk(stored)
                rows += len(chunk) if isinstance(chunk, ChunkRows) else chunk.batch.num_rows
                yield chunk
        self.meta.verify(digests, rows)

    def rows_of(self, chunk: ChunkRows | ArrowChunk) -> ChunkRows:
        """The rows of a chunk as written; CorruptData if they cannot be read."""
        return self._reader.to_rows(chunk)

    async def rows(self) -> AsyncGenerator[Row, None]:
        """Its rows one by one, verified like `chunks`."""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                for row in chunk:
                    yield row

    async def raw_chunks(self) -> AsyncGenerator[StoredChunk, None]:
        """Every chunk once, verified by its own sha256, not decoded."""
        seen: set[int] = set()
        if not self.meta.batch_count:
            return
        chunks = Selection(
            self._subjects.init_stream,
            [self._subjects.chunk(self.meta.token, self.meta.snapshot_id, "*")],
            trimming=Trimming.ALLOWED,
        )
        consumer = PullConsumer(self._nc, chunks, window=32)
        try:
            while len(seen) < self.meta.batch_count:
                frames = await consumer.take(8, wait=1.0)
                if not frames and consumer.caught_up:
                    # In a cluster the consumer may run on a server that lags: ask the leader.
                    await self.raw_chunk(_first_missing(seen))
                for frame in frames:
                    stored = self._verified(frame)
                    if stored.number not in seen:
                        seen.add(stored.number)
                        yield stored
        except GapError as error:
            # This gap is in the INIT stream, so the change stream need not be read again.
            raise self._no_longer_stored(_first_missing(seen)) from error
        finally:
            await consumer.close()

    async def raw_chunk(self, number: int) -> StoredChunk:
        """One chunk by its number, verified by its own sha256, not decoded."""
        subject = self._subjects.chunk(self.meta.token, self.meta.snapshot_id, number)
        request = {"last_by_subj": subject}
        frame = await get_message(self._nc, self._subjects.init_stream, request)
        if frame is None:
            raise self._no_longer_stored(number)
        stored = self._verified(frame)
        if stored.number != number:
            raise CorruptData(
                f"{self.meta.describe()}: chunk {stored.number} is stored as chunk {number}"
            )
        return stored

    async def chunk(self, number: int) -> ChunkRows:
        """The rows of one chunk, verified by its own sha256."""
        stored = await self.raw_chunk(number)
        return await self._reader.rows(number, stored.frame)

    async def read_chunk(self, stored: StoredChunk) -> ChunkRows | ArrowChunk:
        """A chunk as it was written: rows, or an Arrow record batch."""
        return await self._reader.read(stored.number, stored.frame)

    def _verified(self, frame: Frame) -> StoredChunk:
        number = frame.subject.rpartition(b".")[2].decode("ascii", "replace")
        headers = parse_headers(frame.headers) or {}
        if not number.isdecimal() or int(number) >= self.meta.batch_count:
            raise CorruptData(f"{self.meta.describe()}: there is no chunk {number}")
        digest = sha256_hex(frame.payload)
        if headers.get(CHUNK_SHA256) != digest:
            raise CorruptData(f"{self.meta.describe()}: chunk {number} does not have its sha256")
        return StoredChunk(int(number), digest, frame)

    def _no_longer_stored(self, number: int) -> SnapshotFailed:
        return SnapshotFailed(
            f"{self.meta.describe()}: chunk {number} is no longer stored; ask for a fresh snapshot"
        )


def _first_missing(seen: set[int]) -> int:
    return next(number for number in count() if number not in seen)


async def newest_metas(deployment: Deployment, token: str) -> AsyncGenerator[Frame, None]:
    """The messages with the newest meta of a table, and with the newest that has all rows."""
    subjects = deployment.subjects
    subject, stream = subjects.meta(token), subjects.init_stream
    newest = await get_message(deployment.nc, stream, {"last_by_subj": subject})
    if newest is None:
        return
    yield newest
    # Many answers with some rows may follow a snapshot that took hours.
    whole = None
    sequence = 1
    while not _has_all_rows(newest) and sequence < newest.stream_seq:
        request = {"seq": sequence, "next_by_subj": subject}
        frame = await get_message(deployment.nc, stream, request)
        if frame is None:
            break
        whole = frame if _has_all_rows(frame) else whole
        sequence = frame.stream_seq + 1
    if whole is not None:
        yield whole


def _has_all_rows(frame: Frame) -> bool:
    try:
        return decode_meta(frame).options.get("where") is None
    except CorruptData:
        return True


def decode_meta(frame: Frame) -> SnapshotMeta:
    """Decode a meta message; CorruptData if its subject names another table."""
    try:
        meta = SnapshotMeta.from_document(
            decode_payload(parse_headers(frame.headers), frame.payload)
        )
    except WireError as error:
        raise CorruptData(f"damaged snapshot meta: {error}") from error
    if frame.subject.decode("utf-8", "replace").partition("init.meta.")[2] != meta.token:
        raise CorruptData(f"damaged snapshot meta: it belongs to table {meta.token}")
    return meta


async def is_reusable(deployment: Deployment, meta: SnapshotMeta, options: dict[str, Any]) -> bool:
    """Whether a retained snapshot may be used in place of a new one.

    Epoch, stream, options and schema version must still match. CDC must still hold all changes
    after the snapshot, and INIT all of its chunks. A snapshot of one consistent point also serves
    those who could use several.
    """
    if meta.exact_lsn and options.get(PIECES) is False:
        return False
    if (
        _without_pieces(meta.options) != _without_pieces(options)
        or meta.stream != deployment.subjects.cdc_stream
    ):
        return False
    schema = await deployment.schemas.find(meta.token)
    if schema is None or schema.schema_version != meta.schema_version:
        return False
    progress = await find_progress(deployment, meta.source)
    if schema.source != meta.source or progress is None or progress.epoch != meta.epoch:
        return False
    bounds = await deployment.cdc_bounds()
    if find_break(bounds, meta.cdc_seq, meta.stream_created) is not None:
        return False
    return await count_chunks(deployment, meta.token, meta.snapshot_id) == meta.batch_count


def _without_pieces(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != PIECES}


async def count_chunks(deployment: Deployment, token: str, snapshot_id: str) -> int:
    """The number of chunks of a snapshot stored in INIT, counted without reading them."""
    chunks = deployment.subjects.chunk(token, snapshot_id, "*")
    start = {"deliver_policy": "all", "filter_subject": chunks}
    info = await probe_consumer(deployment.nc, deployment.subjects.init_stream, start)
    return int(info["num_pending"])
