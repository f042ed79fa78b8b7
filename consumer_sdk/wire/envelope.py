"""Messages as bytes, in MessagePack or JSON, and the events in them.

`encode` and `decode_payload` convert whole documents; `read_events` returns the events of one
stored message, several if rows are packed.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgpack
import msgspec

from consumer_sdk.wire.compression import Dictionaries, decompress
from consumer_sdk.wire.errors import WireError, WireVersionError
from consumer_sdk.wire.position import Position

WIRE_VERSION = 1
MSGPACK = "application/msgpack"
JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"

CONTENT_TYPE = "Content-Type"
CONTENT_ENCODING = "Content-Encoding"
DICTIONARY = "Cdc-Dict"
CHUNK_SHA256 = "Cdc-Sha256"
MSG_ID = "Nats-Msg-Id"

LARGEST_JSON_INTEGER = 2**53
MOST_CHUNK_ROWS = 10_000
_DIGITS = re.compile(r"[0-9]{1,20}\Z")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TIMESTAMPS = (b"\xd6\xff", b"\xd7\xff", b"\xc7\x0c\xff")

Document = dict[str, Any]


def to_json_value(value: Any) -> Any:
    """A value in a form that JSON carries exactly: bytes as base64, special numbers as text."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if -LARGEST_JSON_INTEGER <= value <= LARGEST_JSON_INTEGER else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    raise TypeError(f"cannot carry a {type(value).__name__} on the wire")


def encode(document: Mapping[str, Any], *, as_json: bool = False) -> bytes:
    """A document as MessagePack, or as JSON."""
    if as_json:
        return json.dumps(
            to_json_value(document), ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ).encode()
    packed: bytes = msgpack.packb(document)
    return packed


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"MessagePack extension {code}")


def may_hold_times(payload: bytes) -> bool:
    """Whether a payload may hold MessagePack timestamps, which the wire format does not allow."""
    # The marks of all of them end with this byte, which most messages do not contain.
    return 0xFF in payload and any(head in payload for head in _TIMESTAMPS)


def _read_msgpack(payload: bytes) -> Any:
    document = msgpack.unpackb(payload, strict_map_key=True, ext_hook=_refuse_extension)
    if may_hold_times(payload):
        level = [document]
        while level:
            one = level.pop()
            if isinstance(one, msgpack.Timestamp):
                raise ValueError("MessagePack timestamp")
            if isinstance(one, (dict, list)):
                level.extend(one.values() if isinstance(one, dict) else one)
    return document


def _read_json(payload: bytes) -> Any:
    document = json.loads(payload, parse_constant=_refuse_constant)
    if _SURROGATE.search(payload):
        # Refuse a lone surrogate: it cannot be printed, stored or encoded again.
        json.dumps(document, ensure_ascii=False).encode()
    return document


def decode_payload(
    headers: Mapping[str, str] | None,
    payload: bytes,
    dictionaries: Dictionaries | None = None,
    *,
    versioned: bool = True,
) -> Document:
    """Decode a document according to its headers; without headers, as MessagePack.

    Rows stored as objects are not `versioned`: they have no field `v`.
    """
    kind = MSGPACK
    if headers:
        kind = headers.get(CONTENT_TYPE) or MSGPACK
        encoding = headers.get(CONTENT_ENCODING)
        if encoding == "zstd":
            payload = decompress(
                payload, dictionary_id=headers.get(DICTIONARY), dictionaries=dictionaries
            )
        elif encoding:
            raise WireError(f"unknown Content-Encoding {encoding!r}")
    try:
        if kind == MSGPACK:
            document = _read_msgpack(payload)
        elif kind == JSON:
            document = _read_json(payload)
        else:
            raise WireError(f"unknown Content-Type {kind!r}")
    except WireError:
        raise
    except Exception as error:  # decoders raise many kinds of errors for foreign bytes
        raise WireError(f"damaged message: {error}") from error
    if not isinstance(document, dict):
        raise WireError("damaged message: not a map")
    if not versioned:
        return document
    version = document.get("v")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise WireError("damaged message: no wire version")
    if version > WIRE_VERSION:
        raise WireVersionError(
            f"message has wire version {version}, this reader understands "
            f"{WIRE_VERSION}; upgrade it"
        )
    return document


WITHOUT_ORDINAL = frozenset({"SCHEMA", "MESSAGE", "PROGRESS"})


class Event(msgspec.Struct, gc=False):
    """One change, or one of the other messages that are stored in order with the changes.

    `seq` counts from 0 within the transaction. `unchanged` names columns whose TOASTed value did
    not change and is absent from `data`; `raw` names JSON columns that hold the document as text.
    For an event without an ordinal, `behind` is the ordinal of the change before it. Events hold
    plain values and never refer to themselves, so the garbage collector can skip them.
    """

    source: str
    epoch: int
    table: str
    schema: str
    operation: str
    commit_lsn: int
    seq: int
    xid: int
    ts: int
    schema_version: int
    relation_id: int
    msg_id: str
    subject: str
    data: Any = None
    old: dict[str, Any] | None = None
    unchanged: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()
    ref: dict[str, Any] | None = None
    last: bool = False
    end_lsn: int = 0
    document: Document | None = None
    behind: int = -1

    @property
    def position(self) -> Position:
        """Reading after it misses nothing; events without an ordinal may be read again."""
        has_none = self.operation in WITHOUT_ORDINAL
        return Position(self.commit_lsn, self.behind if has_none else self.seq)


def unsigned(document: Document, key: str, default: int | None = None) -> int:
    """The unsigned 64-bit integer of a field; JSON carries large ones as text."""
    value = document.get(key, default)
    if isinstance(value, str) and _DIGITS.match(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise WireError(f"damaged message: {key} is not an unsigned integer")
    return value


def _text(document: Document, key: str, default: str | None = None) -> str:
    value = document.get(key, default)
    if not isinstance(value, str):
        raise WireError(f"damaged message: {key} is not text")
    return value


def _map(value: Any, key: str) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise WireError(f"damaged message: {key} is not a map")
    return value


def _names(value: Any, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise WireError(f"damaged message: {key} is not a list of names")
    return tuple(value)


def message_content(document: Document) -> str | bytes:
    """The content of a logical message: text if it is valid UTF-8, else bytes."""
    data, encoding = document.get("data"), document.get("encoding", "utf8")
    if isinstance(data, bytes) or (isinstance(data, str) and encoding == "utf8"):
        return data
    if not isinstance(data, str):
        raise WireError("damaged message: a logical message without data")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise WireError("damaged message: data is not base64") from error


ROW_OPERATIONS = frozenset({"INSERT", "UPDATE", "DELETE"})
KNOWN_OPERATIONS = ROW_OPERATIONS | {"TRUNCATE", "SCHEMA", "COMMIT", "MESSAGE"}


def _plain_row(document: Document) -> Event | None:
    """The event of an ordinary row change; None for a message that needs every check."""
    get = document.get
    data = get("data")
    operation = get("operation")
    source, table, schema = get("source"), get("table"), get("schema")
    epoch, lsn, seq, xid, ts = get("epoch"), get("lsn"), get("seq"), get("xid"), get("ts")
    version, relation = get("schema_version"), get("relation_id")
    msg_id, subject, old = get("msg_id"), get("subject"), get("old")
    if (
        type(data) is not dict
        or type(operation) is not str
        or operation not in ROW_OPERATIONS
        or "unchanged" in document
        or "raw" in document
        or "rows" in document
        or "ref" in document
        or not (type(source) is type(table) is type(schema) is type(msg_id) is type(subject) is str)
        or not (type(epoch) is type(lsn) is type(seq) is type(xid) is type(ts) is int)
        or not (type(version) is type(relation) is int)
        or (old is not None and type(old) is not dict)
        # Not zero if any of them is negative or beyond 64 bits.
        or (epoch | lsn | seq | xid | version | relation) >> 64
        or (ts if ts >= 0 else ~ts) >> 63
    ):
        return None
    last = get("last") is True
    return Event(
        source, epoch, table, schema, operation, lsn, seq, xid, ts, version, relation, msg_id,
        subject, data, old, (), (), None, last,
        unsigned(document, "end_lsn") if "end_lsn" in document else 0,
    )  # fmt: skip


def events_of(document: Document) -> list[Event]:
    """The events of one decoded message, in order; packed rows become one event each."""
    plain = _plain_row(document)
    if plain is not None:
        return [plain]
    operation = _text(document, "operation")
    if operation not in KNOWN_OPERATIONS:
        raise WireError("unknown operation")
    source = _text(document, "source")
    epoch = unsigned(document, "epoch")
    table = _text(document, "table", "")
    schema = _text(document, "schema", "")
    commit_lsn = unsigned(document, "lsn")
    seq = unsigned(document, "seq", 0)
    xid = unsigned(document, "xid", 0)
    ts = document.get("ts", 0)
    if isinstance(ts, str) and _DIGITS.match(ts.removeprefix("-")):
        ts = int(ts)
    if not isinstance(ts, int) or isinstance(ts, bool) or not -(1 << 63) <= ts < 1 << 63:
        raise WireError("damaged message: ts is not an integer")
    version = unsigned(document, "schema_version", 0)
    relation_id = unsigned(document, "relation_id", 0)
    msg_id = _text(document, "msg_id", "")
    subject = _text(document, "subject", "")
    last = document.get("last") is True
    end_lsn = unsigned(document, "end_lsn", 0)
    rows = document.get("rows")
    if rows is not None:
        if not isinstance(rows, list) or not rows or operation not in ROW_OPERATIONS:
            raise WireError("damaged message: rows is not a list of rows")
        final = len(rows) - 1
        events = []
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise WireError("damaged message: a packed row is not a map")
            event = Event(
                source, epoch, table, schema, operation, commit_lsn, seq + index, xid, ts,
                version, relation_id, msg_id, subject,
                _map(row.get("data"), "data"), _map(row.get("old"), "old"),
                _names(row.get("unchanged"), "unchanged"), _names(row.get("raw"), "raw"),
                _map(row.get("ref"), "ref"), last and index == final,
                end_lsn if index == final else 0,
            )  # fmt: skip
            _require_row(event)
            events.append(event)
        return events
    data = document.get("data")
    if operation in ROW_OPERATIONS:
        _map(data, "data")
    elif operation == "MESSAGE" and document.get("ref") is None:
        data = message_content(document)
    event = Event(
        source, epoch, table, schema, operation, commit_lsn, seq, xid, ts, version, relation_id,
        msg_id, subject, data, _map(document.get("old"), "old"),
        _names(document.get("unchanged"), "unchanged"), _names(document.get("raw"), "raw"),
        _map(document.get("ref"), "ref"), last, end_lsn,
        None if operation in ROW_OPERATIONS else document,
    )  # fmt: skip
    if operation in ROW_OPERATIONS:
        _require_row(event)
    return [event]


def _require_row(event: Event) -> None:
    if event.data is None and event.ref is None:
        raise WireError("damaged message: a row change without data")


def read_events(
    headers: Mapping[str, str] | None, payload: bytes, dictionaries: Dictionaries | None = None
) -> list[Event]:
    """The events of one stored message.

    Raises WireVersionError for a newer format, DictionaryMissing if a dictionary must be fetched
    first, and WireError for any other violation of the format.
    """
    return events_of(decode_payload(headers, payload, dictionaries))


def final_seq(document: Document) -> int:
    """The ordinal of the last row in a message."""
    rows = document.get("rows")
    seq = unsigned(document, "seq", 0)
    return seq + len(rows) - 1 if isinstance(rows, list) and rows else seq
