"""What a SQLite mirror remembers of its copies, in the columns that release 0.1.0 has written."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from consumer_sdk.targets.sqlite import SqliteTarget
from consumer_sdk.targets.target import CopyState, MirrorCopy
from tests.mirror_model import table_schema

if TYPE_CHECKING:
    from pathlib import Path

STORED = {
    CopyState.PLANNED: ("next", 0),
    CopyState.LOADING: ("next", 0),
    CopyState.CATCHING_UP: ("next", 1),
    CopyState.LIVE: ("live", 1),
    CopyState.RETIRED: ("live", 0),
}
COPY = MirrorCopy(table_schema("t"), epoch=3, snapshot_id="s", snapshot_lsn=5, relation_id=9)


@pytest.mark.parametrize("state", CopyState)
def test_a_copy_is_stored_by_its_lane_and_whether_it_is_loaded(
    state: CopyState, tmp_path: Path
) -> None:
    target = SqliteTarget(tmp_path / "m.db")
    target.open()
    target.begin()
    target.save_copy(replace(COPY, state=state))
    target.commit()
    # A copy whose loading was interrupted is loaded from its beginning.
    read = CopyState.PLANNED if state is CopyState.LOADING else state
    assert target.read_state().copies == [replace(COPY, state=read)]
    target.close()
    with closing(sqlite3.connect(tmp_path / "m.db")) as file:
        assert file.execute("SELECT lane, loaded FROM _tailrace_copies").fetchall() == [
            STORED[state]
        ]


def test_a_mirror_of_release_0_1_0_goes_on(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "m.db")) as file:
        file.execute(
            "CREATE TABLE _tailrace_copies (table_schema text, table_name text, lane text, "
            "epoch INTEGER, snapshot_id text, snapshot_lsn INTEGER, loaded integer, "
            "applied_lsn INTEGER, stream_seq INTEGER, stream_created INTEGER, "
            "relation_id INTEGER, document text, "
            "PRIMARY KEY (table_schema, table_name, lane))"
        )
        file.execute(
            "CREATE TABLE _tailrace_positions (source text PRIMARY KEY, epoch INTEGER, "
            "commit_lsn INTEGER, seq INTEGER, stream_seq INTEGER, stream_created INTEGER)"
        )
        document = json.dumps(COPY.schema.to_document())
        file.execute(
            "INSERT INTO _tailrace_copies "
            "VALUES ('public', 't', 'live', 3, 's', 5, 1, 0, 0, 0, 9, ?)",
            (document,),
        )
        file.commit()
    target = SqliteTarget(tmp_path / "m.db")
    target.open()
    assert target.read_state().copies == [replace(COPY, state=CopyState.LIVE)]
    target.close()
