"""Rows too wide for a message, kept in the object store."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import nats.errors
import nats.js.errors

from consumer_sdk.errors import CorruptData, NotAvailable

if TYPE_CHECKING:
    from nats.js import JetStreamContext

LARGEST_OBJECT_BYTES = 4 * 1024**3


async def fetch_object(js: JetStreamContext, bucket: str, ref: dict[str, Any]) -> bytes:
    """The bytes a `ref` stands for, with size and sha256 verified.

    A ref to another bucket than `bucket`, the deployment's own, is refused.
    """
    name, size, digest = ref.get("name"), ref.get("size"), ref.get("sha256")
    if ref.get("bucket") != bucket or not isinstance(name, str) or not name:
        raise CorruptData("a row refers to an object outside this deployment's object store")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= LARGEST_OBJECT_BYTES:
        raise CorruptData(f"object {name}: no sane size")
    if not isinstance(digest, str):
        raise CorruptData(f"object {name}: no sha256")
    try:
        store = await js.object_store(bucket)
        result = await store.get(name)
    except nats.js.errors.NotFoundError as error:
        raise CorruptData(f"object {name} is not in the object store {bucket}") from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise NotAvailable(f"object {name} cannot be read: {error}") from error
    content = result.data or b""
    if len(content) != size:
        raise CorruptData(f"object {name} has {len(content)} bytes, {size} were written")
    if hashlib.sha256(content).hexdigest() != digest.lower():
        raise CorruptData(f"object {name} does not have the sha256 it was written with")
    return content
