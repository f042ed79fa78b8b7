"""Messages between coordinator and workers, and the states of a snapshot."""

from __future__ import annotations

import itertools

import pytest

from bridge.errors import SnapshotError
from bridge.events.values import ColumnType
from bridge.jetstream.dictionaries import ZstdDictionary
from bridge.snapshot.coordinator.jobs import JobState, SnapshotJob
from bridge.snapshot.coordinator.requests import CopyOptions
from bridge.snapshot.keys import KeyColumn, KeyRange
from bridge.snapshot.messages import (
    Alive,
    ChunkNumber,
    ChunkNumberWanted,
    ChunkStored,
    Command,
    Connected,
    CopyDone,
    CopyPiece,
    CopyTask,
    DictionaryTrained,
    LocksTaken,
    LockTables,
    NoMorePieces,
    ObjectAnnounced,
    PieceCut,
    PieceWanted,
    Report,
    ServerAccess,
    StartCopying,
    TableCancelled,
    TableFailed,
    TableFinished,
    TableTask,
    WorkerFailed,
    decode_command,
    decode_report,
    encode,
)
from bridge.snapshot.tables import CopyColumn, Heap, Piece, TableDescription
from bridge.telemetry.stats import SnapshotGauge

TABLE = TableDescription(
    "s",
    't"ä\n',
    1,
    2,
    True,
    (CopyColumn(1, 1, "id", ColumnType(1231, 655366, 1231, 1700), "numeric(10,2)[]", False),),
    "(id > 5)",
    (Heap("s", "leaf", 10, 100, True), Heap("s", "other", 11, 101, False)),
)
COMMANDS: list[Command] = [
    CopyTask(
        worker=1,
        access=ServerAccess("host=h password='x y'", {"nats_url": "nats://h", "nats_tls": True}),
        snapshot_name="00000003-0000001B-1",
        snapshot_lsn=2**63 + 1,
        source="src",
        epoch=1_700_000_000,
        prefix="p",
        init_stream="Snapshots",
        chunk_rows=10_000,
        tables=(
            TableTask(TABLE, "id", "msgpack", True, ZstdDictionary("d", bytes(range(256))), False),
            TableTask(TABLE, "id", "arrow", False, None, False),
        ),
    ),
    LockTables(1.5, 120),
    StartCopying(),
    CopyPiece(3, Piece(0, 16, 32)),
    CopyPiece(3, Piece(None)),
    CopyPiece(
        0,
        Piece(
            None,
            keys=KeyRange(
                (KeyColumn("id", ColumnType(25), "text", 0),), ((">=", ("'",)),), (("a",), ("ä",))
            ),
            rows=7,
        ),
    ),
    NoMorePieces(),
    ChunkNumber(0),
    TableCancelled(),
]
REPORTS: list[Report] = [
    Alive(),
    Connected(4711),
    LocksTaken({0: "permission denied", 7: "lock timeout"}),
    PieceWanted(),
    PieceCut(0, ("1", "x")),
    PieceCut(0, None),
    ChunkNumberWanted(2),
    ObjectAnnounced(2, "snapshot-x-0-0"),
    ChunkStored(2, 5, 10_000, "00ff"),
    DictionaryTrained(0, b"\x00\xff"),
    TableFinished(0),
    TableFailed(0, "out of range"),
    TableFailed(0, "NATS is away", is_passing=True),
    CopyDone(),
    WorkerFailed("the connection is lost"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: type(one).__name__)
def test_a_command_survives_the_way_to_a_worker(command: Command) -> None:
    line = encode(command)
    assert line.index(b"\n") == len(line) - 1
    assert decode_command(line) == command
    with pytest.raises(SnapshotError):
        decode_report(line)


def test_a_worker_is_told_the_name_of_the_stream() -> None:
    task = decode_command(encode(COMMANDS[0]))
    assert isinstance(task, CopyTask)
    assert (task.subjects.init_stream, task.subjects.init) == ("Snapshots", "p.init")


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: type(one).__name__)
def test_a_report_survives_the_way_to_the_coordinator(report: Report) -> None:
    line = encode(report)
    assert line.index(b"\n") == len(line) - 1
    assert decode_report(line) == report
    with pytest.raises(SnapshotError):
        decode_command(line)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello",
        b"\xff\xfe",
        b"[]",
        b'{"type":"Unknown"}',
        b'{"type":"ChunkNumber"}',
        b'{"type":"ChunkNumber","number":"1"}',
        b'{"type":"ChunkNumber","number":1,"more":2}',
        b'{"type":"Connected","backend_pid":null}',
    ],
)
def test_a_damaged_message_is_an_error_that_does_not_quote_it(line: bytes) -> None:
    for decode in (decode_command, decode_report):
        with pytest.raises(SnapshotError) as caught:
            decode(line)
        assert "hello" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_snapshot_goes_through_its_states_in_one_direction() -> None:
    allowed = {
        (JobState.WAITING, JobState.COPYING),
        (JobState.WAITING, JobState.FAILED),
        (JobState.COPYING, JobState.READY),
        (JobState.COPYING, JobState.FAILED),
    }
    for before, after in itertools.product(JobState, JobState):
        options = CopyOptions(None, "msgpack", False)
        job = SnapshotJob("public", "t", options, {}, "id", SnapshotGauge("t"), state=before)
        if (before, after) in allowed:
            job.move_to(after)
            assert job.state is after
        else:
            with pytest.raises(ValueError, match="cannot become"):
                job.move_to(after)
    assert [state for state in JobState if state.is_final] == [JobState.READY, JobState.FAILED]
