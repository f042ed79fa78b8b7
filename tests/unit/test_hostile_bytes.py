"""What a message can make its reader do: memory and fetches stay bounded whatever it claims."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
import zstandard

from bridge.errors import Refused
from bridge.events.messages import Packaging
from bridge.schemas.coverage_watch import CoverageStore, SavedCoverage
from bridge.snapshot.coordinator.requests import parse_request
from bridge.source import Source
from consumer_sdk.errors import CorruptData
from consumer_sdk.reading.decoder import EventDecoder
from consumer_sdk.reading.references import LARGEST_OBJECT_BYTES, References
from consumer_sdk.transport.api import Frame
from consumer_sdk.wire.compression import (
    LARGEST_DICTIONARY_BYTES,
    LARGEST_PLAIN_BYTES,
    MAX_DICTIONARIES,
    LoadedDictionaries,
    compress,
    decompress,
)
from consumer_sdk.wire.envelope import JSON, MSGPACK, decode_payload, encode, read_events
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.row_messages import read_row_message
from consumer_sdk.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Callable

    from consumer_sdk.wire.column_types import TableSchema

ROOT = Path(__file__).parents[2]
MIB = 1024**2
REF: dict[str, Any] = {
    "bucket": "cdc_objects", "name": "s/1-t-insert-0-1", "size": 10, "sha256": "0" * 64,
}  # fmt: skip
EVENT: dict[str, Any] = {
    "v": 1, "source": "s", "epoch": 1, "table": "t", "schema": "public", "operation": "INSERT",
    "lsn": 16, "seq": 0, "xid": 1, "ts": 0, "schema_version": 1, "relation_id": 1, "msg_id": "m",
    "subject": "cdc.t.insert", "last": True,
}  # fmt: skip


def zeros(size: int, *, content_size: bool = True) -> bytes:
    """A frame of zeros, made piece by piece."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=content_size)
    stream = compressor.compressobj(size=size if content_size else -1)
    piece = bytes(MIB)
    pieces = [stream.compress(piece) for _ in range(size // MIB)]
    return b"".join([*pieces, stream.compress(bytes(size % MIB)), stream.flush()])


def with_content_size(frame: bytes, size: int) -> bytes:
    """The same frame with another content size in its header."""
    assert frame[4] >> 6 == 2, "a content size of four bytes"
    place = 5 if frame[4] & 0x20 else 6
    return frame[:place] + size.to_bytes(4, "little") + frame[place + 4 :]


FRAMES: dict[str, Callable[[], bytes]] = {
    "more than the limit": lambda: zeros(LARGEST_PLAIN_BYTES + 1),
    "a gigabyte": lambda: zeros(1024 * MIB),
    "no content size": lambda: zeros(1024 * MIB, content_size=False),
    "more than it says": lambda: with_content_size(zeros(512 * MIB), 1 * MIB),
    "less than it says": lambda: with_content_size(zeros(1 * MIB), 32 * MIB),
    "two frames": lambda: compress(b"x") + zeros(512 * MIB),
    "a frame behind one to skip": lambda: b"\x50\x2a\x4d\x18\x01\x00\x00\x00x" + zeros(512 * MIB),
    "cut off": lambda: zeros(32 * MIB)[:-5],
    "another dictionary": lambda: zstandard.ZstdCompressor(
        dict_data=zstandard.train_dictionary(
            1024, [str(n).encode() * 20 for n in range(1000)], dict_id=77
        )
    ).compress(b"x" * 100),
}


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def grown_by_frame(path: str) -> int:
    """How much this process grows at most, in KiB, while it refuses the frame."""
    payload = Path(path).read_bytes()
    before = peak_kib()
    for kind in (MSGPACK, JSON):
        with pytest.raises(WireError):
            decode_payload({"Content-Type": kind, "Content-Encoding": "zstd"}, payload)
    return peak_kib() - before


def run(call: str) -> str:
    """What an expression with this module's names gives, in a process of its own."""
    program = f"from tests.unit import test_hostile_bytes as m;print(eval({call!r}, vars(m)))"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=100,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])
    return ended.stdout.strip()


@pytest.mark.parametrize("frame", FRAMES)
def test_a_zstd_frame_that_lies_is_refused_within_the_memory_it_may_claim(
    frame: str, tmp_path: Path
) -> None:
    path = tmp_path / "frame"
    path.write_bytes(FRAMES[frame]())
    assert path.stat().st_size < MIB
    assert int(run(f"grown_by_frame({str(path)!r})")) < 40 * 1024


def test_a_frame_as_large_as_a_message_can_be_is_read() -> None:
    plain = b"x" * LARGEST_PLAIN_BYTES
    assert decompress(compress(plain)) == plain


def test_the_bridge_sends_no_frame_that_readers_refuse() -> None:
    subjects = Subjects("")
    source = Source("s", 1, "p", subjects, as_json=False)
    packaging = Packaging(source, 64 * MIB, compress=lambda _, payload: (compress(payload), b""))
    assert packaging.fitted("t", bytes(LARGEST_PLAIN_BYTES + 1)) is None
    assert packaging.fitted("t", bytes(LARGEST_PLAIN_BYTES)) is not None


def test_dictionaries_are_limited_in_number_and_size() -> None:
    loaded = LoadedDictionaries()
    for number in range(3 * MAX_DICTIONARIES):
        loaded.add(str(number), b"x")
        assert len(loaded) <= MAX_DICTIONARIES
        assert str(number) in loaded
    with pytest.raises(WireError, match="zstd dictionary of more than"):
        loaded.add("large", bytes(LARGEST_DICTIONARY_BYTES + 1))


class Store(References):
    """References to objects that all have the same content, and count."""

    nowhere: Any = None

    def __init__(self, content: bytes = b"") -> None:
        super().__init__(self.nowhere, Subjects(""))
        self.content = content
        self.fetched = 0

    async def _content_id(self, _name: str, _size: int) -> str:
        self.fetched += 1
        return "n"

    async def _content(self, _name: str, _nuid: str, _size: int) -> bytes:
        return self.content

    async def of_version(self, _token: str, _version: int) -> TableSchema | None:
        return None


def frame_of(document: dict[str, Any], *, zstd: bool = False) -> Frame:
    payload = encode(document)
    encoding = "Content-Encoding: zstd\r\n" if zstd else ""
    headers = f"NATS/1.0\r\nContent-Type: {MSGPACK}\r\n{encoding}\r\n".encode()
    return Frame(7, b"cdc.t.insert", headers, compress(payload) if zstd else payload)


@pytest.mark.parametrize(
    "damage",
    [
        {"bucket": "KV_bridge"},
        {"bucket": None},
        {"bucket": ["cdc_objects"]},
        {"name": ""},
        {"name": "x" * 2001},
        {"name": "a\x1b[2Jb"},
        {"name": "a\nb"},
        {"name": 5},
        {"size": 0},
        {"size": -1},
        {"size": True},
        {"size": "10"},
        {"size": 1.5},
        {"size": LARGEST_OBJECT_BYTES + 1},
        {"size": 2**64 - 1},
        {"sha256": ""},
        {"sha256": "0" * 63},
        {"sha256": "g" * 64},
        {"sha256": 5},
    ],
)
async def test_a_reference_to_anything_but_an_object_of_ours_fetches_nothing(
    damage: dict[str, Any],
) -> None:
    store = Store()
    ref = {**REF, **damage}
    with pytest.raises(CorruptData):
        await EventDecoder(Subjects(""), store, store).decode([frame_of({**EVENT, "ref": ref})])
    with pytest.raises(CorruptData):
        await store.self_contained([frame_of({**EVENT, "ref": ref})])
    with pytest.raises(CorruptData):
        await store.fetch_object(ref)
    assert not store.fetched


async def test_all_objects_of_a_message_together_are_within_the_limit_for_one() -> None:
    store = Store()
    rows = [{"ref": {**REF, "size": LARGEST_OBJECT_BYTES // 4}}] * 5
    with pytest.raises(CorruptData, match="its size is not valid"):
        await EventDecoder(Subjects(""), store, store).decode([frame_of({**EVENT, "rows": rows})])
    assert not store.fetched


async def test_an_object_is_not_used_unless_size_and_sha256_are_those_of_the_reference() -> None:
    for content in (b"", b"123456789", b"1234567890", b"12345678901"):
        with pytest.raises(CorruptData):
            await Store(content).fetch_object(REF)


def grown_by_bombs() -> int:
    """How much this process grows, in KiB, while it reads messages that expand a thousandfold."""
    event = {**EVENT, "data": {"id": 1, "x": "y" * (32 * MIB)}}
    frames = [frame_of(event, zstd=True)] * 20
    assert sum(len(one.payload) for one in frames) < MIB
    store = Store()
    decoder = EventDecoder(Subjects(""), store, store)
    del event
    loop = asyncio.new_event_loop()
    before = peak_kib()
    left = frames
    while left:
        stored, used = loop.run_until_complete(decoder.decode_some(left, 1000))
        assert 0 < len(stored) == used
        left = left[used:]
    left = frames
    while left:
        contents = loop.run_until_complete(store.self_contained(left))
        assert contents
        left = left[len(contents) :]
    loop.close()
    return peak_kib() - before


def test_a_batch_of_messages_that_expand_is_read_in_parts() -> None:
    assert int(run("grown_by_bombs()")) < 400 * 1024


DEEP = 100_000
NESTED = {
    "arrays": b"\x91" * DEEP + b"\xc0",
    "maps": b"\x81\xa1x" * DEEP + b"\xc0",
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a text of four gigabytes": b"\x81\xa1x\xdb\xff\xff\xff\xff",
    "bytes of four gigabytes": b"\x81\xa1x\xc6\xff\xff\xff\xff",
    "an extension": b"\x81\xa1x\xc9\xff\xff\xff\xff\x05",
    "arrays that claim all that follows": b"\xdd\x00\x0f\x00\x00" * 1000 + bytes(MIB),
}


@pytest.mark.parametrize("nested", NESTED)
def test_messagepack_that_claims_more_than_there_is_is_refused(nested: str) -> None:
    payload = NESTED[nested]
    assert read_row_message(payload) is None
    with pytest.raises(WireError):
        read_events(None, payload)
    with pytest.raises(Refused):
        parse_request(payload, None, as_json=False, zstd=False)


@pytest.mark.parametrize(
    "text",
    [
        b'{"v":' + b"[" * DEEP,
        b'{"v":' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"x":' * DEEP + b"1" + b"}" * DEEP,
        b'{"v":1,"lsn":' + b"9" * 5000 + b"}",
        b'{"v":1,"lsn":NaN}',
    ],
)
def test_json_that_is_nested_or_long_beyond_reason_is_refused(text: bytes) -> None:
    with pytest.raises(WireError):
        read_events({"Content-Type": JSON}, text)
    with pytest.raises(Refused):
        parse_request(text, {"Content-Type": JSON}, as_json=True, zstd=False)


def test_of_two_equal_keys_all_readers_take_the_last() -> None:
    packed = encode({**EVENT, "data": {"id": 1}})
    twice = bytes([packed[0], *packed[1:3]]) if packed[0] == 0xDE else packed[:1]
    count = len(EVENT) + 1
    assert packed[0] == 0xDE or packed[0] == 0x80 + count
    head = b"\xde" + (count + 1).to_bytes(2, "big")
    payload = head + packed[len(twice) :] + msgpack.packb("lsn") + msgpack.packb(99)
    fast = read_row_message(payload)
    assert fast is not None
    assert fast == read_events(None, payload)
    assert fast[0].commit_lsn == 99
    text = encode({**EVENT, "data": {"id": 1}}, as_json=True)[:-1] + b',"lsn":99}'
    assert read_events({"Content-Type": JSON}, text)[0].commit_lsn == 99


class Bucket:
    """A bucket that has the same value under every key."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    async def get(self, _key: str) -> Bucket:
        return self


def grown_by_coverage() -> int:
    """How much this process grows, in KiB, while it reads a saved coverage of 384 MiB of blanks."""
    packer = zlib.compressobj(1)
    pieces = [packer.compress(b'{"x":1'), *(packer.compress(b" " * MIB) for _ in range(384))]
    bucket: Any = Bucket(b"".join([*pieces, packer.flush()]))
    nowhere: Any = None
    store = CoverageStore(nowhere, bucket, Source("s", 1, "p", Subjects(""), as_json=False))
    before = peak_kib()
    assert asyncio.run(store.load()) is None
    return peak_kib() - before


def test_a_saved_coverage_that_expands_without_end_is_not_read() -> None:
    assert int(run("grown_by_coverage()")) < 250 * 1024
    good: Any = Bucket(
        zlib.compress(json.dumps({"epoch": 1, "tables": {}, "publication": "p"}).encode())
    )
    nowhere: Any = None
    source = Source("s", 1, "p", Subjects(""), as_json=False)
    assert asyncio.run(CoverageStore(nowhere, good, source).load()) == SavedCoverage({})
