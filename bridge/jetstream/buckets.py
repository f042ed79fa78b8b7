"""KV buckets and the object store: created if missing; existing ones are never altered."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import nats.errors
from nats.js.api import ObjectMeta, ObjectMetaOptions
from nats.js.errors import NotFoundError, ObjectNotFoundError, ServiceUnavailableError

from bridge.errors import BrokerError, Retryable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.client import JetStreamContext
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

    from bridge.config import Settings

PIECE_BYTES: Final = 128 * 1024
NEW_SECONDS: Final = 3600.0
"""An object is kept a day longer than its message. An older object is stored again, because it
would expire before a new message that refers to it."""


async def ensure_bucket(
    js: JetStreamContext, bucket: str, *, history: int, replicas: int
) -> KeyValue:
    """Find or create a KV bucket."""
    try:
        try:
            return await js.key_value(bucket)
        except NotFoundError:
            return await js.create_key_value(bucket=bucket, history=history, replicas=replicas)
    except (TimeoutError, nats.errors.TimeoutError, ServiceUnavailableError) as error:
        raise Retryable(f"bucket {bucket}: NATS does not answer") from error
    except nats.errors.Error as error:
        raise BrokerError(
            f"bucket {bucket} cannot be used: {error}; `bridge check` checks permissions and limits"
        ) from error


async def ensure_objects(js: JetStreamContext, bucket: str, settings: Settings) -> ObjectStore:
    """Find or create the object store, which keeps objects longer than both streams."""
    try:
        try:
            return await js.object_store(bucket)
        except NotFoundError:
            ages = (settings.cdc_max_age, settings.init_max_age)
            ttl = max(ages) + 86400 if all(ages) else None
            return await js.create_object_store(bucket, ttl=ttl, replicas=settings.replicas)
    except (TimeoutError, nats.errors.TimeoutError, ServiceUnavailableError) as error:
        raise Retryable(f"object store {bucket}: NATS does not answer") from error
    except nats.errors.Error as error:
        raise BrokerError(
            f"object store {bucket} cannot be used: {error}; "
            "`bridge check` checks permissions and limits"
        ) from error


class ObjectWriter:
    """Stores rows too wide for a message, named by message id; storing one again is harmless."""

    def __init__(self, store: ObjectStore, client: Client) -> None:
        self._store = store
        self._client = client

    async def put(self, name: str, content: bytes) -> None:
        """Store the content, unless an equal object that is new enough exists already."""
        digest = hashlib.sha256(content).digest()
        try:
            info = await self._store.get_info(name)
            is_same = info.size == len(content) and info.digest and _same(info.digest, digest)
            if is_same and _is_new(info.mtime):
                return
        except ObjectNotFoundError:
            pass
        # The default size of a piece can exceed the server's max_payload.
        size = min(PIECE_BYTES, self._client.max_payload // 2)
        meta = ObjectMeta(name=name, options=ObjectMetaOptions(max_chunk_size=size))
        await self._store.put(name, content, meta)


def _is_new(stored_at: str | None) -> bool:
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(stored_at or "")
    except (TypeError, ValueError):
        return False
    return age.total_seconds() < NEW_SECONDS


def _same(stated: str, digest: bytes) -> bool:
    _, _, text = stated.partition("=")
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)) == digest
    except ValueError:
        return False
