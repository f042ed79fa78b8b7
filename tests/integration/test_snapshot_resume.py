"""What is stored of a snapshot in groups stays stored: kill, restart, takeover, outage.

The oracle: the rows of all chunks by key, then every event of the table from the meta's `lsn` on,
must give the source row by row.
"""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from consumer_sdk.wire import Subjects
from tests.fixtures.snapshots import Snapshots
from tests.fixtures.stored import stored_events
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from nats.aio.client import Client

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Holds, ReadSnapshot

ROWS = 4000
FLAGS = ("--snapshot-export-limit", "50ms", "--snapshot-chunk-rows", "400")
HELD = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name IN"
    " ('tailrace snapshot', 'tailrace snapshot export') AND datname = current_database()"
)


@pytest.fixture
async def reader(
    nats_client: Client, nats_server: NatsServer, database: Database, prefix: str
) -> AsyncIterator[Snapshots]:
    """Asks for snapshots and reads them; the bridge is started by the test."""
    async with AsyncExitStack() as stack:
        harness = Snapshots(nats_client, nats_server.bridge_url, database, Subjects(prefix), stack)
        await harness.listen()
        yield harness


@pytest.fixture
def writing(database: Database) -> Iterator[None]:
    """A table of about 2 MB, and a session that changes its rows and keys all the time."""
    database.execute(
        "CREATE TABLE accounts (id int PRIMARY KEY, balance int, note text);"
        "CREATE TABLE marker (id int PRIMARY KEY);"
        f"INSERT INTO accounts SELECT g, 0, repeat('x', 400) FROM generate_series(1, {ROWS}) g;"
        "ANALYZE accounts"
    )
    database.publish("accounts", "marker")
    stop = threading.Event()

    def write() -> None:
        with database.connect() as connection:
            number = 0
            while not stop.wait(0.01):
                number += 1
                key = number * 37 % ROWS + 1
                connection.execute("UPDATE accounts SET balance = %s WHERE id = %s", [number, key])
                connection.execute("DELETE FROM accounts WHERE id = %s", [key * 7 % ROWS + 1])
                connection.execute(
                    "UPDATE accounts SET id = %s WHERE id = %s", [ROWS + number, key * 3 % ROWS + 1]
                )

    thread = threading.Thread(target=write)
    thread.start()
    yield
    stop.set()
    thread.join()


async def assert_converges(reader: Snapshots, answer: dict[str, Any]) -> ReadSnapshot:
    """The snapshot is complete, its chunks fit the meta, and it converges to the source."""
    read = await reader.read("accounts", answer["snapshot_id"], 120)
    with reader.database.connect(row_factory=psycopg.rows.dict_row) as connection:
        connection.execute("BEGIN; LOCK TABLE accounts; INSERT INTO marker VALUES (1)")
        source = {row["id"]: row for row in connection.execute("SELECT * FROM accounts")}
        connection.execute("COMMIT")
    subjects = reader.subjects

    async def events(table: str) -> list[Any]:
        wanted = subjects.table_filter(table)
        return await stored_events(reader.client, subjects.prefix, wanted, read.meta["cdc_seq"])

    marker = (await eventually(lambda: events("marker"), 60, "the marker in CDC"))[0].commit_lsn
    rows = {row["id"]: row for row in read.rows}
    for event in await events("accounts"):
        if not read.meta["lsn"] <= event.commit_lsn < marker:
            continue
        if event.operation == "DELETE":
            rows.pop(event.data["id"], None)
            continue
        if event.old:
            rows.pop(event.old["id"], None)
        rows[event.data["id"]] = dict(event.data)
    assert rows == source
    assert len(rows) > 100
    assert len(read.meta["pieces"]) > 1
    await eventually(lambda: _is_over(reader))
    return read


async def _is_over(reader: Snapshots) -> bool:
    return await reader.record_keys() == []


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize(
    "point",
    [
        "snapshot.exported",
        "snapshot.group.copied",
        "snapshot.group.finished",
        "between-chunk-and-meta",
    ],
)
async def test_a_killed_bridge_goes_on_with_the_next_group(
    reader: Snapshots,
    bridge_process: Callable[..., BridgeProcess],
    holds: Holds,
    point: str,
) -> None:
    holds.kill(point)
    bridge = bridge_process(*FLAGS)
    answer = await reader.begin("accounts")
    bridge.wait(60)
    stored = await reader.chunk_messages("accounts", answer["snapshot_id"])
    holds.spare(point)
    bridge = bridge_process(*FLAGS)
    again = await reader.begin("accounts")
    assert again["snapshot_id"] == answer["snapshot_id"]
    read = await assert_converges(reader, answer)
    assert "snapshot goes on" in bridge.log_text()
    assert await reader.errors("accounts") == []
    if point in ("snapshot.group.finished", "between-chunk-and-meta"):
        # The chunks of finished groups were not sent again.
        kept = [message.data for message in read.messages[: len(stored)]]
        assert kept == [message.data for message in stored]


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize("end", ["kill", "terminate"])
async def test_a_bridge_that_ends_in_the_middle_of_a_group_goes_on(
    database: Database,
    reader: Snapshots,
    bridge_process: Callable[..., BridgeProcess],
    holds: Holds,
    end: str,
) -> None:
    bridge = bridge_process(*FLAGS)
    holds.set("snapshot.chunk.3")
    answer = await reader.begin("accounts")
    await holds.wait_reached("snapshot.chunk.3")
    before = await reader.chunk_messages("accounts", answer["snapshot_id"])
    assert len(before) == 3
    if end == "kill":
        bridge.kill()
    else:
        bridge.terminate()
        assert bridge.wait(30) == 0
    await eventually(lambda: database.value(HELD) == 0, what="the export has ended")
    holds.release("snapshot.chunk.3")
    bridge_process(*FLAGS)
    read = await assert_converges(reader, answer)
    assert read.messages[0].data == before[0].data
    assert await reader.errors("accounts") == []


@pytest.mark.usefixtures("writing")
async def test_a_standby_goes_on_while_the_frozen_bridge_still_stores_chunks(
    reader: Snapshots, bridge_process: Callable[..., BridgeProcess], holds: Holds
) -> None:
    stale = bridge_process(*FLAGS)
    holds.set("snapshot.chunk.3")
    answer = await reader.begin("accounts")
    await holds.wait_reached("snapshot.chunk.3")
    # A file holds the point; the next bridge must not see it.
    bridge_process(*FLAGS, wait=False, environment={"TAILRACE_HOLD": ""})
    stale.freeze()
    read = await reader.read("accounts", answer["snapshot_id"], 120)
    stale.thaw()
    holds.release("snapshot.chunk.3")
    await eventually(lambda: stale.status()["status"] == "standby", 40, "the thawed stands by")
    again = await assert_converges(reader, answer)
    assert [one.data for one in again.messages] == [one.data for one in read.messages]
    assert await reader.errors("accounts") == []


@pytest.mark.usefixtures("writing")
async def test_a_new_epoch_begins_the_snapshot_again_and_says_so(
    database: Database,
    reader: Snapshots,
    bridge_process: Callable[..., BridgeProcess],
    holds: Holds,
) -> None:
    holds.kill("snapshot.group.finished")
    bridge = bridge_process(*FLAGS)
    answer = await reader.begin("accounts")
    bridge.wait(60)
    holds.spare("snapshot.group.finished")
    slot = f"slot_{database.name}"
    await eventually(lambda: not database.slot(slot)["active"])  # type: ignore[index]
    database.execute("SELECT pg_drop_replication_slot(%s)", [slot])
    bridge_process(*FLAGS, "--on-gap", "new-epoch")
    reason = await reader.failure("accounts", answer["snapshot_id"])
    assert reason == "a new epoch began while the snapshot was under way; ask again"
    assert (await reader.errors("accounts"))[-1]["retry"] is True
    await assert_converges(reader, await reader.begin("accounts"))


@pytest.mark.usefixtures("writing")
async def test_changes_that_were_trimmed_begin_the_snapshot_again(
    reader: Snapshots, bridge_process: Callable[..., BridgeProcess], holds: Holds
) -> None:
    bridge_process(*FLAGS)
    holds.set("snapshot.group.finished")
    answer = await reader.begin("accounts")
    await holds.wait_reached("snapshot.group.finished")
    stream = reader.subjects.cdc_stream
    last = (await reader.client.jsm().stream_info(stream)).state.last_seq

    async def has_grown() -> bool:
        return (await reader.client.jsm().stream_info(stream)).state.last_seq > last + 5

    await eventually(has_grown)
    await reader.client.jsm().purge_stream(stream, seq=last + 2)
    holds.release("snapshot.group.finished")
    reason = await reader.failure("accounts", answer["snapshot_id"])
    assert "no longer holds the changes since the snapshot began" in reason
    assert (await reader.errors("accounts"))[-1]["retry"] is True


@pytest.mark.usefixtures("writing")
async def test_an_outage_of_nats_ends_the_export_and_not_the_snapshot(
    database: Database,
    reader: Snapshots,
    nats_server: NatsServer,
    bridge_process: Callable[..., BridgeProcess],
    holds: Holds,
) -> None:
    bridge_process(*FLAGS)
    holds.set("snapshot.chunk.3")
    answer = await reader.begin("accounts")
    await holds.wait_reached("snapshot.chunk.3")
    before = await reader.chunk_messages("accounts", answer["snapshot_id"])
    nats_server.stop()
    holds.release("snapshot.chunk.3")
    assert database.value(HELD) > 0
    await eventually(lambda: database.value(HELD) == 0, 60, "the export has ended without NATS")
    nats_server.start()
    read = await assert_converges(reader, answer)
    assert read.messages[0].data == before[0].data
    assert await reader.errors("accounts") == []
