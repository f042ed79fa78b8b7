"""After a takeover, every message that the old writer still sends is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from bridge.events.messages import OutgoingMessage, TransactionHeader
from bridge.jetstream.batches import FastIngestWriter, PlainWriter
from bridge.jetstream.fence import WRONG_LAST_SEQUENCE, Fence, Fenced
from bridge.jetstream.frames import FrameWriter, PublishFrame
from tests.fault.nats_binaries import OLDEST
from tests.fault.scenario import create_stream
from tests.fault.stream_reader import read_stream


def _fence(scenario, instance, *, batched=True):
    return Fence(
        scenario.client,
        stream=scenario.subjects.cdc_stream,
        subject=scenario.subjects.fence("shop"),
        source="shop",
        instance=instance,
        as_json=False,
        batched=batched,
    )


def _items(scenario, numbers):
    subject = scenario.subjects.change("t", "insert").encode()
    return [
        OutgoingMessage.change(
            subject=subject, msg_id=b"id-%d" % n, headers=b"", payload=b"%d" % n, token="t",
            transaction=TransactionHeader(1, 1, 0), ordinal=n,
        )
        for n in numbers
    ]  # fmt: skip


async def _numbers(scenario):
    stored = await read_stream(scenario.client, scenario.subjects.cdc_stream)
    return [int(message.data) for message in stored if message.subject.endswith(".insert")]


async def _publish_raw(scenario, item, reply, headers=b""):
    """One message of a batch in the socket buffer of the stale process."""
    writer = FrameWriter(scenario.client, direct=True)
    lines = b"Nats-Msg-Id: %b\r\n%b" % (item.msg_id, headers)
    await writer.write([PublishFrame(item.subject, reply, lines, item.payload)])


async def test_taking_the_fence_ends_a_batch_that_was_left_open(scenario):
    await create_stream(scenario, allow_batched=True, duplicate_window=int(1e8))
    stale = _fence(scenario, "stale")
    await stale.take()
    inbox = scenario.client.new_inbox()
    answers = await scenario.client.subscribe(f"{inbox}.>")
    await scenario.client.flush()
    items = _items(scenario, range(1, 7))

    def reply(place, operation):
        return b"%b.%b.10.fail.%d.%d.$FI" % (inbox.encode(), stale.batch_id, place, operation)

    for place in (1, 2, 3):
        headers = stale.headers if place == 1 else b""
        await _publish_raw(scenario, items[place - 1], reply(place, place > 1), headers)
    await answers.next_msg()
    fresh = _fence(scenario, "fresh")
    await fresh.take()
    for place in (4, 5, 6):
        operation = 2 if place == 6 else 1
        await _publish_raw(scenario, items[place - 1], reply(place, operation))
        answer = json.loads((await answers.next_msg()).data)
        while "error" not in answer:
            answer = json.loads((await answers.next_msg()).data)
    assert await _numbers(scenario) == [1, 2, 3]
    # All messages of the stale writer are before the newest fence: read up to there.
    stored = await read_stream(scenario.client, scenario.subjects.cdc_stream)
    assert stored[-1].sequence == fresh.sequence
    with pytest.raises(Fenced):
        await stale.renew()


async def test_a_fence_whose_acknowledgement_was_lost_is_still_ours(scenario):
    await create_stream(scenario)
    fence = _fence(scenario, "one", batched=False)
    held = await fence.take()
    twin = _fence(scenario, "one", batched=False)
    twin.sequence = held
    await twin.renew()
    assert await fence.renew() > held


async def test_a_fence_that_retention_took_is_written_again(scenario):
    await create_stream(scenario)
    fence = _fence(scenario, "one", batched=False)
    held = await fence.take()
    await scenario.api(f"STREAM.PURGE.{scenario.subjects.cdc_stream}")
    assert await fence.renew() > held


@pytest.mark.parametrize("writer_class", [FastIngestWriter, PlainWriter])
async def test_a_stale_batch_is_refused_as_a_whole(scenario, writer_class):
    batched = writer_class is FastIngestWriter
    await create_stream(scenario, allow_batched=batched, duplicate_window=int(1e8))
    frames = await FrameWriter.create(scenario.client, scenario.subjects.cdc_stream)
    stale, fresh = (_fence(scenario, name, batched=batched) for name in ("stale", "fresh"))
    writer = writer_class(scenario.client, frames, 5)
    await writer.open()
    await stale.take()
    assert (await writer.send(_items(scenario, range(3)), stale)).stored == 3
    await fresh.take()
    outcome = await writer.send(_items(scenario, range(3, 6)), stale)
    assert outcome.stored == 0
    assert outcome.refusal is not None
    assert outcome.refusal.code == WRONG_LAST_SEQUENCE
    assert await _numbers(scenario) == [0, 1, 2]
    await writer.close()


@pytest.mark.parametrize("version", [OLDEST, None], ids=[OLDEST, "newest"])
async def test_a_chain_cut_by_a_takeover_cannot_go_on(scenario_on, version):
    """Plain messages of one batch, with the fence of another bridge among them."""
    scenario, _ = await scenario_on(version)
    await create_stream(scenario, duplicate_window=int(1e8))
    stale, fresh = (_fence(scenario, name, batched=False) for name in ("stale", "fresh"))
    await stale.take()
    items = _items(scenario, range(6))
    before, headers = stale.msg_id, stale.headers
    for item in items[:3]:
        guard = b"Nats-Expected-Last-Msg-Id: %b\r\n" % before
        await _publish_raw(scenario, item, b"nobody", headers + guard)
        before, headers = item.msg_id, b""
    await scenario.client.flush()
    await fresh.take()
    for item in items[3:]:
        guard = b"Nats-Expected-Last-Msg-Id: %b\r\n" % before
        await _publish_raw(scenario, item, b"nobody", guard)
        before = item.msg_id
    await scenario.client.flush()
    frames = await FrameWriter.create(scenario.client, scenario.subjects.cdc_stream)
    writer = PlainWriter(scenario.client, frames, 5)
    await writer.open()
    assert (await writer.send(items[3:], fresh)).refusal is None
    assert await _numbers(scenario) == [0, 1, 2, 3, 4, 5]
    await writer.close()


async def test_a_stale_message_right_behind_ours_is_noticed(scenario):
    """One message of a stale chain is the one to be sent next: it must not be stored twice."""
    await create_stream(scenario, duplicate_window=int(1e8))
    fence = _fence(scenario, "one", batched=False)
    await fence.take()
    writer = PlainWriter(
        scenario.client, await FrameWriter.create(scenario.client, scenario.subjects.cdc_stream), 5
    )
    await writer.open()
    items = _items(scenario, range(4))
    assert (await writer.send(items[:2], fence)).refusal is None
    stale = b"Nats-Expected-Last-Msg-Id: %b\r\n" % items[1].msg_id
    await _publish_raw(scenario, items[2], b"nobody", stale)
    await scenario.client.flush()
    # After the deduplication window, the id alone does not prevent a duplicate.
    await asyncio.sleep(0.3)
    outcome = await writer.send(items[2:], fence)
    assert outcome.refusal is not None, "nothing tells that the record must be read back"
    assert outcome.stored == 0
    assert await _numbers(scenario) == [0, 1, 2, 3]
    await writer.close()
