"""The INIT stream and the object store beside it, as the coordinator of snapshots uses them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import nats.errors
import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from bridge.errors import Retryable
from bridge.jetstream.streams import ApiError
from consumer_sdk.wire import envelope
from consumer_sdk.wire.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nats.js.client import JetStreamContext

    from consumer_sdk.wire.subjects import Subjects

COUNTING_SECONDS: Final = 10.0
PUBLISH_ATTEMPTS: Final = 4
BROKER_TROUBLE: Final = (nats.errors.Error, OSError, TimeoutError, ApiError, Retryable)


class InitStream:
    """Publishes metas and errors, counts and purges chunks, reads metas back."""

    def __init__(self, js: JetStreamContext, subjects: Subjects, *, as_json: bool) -> None:
        self._js = js
        self._subjects = subjects
        self._as_json = as_json

    async def publish(self, subject: str, document: dict[str, Any], message_id: str) -> None:
        """Store a document; it is stored once however often it is sent, for its id stays."""
        headers = {
            envelope.MSG_ID: message_id,
            envelope.CONTENT_TYPE: envelope.JSON if self._as_json else envelope.MSGPACK,
        }
        body = envelope.encode(document, as_json=self._as_json)
        stream = self._subjects.init_stream
        for attempt in range(PUBLISH_ATTEMPTS):
            try:
                await self._js.publish(subject, body, stream=stream, headers=dict(headers))
            except (nats.errors.TimeoutError, TimeoutError, nats.js.errors.NoStreamResponseError):
                if attempt + 1 == PUBLISH_ATTEMPTS:
                    raise
            else:
                return

    async def count_chunks(self, token: str, snapshot_id: str) -> int:
        """How many chunks are stored, which a consumer tells without reading any."""
        stream = self._subjects.init_stream
        consumer = await self._js.add_consumer(
            stream,
            ConsumerConfig(
                filter_subject=self._subjects.chunk(token, snapshot_id, "*"),
                deliver_policy=DeliverPolicy.ALL,
                ack_policy=AckPolicy.NONE,
                inactive_threshold=COUNTING_SECONDS,
                mem_storage=True,
            ),
        )
        with suppress(*BROKER_TROUBLE):
            await self._js.delete_consumer(stream, consumer.name)
        return consumer.num_pending or 0

    async def purge_chunks(self, token: str, snapshot_id: str) -> None:
        """Remove every chunk of a snapshot."""
        await self._js.purge_stream(
            self._subjects.init_stream, subject=self._subjects.chunk(token, snapshot_id, "*")
        )

    async def newest_meta(self, token: str) -> dict[str, Any] | None:
        """The table's last meta, None if there is none that this version can read."""
        try:
            message = await self._js.get_last_msg(
                self._subjects.init_stream, self._subjects.meta(token)
            )
            return envelope.decode_payload(message.headers, message.data or b"")
        except (nats.js.errors.NotFoundError, WireError):
            return None

    async def has_message(self, subject: str, message_id: str) -> bool:
        """Whether a message with this id is among those of a subject."""
        sequence = 1
        while True:
            try:
                message = await self._js.get_msg(
                    self._subjects.init_stream, seq=sequence, subject=subject, next=True
                )
            except nats.js.errors.NotFoundError:
                return False
            if (message.headers or {}).get(envelope.MSG_ID) == message_id:
                return True
            sequence = (message.seq or sequence) + 1

    async def object_names(self) -> list[str]:
        """Every wide row in the object store."""
        try:
            objects = await self._js.object_store(self._subjects.objects_bucket)
            listed = await objects.list(ignore_deletes=True)
        except nats.js.errors.NotFoundError:
            return []
        return [item.name for item in listed]

    async def delete_objects(self, names: Iterable[str]) -> None:
        """Remove wide rows; those already gone do not matter."""
        for name in names:
            with suppress(nats.js.errors.NotFoundError):
                objects = await self._js.object_store(self._subjects.objects_bucket)
                await objects.delete(name)
