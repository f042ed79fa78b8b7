"""Foreign messages on the bridge's subjects break nothing, at any place in the stream."""

from __future__ import annotations

import pytest

from consumer_sdk.wire import encode, message_id
from tests.fault.conftest import prepare
from tests.fault.stream_oracle import read_history

JUNK = (
    (b"", {}),
    (b"not msgpack at all \xc1", {}),
    (b'{"v": 1', {"Content-Type": "application/json"}),
    (b"x", {"Content-Type": "application/x-nothing"}),
    (b"x", {"Content-Encoding": "zstd"}),
    (b"x", {"Content-Encoding": "zstd", "Cdc-Dict": "no such dictionary"}),
    (b"x", {"Content-Encoding": "zstd", "Cdc-Dict": "unknown"}),
    (encode({"v": 99, "source": "x"}), {}),
    (encode({"v": 1}), {"Status": "404"}),
    (encode({"v": 1, "source": "somebody else", "epoch": 1, "lsn": 1, "seq": 0, "ts": 0}), {}),
)


def _forged(slot, subjects, *, lsn):
    """A message that looks like one of the bridge, except for its id."""
    document = {
        "v": 1, "source": slot, "epoch": 2**31, "table": "ledger_0", "schema": "public",
        "operation": "INSERT", "relation_id": 1, "schema_version": 1, "msg_id": "forged",
        "subject": subjects.change("ledger_0", "insert"), "lsn": lsn, "xid": 1, "seq": 0, "ts": 0,
        "data": {"n": -1}, "last": True, "end_lsn": lsn + 1,
    }  # fmt: skip
    return encode(document), {"Nats-Msg-Id": "forged"}


async def _pollute(scenario, tables):
    """Publish junk after the newest message of every subject."""
    subjects, js = scenario.subjects, scenario.client.jetstream()
    targets = [
        subjects.change(table, operation)
        for table in tables
        for operation in ("insert", "update", "delete", "schema", "commit")
    ]
    targets += [
        subjects.progress(scenario.slot),
        subjects.message("audit"),
        subjects.fence("somebody"),
        subjects.progress("somebody"),
        f"{subjects.cdc}.nowhere",
    ]
    sent = 0
    for target in targets:
        for payload, headers in scenario.rng.sample(JUNK, 3):
            await js.publish(target, payload, headers=headers)
            sent += 1
    for lsn in (2**40, 1):
        payload, headers = _forged(scenario.slot, subjects, lsn=lsn)
        headers["Nats-Msg-Id"] += str(scenario.rng.getrandbits(64))
        await js.publish(subjects.change("ledger_0", "insert"), payload, headers=headers)
        sent += 1
    return sent


@pytest.mark.parametrize("with_kv", [True, False], ids=["kv", "no-kv"])
async def test_junk_as_the_newest_message_hides_nothing_from_a_restart(scenario, with_kv):
    load = prepare(scenario, writers=1, kinds=("ledger", "transfer", "message", "keyed"))
    bridge = scenario.bridge()
    load.start()
    sent = 0
    for _ in range(3):
        await scenario.grown(30)
        sent += await _pollute(scenario, load.tables)
        bridge.kill()
        sent += await _pollute(scenario, load.tables)
        if not with_kv:
            bucket = scenario.subjects.bridge_bucket
            await scenario.client.jetstream().delete_key_value(bucket)
        bridge = scenario.bridge()
    await scenario.grown(30)
    load.stop()
    history = await scenario.verdict(load)
    assert len(history.sources[scenario.slot].epochs) == 1
    assert len(history.foreign) == sent


async def test_junk_under_way_hides_nothing_from_a_reconnect(scenario, tcp_proxy, nats_server):
    proxy = tcp_proxy(nats_server.port)
    load = prepare(scenario, writers=1, kinds=("ledger", "transfer", "message"))
    bridge = scenario.bridge(nats_url=proxy.through(scenario.nats_url))
    load.start()
    for _ in range(2):
        await scenario.grown(30)
        proxy.cut()
        await _pollute(scenario, load.tables)
    await scenario.grown(30)
    load.stop()
    await scenario.verdict(load)
    assert bridge.ready()


async def test_a_forged_position_in_our_name_stops_the_bridge_rather_than_skipping(scenario):
    """Valid messages forged in the bridge's name can stop it, but not make it lose a change."""
    load = prepare(scenario, writers=1)
    bridge = scenario.bridge()
    load.start()
    await scenario.grown(30)
    bridge.kill()
    load.stop()
    history = await read_history(scenario.client, scenario.prefix, finished=False)
    epoch = history.sources[scenario.slot].epochs[-1]
    lsn = 2**40
    payload = encode(
        {
            "v": 1, "source": scenario.slot, "epoch": epoch, "lsn": lsn, "xid": 1, "seq": 0,
            "operation": "INSERT", "ts": 1, "data": {},
            "msg_id": message_id(lsn, "ledger_0", "insert", 0, epoch),
        }
    )  # fmt: skip
    await scenario.client.jetstream().publish(
        scenario.subjects.change("ledger_0", "insert"),
        payload,
        headers={"Nats-Msg-Id": message_id(lsn, "ledger_0", "insert", 0, epoch)},
    )
    refused = scenario.bridge(wait=False)
    assert refused.wait(40) == 4
    assert "the stream records up to" in refused.log_text()


async def test_somebody_writing_to_our_fence_only_interrupts(scenario):
    load = prepare(scenario, writers=1)
    bridge = scenario.bridge()
    load.start()
    js = scenario.client.jetstream()
    for _ in range(3):
        await scenario.grown(30)
        await js.publish(scenario.subjects.fence(scenario.slot), b"mine now")
    await scenario.grown(30)
    load.stop()
    await scenario.verdict(load)
    assert bridge.running
