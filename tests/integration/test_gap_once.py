"""A gap is announced once, whatever fails or dies around its announcement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.wire.envelope import JSON, encode
from consumer_sdk.wire.position import message_id, parse_lsn
from tests.fixtures.nats import accounts
from tests.fixtures.waiting import eventually, wait_until
from tests.integration.test_coverage import PARTITIONED, gaps, remembered

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.nats import SharedNats
    from tests.fixtures.postgres import Database
    from tests.fixtures.snapshots import Holds

pytestmark = pytest.mark.quick_checks


@pytest.fixture
def partitioned(database: Database) -> Database:
    for statement in PARTITIONED.strip().splitlines():
        database.execute(statement)
    database.publish("part", options="publish_via_partition_root = true")
    return database


class Obstacle:
    """Makes a call of the bridge fail: JetStream refuses it, or no answer comes."""

    def __init__(self, server: SharedNats, cdc: CdcLog, stream: str, prefix: str) -> None:
        self._server = server
        self._cdc = cdc
        self._stream = stream
        self._prefix = prefix

    async def set(self, how: str) -> None:
        if how == "time-out":
            # What the server does not permit gets no answer.
            denied = {
                self._cdc.subjects.init_stream: f'"$JS.API.STREAM.PURGE.{self._stream}",',
                f"KV_{self._cdc.subjects.bridge_bucket}": f'"$KV.{self._stream[3:]}.>",',
            }[self._stream]
            config = accounts(self._prefix)
            head, _, tail = config.partition(denied)
            assert tail
            self._load(head + tail)
        else:
            await self._update(deny_purge=True, max_msg_size=1)

    async def clear(self, how: str) -> None:
        if how == "time-out":
            self._load(accounts(self._prefix))
        else:
            # `deny_purge` cannot be taken back: the stream is created again, as it was.
            await self._update(max_msg_size=-1)

    def _load(self, config: str) -> None:
        loaded = self._server._loaded_at()
        self._server.config = config
        self._server.reload()
        wait_until(lambda: self._server._loaded_at() != loaded, what="the configuration is loaded")

    async def _update(self, **changes: Any) -> None:
        js = self._cdc.client.jetstream()
        config = (await js.stream_info(self._stream)).config
        if self._stream == self._cdc.subjects.init_stream:
            changes.pop("max_msg_size")
            if not changes:
                await js.delete_stream(self._stream)
                config.deny_purge = False
                await js.add_stream(config)
                return
        else:
            changes.pop("deny_purge", None)
        await js.update_stream(config, **changes)


async def is_finished(cdc: CdcLog, database: Database) -> bool:
    document = await remembered(cdc, database)
    return not document.get("gaps")


async def compared_again(bridge: BridgeProcess, cdc: CdcLog) -> None:
    """Return after another comparison or two, which take place every second."""
    began = bridge.status()["now"]
    await eventually(lambda: bridge.status()["now"] > began + 2)
    await cdc.settle()


@pytest.mark.parametrize(
    ("how", "restart"), [("refusal", False), ("time-out", False), ("time-out", True)]
)
@pytest.mark.parametrize(
    ("point", "stream"),
    [
        # The calls after the announcement: save, purge, save again.
        ("gap-announced", "KV"),
        ("gap-announced", "INIT"),
        ("gap-snapshots-discarded", "KV"),
    ],
)
async def test_a_call_that_fails_after_the_announcement_does_not_repeat_the_gap(
    point: str,
    stream: str,
    how: str,
    restart: bool,
    partitioned: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: SharedNats,
    cdc: CdcLog,
    holds: Holds,
    prefix: str,
) -> None:
    subjects = cdc.subjects
    name = subjects.init_stream if stream == "INIT" else f"KV_{subjects.bridge_bucket}"
    obstacle = Obstacle(nats_server, cdc, name, prefix)
    bridge = bridge_process()
    await eventually(lambda: remembered(cdc, partitioned))
    holds.set(point)
    partitioned.execute("TRUNCATE part1")
    await holds.wait_reached(point)
    assert len(await gaps(cdc)) == 1
    await obstacle.set(how)
    holds.release(point)
    bridge.wait_logged("gap not finished")
    if restart:
        bridge.kill()
    await obstacle.clear(how)
    if restart:
        bridge = bridge_process()
    await eventually(lambda: is_finished(cdc, partitioned))
    await compared_again(bridge, cdc)
    assert len(await gaps(cdc)) == 1


@pytest.mark.parametrize("point", ["gap-saved", "gap-announced", "gap-snapshots-discarded"])
async def test_a_bridge_killed_around_the_announcement_does_not_repeat_or_forget_the_gap(
    point: str,
    partitioned: Database,
    bridge_process: Callable[..., BridgeProcess],
    cdc: CdcLog,
    holds: Holds,
) -> None:
    bridge = bridge_process()
    await eventually(lambda: remembered(cdc, partitioned))
    holds.kill(point)
    partitioned.execute("TRUNCATE part1")
    wait_until(lambda: not bridge.running)
    holds.spare(point)
    bridge = bridge_process()
    await eventually(lambda: gaps(cdc))
    await eventually(lambda: is_finished(cdc, partitioned))
    await compared_again(bridge, cdc)
    (gap,) = await gaps(cdc)
    assert gap["tables"] == ["part"]


async def test_a_gap_that_cannot_be_saved_is_announced_all_the_same(
    partitioned: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: SharedNats,
    cdc: CdcLog,
    prefix: str,
) -> None:
    obstacle = Obstacle(nats_server, cdc, f"KV_{cdc.subjects.bridge_bucket}", prefix)
    bridge = bridge_process()
    await eventually(lambda: remembered(cdc, partitioned))
    await obstacle.set("refusal")
    partitioned.execute("TRUNCATE part1")
    await eventually(lambda: gaps(cdc), 40)
    await compared_again(bridge, cdc)
    await obstacle.clear("refusal")
    await eventually(lambda: is_finished(cdc, partitioned))
    assert len(await gaps(cdc)) == 1


async def test_a_start_that_fails_after_its_gap_does_not_announce_another(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    cdc: CdcLog,
    holds: Holds,
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge = bridge_process("--json")
    database.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    bridge.terminate()
    assert bridge.wait() == 0
    # A transaction that the log will not contain: PostgreSQL has another history.
    lsn = parse_lsn(str(database.value("SELECT pg_current_wal_lsn()::text"))) + 1
    database.execute("INSERT INTO t VALUES (2)")
    stored = [one for one in await cdc.of_tables() if one.document["operation"] == "INSERT"][-1]
    forged = {**stored.document, "lsn": lsn, "end_lsn": lsn}
    forged["msg_id"] = message_id(lsn, "t", "insert", 0, forged["epoch"])
    await cdc.client.jetstream().publish(
        stored.subject,
        encode(forged, as_json=True),
        headers={"Content-Type": JSON, "Nats-Msg-Id": forged["msg_id"]},
    )
    holds.set("new-epoch-announced")
    bridge = bridge_process("--json", "--on-gap=new-epoch", wait=False)
    await holds.wait_reached("new-epoch-announced")
    assert len(await gaps(cdc)) == 1
    # The rest of the start fails.
    await cdc.client.jetstream().delete_key_value(cdc.subjects.bridge_bucket)
    holds.release("new-epoch-announced")
    bridge.wait_logged("not streaming")
    bridge.wait_ready()
    await cdc.settle()
    assert len(await gaps(cdc)) == 1
