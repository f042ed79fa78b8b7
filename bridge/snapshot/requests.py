"""The door: requests come in on `snapshot.request.>`, each is answered within a second."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

import nats.errors
import psycopg

from bridge.errors import BridgeError, Retryable
from bridge.snapshot.errors import ForeignTable, Refused
from bridge.snapshot.options import body_is_json, parse_request
from consumer_sdk.wire import envelope
from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.subjects import parse_table_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from bridge.snapshot.options import Request
    from consumer_sdk.wire.subjects import Subjects

    Admit = Callable[[str, str, Request], Awaitable[tuple[str, str]]]

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 0.9


class RequestDoor:
    """Reads requests, hands them on, and answers in the encoding they came in.

    `admit` gives snapshot id and state, or raises Refused.
    """

    def __init__(
        self, client: Client, subjects: Subjects, admit: Admit, *, as_json: bool, zstd: bool
    ) -> None:
        self._client = client
        self._subjects = subjects
        self._admit = admit
        self._as_json = as_json
        self._zstd = zstd
        self._subscription: Subscription | None = None
        self._answers: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begin to take requests."""
        self._subscription = await self._client.subscribe(
            self._subjects.snapshot_request(">"), cb=self._take
        )
        await self._client.flush()

    async def close(self) -> None:
        """Take no more requests; those already taken are still answered."""
        if self._subscription is not None:
            try:
                await self._subscription.unsubscribe()
            except nats.errors.Error:
                logger.debug("unsubscribing from requests failed", exc_info=True)
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def _take(self, message: Msg) -> None:
        # Each in a task of its own: a slow catalog must not hold up the next request.
        task = asyncio.create_task(self._answer(message))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, message: Msg) -> None:
        answer: dict[str, Any]
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                snapshot_id, state = await self._grant(message)
            answer = {"ok": True, "snapshot_id": snapshot_id, "state": state}
        except ForeignTable:
            # The bridge that publishes it answers; a refusal from here could come first.
            return
        except Refused as refusal:
            answer = {"ok": False, "error": str(refusal)}
        except TimeoutError:
            answer = _later("PostgreSQL or NATS answers too slowly")
        except (BridgeError, Retryable) as error:
            answer = {"ok": False, "error": str(error)}
        except psycopg.errors.LockNotAvailable:
            answer = _later("another session has locked this or another published table for itself")
        except psycopg.Error:
            answer = _later("PostgreSQL cannot be asked at the moment")
        except (nats.errors.Error, OSError):
            answer = _later("JetStream does not answer the bridge")
        except Exception:
            logger.exception("snapshot request failed")
            answer = {"ok": False, "error": "the bridge could not handle the request; see its log"}
        await self._reply(message, answer)

    async def _grant(self, message: Msg) -> tuple[str, str]:
        token = message.subject.removeprefix(self._subjects.snapshot_request(""))
        try:
            schema, table = parse_table_token(token)
        except WireError as error:
            raise Refused(f"{token!r} is not a table; see the subjects in WIRE.md") from error
        request = parse_request(
            message.data, message.headers, as_json=self._as_json, zstd=self._zstd
        )
        return await self._admit(schema, table, request)

    async def _reply(self, message: Msg, answer: dict[str, Any]) -> None:
        if not message.reply:
            return
        as_json = body_is_json(message.data, message.headers, default=self._as_json)
        headers = {envelope.CONTENT_TYPE: envelope.JSON if as_json else envelope.MSGPACK}
        body = envelope.encode({"v": envelope.WIRE_VERSION, **answer}, as_json=as_json)
        try:
            await self._client.publish(message.reply, body, headers=headers)
        except (nats.errors.Error, OSError):
            logger.debug("a snapshot request was not answered", exc_info=True)


def _later(why: str) -> dict[str, Any]:
    """A refusal that says nothing of the request itself."""
    return {"ok": False, "error": f"{why}; ask again", "retry": True}
