"""What strangers can send us, one function for each decoder: any bytes, and only the errors that
its callers expect.

`test_targets.py` feeds them by hypothesis, `coverage_guided.py` by a fuzzer that watches which
lines it has reached.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bridge.errors import ProtocolError, Refused
from bridge.jetstream.record import StreamRecord
from bridge.postgres.copy_stream import FrameSplitter
from bridge.snapshot.coordinator.requests import body_is_json, parse_request
from bridge.telemetry.access import Access
from bridge.telemetry.http import HttpServer
from bridge.telemetry.stats import BridgeStats
from bridge.wal.framing import POSTGRES_EPOCH_US, parse_frame
from bridge.wal.messages import UNCHANGED, Begin, Insert, Relation, RelationColumn, Truncate
from bridge.wal.pgoutput import decode
from consumer_sdk.errors import CdcError, CorruptData
from consumer_sdk.reading.decoder import EventDecoder
from consumer_sdk.reading.references import References
from consumer_sdk.snapshot.snapshot import decode_meta
from consumer_sdk.transport.api import Frame
from consumer_sdk.wire import Subjects, decode_payload, read_events
from consumer_sdk.wire.envelope import encode
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import parse_table_token
from tests.pgoutput_encoder import encode_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from consumer_sdk.wire.column_types import TableSchema

    Target = Callable[[bytes], None]

SUBJECTS = (
    b"cdc.users.insert",
    b"cdc.users.schema",
    b"cdc.users.commit",
    b"cdc.$progress.shop",
    b"cdc.$message.audit",
    b"cdc.$fence.shop",
)
HEADERS = (
    None,
    b"NATS/1.0\r\nContent-Type: application/msgpack\r\n\r\n",
    b"NATS/1.0\r\nContent-Type: application/json\r\n\r\n",
    b"NATS/1.0\r\nContent-Type: application/msgpack\r\nContent-Encoding: zstd\r\n\r\n",
    b"NATS/1.0\r\nContent-Type: application/json\r\nCdc-Dict: 1\r\nContent-Encoding: zstd\r\n\r\n",
)


def pgoutput(data: bytes) -> None:
    """What the walsender sends: a frame, and the message in it."""
    with suppress(ProtocolError):
        parse_frame(data)
    with suppress(ProtocolError):
        decode(data)


def wire(data: bytes) -> None:
    """A message on one of our subjects, as an SDK reads it; the first byte chooses which."""
    choice, payload = (data[0], data[1:]) if data else (0, b"")
    headers = HEADERS[choice % len(HEADERS)]
    subject = SUBJECTS[choice // len(HEADERS) % len(SUBJECTS)]
    store = _Store(payload)
    decoder = EventDecoder(Subjects(""), store, store)
    with suppress(CdcError):
        _complete(decoder.decode([Frame(1, subject, headers, payload)]))
    with suppress(WireError):
        read_events({"Content-Type": "application/msgpack"}, payload)


def snapshot_meta(data: bytes) -> None:
    """A finished snapshot's description, as an SDK reads it."""
    choice, payload = (data[0], data[1:]) if data else (0, b"")
    with suppress(CdcError):
        decode_meta(Frame(1, b"init.meta.users", HEADERS[choice % len(HEADERS)], payload))


def copy_reader(data: bytes) -> None:
    """What PostgreSQL answers to COPY, in any pieces; the first byte is their size."""
    step = 1 + (data[0] if data else 0)
    splitter = FrameSplitter()
    with suppress(ProtocolError):
        for start in range(1, len(data), step):
            splitter.feed(data[start : start + step])


def snapshot_request(data: bytes) -> None:
    """The body and the subject of a request for a snapshot."""
    for headers in (None, {"Content-Type": "application/json"}):
        body_is_json(data, headers, default=False)
        with suppress(Refused):
            parse_request(data, headers, as_json=False, zstd=False)
    with suppress(WireError):
        parse_table_token(data.decode("utf-8", "replace"))


def stream_record(data: bytes) -> None:
    """What a bridge finds in the stream where it expects its own record."""
    choice, payload = (data[0], data[1:]) if data else (0, b"")
    kinds = ("application/msgpack", "application/json")
    # What the bridge takes for damage when it reads its record back.
    with suppress(WireError, KeyError, TypeError, ValueError, OverflowError):
        StreamRecord().note(decode_payload({"Content-Type": kinds[choice % 2]}, payload))


class HttpTarget:
    """Raw bytes on the HTTP port of a bridge whose shutdown needs a token."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._shutdowns = 0
        self._failures: list[str] = []
        self._server = HttpServer(
            BridgeStats(),
            port=0,
            access=Access("only the operator knows"),
            request_shutdown=self._note_shutdown,
            stream_info=self._stream_info,
        )
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self._failures.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("bridge.http").addHandler(handler)
        self._loop.run_until_complete(self._server.start())

    def __call__(self, data: bytes) -> None:
        answer = self._loop.run_until_complete(self._send(data))
        assert not answer.startswith(b"HTTP/1.1 5"), answer[:200]
        assert not self._shutdowns, "shut down without the token"
        assert not self._failures, self._failures

    def close(self) -> None:
        """Stop listening."""
        self._loop.run_until_complete(self._server.stop())
        self._loop.close()

    def _note_shutdown(self) -> None:
        self._shutdowns += 1

    async def _stream_info(self, name: str) -> dict[str, Any] | None:
        return {"messages": 1} if name == "CDC" else None

    async def _send(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            writer.write(data)
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


HTTP_SEEDS: Sequence[bytes] = (
    b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /streams/info?stream=CDC HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /shutdown HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n\r\n",
    b"POST /shutdown HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n",
    b"POST /shutdown HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
)


class _Store(References):
    """An object store that holds one content under every name, and nothing else."""

    def __init__(self, content: bytes) -> None:
        nc: Any = None
        super().__init__(nc, Subjects(""))
        self._content_of_all = content

    async def fetch_dictionary(self, _name: str) -> bytes:
        raise CorruptData("no dictionary")

    async def fetch_object(self, _reference: dict[str, Any]) -> bytes:
        return self._content_of_all

    async def of_version(self, _token: str, _version: int) -> TableSchema | None:
        return None


def _complete(work: Any) -> Any:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a decoder waited")


def seeds(name: str) -> list[bytes]:
    """Well-formed inputs of a target, from which a fuzzer begins."""
    event = {
        "v": 1, "source": "shop", "epoch": 1, "table": "users", "schema": "public",
        "operation": "UPDATE", "relation_id": 1, "schema_version": 1, "msg_id": "1-users-update-0",
        "subject": "cdc.users.update", "lsn": 1, "xid": 1, "seq": 0, "ts": 1, "last": True,
        "data": {"id": 1, "name": "a"}, "old": {"id": 2}, "unchanged": ["big"], "raw": ["doc"],
    }  # fmt: skip
    packed = {**event, "rows": [{"data": {"id": 1}}, {"data": {"id": 2}, "old": {"id": 1}}]}
    stored = {**event, "ref": {"bucket": "b", "name": "n", "size": 1, "sha256": "0"}}
    progress = {"v": 1, "source": "shop", "epoch": 1, "lsn": 1, "stream_seq": 1, "ts": 1}
    message = {**event, "operation": "MESSAGE", "ordinal": 0, "prefix": "audit"}
    documents = [event, packed, stored, progress, message]
    if name == "snapshot_meta":
        documents = [
            {
                "v": 1, "snapshot_id": "a", "source": "shop", "epoch": 1, "table": "users",
                "schema": "public", "lsn": 1, "timestamp": 1, "batch_count": 1, "row_count": 1,
                "schema_version": 1, "columns": ["id"], "options": {}, "format": "msgpack",
                "stream": "CDC", "stream_created": 1, "cdc_seq": 1, "checksum": "0",
            }
        ]  # fmt: skip
    if name == "snapshot_request":
        asked = {"columns": ["id"], "format": "json", "zstd": True, "fresh": True}
        return [b"", encode(asked), encode(asked, as_json=True)]
    if name in ("wire", "snapshot_meta", "stream_record"):
        kinds = [(bytes([1]), False), (bytes([2]), True), (bytes([16]), False), (bytes([17]), True)]
        return [
            head + encode(document, as_json=json) for document in documents for head, json in kinds
        ]
    if name == "copy_reader":
        row = b"d" + (4 + 4).to_bytes(4, "big") + b"1\ta\n"
        return [b"\x40" + row + row + b"c\0\0\0\x04" + b"Z\0\0\0\x05I"]
    return [
        encode_message(message)
        for message in (
            Begin(final_lsn=1, commit_time=POSTGRES_EPOCH_US, xid=1),
            Insert(relation_id=1, new=(b"1", None, UNCHANGED)),
            Relation(1, "public", "users", "d", (RelationColumn(1, "id", 23, -1),)),
            Truncate(relation_ids=(1, 2), cascade=True, restart_identity=False),
        )
    ]
