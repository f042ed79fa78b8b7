"""Arrow chunks with any bytes are read as rows of the snapshot's columns, or refused.

The corpus runs in a process of its own, because unchecked offsets end the process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bridge.events.values import ColumnType
from bridge.snapshot.formats.arrow import ArrowEncoder
from bridge.snapshot.formats.chunks import ChunkHead
from bridge.snapshot.tables import CopyColumn
from consumer_sdk.errors import CorruptData
from consumer_sdk.reading.references import References
from consumer_sdk.snapshot.chunks import ChunkReader, ChunkRows
from consumer_sdk.snapshot.snapshot import SnapshotMeta
from consumer_sdk.transport.api import Frame
from consumer_sdk.wire import oids
from consumer_sdk.wire.compression import compress
from consumer_sdk.wire.envelope import ARROW, MOST_CHUNK_ROWS
from consumer_sdk.wire.subjects import Subjects

ROOT = Path(__file__).parents[2]
HEAD = ChunkHead("src", 17, "t", "public", "snap", 2**40)
NUMERIC_10_2 = (10 << 16 | 2) + 4
COLUMNS = [
    CopyColumn(n, n, name, ColumnType(oid, typmod, oid, element), "", True)
    for n, (name, oid, typmod, element) in enumerate(
        [
            ("id", oids.INT4, -1, 0),
            ("v", oids.TEXT, -1, 0),
            ("n", oids.NUMERIC, NUMERIC_10_2, 0),
            ("b", oids.BOOL, -1, 0),
            ("y", oids.BYTEA, -1, 0),
            ("a", 1009, -1, oids.TEXT),
            ("t", oids.TIMESTAMPTZ, -1, 0),
            ("d", oids.DATE, -1, 0),
            ("f", oids.FLOAT4, -1, 0),
        ],
        1,
    )
]
LINES = [
    b"1\tabc\t1.25\tt\t\\\\x00ff\t{x,NULL}\t2025-01-02 03:04:05.5+00\t2025-01-02\t1.5",
    b"2\t\\N\t\\N\t\\N\t\\N\t\\N\tinfinity\t\\N\t\\N",
    b"3\t\t99999999.99\tf\t\\\\x\t{}\t1970-01-01 00:00:00+00\t0001-01-01\t-0",
]
NAMES = [column.name for column in COLUMNS]


def meta() -> SnapshotMeta:
    return SnapshotMeta(
        "snap", "src", 17, "t", "public", 2**40, 0, 1, len(LINES), 1,
        tuple(column.to_document() for column in COLUMNS), {}, "arrow", "CDC", 0, 1, "",
    )  # fmt: skip


def chunk() -> bytes:
    encoder = ArrowEncoder(HEAD, COLUMNS, max_rows=10, max_bytes=10**6, store_object=lambda _: {})
    (content,) = [*encoder.add(LINES), *encoder.flush()]
    return content.encode(0)


def read(stream: bytes, headers: str = f"Content-Type: {ARROW}\r\n") -> ChunkRows:
    nowhere: Any = None
    reader = ChunkReader(References(nowhere, Subjects("")), meta())
    frame = Frame(1, b"init.snap.t.snap.0", f"NATS/1.0\r\n{headers}\r\n".encode(), stream)
    return asyncio.run(reader.rows(0, frame))


def read_patched(seed: int) -> dict[str, int]:
    """Read the chunk with each byte changed in several ways; count what came of it."""
    good = chunk()
    loop = asyncio.new_event_loop()
    nowhere: Any = None
    reader = ChunkReader(References(nowhere, Subjects("")), meta())
    block = f"NATS/1.0\r\nContent-Type: {ARROW}\r\n\r\n".encode()
    chance = random.Random(seed)
    patches: list[tuple[int, bytes]] = [
        (place, bytes([new]))
        for place in range(len(good))
        for new in {good[place] ^ 0xFF, good[place] ^ 0x01, 0x00, 0x7F, 0x80} - {good[place]}
    ]
    # Numbers of four and eight bytes: offsets and lengths that are negative, or far away.
    numbers = [struct.pack("<i", n) for n in (-1, 2**31 - 1, -(2**31), 1 << 20)]
    numbers += [struct.pack("<q", n) for n in (-1, 2**62, 1 << 40)]
    patches += list(itertools.product(range(0, len(good) - 8, 4), numbers))
    patches += [
        (place, chance.randbytes(chance.choice((2, 4, 8, 16))))
        for place in (chance.randrange(len(good)) for _ in range(2000))
    ]
    found = {"rows": 0, "refused": 0}
    for place, new in patches:
        stream = good[:place] + new + good[place + len(new) :]
        # The last thing printed is the patch that ended the process.
        print(place, new.hex(), flush=True)
        try:
            rows = loop.run_until_complete(reader.rows(0, Frame(1, b"s.0", block, stream)))
        except CorruptData:
            found["refused"] += 1
        else:
            found["rows"] += 1
            assert all(list(row) == NAMES for row in rows)
            assert len(rows) <= len(LINES)
    loop.close()
    return found


def run(call: str) -> subprocess.CompletedProcess[str]:
    """Evaluate an expression with this module's names, in a process of its own."""
    program = (
        "import json, sys; from tests.unit import test_hostile_arrow as m;"
        f"print(json.dumps(eval({call!r}, vars(m))))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=100,
    )  # fmt: skip


def test_the_chunk_that_the_corpus_patches_is_read() -> None:
    rows = read(chunk())
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert rows[0]["a"] == ["x", None]
    assert rows[1]["t"] == "infinity"


def test_a_chunk_with_any_byte_changed_gives_rows_of_its_columns_or_is_refused() -> None:
    ended = run("read_patched(7)")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, (ended.returncode, lines[-1:], ended.stderr[-2000:])
    found = json.loads(lines[-1])
    assert found["refused"] > 1000
    assert found["rows"] > 100


def patched_offset(value: int) -> bytes:
    """The chunk with the end of the text `abc` somewhere else."""
    offsets = struct.pack("<4i", 0, 3, 3, 3)
    good = chunk()
    assert good.count(offsets) == 1
    return good.replace(offsets, struct.pack("<4i", 0, value, value, value))


@pytest.mark.parametrize("value", [4, 1 << 16, 2**31 - 1, -1])
def test_a_text_that_ends_outside_of_the_chunk_is_not_read(value: int) -> None:
    ended = run(f"len(read(patched_offset({value})))")
    assert "CorruptData: chunk 0: damaged Arrow chunk" in ended.stderr, ended
    assert ended.returncode == 1


def batch() -> Any:
    with pa.ipc.open_stream(chunk()) as reader:
        return reader.read_next_batch()


def written(*batches: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as w:
        for one in batches:
            w.write_batch(one)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


def replaced(name: str, array: Any) -> Any:
    """The batch with another array as one of its columns."""
    good = batch()
    place = good.schema.get_field_index(name)
    columns = [array if n == place else one for n, one in enumerate(good.columns)]
    schema = good.schema.set(place, pa.field(name, array.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def nested(depth: int) -> Any:
    array = pa.array([None] * len(LINES), pa.null())
    for _ in range(depth):
        array = pa.StructArray.from_arrays([array], ["x"])
    return array


FORGED = {
    "another type": lambda: written(replaced("id", pa.array([1, 2, 3], pa.int64()))),
    "a dictionary": lambda: written(replaced("v", pa.array(["a", "b", "c"]).dictionary_encode())),
    "nested columns": lambda: written(replaced("v", nested(60))),
    "columns in another order": lambda: written(batch().select([*NAMES[1:], NAMES[0]])),
    "a column less": lambda: written(batch().select(NAMES[1:])),
    "no batch": lambda: written(batch())[: len(batch().schema.serialize())],
    "two batches": lambda: written(batch(), batch()),
    "an empty stream": lambda: b"",
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_chunk_that_is_not_one_batch_of_the_columns_is_refused(forged: str) -> None:
    with pytest.raises(CorruptData, match="chunk 0: damaged Arrow chunk"):
        read(FORGED[forged]())


@pytest.mark.parametrize("place", ["-1", "3", "x", "99999999999999999999", "0\n"])
def test_an_odd_value_of_a_row_that_is_not_there_is_refused(place: str) -> None:
    good = batch()
    fields = json.loads(good.schema.metadata[b"cdc"])
    fields["odd"] = {"t": {place: "infinity"}}
    forged = good.replace_schema_metadata({b"cdc": json.dumps(fields)})
    with pytest.raises(CorruptData, match="damaged Arrow chunk"):
        read(written(forged))


def test_more_rows_than_a_chunk_may_have_are_refused() -> None:
    good = batch()
    count = MOST_CHUNK_ROWS + 1
    many = pa.RecordBatch.from_arrays(
        [pa.nulls(count, field.type) for field in good.schema], schema=good.schema
    )
    with pytest.raises(CorruptData, match="more than 10000 rows"):
        read(written(many))


def write_bomb(path: str, codec: str) -> None:
    """Write a chunk whose text column has 64 MiB when it is expanded."""
    text = pa.array(["x" * (1 << 26), None, None], pa.string())
    forged = replaced("v", text).replace_schema_metadata(batch().schema.metadata)
    Path(path).write_bytes(written(forged, compression=codec))


def grown_by_reading(path: str) -> int:
    """How much the largest size of this process grows, in KiB, while a chunk is refused."""
    stream = Path(path).read_bytes()
    read(chunk())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptData, match="its buffers are compressed"):
        read(stream)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_buffers_in_a_chunk_are_refused_before_they_are_expanded(
    codec: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "chunk")
    assert run(f"write_bomb({path!r}, {codec!r})").returncode == 0
    assert Path(path).stat().st_size < 2 * 1024**2
    ended = run(f"grown_by_reading({path!r})")
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 8 * 1024


def test_a_compressed_message_with_an_arrow_chunk_is_read() -> None:
    headers = f"Content-Type: {ARROW}\r\nContent-Encoding: zstd\r\n"
    assert len(read(compress(chunk()), headers)) == len(LINES)
