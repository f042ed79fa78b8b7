"""Reads a source's record from the stream: at every start, and when a publish result is unknown.

The newest message of each subject is enough, because the last stored message of a source is the
newest on its subject. If the newest message of a subject is not the bridge's own, the tail of the
stream is read, beginning at the sequence of the KV bucket's progress record. The tail, with the
schema of each table, is also enough if it is shorter than the list of subjects.

A replica may lag behind the leader, so a read is valid only if it contains our own fence.
`bridge check` takes no fence; it reads until the message that was the newest when it began.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import nats.errors
from nats.js.errors import APIError, InvalidKeyError, KeyNotFoundError

from bridge.errors import DataAtRiskError, Retryable
from bridge.jetstream.record import StreamRecord, is_recorded
from bridge.jetstream.streams import api, stored_message
from consumer_sdk.transport.api import ApiError, parse_headers
from consumer_sdk.transport.calls import API, DEFAULT_INBOX_PREFIX, ApiCall, consumer_name
from consumer_sdk.wire.compression import LoadedDictionaries
from consumer_sdk.wire.envelope import decode_payload
from consumer_sdk.wire.errors import DictionaryMissing, WireError
from consumer_sdk.wire.position import message_id, parse_message_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.kv import KeyValue

    from bridge.events.messages import OutgoingMessage
    from consumer_sdk.transport.api import Frame
    from consumer_sdk.wire.envelope import Document
    from consumer_sdk.wire.subjects import Subjects

PULL_MESSAGES = 256
PULL_TIMEOUT_SECONDS = 10.0


class RecordReader:
    """Reads the record of one source.

    `is_foreign` tells whether a table belongs to another source; its messages are skipped.
    """

    def __init__(
        self,
        client: Client,
        subjects: Subjects,
        source: str,
        is_foreign: Callable[[str], bool],
        dictionaries: KeyValue | None,
    ) -> None:
        self._client = client
        self._subjects = subjects
        self._source = source
        self._is_foreign = is_foreign
        self._bucket = dictionaries
        self._dictionaries = LoadedDictionaries()

    async def read(self, fence_seq: int, kept: Document | None) -> StreamRecord:
        """Read the record up to our fence; after it, only this bridge writes for the source.

        `kept` is the progress record of the KV bucket, which the stream's retention never removes.
        """
        record = StreamRecord()
        has_short_tail = kept is not None and await self._has_short_tail(kept, fence_seq)
        if has_short_tail:
            newest = {"deliver_policy": "last_per_subject", "filter_subjects": self._schemas()}
        else:
            newest = {
                "deliver_policy": "last_per_subject",
                "filter_subject": self._subjects.cdc_all,
            }
        await self._read_until(fence_seq, record, newest)
        if record.needs_tail_scan or has_short_tail:
            start = int(kept["stream_seq"]) + 1 if kept is not None else 1
            tail = {"deliver_policy": "by_start_sequence", "opt_start_seq": max(start, 1)}
            await self._read_until(fence_seq, record, tail)
        if kept is not None:
            record.note_progress(kept)
        return record

    def _schemas(self) -> list[str]:
        """The subjects of all schema messages, and that of the fence, where reading ends."""
        cdc = self._subjects.cdc
        schemas = [f"{cdc}.*.schema", f"{cdc}.*.*.schema"]
        fence = self._subjects.fence(self._source)
        # JetStream refuses filters that overlap.
        return schemas if fence.endswith(".schema") else [*schemas, fence]

    async def _has_short_tail(self, kept: Document, fence_seq: int) -> bool:
        """Whether fewer messages follow the kept record than there are subjects.

        The stream must hold the message where it ended by that record. Everything before it is
        covered by the position in the record.
        """
        ended_at, ended_with = kept.get("stream_seq"), kept.get("stream_msg_id")
        if not isinstance(ended_at, int) or "position" not in kept:
            return False
        try:
            answer = await api(self._client, ApiCall.STREAM_INFO.of(self._subjects.cdc_stream))
        except ApiError as error:
            raise Retryable(f"the record cannot be read: {error}") from error
        if fence_seq - ended_at > answer["state"].get("num_subjects", 0):
            return False
        return ended_with is not None and await self.message_id_at(ended_at) == ended_with

    async def read_unfenced(self, kept: Document | None) -> StreamRecord:
        """Read the record without a fence, while a bridge may write; nothing is written here.

        The record covers every message that was stored before this call.
        """
        record = StreamRecord()
        last_seq = await self._last_seq()
        if last_seq:
            newest = {
                "deliver_policy": "last_per_subject",
                "filter_subject": self._subjects.cdc_all,
            }
            await self._read_until(last_seq, record, newest, whole=True)
        if record.needs_tail_scan:
            start = max(int(kept["stream_seq"]) + 1 if kept is not None else 1, 1)
            if start <= last_seq:
                tail = {
                    "deliver_policy": "by_start_sequence",
                    "opt_start_seq": start,
                    "filter_subject": self._subjects.cdc_all,
                }
                await self._read_until(last_seq, record, tail, whole=True)
        if kept is not None:
            record.note_progress(kept)
        return record

    async def _last_seq(self) -> int:
        """Sequence of the newest message in the stream, 0 if it is empty."""
        newest = await self._stored({"last_by_subj": self._subjects.cdc_all})
        return 0 if newest is None else newest.stream_seq

    async def message_id_at(self, seq: int) -> str | None:
        """Id of the message with this sequence; None if the stream no longer holds it."""
        message = await self._stored({"seq": seq})
        if message is None:
            return None
        return (parse_headers(message.headers) or {}).get("Nats-Msg-Id", "")

    async def tail_id(self, record: StreamRecord) -> str | None:
        """Id of the message at the sequence where the stream ended by the progress record.

        None if there is no progress record, or if the stream no longer holds that message.
        """
        ended_at = (record.progress or {}).get("stream_seq")
        return await self.message_id_at(ended_at) if isinstance(ended_at, int) else None

    async def holds(self, item: OutgoingMessage) -> bool:
        """Whether the newest message on the item's subject is the item or one after it."""
        message = await self._stored({"last_by_subj": item.subject.decode()})
        if message is None:
            return False
        record = StreamRecord()
        headers = parse_headers(message.headers) or {}
        await self._take(record, item.subject.decode(), headers, message.payload)
        return not record.needs_tail_scan and is_recorded(item, record)

    async def _stored(self, request: Mapping[str, Any]) -> Frame | None:
        try:
            return await stored_message(self._client, self._subjects.cdc_stream, request)
        except ApiError as error:
            raise Retryable(f"the record cannot be read: {error}") from error

    async def _read_until(
        self, last_seq: int, record: StreamRecord, config: Mapping[str, Any], *, whole: bool = False
    ) -> None:
        """Read until `last_seq`; with `whole`, read all messages that exist at the beginning.

        After a fence there are no messages of this source, so reading may stop there. Without a
        fence, a message of another source may reach `last_seq` before one of ours.
        """
        for _ in range(20):
            reached = False
            async with _consumer(
                self._client, self._subjects.cdc_stream, config, bounded=whole
            ) as messages:
                async for message, seq in messages:
                    headers = message.headers or {}
                    await self._take(record, message.subject, headers, message.data)
                    reached = reached or seq >= last_seq
                    if reached and not whole:
                        return
            if reached:
                return
            await asyncio.sleep(0.25)  # a replica that lags behind the leader
        raise Retryable("the stream's replica stays behind its leader")

    async def _take(
        self, record: StreamRecord, subject: str, headers: dict[str, str], data: bytes
    ) -> None:
        subjects = self._subjects
        is_progress = subject == subjects.progress(self._source)
        change = subjects.split_change(subject)
        if change is not None and self._is_foreign(change[0]):
            return
        if (
            not is_progress
            and change is None
            and not subject.startswith(f"{subjects.cdc}.$message.")
        ):
            return
        try:
            document = await self._decode(subject, headers, data)
            if document.get("source") != self._source:
                raise WireError("of another source")
            msg_id = headers.get("Nats-Msg-Id", "")
            if is_progress:
                if not msg_id.startswith(f"{int(document['lsn']):x}-$progress.{self._source}-"):
                    raise WireError("not a record of the bridge")
                record.note_progress(document)
            elif change is not None and change[1] == "schema":
                if not isinstance(document["columns"], list):
                    raise WireError("no columns")
                record.schemas[change[0]] = document
            else:
                if not msg_id == document["msg_id"] == self._id_of(subject, document):
                    raise WireError("not a message of the bridge")
                record.note(document)
            record.newest_ids.add(msg_id.encode())
        except (WireError, KeyError, TypeError, ValueError, OverflowError):
            record.needs_tail_scan = True

    def _id_of(self, subject: str, document: Document) -> str:
        """The id that the bridge gives to a message with these contents."""
        change = self._subjects.split_change(subject)
        number = "seq"
        if change is None:
            change, number = (subject.removeprefix(f"{self._subjects.cdc}."), "message"), "ordinal"
        token, operation = change
        return message_id(
            int(document["lsn"]), token, operation, int(document[number]), int(document["epoch"])
        )

    async def _decode(self, subject: str, headers: dict[str, str], data: bytes) -> Document:
        """Decode a message, after fetching the dictionary it is compressed with."""
        try:
            return decode_payload(headers, data, self._dictionaries)
        except DictionaryMissing as missing:
            name = missing.dictionary_id
            try:
                if self._bucket is None:
                    raise KeyNotFoundError
                entry = await self._bucket.get(name)
            except KeyNotFoundError as error:
                if not _has_change_id(self._subjects, subject, headers):
                    raise missing from error
                raise DataAtRiskError(
                    f"dictionary {name}, which the newest messages are compressed with, has gone "
                    "from KV, so the record cannot be read; restore it, or start with another "
                    "--slot and have consumers bootstrap again"
                ) from error
            except InvalidKeyError:
                raise missing from None
            except (nats.errors.Error, APIError, TimeoutError, OSError) as error:
                raise Retryable(f"dictionary {name} cannot be read: {error}") from error
            self._dictionaries.add(name, entry.value or b"")
            return decode_payload(headers, data, self._dictionaries)


async def stored_headers(
    client: Client, stream: str, config: Mapping[str, Any]
) -> AsyncIterator[Msg]:
    """The messages that a stream holds now, as far as the consumer's configuration selects them."""
    async with _consumer(client, stream, config, bounded=True) as messages:
        async for message, _ in messages:
            yield message


@asynccontextmanager
async def _consumer(
    client: Client, stream: str, config: Mapping[str, Any], *, bounded: bool
) -> AsyncIterator[AsyncGenerator[tuple[Msg, int], None]]:
    name = consumer_name(DEFAULT_INBOX_PREFIX)
    body = {
        "stream_name": stream,
        "action": "create",
        "config": {
            "name": name,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(30e9),
            **config,
        },
    }
    try:
        created = await api(client, ApiCall.CONSUMER_CREATE.of(stream, name), body)
    except ApiError as error:
        raise Retryable(f"the record cannot be read: {error}") from error
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, pending_msgs_limit=-1, pending_bytes_limit=-1)
    try:
        pending = created["num_pending"]
        limit = pending if bounded else None
        messages = _messages(client, subscription, inbox, stream, name, pending, limit)
        async with aclosing(messages):
            yield messages
    finally:
        await subscription.unsubscribe()
        try:
            await api(client, ApiCall.CONSUMER_DELETE.of(stream, name))
        except (ApiError, Retryable):
            pass


async def _messages(
    client: Client,
    subscription: Any,
    inbox: str,
    stream: str,
    name: str,
    pending: int,
    limit: int | None,
) -> AsyncGenerator[tuple[Msg, int], None]:
    while pending:
        request = {"batch": min(pending, PULL_MESSAGES), "expires": int(5e9)}
        await client.publish(
            f"{API}.{ApiCall.CONSUMER_NEXT.of(stream, name)}",
            json.dumps(request).encode(),
            reply=inbox,
        )
        for _ in range(request["batch"]):
            try:
                message = await subscription.next_msg(timeout=PULL_TIMEOUT_SECONDS)
            except (TimeoutError, nats.errors.Error) as error:
                raise Retryable(f"the record cannot be read: {error}") from error
            if not message.reply:
                # A status of the server: messages of the stream have a reply subject.
                raise Retryable("the record cannot be read: the server gave up")
            tokens = message.reply.split(".")
            pending = int(tokens[-1])
            if limit is not None:
                limit -= 1
                pending = min(pending, limit)
            yield message, int(tokens[-4])
            if not pending:
                return


def _has_change_id(subjects: Subjects, subject: str, headers: dict[str, str]) -> bool:
    """Whether a message that cannot be read has the id of a change on its subject."""
    try:
        found = parse_message_id(headers.get("Nats-Msg-Id", ""))
    except WireError:
        return False
    return subject == f"{subjects.cdc}.{found.token}.{found.operation}"
