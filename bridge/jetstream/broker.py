"""What a streaming session needs on NATS: streams, buckets and the object store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nats.js.errors import NotFoundError

from bridge.errors import BrokerError, DataAtRiskError, Retryable
from bridge.jetstream.buckets import ensure_bucket, ensure_objects
from bridge.jetstream.connection import server_version
from bridge.jetstream.record import load_progress
from bridge.jetstream.streams import (
    NO_LIMIT,
    SizeLimits,
    cdc_config,
    ensure_stream,
    init_config,
    read_size_limits,
    stream_state,
)
from consumer_sdk.transport.api import ApiError
from consumer_sdk.transport.cancellation import stay_cancelled

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

    from bridge.config import Settings
    from consumer_sdk.wire.subjects import Subjects

BUCKET_POLL_SECONDS = 5.0
OLDEST_VERSION = (2, 11, 0)
"""Since this version a message can expect the newest sequence of another subject: the fence's."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A connection to NATS, with the streams and buckets that a bridge writes to."""

    client: Client
    subjects: Subjects
    schemas: KeyValue
    bridge: KeyValue
    objects: ObjectStore
    dictionaries: KeyValue

    async def watch(self) -> None:
        """Raise Retryable when a bucket was deleted, or the server takes only smaller messages.

        The next session creates and fills the bucket, and encodes the messages again.
        """
        names, limit = self.subjects, self.client.max_payload
        while True:
            await stay_cancelled()
            await asyncio.sleep(BUCKET_POLL_SECONDS)
            if self.client.max_payload < limit:
                raise Retryable(f"max_payload of NATS was lowered to {self.client.max_payload}")
            for name in (names.schemas_bucket, names.bridge_bucket, names.dicts_bucket):
                try:
                    found = await stream_state(self.client, f"KV_{name}")
                except (ApiError, Retryable):
                    # The publisher handles the loss of NATS.
                    break
                if found is None:
                    raise Retryable(f"bucket {name} has gone; it is created again")


async def open_broker(client: Client, settings: Settings) -> Broker:
    """Open streams and buckets; create those that are missing."""
    subjects, replicas = settings.subjects, settings.replicas
    js = client.jetstream()
    version = server_version(client)
    if version < OLDEST_VERSION:
        raise BrokerError(
            f"nats-server {'.'.join(map(str, version))} is too old; upgrade it to 2.11 or newer"
        )
    await _refuse_lost_stream(client, settings)
    limits = await _size_limits(client, settings)
    config = cdc_config(settings, version)
    await ensure_stream(client, subjects.cdc_stream, subjects.cdc_all, config, limits.cdc)
    broker = Broker(
        client=client,
        subjects=subjects,
        schemas=await ensure_bucket(js, subjects.schemas_bucket, history=10, replicas=replicas),
        bridge=await ensure_bucket(js, subjects.bridge_bucket, history=1, replicas=replicas),
        dictionaries=await ensure_bucket(js, subjects.dicts_bucket, history=1, replicas=replicas),
        objects=await ensure_objects(js, subjects.objects_bucket, settings),
    )
    # Last, because it takes what it can of the room that is left.
    config = init_config(settings)
    await ensure_stream(client, subjects.init_stream, subjects.init_all, config, limits.init)
    return broker


async def _size_limits(client: Client, settings: Settings) -> SizeLimits:
    try:
        return await read_size_limits(client, settings)
    except ApiError:
        # Creating the streams will report the error.
        return SizeLimits(NO_LIMIT, NO_LIMIT)


async def _refuse_lost_stream(client: Client, settings: Settings) -> None:
    """Raise DataAtRiskError if the stream is missing although the source has used one before."""
    subjects = settings.subjects
    try:
        if await stream_state(client, subjects.cdc_stream) is not None:
            return
        bucket = await client.jetstream().key_value(subjects.bridge_bucket)
    except (ApiError, NotFoundError):
        # Either no stream was used before, or creating it will report the error.
        return
    if settings.on_gap != "new-epoch" and await load_progress(bucket, settings.slot) is not None:
        raise DataAtRiskError(
            f"continuity of source {settings.slot} is lost: stream {subjects.cdc_stream} is gone; "
            "start with --on-gap=new-epoch to create it and go on, consumers will bootstrap again"
        )
