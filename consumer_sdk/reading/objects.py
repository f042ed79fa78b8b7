"""Rows too wide for a message, kept in the object store."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

import nats.errors
import nats.js.errors

from consumer_sdk.errors import CorruptData, GapError, NotAvailable
from consumer_sdk.reading.proof import Selection, Trimming
from consumer_sdk.reading.pull import PullConsumer
from consumer_sdk.wire.errors import MISFITS

if TYPE_CHECKING:
    from consumer_sdk.transport.connection import LogConnection

LARGEST_OBJECT_BYTES = 4 * 1024**3
LOOK_SECONDS = 1.0
WINDOW = 32
_NUID = re.compile(r"[A-Za-z0-9]+\Z")


async def fetch_object(nc: LogConnection, bucket: str, ref: dict[str, Any]) -> bytes:
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
    nuid = await _content_id(nc, bucket, name, size)
    content = await _content(nc, bucket, name, nuid, size)
    if len(content) != size:
        raise CorruptData(f"object {name} has {len(content)} bytes, {size} were written")
    if hashlib.sha256(content).hexdigest() != digest.lower():
        raise CorruptData(f"object {name} does not have the sha256 it was written with")
    return bytes(content)


async def _content_id(nc: LogConnection, bucket: str, name: str, size: int) -> str:
    """Under what an object's pieces are stored, once it says that it is as large as it should."""
    try:
        store = await nc.jetstream().object_store(bucket)
        info = await store.get_info(name)
        linked, found, nuid = info.is_link(), info.size, info.nuid
    except nats.js.errors.NotFoundError as error:
        raise CorruptData(f"object {name} is not in the object store {bucket}") from error
    except (nats.js.errors.BadObjectMetaError, *MISFITS) as error:
        raise CorruptData(f"object {name} is not described as an object is") from error
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise NotAvailable(f"object {name} cannot be read: {error}") from error
    if linked or _NUID.match(str(nuid)) is None:
        raise CorruptData(f"object {name} is not described as an object is")
    if found != size:
        raise CorruptData(f"object {name} has {found!r} bytes, {size} were written")
    return nuid


async def _content(nc: LogConnection, bucket: str, name: str, nuid: str, size: int) -> bytearray:
    """The pieces in order, as far as they are wanted; NATS is waited for, missing ones are not."""
    content = bytearray()
    pieces = Selection(f"OBJ_{bucket}", [f"$O.{bucket}.C.{nuid}"], trimming=Trimming.ALLOWED)
    consumer = PullConsumer(nc, pieces, window=WINDOW)
    try:
        while len(content) < size:
            frames = await consumer.take(WINDOW, wait=LOOK_SECONDS)
            # Caught up means that the leader of the stream has no more of them.
            if not frames and consumer.caught_up:
                raise CorruptData(f"object {name} has {len(content)} of its {size} bytes")
            for frame in frames:
                content += frame.payload
    except GapError as error:
        raise CorruptData(f"object {name}: the object store {bucket} was recreated") from error
    finally:
        await consumer.close()
    return content
