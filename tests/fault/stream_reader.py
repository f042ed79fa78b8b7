"""Reads all messages of a stream, also while a cluster elects a leader."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from nats.errors import NoRespondersError
from nats.js.errors import (
    BucketNotFoundError,
    InvalidKeyError,
    KeyNotFoundError,
    ServiceUnavailableError,
)

from consumer_sdk.wire.envelope import DICTIONARY
from tests.fixtures.stored import StoredMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from consumer_sdk.wire import Subjects

READ_TIMEOUT_SECONDS = 30
READ_ATTEMPTS = 10
LEADERLESS = (TimeoutError, NoRespondersError, ServiceUnavailableError)
"""Errors of requests while a cluster elects a leader; nats-py's timeout is a TimeoutError."""


async def read_stream(client: Client, stream: str, start: int = 1) -> list[StoredMessage]:
    """All messages up to the leader's last sequence, in order."""
    found: list[StoredMessage] = []
    for _ in range(READ_ATTEMPTS):
        with suppress(*LEADERLESS):
            end = await _end(client, stream)
            if await _read_on(client, stream, found, start):
                last = found[-1].sequence if found else start - 1
                if last >= end:
                    return found
        await asyncio.sleep(1)
        start = found[-1].sequence + 1 if found else start
    raise AssertionError(f"stream {stream} cannot be read beyond {start}")


async def _end(client: Client, stream: str) -> int:
    """The leader's last sequence; a consumer may be on a replica that lags."""
    answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=10)
    state = json.loads(answer.data).get("state", {})
    return int(state["last_seq"]) if state.get("messages") else 0


async def _read_on(client: Client, stream: str, found: list[StoredMessage], start: int) -> bool:
    """Add the messages from `start` on; False if the cluster lost the request."""
    name = f"oracle-{secrets.token_hex(6)}"
    request = {
        "stream_name": stream,
        "config": {
            "name": name, "ack_policy": "none", "deliver_policy": "by_start_sequence",
            "opt_start_seq": start, "inactive_threshold": int(60e9), "mem_storage": True,
        },
    }  # fmt: skip
    answer = await client.request(
        f"$JS.API.CONSUMER.CREATE.{stream}.{name}", json.dumps(request).encode(), timeout=10
    )
    created = json.loads(answer.data)
    if "error" in created:
        if created["error"].get("err_code") == 10059:
            return True
        if created["error"].get("code") == 503:
            return False
        raise AssertionError(created["error"])
    total = len(found) + int(created["num_pending"])
    complete = asyncio.Event()

    async def take(message: Msg) -> None:
        if message.reply:
            sequence = int(message.reply.split(".")[-4])
            headers = dict(message.headers or {})
            found.append(StoredMessage(sequence, message.subject, headers, message.data))
        if len(found) >= total:
            complete.set()

    inbox = client.new_inbox()
    subscription = await client.subscribe(
        inbox, cb=take, pending_msgs_limit=-1, pending_bytes_limit=-1
    )
    try:
        if len(found) < total:
            pull = {"batch": total - len(found), "expires": int(READ_TIMEOUT_SECONDS * 1e9)}
            await client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", json.dumps(pull).encode(), reply=inbox
            )
            await asyncio.wait_for(complete.wait(), READ_TIMEOUT_SECONDS)
    except TimeoutError:
        return False
    finally:
        await subscription.unsubscribe()
    return True


async def load_dictionaries(
    client: Client, subjects: Subjects, messages: Iterable[StoredMessage]
) -> dict[str, bytes]:
    """The dictionaries that messages are compressed with, by their ids.

    Each is requested by name, which the leader answers; any replica may answer a list request.
    """
    wanted = {one.headers[DICTIONARY] for one in messages if DICTIONARY in one.headers}
    for _ in range(READ_ATTEMPTS):
        with suppress(*LEADERLESS):
            return await _load_dictionaries(client, subjects, wanted)
        await asyncio.sleep(1)
    raise AssertionError(f"bucket {subjects.dicts_bucket} cannot be read")


async def _load_dictionaries(
    client: Client, subjects: Subjects, wanted: Iterable[str]
) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with suppress(BucketNotFoundError):
        bucket = await client.jetstream().key_value(subjects.dicts_bucket)
        for name in wanted:
            # A foreign message may name any dictionary.
            with suppress(KeyNotFoundError, InvalidKeyError):
                found[name] = (await bucket.get(name)).value or b""
    return found
