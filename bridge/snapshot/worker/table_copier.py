"""Copies one table in one worker, from rows to acknowledged chunks."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

from bridge.postgres.copy_stream import copy_rows
from bridge.snapshot.formats.chunks import ChunkHead, ChunkMessageBuilder, byte_limit
from bridge.snapshot.formats.rows import RowEncoder, RowSamples
from bridge.snapshot.keys import end_sql
from bridge.snapshot.messages import (
    ChunkNumber,
    ChunkNumberWanted,
    ChunkStored,
    DictionaryTrained,
    ObjectAnnounced,
    PieceCut,
    TableCancelled,
    unexpected,
)
from bridge.snapshot.tables import Piece, copy_sql, whole_table
from consumer_sdk.transport.holds import hold
from consumer_sdk.wire.subjects import table_token

if TYPE_CHECKING:
    from bridge.postgres.sessions import CopySession
    from bridge.snapshot.formats.chunks import ChunkContent, ChunkEncoder
    from bridge.snapshot.messages import CopyTask
    from bridge.snapshot.worker.chunk_store import ChunkStore
    from bridge.snapshot.worker.pipe import CoordinatorPipe


class CopyCancelled(Exception):
    """The coordinator wants no more chunks of this table."""


class TableCopier:
    """Copies pieces of one table; chunks get their numbers from the coordinator."""

    def __init__(
        self, index: int, task: CopyTask, store: ChunkStore, pipe: CoordinatorPipe
    ) -> None:
        own = task.tables[index]
        self.index = index
        self.description = own.description
        self._snapshot_id = own.snapshot_id
        self._store = store
        self._pipe = pipe
        self._objects = 0
        self._subjects = task.subjects
        self._token = table_token(own.description.schema, own.description.table)
        # Another attempt at the same group has other rows in the objects of the same numbers.
        self._objects_of = "-".join(filter(None, (own.snapshot_id, own.attempt, str(task.worker))))
        self._messages = ChunkMessageBuilder(
            own.snapshot_id, zstd=own.zstd, dictionary=own.dictionary, attempt=own.attempt
        )
        self._samples = RowSamples() if own.train else None
        self._encoder = self._make_encoder(task)

    def _make_encoder(self, task: CopyTask) -> ChunkEncoder:
        form, table = task.tables[self.index].format, self.description
        head = ChunkHead(
            source=task.source,
            epoch=task.epoch,
            table=table.table,
            schema=table.schema,
            snapshot_id=self._snapshot_id,
            snapshot_lsn=task.snapshot_lsn,
        )
        max_bytes = byte_limit(self._store.max_payload)
        if form == "arrow":
            from bridge.snapshot.formats.arrow import ArrowEncoder

            return ArrowEncoder(
                head,
                table.columns,
                max_rows=task.chunk_rows,
                max_bytes=max_bytes,
                store_object=self._store_object,
            )
        return RowEncoder(
            head,
            table.columns,
            as_json=form == "json",
            max_rows=task.chunk_rows,
            max_bytes=max_bytes,
            store_object=self._store_object,
        )

    def copy(self, session: CopySession, piece: Piece) -> None:
        """Copy one piece; rows that do not fill a chunk are kept for the next piece."""
        if piece.rows is not None:
            piece = self._cut(session, piece, piece.rows)
        statement = copy_sql(self.description, piece)
        with closing(copy_rows(session.connection, statement)) as blocks:
            for lines in blocks:
                for content in self._encoder.add(lines):
                    self._send(content)

    def _cut(self, session: CopySession, piece: Piece, rows: int) -> Piece:
        """End a piece before the key after its first rows; the coordinator continues there."""
        assert piece.keys is not None
        session.prefer_indexes()
        end = session.first_row(end_sql(whole_table(self.description), piece.keys, rows))
        self._pipe.send(PieceCut(self.index, end))
        return Piece(None, keys=piece.keys.until(end))

    def finish(self) -> None:
        """Send the remaining rows and wait for all acknowledgements."""
        for content in self._encoder.flush():
            self._send(content)
        self._store.drain()
        trained = None if self._samples is None else self._samples.train()
        if trained is not None:
            self._pipe.send(DictionaryTrained(self.index, trained))

    def _send(self, content: ChunkContent) -> None:
        number = self._next_number()
        hold(f"snapshot.chunk.{number}")
        message = self._messages.build(content, number)
        if self._samples is not None:
            self._samples.add(content)
        stored = ChunkStored(self.index, number, content.row_count, message.sha256)
        self._store.publish(
            self._subjects.chunk(self._token, self._snapshot_id, number),
            message,
            lambda: self._pipe.send(stored),
        )

    def _next_number(self) -> int:
        self._pipe.send(ChunkNumberWanted(self.index))
        match self._pipe.receive():
            case ChunkNumber(number):
                return number
            case TableCancelled():
                raise CopyCancelled
            case other:
                raise unexpected(other)

    def _store_object(self, payload: bytes) -> dict[str, Any]:
        name = f"snapshot-{self._objects_of}-{self._objects}"
        self._objects += 1
        self._pipe.send(ObjectAnnounced(self.index, name))
        return self._store.put_object(name, payload)
