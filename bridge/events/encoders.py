"""Encodes messages in fragments: fields that many events share are encoded only once.

A fragment is the encoded fields of a map without the map's head and end. `message` makes a map
from a fragment and the fields of one message. The fragment of a row has the field `data`, and if
needed `old`, `unchanged` and `raw`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgpack

from consumer_sdk.wire.envelope import JSON, MSGPACK, to_json_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bridge.source import Source

_SMALL_MAP = 15
_MAP_HEADS: Final = [bytes([0x80 | count]) for count in range(_SMALL_MAP + 1)]
STATIC_FIELDS: Final = 9
TRANSACTION_FIELDS: Final = 3
SHARED_FIELDS: Final = STATIC_FIELDS + TRANSACTION_FIELDS
"""The fields of the fragment that the events of a table share within a transaction."""
_STR8_BYTES: Final = 255
_LARGE_BYTES: Final = 1024 * 1024
_SEQS: Final = 1024
_SEQ_FIELDS: Final = [b"\xa3seq%b" % cast("bytes", msgpack.packb(seq)) for seq in range(_SEQS)]


class Encoder(Protocol):
    """One of the two encodings of the wire."""

    content_type: str
    binary: str
    """The encoding's type for bytes."""

    def fragment(self, fields: Mapping[str, Any]) -> bytes:
        """Encode fields without the map around them."""
        ...

    def join(self, first: bytes, second: bytes) -> bytes:
        """Join two fragments."""
        ...

    def message(self, count: int, shared: bytes, fields: Mapping[str, Any]) -> bytes:
        """A map with the `count` fields of a fragment and the given fields."""
        ...

    def document(self, fields: Mapping[str, Any]) -> bytes:
        """A map that shares nothing."""
        ...

    def body(self, fields: Mapping[str, Any]) -> bytes:
        """The fragment of one row; the encoding must be able to carry its values."""
        ...

    def row(self, body: bytes, count: int) -> bytes:
        """The map of a row whose fragment has `count` fields."""
        ...

    def event(self, shared: bytes, msg_id: bytes, seq: int, body: bytes, count: int) -> bytes:
        """The message of one row: the shared fragment, id, ordinal, and the row's fragment."""
        ...

    def rows(self, shared: bytes, msg_id: bytes, seq: int, rows: Sequence[bytes]) -> bytes:
        """The message of several rows."""
        ...

    def with_end(self, payload: bytes, end_lsn: int) -> bytes:
        """The message marked as the last of its transaction."""
        ...


class MsgpackEncoder:
    """MessagePack: fragments are concatenated; the map's head holds the number of fields."""

    content_type = MSGPACK
    binary = "binary"

    def __init__(self) -> None:
        self._pack = msgpack.Packer(autoreset=True).pack

    def _free_buffer(self) -> None:
        """Drop the packer's buffer, which would stay as large as the largest row ever packed."""
        self._pack = msgpack.Packer(autoreset=True).pack

    def fragment(self, fields: Mapping[str, Any]) -> bytes:
        packed: bytes = self._pack(fields)
        return packed[1:] if len(fields) <= _SMALL_MAP else packed[3:]

    def join(self, first: bytes, second: bytes) -> bytes:
        return first + second

    def message(self, count: int, shared: bytes, fields: Mapping[str, Any]) -> bytes:
        # A map of up to 15 fields has a head of one byte; messages never have more fields.
        return b"\xde\x00%c%b%b" % (count + len(fields), shared, self._pack(fields)[1:])

    def document(self, fields: Mapping[str, Any]) -> bytes:
        packed: bytes = self._pack(fields)
        if len(packed) > _LARGE_BYTES:
            self._free_buffer()
        return packed

    def body(self, fields: Mapping[str, Any]) -> bytes:
        return self.document(fields)[1:]

    def row(self, body: bytes, count: int) -> bytes:
        return _MAP_HEADS[count] + body

    def event(self, shared: bytes, msg_id: bytes, seq: int, body: bytes, count: int) -> bytes:
        size = len(msg_id)
        if size > _STR8_BYTES:
            return b"\xde\x00%c%b%b%b" % (
                SHARED_FIELDS + 2 + count, shared,
                self._pack({"msg_id": msg_id.decode(), "seq": seq})[1:], body,
            )  # fmt: skip
        seq_field = _SEQ_FIELDS[seq] if seq < _SEQS else b"\xa3seq%b" % self._pack(seq)
        return b"\xde\x00%c%b\xa6msg_id\xd9%c%b%b%b" % (
            SHARED_FIELDS + 2 + count, shared, size, msg_id, seq_field, body,
        )  # fmt: skip

    def rows(self, shared: bytes, msg_id: bytes, seq: int, rows: Sequence[bytes]) -> bytes:
        count = len(rows)
        body = b"\xa4rows\xdc%c%c%b" % (count >> 8, count & 0xFF, b"".join(rows))
        return self.event(shared, msg_id, seq, body, 1)

    def with_end(self, payload: bytes, end_lsn: int) -> bytes:
        return b"\xde\x00%c%b\xa4last\xc3\xa7end_lsn%b" % (
            payload[2] + 2, payload[3:], self._pack(end_lsn),
        )  # fmt: skip


class JsonEncoder:
    """JSON: fragments are separated by commas.

    `message` requires values that JSON can carry unchanged; `document` adapts all others.
    """

    content_type = JSON
    binary = "base64"

    def __init__(self) -> None:
        self._dumps = json.JSONEncoder(
            ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ).encode

    def fragment(self, fields: Mapping[str, Any]) -> bytes:
        return self.document(fields)[1:-1]

    def join(self, first: bytes, second: bytes) -> bytes:
        return b"%b,%b" % (first, second)

    def message(self, count: int, shared: bytes, fields: Mapping[str, Any]) -> bytes:  # noqa: ARG002
        return b"{%b,%b" % (shared, self._dumps(fields)[1:].encode())

    def document(self, fields: Mapping[str, Any]) -> bytes:
        return self._dumps(to_json_value(fields)).encode()

    def body(self, fields: Mapping[str, Any]) -> bytes:
        return self._dumps(fields)[1:-1].encode()

    def row(self, body: bytes, count: int) -> bytes:  # noqa: ARG002
        return b"{%b}" % body

    def event(self, shared: bytes, msg_id: bytes, seq: int, body: bytes, count: int) -> bytes:  # noqa: ARG002
        name = self._dumps(msg_id.decode()).encode()
        return b'{%b,"msg_id":%b,"seq":%d,%b}' % (shared, name, seq, body)

    def rows(self, shared: bytes, msg_id: bytes, seq: int, rows: Sequence[bytes]) -> bytes:
        return self.event(shared, msg_id, seq, b'"rows":[%b]' % b",".join(rows), 1)

    def with_end(self, payload: bytes, end_lsn: int) -> bytes:
        return b'%b,"last":true,"end_lsn":%d}' % (payload[:-1], end_lsn)


def encoder_for(source: Source) -> Encoder:
    """The encoder of a source's messages."""
    return JsonEncoder() if source.as_json else MsgpackEncoder()
