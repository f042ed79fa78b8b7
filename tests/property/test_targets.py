"""Any bytes from strangers: decoded, or refused with the error that callers expect."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.property import targets

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELDS = (
    "v", "source", "epoch", "table", "schema", "operation", "relation_id", "schema_version",
    "msg_id", "subject", "lsn", "end_lsn", "xid", "seq", "ts", "data", "old", "unchanged", "raw",
    "ref", "last", "rows", "tables", "changes", "columns", "primary_key", "prefix", "content",
    "ordinal", "snapshot_id", "timestamp", "batch_count", "row_count", "options", "format",
    "stream", "stream_created", "cdc_seq", "checksum", "fresh", "zstd", "name", "bucket", "size",
)  # fmt: skip
WORDS = ("INSERT", "UPDATE", "DELETE", "TRUNCATE", "COMMIT", "SCHEMA", "MESSAGE", "users", "arrow")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
documents = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8).map(
    lambda document: {"v": 1, **document}
)


def _json(document: Any) -> bytes:
    return json.dumps(document, default=str).encode("utf-8", "replace")


payloads = st.binary(max_size=300) | documents.map(msgpack.packb) | documents.map(_json)
chosen = st.builds(lambda choice, payload: bytes([choice]) + payload, st.integers(0, 29), payloads)


INFINITE_LSN = b"\xa3lsn" + msgpack.packb(float("inf"))
INFINITE = {"v": 1, "source": "shop", "epoch": float("inf"), "lsn": 1, "ts": 1}


@given(st.binary(max_size=300))
def test_the_walsender_may_send_anything(data: bytes) -> None:
    targets.pgoutput(data)


@given(chosen)
@example(bytes([16]) + msgpack.packb(INFINITE))
def test_a_message_on_our_subjects_may_hold_anything(data: bytes) -> None:
    targets.wire(data)


@given(chosen)
@example(bytes([1]) + targets.seeds("snapshot_meta")[0][1:].replace(b"\xa3lsn\x01", INFINITE_LSN))
def test_the_meta_of_a_snapshot_may_hold_anything(data: bytes) -> None:
    targets.snapshot_meta(data)


@given(st.binary(max_size=300))
def test_the_answer_to_copy_may_be_anything(data: bytes) -> None:
    targets.copy_reader(data)


@given(payloads)
def test_a_request_for_a_snapshot_may_hold_anything(data: bytes) -> None:
    targets.snapshot_request(data)


@given(chosen)
def test_the_record_in_the_stream_may_be_anything(data: bytes) -> None:
    targets.stream_record(data)


@pytest.fixture(scope="module")
def http() -> Iterator[targets.HttpTarget]:
    target = targets.HttpTarget()
    yield target
    target.close()


pieces = st.sampled_from(
    (
        b"GET", b"POST", b" ", b"/", b"/shutdown", b"/status", b"/streams/info?stream=", b"%00",
        b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"Host: localhost", b"Host: evil.example",
        b"Authorization: Bearer ", b"Content-Length: 5", b"Transfer-Encoding: chunked",
        b"Expect: 100-continue", b"Upgrade: websocket", b"0", b"\x00", b"\xff",
    )
)  # fmt: skip


@given(st.lists(pieces | st.binary(max_size=6), max_size=14).map(b"".join))
@example(targets.HTTP_SEEDS[0])
@example(targets.HTTP_SEEDS[1])
@example(targets.HTTP_SEEDS[2])
@example(targets.HTTP_SEEDS[3])
@example(targets.HTTP_SEEDS[4])
def test_the_http_port_may_be_sent_anything(http: targets.HttpTarget, data: bytes) -> None:
    http(data)
