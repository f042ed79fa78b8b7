"""Size limits of the streams that the bridge creates, and what happens when they are reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack
import nats
import pytest

from bridge.config import Settings
from bridge.jetstream.streams import (
    INIT_BYTES,
    api,
    derive_size_limits,
    server_storage,
)
from bridge.preflight.nats import check_nats
from consumer_sdk.wire import Subjects
from tests.fixtures.stored import stored_events, stored_messages
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.client import Client

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.postgres import Database

GIGABYTE = 1024**3
MEGABYTE = 1024**2


def info(total: int = -1, **fields: Any) -> dict[str, Any]:
    limits = {"max_storage": total, **fields.pop("limits", {})}
    return {"limits": limits, "storage": 0, "reserved_storage": 0, **fields}


def sizes(account: dict[str, Any], varz: Any = None, **settings: Any) -> tuple[int, int]:
    origins = dict.fromkeys(settings, "flag --x")
    found = derive_size_limits(Settings(**settings, origins=origins), account, varz)
    return found.cdc.max_bytes, found.init.max_bytes


def test_limits_are_shares_of_what_is_left() -> None:
    assert sizes(info()) == (-1, INIT_BYTES)
    assert sizes(info(80 * GIGABYTE)) == (60 * GIGABYTE, 10 * GIGABYTE)
    assert sizes(info(100 * GIGABYTE, storage=20 * GIGABYTE)) == (60 * GIGABYTE, 10 * GIGABYTE)
    # Others have reserved most of it: too small a limit would stop the bridge.
    assert sizes(info(80 * GIGABYTE, reserved_storage=64 * GIGABYTE)) == (-1, 2 * GIGABYTE)
    # An account counts all replicas; a tier of the account counts one.
    assert sizes(info(240 * GIGABYTE), replicas=3) == (60 * GIGABYTE, 10 * GIGABYTE)
    tiers = {"R3": info(80 * GIGABYTE)}
    assert sizes(info(0, tiers=tiers), replicas=3) == (60 * GIGABYTE, 10 * GIGABYTE)
    assert sizes(info(0, tiers=tiers), replicas=1) == (-1, INIT_BYTES)
    one = {"storage_max_stream_bytes": GIGABYTE}
    assert sizes(info(80 * GIGABYTE, limits=one)) == (GIGABYTE, GIGABYTE)


def test_a_setting_outranks_what_is_derived() -> None:
    given = {"cdc_max_bytes": 5, "init_max_bytes": 0}
    assert sizes(info(80 * GIGABYTE), **given) == (5, -1)


def test_a_server_says_its_storage_on_its_monitoring_port(
    own_nats: Callable[..., NatsServer],
) -> None:
    server = own_nats(jetstream={"max_file_store": "8GB"})
    found = server_storage(server.monitor("/varz"))
    assert found is not None
    assert (found.total, found.left) == (8 * GIGABYTE, 8 * GIGABYTE)
    assert server_storage({}) is None


async def stream_config(url: str, name: str) -> dict[str, Any]:
    client = await nats.connect(url)
    try:
        config: dict[str, Any] = (await api(client, f"STREAM.INFO.{name}"))["config"]
        return config
    finally:
        await client.close()


@pytest.mark.parametrize("seen", ["account", "server", "nothing"])
async def test_created_streams_have_limits_that_fit_and_check_says_which(
    database: Database,
    own_nats: Callable[..., NatsServer],
    bridge_process: Callable[..., BridgeProcess],
    seen: str,
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    environment = {}
    if seen == "account":
        account = "A { users: [{user: a, password: a}], jetstream: { max_file: 1GB } }"
        server = own_nats(config=f"accounts {{ {account} }}")
        url = server.url_as("a", "a")
    else:
        server = own_nats(jetstream={"max_file_store": "1GB"})
        url = server.url
        if seen == "server":
            environment = {"BRIDGE_NATS_MONITOR": server.monitor_url}
    settings = Settings(nats_monitor=environment.get("BRIDGE_NATS_MONITOR", ""))

    async def said() -> str:
        client = await nats.connect(url)
        found = await check_nats(client, subjects=Subjects("p"), settings=settings)
        await client.close()
        return "\n".join(f"{one.severity} {one.what}" for one in found)

    before = await said()
    bridge_process(nats_url=url, prefix="p", environment=environment)
    cdc = await stream_config(url, "p_CDC")
    init = await stream_config(url, "p_INIT")
    assert (cdc["discard"], init["discard"]) == ("new", "new")
    if seen == "nothing":
        assert "warning stream p_CDC will be created without a size limit" in before
        assert cdc["max_bytes"] == -1
        # The default was lowered until the server had room for it.
        assert 0 < init["max_bytes"] < GIGABYTE
        assert "warning stream p_CDC has no size limit" in await said()
        return
    assert cdc["max_bytes"] == pytest.approx(0.75 * GIGABYTE, rel=0.1)
    assert init["max_bytes"] == pytest.approx(0.125 * GIGABYTE, rel=0.1)
    assert f"75% of what is left of the {seen}'s storage" in before
    assert f"12.5% of what is left of the {seen}'s storage" in before
    after = await said()
    assert "no size limit" not in after
    assert "of at most" in after


async def test_a_full_init_stream_fails_snapshots_and_changes_go_on(
    database: Database,
    cdc: CdcLog,
    prefix: str,
    nats_client: Client,
    bridge_process: Callable[..., BridgeProcess],
) -> None:
    database.execute("CREATE TABLE big (id int PRIMARY KEY, body text)")
    database.execute(
        "INSERT INTO big SELECT g, repeat(md5(g::text), 20) FROM generate_series(1, 20000) g"
    )
    database.publish("big")
    bridge = bridge_process("--init-max-bytes", "3MB")
    names = Subjects(prefix)

    async def outcome(subject: str, count: int) -> dict[str, Any]:
        async def found() -> list[Any]:
            stored = await stored_messages(nats_client, names.init_stream, subject)
            return stored[count - 1 :]

        document: dict[str, Any] = msgpack.unpackb((await eventually(found, 40))[0].data)
        return document

    for attempt in (1, 2):
        reply = await nats_client.request(names.snapshot_request("big"), b"", timeout=2)
        assert msgpack.unpackb(reply.data)["ok"] is True
        error = await outcome(names.error("big"), attempt)
        assert f"stream {names.init_stream} is full" in error["error"]
        assert "max_bytes" in error["error"]

        async def nothing_left() -> bool:
            return not await stored_messages(
                nats_client, names.init_stream, names.chunk("big", "*", "*")
            )

        await eventually(nothing_left)
        database.execute("UPDATE big SET body = %s WHERE id = 1", [f"attempt {attempt}"])
        await cdc.settle()
    events = await stored_events(nats_client, prefix, names.table_filter("big"))
    assert [event.data["body"] for event in events if event.data] == ["attempt 1", "attempt 2"]
    assert bridge.running
    config = await stream_config(nats_client.connected_url.geturl(), names.init_stream)  # type: ignore[union-attr]
    await api(
        nats_client, f"STREAM.UPDATE.{names.init_stream}", {**config, "max_bytes": 64 * MEGABYTE}
    )
    await nats_client.request(names.snapshot_request("big"), b"", timeout=2)
    assert (await outcome(names.meta("big"), 1))["row_count"] == 20_000


async def test_an_init_stream_full_of_others_does_not_keep_a_bridge_from_streaming(
    database: Database,
    cdc: CdcLog,
    prefix: str,
    nats_client: Client,
    bridge_process: Callable[..., BridgeProcess],
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    bridge = bridge_process("--init-max-bytes", "1MB")
    names = Subjects(prefix)
    bridge.kill()
    js = nats_client.jetstream()
    for size in (100_000, 1000, 10):
        while True:
            try:
                await js.publish(f"{names.init}.other", b"x" * size)
            except nats.js.errors.APIError:
                break
    bucket = await js.key_value(names.bridge_bucket)
    record = (
        b'{"source": "slot_%s", "schema": "public", "table": "t", "snapshot_id": "abandoned",'
        b' "is_complete": false}'
    )
    await bucket.put("snapshot.abandoned", record % database.name.encode())
    bridge = bridge_process()
    database.execute("INSERT INTO t VALUES (1)")
    await cdc.settle()
    assert "snapshot of an earlier bridge not ended" in bridge.log_text()
