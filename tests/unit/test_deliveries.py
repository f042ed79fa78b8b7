"""The inbox of a pull consumer notices that its consumer has gone without a word."""

from __future__ import annotations

import asyncio

import pytest

from consumer_sdk import deliveries
from consumer_sdk.deliveries import Deliveries

HEARTBEAT = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 0\r\n\r\n"


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Deliveries:
    monkeypatch.setattr(deliveries, "STALL_SECONDS", 0.3)
    return Deliveries()


async def wait_often(inbox: Deliveries, times: int) -> None:
    """As a mirror does, which looks after other things several times a second."""
    loop = asyncio.get_running_loop()
    for _ in range(times):
        await inbox.wait(loop.time() + 0.05)


async def test_silence_adds_up_over_short_waits(inbox: Deliveries) -> None:
    inbox.trouble = None
    inbox.begin(1)
    await wait_often(inbox, 4)
    assert inbox.trouble is None
    await wait_often(inbox, 4)
    assert inbox.trouble == "no heartbeat"


@pytest.mark.parametrize("sign", ["heartbeat", "message"])
async def test_any_sign_of_life_ends_it(inbox: Deliveries, sign: str) -> None:
    inbox.trouble = None
    inbox.begin(1)
    for _ in range(4):
        await wait_often(inbox, 3)
        if sign == "heartbeat":
            inbox.on_frame(b"inbox", b"", b"", HEARTBEAT)
        else:
            asyncio.get_running_loop().call_later(
                0.01, inbox.on_frame, b"s", b"$JS.ACK.x", b"payload", None
            )
            await wait_often(inbox, 1)
            inbox.remove(1, 7)
    assert inbox.trouble is None


async def test_messages_that_come_between_waits_are_signs_of_life_too(inbox: Deliveries) -> None:
    inbox.trouble = None
    inbox.begin(1)
    for _ in range(4):
        await wait_often(inbox, 3)
        inbox.on_frame(b"s", b"$JS.ACK.x", b"payload", None)
        inbox.remove(1, 7)
    assert inbox.trouble is None


async def test_a_busy_reader_is_not_taken_for_a_silent_server(inbox: Deliveries) -> None:
    inbox.trouble = None
    inbox.begin(1)
    await asyncio.sleep(0.5)
    await wait_often(inbox, 2)
    assert inbox.trouble is None
