"""The demand of a pull consumer notices silence, and time in which nobody asked for anything."""

from __future__ import annotations

import asyncio

import pytest

from consumer_sdk.reading import demand
from consumer_sdk.reading.demand import Demand

HEARTBEAT = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 0\r\n\r\n"
EXPIRED = b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 4\r\n\r\n"


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Demand:
    monkeypatch.setattr(demand, "STALL_SECONDS", 0.3)
    return Demand(4)


async def wait_often(inbox: Demand, times: int) -> None:
    """As a mirror does, which looks after other things several times a second."""
    loop = asyncio.get_running_loop()
    for _ in range(times):
        await inbox.wait(loop.time() + 0.05)


async def test_silence_adds_up_over_short_waits(inbox: Demand) -> None:
    inbox.failure = None
    inbox.begin(1)
    await wait_often(inbox, 4)
    assert inbox.failure is None
    await wait_often(inbox, 4)
    assert inbox.failure == "no heartbeat"


@pytest.mark.parametrize("sign", ["heartbeat", "message"])
async def test_any_sign_of_life_ends_it(inbox: Demand, sign: str) -> None:
    inbox.failure = None
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
    assert inbox.failure is None


async def test_messages_that_come_between_waits_are_signs_of_life_too(inbox: Demand) -> None:
    inbox.failure = None
    inbox.begin(1)
    for _ in range(4):
        await wait_often(inbox, 3)
        inbox.on_frame(b"s", b"$JS.ACK.x", b"payload", None)
        inbox.remove(1, 7)
    assert inbox.failure is None


async def test_a_busy_reader_is_not_taken_for_a_silent_server(inbox: Demand) -> None:
    inbox.failure = None
    inbox.begin(1)
    await asyncio.sleep(0.5)
    await wait_often(inbox, 2)
    assert inbox.failure is None


@pytest.mark.parametrize("frozen", [False, True], ids=["awake", "frozen"])
async def test_a_request_that_expired_in_a_frozen_process_left_a_time_unasked(
    inbox: Demand, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """One that expires is renewed at once; only a process that was frozen has missed the moment."""
    inbox.failure = None
    inbox.begin(1)
    assert inbox.request(0) is not None
    asked_at = demand.time.time()
    late = demand.EXPIRES_SECONDS + (20.0 if frozen else 0.0)
    monkeypatch.setattr(demand.time, "time", lambda: asked_at + late)
    inbox.on_frame(b"inbox", b"", b"", EXPIRED)
    assert inbox.exhausted
    assert inbox.lacked_request is frozen


@pytest.mark.parametrize("description", ["Message Size Exceeds MaxBytes", "Andere Worte"])
async def test_a_request_whose_bytes_are_used_up_is_no_failure(
    inbox: Demand, description: str
) -> None:
    inbox.failure = None
    inbox.begin(1)
    assert inbox.request(0) is not None
    status = f"NATS/1.0 409 {description}\r\nNats-Pending-Messages: 4\r\n\r\n"
    inbox.on_frame(b"inbox", b"", b"", status.encode())
    assert inbox.failure is None
    assert inbox.exhausted
    assert inbox.lacked_request


async def test_a_consumer_that_cannot_deliver_any_more_is_replaced(inbox: Demand) -> None:
    inbox.failure = None
    inbox.begin(1)
    assert inbox.request(0) is not None
    inbox.on_frame(b"inbox", b"", b"", b"NATS/1.0 409 Leadership Change\r\n\r\n")
    assert inbox.failure == "409 leadership change"
