"""A reader who attacks changes nothing, with the accounts that `bridge check --permissions` prints.

NATS does not check publish rights on the reply subject of a request. In the bridge's own account,
the answer to a permitted request can therefore be stored as a change, or be taken for a request to
delete the stream; the last test shows that these attacks work there.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import nats
import nats.errors
import pytest

from bridge.preflight.permissions import (
    READER_INBOX,
    reader_permissions,
    stream_names,
)
from consumer_sdk.transport.calls import API
from consumer_sdk.wire.subjects import Subjects
from tests.fixtures.hostile_reader import (
    Reader,
    push_everywhere,
    reading_requests,
    request_everywhere,
    targets,
)
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nats.aio.client import Client

    from bridge.embedded import NatsServer
    from tests.fixtures.cdc_log import CdcLog
    from tests.fixtures.nats import SharedNats
    from tests.fixtures.postgres import Database


@pytest.fixture
def subjects(prefix: str) -> Subjects:
    return Subjects(prefix)


@pytest.fixture
async def reader(nats_server: SharedNats, prefix: str) -> AsyncIterator[Reader]:
    """A reader's login."""
    reader = Reader()
    await reader.connect(nats_server.reader_url)
    yield reader
    await reader.client.close()


@pytest.fixture
def shop(bridge_process: Any, database: Database) -> Database:
    """A bridge that has published five orders."""
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    database.publish("orders")
    bridge_process()
    database.execute("INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 5) n")
    return database


async def stored(client: Client, subjects: Subjects) -> dict[str, Any]:
    """Creation time of every stream, and how many messages it holds on which subject.

    Progress of the bridge's own source is left out: it is written whenever PostgreSQL writes WAL.
    """
    found = {}
    for name in stream_names(subjects):
        reply = await client.request(
            f"{API}.STREAM.INFO.{name}", json.dumps({"subjects_filter": ">"}).encode(), timeout=5
        )
        info = json.loads(reply.data)
        held = info.get("state", {}).get("subjects") or {}
        kept = {subject: count for subject, count in held.items() if ".slot_test_" not in subject}
        found[name] = (info.get("created"), kept)
    return found


async def settled(cdc: CdcLog, client: Client, subjects: Subjects) -> dict[str, Any]:
    """What the streams hold once the bridge has nothing more to write."""
    await cdc.settle()
    seen: list[dict[str, Any]] = [{}]

    async def is_quiet() -> bool:
        seen.append(await stored(client, subjects))
        return seen[-1] == seen[-2]

    await eventually(is_quiet, what="nothing more is written")
    return seen[-1]


async def test_an_answer_to_a_reader_cannot_be_stored_nor_delete_anything(
    shop: Database, reader: Reader, cdc: CdcLog, nats_client: Client, subjects: Subjects
) -> None:
    before = await settled(cdc, nats_client, subjects)
    await request_everywhere(reader.client, reading_requests(subjects), targets(subjects))
    assert await stored(nats_client, subjects) == before
    shop.execute("INSERT INTO orders VALUES (6, 'after')")
    await cdc.settle()
    assert [event.data["id"] for event in await cdc.changes("orders")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("shop")
async def test_a_push_consumer_of_a_reader_cannot_deliver_into_the_bridges_subjects(
    reader: Reader, cdc: CdcLog, nats_client: Client, subjects: Subjects
) -> None:
    before = await settled(cdc, nats_client, subjects)
    created = await push_everywhere(reader, subjects, targets(subjects))
    assert created  # some are refused as a cycle; the others find nobody who listens
    await reader.client.flush()
    assert await stored(nats_client, subjects) == before


async def test_a_reader_may_publish_nothing_but_requests(
    reader: Reader, subjects: Subjects
) -> None:
    for subject in (
        *targets(subjects),
        f"{API}.CONSUMER.NAMES.{subjects.cdc_stream}",
        f"{API}.CONSUMER.LIST.{subjects.cdc_stream}",
        f"{API}.CONSUMER.DURABLE.CREATE.{subjects.cdc_stream}.x",
        f"{API}.STREAM.MSG.DELETE.{subjects.cdc_stream}",
        f"{API}.STREAM.NAMES",
        f"{API}.STREAM.LIST",
        subjects.snapshot_progress("orders", "x"),
        "_INBOX_other.x",
    ):
        reader.refusals.clear()
        await reader.client.publish(subject, b"{}")
        await eventually(lambda: bool(reader.refusals), what=subject)
        assert "permissions violation for publish" in reader.refusals[0].lower(), subject


@pytest.mark.parametrize("subject", [">", "_INBOX.>", "_INBOX_other.>", "*.>", "$JS.>", "$SYS.>"])
async def test_a_reader_hears_nobody_elses_answers(reader: Reader, subject: str) -> None:
    await reader.client.subscribe(subject)
    await eventually(lambda: bool(reader.refusals), what=subject)
    assert "permissions violation for subscription" in reader.refusals[0].lower()


async def test_names_of_consumers_cannot_be_guessed_and_say_whose_they_are(
    client: Any, publisher: Any, nats_client: Client, subjects: Subjects
) -> None:
    await publisher.insert(1)
    infos: list[Any] = []
    async with aclosing(client.messages()) as messages:
        waiting = asyncio.ensure_future(anext(messages))

        async def is_read() -> bool:
            infos[:] = await nats_client.jsm().consumers_info(subjects.cdc_stream)
            return bool(infos)

        await eventually(is_read)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert all(re.fullmatch(r"consumer-[0-9a-f]{32}", info.name) for info in infos)


def test_what_a_reader_may_do_changes_nothing_that_is_stored(subjects: Subjects) -> None:
    for subject in reader_permissions(subjects, READER_INBOX).publish:
        assert not re.search(r"STREAM\.(CREATE|UPDATE|DELETE|PURGE|RESTORE)|MSG\.DELETE", subject)
        assert subject.startswith((f"{API}.", f"{subjects.snapshot}.request."))


async def test_the_same_attacks_succeed_for_a_reader_in_the_bridges_account(
    own_nats: Callable[..., NatsServer],
) -> None:
    """The control: if these attacks failed everywhere, the tests above would prove nothing."""
    server = own_nats(
        config="authorization { users: [ { user: r, password: p, permissions { publish: "
        '["$JS.API.DIRECT.GET.CDC.>", "$JS.API.STREAM.INFO.CDC"], subscribe: ["_INBOX.>"] } }, '
        "{ user: a, password: a } ] }"
    )
    admin = await nats.connect(server.url_as("a", "a"))
    reader = await nats.connect(server.url_as("r", "p"))
    try:
        manager = admin.jsm()
        await manager.add_stream(name="CDC", subjects=["cdc.>"], allow_direct=True)
        await reader.publish(f"{API}.STREAM.INFO.CDC", b"", reply="cdc.orders.insert")

        async def is_forged() -> bool:
            return (await manager.stream_info("CDC")).state.messages == 1

        await eventually(is_forged)
        await reader.publish(f"{API}.DIRECT.GET.CDC.none", b"", reply=f"{API}.STREAM.DELETE.CDC")

        async def is_deleted() -> bool:
            return not await manager.streams_info()

        await eventually(is_deleted)
    finally:
        await reader.close()
        await admin.close()
