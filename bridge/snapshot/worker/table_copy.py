"""One table as one worker copies it, from rows to acknowledged chunks."""

from __future__ import annotations

import base64
import json
import os
import queue
import threading
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn

from bridge.snapshot.formats.chunks import ChunkHead, Sealer, byte_limit
from bridge.snapshot.formats.row_chunks import RowEncoder, RowSamples
from bridge.snapshot.tables import Piece, copy_sql, shape_from_document
from bridge.snapshot.worker.copy_stream import copy_rows
from consumer_sdk.transport.holds import hold
from consumer_sdk.wire.subjects import Subjects, table_token

if TYPE_CHECKING:
    import psycopg

    from bridge.snapshot.formats.chunks import ChunkEncoder, Content
    from bridge.snapshot.worker.chunk_store import ChunkStore

ORPHANED: Final = 3
READ_BYTES: Final = 65536
ALIVE_SECONDS: Final = 5.0


class Pipe:
    """Lines of JSON to the bridge and back; reports may come from any thread."""

    def __init__(self) -> None:
        # Nothing else may write into the conversation, whatever a library prints.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="bridge").start()
        threading.Thread(target=self._live, daemon=True, name="sign of life").start()

    def tell(self, what: str, **fields: Any) -> None:
        """Report something that needs no answer."""
        line = json.dumps({"say": what, **fields}).encode() + b"\n"
        with self._lock:
            try:
                self._out.write(line)
            except OSError:
                _orphaned()

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self.tell(what, **fields)
        return self._answers.get()

    def next_line(self) -> dict[str, Any]:
        """Wait for something the bridge says of itself."""
        return self._answers.get()

    def _live(self) -> None:
        """Let the bridge tell a worker that is slow from one that hangs."""
        while True:
            self.tell("alive")
            time.sleep(ALIVE_SECONDS)

    def _listen(self) -> None:
        # Unbuffered: a thread that waits in a buffer of sys.stdin would disturb an orderly exit.
        pending = b""
        with suppress(OSError, ValueError):
            while data := os.read(0, READ_BYTES):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._answers.put(json.loads(line))
        _orphaned()


def _orphaned() -> NoReturn:
    os._exit(ORPHANED)


class Abandoned(Exception):
    """The bridge wants nothing more of this table."""


class TableCopy:
    """One table as this worker copies it, from rows to acknowledged chunks."""

    def __init__(
        self, index: int, document: dict[str, Any], task: dict[str, Any], store: ChunkStore,
        pipe: Pipe, max_payload: int,
    ) -> None:  # fmt: skip
        self.index = index
        self.shape = shape_from_document(document["shape"])
        self._store = store
        self._pipe = pipe
        self._objects = 0
        self._worker = task["worker"]
        self._snapshot_id = document["snapshot_id"]
        self._subjects = Subjects(task["prefix"])
        self._token = table_token(self.shape.schema, self.shape.table)
        known = document["dictionary"]
        dictionary = (known["id"], base64.b64decode(known["content"])) if known else None
        self._sealer = Sealer(self._snapshot_id, zstd=document["zstd"], dictionary=dictionary)
        self._samples = RowSamples() if document["train"] else None
        head = ChunkHead(
            task["source"], task["epoch"], self.shape.table, self.shape.schema,
            self._snapshot_id, task["snapshot_lsn"],
        )  # fmt: skip
        limit = byte_limit(max_payload)
        self._encoder = self._make_encoder(document["format"], head, task["chunk_rows"], limit)

    def _make_encoder(
        self, kind: str, head: ChunkHead, max_rows: int, max_bytes: int
    ) -> ChunkEncoder:
        columns = self.shape.columns
        if kind == "arrow":
            from bridge.snapshot.formats.arrow_chunks import ArrowEncoder

            return ArrowEncoder(
                head, columns, max_rows=max_rows, max_bytes=max_bytes, refer=self._refer
            )
        return RowEncoder(
            head,
            columns,
            as_json=kind == "json",
            max_rows=max_rows,
            max_bytes=max_bytes,
            refer=self._refer,
        )

    def copy(self, connection: psycopg.Connection[Any], piece: Piece) -> None:
        """Copy one piece; what does not fill a chunk waits for the next."""
        with closing(copy_rows(connection, copy_sql(self.shape, piece))) as blocks:
            for lines in blocks:
                for content in self._encoder.add(lines):
                    self._send(content)

    def finish(self) -> None:
        """Send what is left and wait for every acknowledgement."""
        for content in self._encoder.flush():
            self._send(content)
        self._store.drain()
        if self._samples is not None:
            trained = self._samples.train()
            if trained is not None:
                content_text = base64.b64encode(trained).decode("ascii")
                self._pipe.tell("dictionary", table=self.index, content=content_text)

    def _send(self, content: Content) -> None:
        number = self._pipe.ask("number", table=self.index)["number"]
        if number is None:
            raise Abandoned
        hold(f"snapshot.chunk.{number}")
        sealed = self._sealer.seal(content, number)
        if self._samples is not None:
            self._samples.add(content)
        rows, size, index, pipe = content.row_count, len(sealed.payload), self.index, self._pipe

        def stored() -> None:
            pipe.tell(
                "stored", table=index, chunk=number, rows=rows, bytes=size, sha256=sealed.sha256
            )

        self._store.publish(
            self._subjects.chunk(self._token, self._snapshot_id, number), sealed, stored
        )

    def _refer(self, payload: bytes) -> dict[str, Any]:
        name = f"snapshot-{self._snapshot_id}-{self._worker}-{self._objects}"
        self._objects += 1
        self._pipe.tell("object", table=self.index, name=name)
        return self._store.put_object(name, payload)
