"""The tests catch the mistakes that they are written for.

Each mutation puts a mistake that loses or repeats changes into a copy of the tree, and runs the
test that must fail there. A mutation whose place in the code no longer exists fails too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.bridge_process import REPOSITORY, clean_environment

if TYPE_CHECKING:
    from pathlib import Path

LOSS = r"missing \[|not in the order|no end|violations|too many|twice"
ROWS = r"assert .*=="
STOPPED = r"ended with 4"
"""The bridge itself detects the mistake and stops before it loses anything."""
MSG_ID = (
    r'msg_id = b"%b%d%b" % \(parts\.id_head, seq, parts\.id_tail\)\n        # What is too large'
)
COPIED = ("bridge", "consumer_sdk", "spark_consumer", "tests", "pyproject.toml")
KILL = "tests/fault/test_kill_bridge.py"
KILL_ONCE = f"{KILL}::test_kill_at_random_moments_leaves_every_change_once_and_in_order[msgpack]"


@dataclass(frozen=True)
class Edit:
    """A place in a file, and its replacement."""

    file: str
    place: str
    """A regular expression that matches exactly once."""
    mistake: str


@dataclass(frozen=True)
class Mutation:
    """One mistake, and the test that must catch it."""

    name: str
    edits: tuple[Edit, ...]
    caught_by: str
    sign: str
    """A regular expression for the message of the failing test, to exclude unrelated failures."""


def mutation(
    name: str, file: str, place: str, mistake: str, caught_by: str, sign: str = LOSS
) -> Mutation:
    """A mistake in one place."""
    return Mutation(name, (Edit(file, place, mistake),), caught_by, sign)


MUTATIONS = (
    # Rows of a COPY share the position of their record.
    Mutation(
        "the record's position as message id",
        (
            Edit(
                "bridge/publish/reader.py",
                r"                        feed\(frame, XLOG_DATA_HEADER_BYTES\)",
                "                        RECORD[0] = int.from_bytes(frame[1:9], 'big')\n"
                "                        feed(frame, XLOG_DATA_HEADER_BYTES)",
            ),
            Edit(
                "bridge/publish/reader.py",
                r"\n\nclass WalReader",
                "\nfrom bridge.events.single import RECORD\n\n\nclass WalReader",
            ),
            Edit(
                "bridge/events/single.py",
                MSG_ID,
                "msg_id = b'%x%b' % (RECORD[0], parts.id_head[parts.id_head.index(b'-'):-1])\n"
                "        # What is too large",
            ),
            Edit(
                "bridge/events/single.py",
                r"\n\nclass SingleMessages",
                "\nRECORD = [0]\n\n\nclass SingleMessages",
            ),
        ),
        KILL_ONCE,
        LOSS,
    ),
    mutation(
        "the current end of the log as a snapshot's position",
        "bridge/postgres/export.py",
        r"        yield ExportedSnapshot\(row\[2\], parse_lsn\(row\[1\]\)\)",
        "        cursor = await catalog.execute('SELECT pg_current_wal_lsn()::text')\n"
        "        position = (await cursor.fetchone())[0]\n"
        "        yield ExportedSnapshot(row[2], parse_lsn(position))",
        "tests/integration/test_snapshot_handoff.py::"
        "test_a_snapshot_under_writes_and_its_changes_give_the_source[plain]",
        ROWS,
    ),
    mutation(
        "an unchanged TOASTed value is null in the mirror",
        "consumer_sdk/targets/sql_rows.py",
        r"            data, old = event\.data, event\.old\n            moved",
        "            data = event.data = {**dict.fromkeys(event.unchanged), **event.data}\n"
        "            old = event.old\n            moved",
        "tests/property/test_handoff_properties.py::"
        "test_sqlite_mirror_equals_the_source_at_every_commit",
        ROWS,
    ),
    mutation(
        "Spark folds whole rows, an unchanged TOASTed value is null",
        "spark_consumer/changes/fold.py",
        r"return fn\.coalesce\(fn\.array_contains\(UNCHANGED, name\), fn\.lit\(False\)\)",
        "return fn.lit(False)",
        "tests/spark/test_fold.py::test_any_history_folded_at_once_leaves_the_rows_it_left",
        ROWS,
    ),
    mutation(
        "message ids without the ordinal",
        "bridge/events/single.py",
        MSG_ID,
        "msg_id = b'%b0%b' % (parts.id_head, parts.id_tail)\n        # What is too large",
        KILL_ONCE,
    ),
    mutation(
        "streaming from the current end of the log",
        "bridge/postgres/connection.py",
        r"result = await self\._execute\(f'START_REPLICATION SLOT \"\{slot\}\" LOGICAL 0/0 ",
        "position = (await self.command('IDENTIFY_SYSTEM'))[0][2]\n"
        "        result = await self._execute("
        'f\'START_REPLICATION SLOT "{slot}" LOGICAL {position} ',
        KILL_ONCE,
        STOPPED,
    ),
    mutation(
        "confirming what was received instead of what is stored",
        "bridge/publish/reader.py",
        r"confirmed = self\._confirmed_lsn\(\)\n        self\._status_lsn = confirmed",
        "confirmed = self._received_lsn\n        self._status_lsn = confirmed",
        f"{KILL}::test_what_was_read_and_not_stored_is_not_confirmed",
        r"assert \d+ <= \d+",
    ),
    mutation(
        "resuming from the slot without reading the stream",
        "bridge/publish/continuity.py",
        r"        Resume\(\n            record\.commit_lsn,\n            record\.next_seq,",
        "        Resume(\n            0,\n            0,",
        KILL_ONCE,
        STOPPED,
    ),
    mutation(
        "no fence",
        "bridge/jetstream/fence.py",
        r"        self\.headers = \(\n",
        "        self.unused_headers = (\n",
        "tests/fault/test_stale_writers.py::"
        "test_a_stale_batch_is_refused_as_a_whole[FastIngestWriter]",
        ROWS,
    ),
    mutation(
        "open batches of a stale writer go on",
        "bridge/jetstream/fence.py",
        r"        if not self\._batched:",
        "        if self._batched:",
        "tests/fault/test_stale_writers.py::test_taking_the_fence_ends_a_batch_that_was_left_open",
        r"nats: timeout",  # the end of the batch gets no answer
    ),
    mutation(
        "after a lost connection the stream is not read back",
        "bridge/publish/publisher.py",
        r"        self\._must_read_back = True\n",
        "        self._must_read_back = False\n",
        "tests/fault/test_continuity.py::"
        "test_a_stream_that_lost_its_tail_while_streaming_is_not_written_to[afterwards]",
        r"the bridge is running",
    ),
    mutation(
        "the newest message of a subject is taken for ours",
        "bridge/jetstream/readback.py",
        r"        except \(WireError, KeyError, TypeError, ValueError, OverflowError\):\n"
        r"            record\.needs_tail_scan = True",
        "        except Exception:\n            pass",
        "tests/fault/test_hostile_messages.py::"
        "test_junk_as_the_newest_message_hides_nothing_from_a_restart[no-kv]",
    ),
)


def _mutated(root: Path, mutation: Mutation) -> dict[str, str]:
    """The files that a mistake changes, in their changed form."""
    texts: dict[str, str] = {}
    for edit in mutation.edits:
        text = texts.get(edit.file) or (root / edit.file).read_text()
        found = re.findall(edit.place, text)
        assert len(found) == 1, f"{mutation.name}: its place is found {len(found)} times"
        texts[edit.file] = re.sub(edit.place, lambda _, edit=edit: edit.mistake, text)
    return texts


def _mutated_copy(mutation: Mutation, target: Path) -> None:
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    for file, text in _mutated(target, mutation).items():
        (target / file).write_text(text)


def _run_test(directory: Path, test: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(TAILRACE_ROUNDS="2") | {"PYTHONPATH": str(directory)}
    return subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
            "--timeout", "180", test,
        ],
        cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mistake_has_its_place(mutation: Mutation) -> None:
    """Fast enough for every run: a code change that moves a place must update it here."""
    for file, text in _mutated(REPOSITORY, mutation).items():
        compile(text, file, "exec")
    file, test = mutation.caught_by.split("::")
    assert f"def {test.partition('[')[0]}(" in (REPOSITORY / file).read_text()


@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_mistake_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    _mutated_copy(mutation, tmp_path)
    done = _run_test(tmp_path, mutation.caught_by)
    # 1: a test failed. Anything else would mean that it did not run.
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]
    shown = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    assert re.search(mutation.sign, "\n".join(shown)), done.stdout[-5000:]
