"""What somebody who may publish can put where readers look things up: told in one line, at once."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.errors import CorruptData, SnapshotFailed
from consumer_sdk.wire.envelope import encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

    from bridge.embedded import NatsServer
    from consumer_sdk.client import Client
    from tests.fixtures.publisher import Publisher


async def _describe(publisher: Publisher, name: str, description: bytes) -> None:
    token = base64.urlsafe_b64encode(name.encode()).decode()
    await publisher.js.publish(f"$O.{publisher.subjects.objects_bucket}.M.{token}", description)


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"[]",
        b"not JSON",
        {"nuid": "neverstored"},
        {"nuid": "*"},
        {"nuid": "a b"},
        {"nuid": 5},
        {"size": 10**15},
        {"size": "9"},
        {"options": {"link": {"bucket": "other", "name": "n"}}},
        {"options": 5},
    ],
)
async def test_an_object_that_is_not_what_it_says_is_corrupt(
    publisher: Publisher, client: Client, description: Any
) -> None:
    ref = await publisher.put_object("wide", encode({"data": {"id": 1}}))
    store = await publisher.js.object_store(publisher.subjects.objects_bucket)
    if isinstance(description, dict):
        info = await store.get_info("wide")
        good = {"name": "wide", "nuid": info.nuid, "size": info.size, "chunks": 1, "bucket": "b"}
        description = json.dumps({**good, **description}).encode()
    await _describe(publisher, "wide", description)
    await publisher.send(publisher.event("users", "INSERT", lsn=0x2000, ref=ref, last=True))
    async with asyncio.timeout(15):
        with pytest.raises(CorruptData, match="object wide"):
            await anext(client.feed(None, 1))


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([b""] * 60 + [None], id="empty pieces"),
        pytest.param([b"x"] * 60, id="pieces of one byte"),
        pytest.param([None, b"x" * 100], id="more than its size"),
        pytest.param([b"x" * 10_000], id="one piece of more than its size"),
    ],
)
async def test_the_pieces_of_an_object_are_bounded_by_its_size(
    publisher: Publisher, client: Client, pieces: list[bytes | None]
) -> None:
    content = encode({"data": {"id": 1, "name": "x" * 20}})
    ref = await publisher.put_object("wide", content)
    bucket = publisher.subjects.objects_bucket
    for piece in pieces:
        await publisher.js.publish(f"$O.{bucket}.C.forged", content if piece is None else piece)
    good = {"name": "wide", "nuid": "forged", "size": len(content), "chunks": 1, "bucket": bucket}
    await _describe(publisher, "wide", json.dumps(good).encode())
    await publisher.send(publisher.event("users", "INSERT", lsn=0x2000, ref=ref, last=True))
    async with asyncio.timeout(60):
        with pytest.raises(CorruptData, match="object wide has other pieces than"):
            await anext(client.feed(None, 1))


async def test_a_row_among_the_schemas_does_not_have_its_schema_looked_up(
    publisher: Publisher, client: Client
) -> None:
    publisher.as_json = True
    await publisher.put_schema()
    row = publisher.event("users", "INSERT", lsn=0x2000, data={"id": 1}, last=True)
    await publisher.send(
        {**row, "schema_version": 9}, subject=publisher.subjects.change("users", "schema")
    )
    with pytest.raises(CorruptData, match="not a schema document"):
        await anext(client.feed(None, 1))


async def test_the_schema_of_another_table_is_corrupt(publisher: Publisher, client: Client) -> None:
    bucket = await publisher.js.key_value(publisher.subjects.schemas_bucket)
    await bucket.put("users", encode(publisher.schema_document("orders")))
    with pytest.raises(CorruptData, match="it belongs to table orders"):
        await client.schema("users")


@pytest.mark.parametrize("junk", [b"junk", encode({"v": 1}), "of another table"])
async def test_a_meta_that_is_none_is_passed_over(
    publisher: Publisher, client: Client, junk: bytes | str
) -> None:
    for table in ("users", "orders"):
        await publisher.put_schema(table)
    await publisher.progress()
    if isinstance(junk, str):
        junk = encode(await publisher.snapshot([], table="orders", snapshot_id="other"))

    async def spoil() -> None:
        await publisher.js.publish(publisher.subjects.meta("users"), junk)

    async def answer(message: Any) -> None:
        await message.respond(encode({"v": 1, "ok": True, "snapshot_id": "snap1"}))
        await spoil()
        await publisher.snapshot([[{"id": 1, "body": None}]])

    await publisher.client.subscribe(publisher.subjects.snapshot_request("users"), cb=answer)
    await spoil()
    snapshot = await client.snapshot("users")
    assert [row["id"] async for row in snapshot.rows()] == [1]


async def test_progress_of_another_source_is_corrupt(publisher: Publisher, client: Client) -> None:
    await publisher.progress(source="other")
    with pytest.raises(CorruptData, match="belongs to another source"):
        await client.progress("shop")
    with pytest.raises(CorruptData, match="progress of source 'other'"):
        await anext(client.feed(None, 1))


async def _all_rows(client: Client) -> list[dict[str, Any]]:
    snapshot = await client.snapshot("users", fresh=True)
    return [row async for row in snapshot.rows()]


@pytest.mark.parametrize("batch_count", [-1, 2**40, 1.5, "many"])
async def test_chunks_that_were_never_written_are_told_at_once(
    publisher: Publisher, client: Client, batch_count: Any
) -> None:
    await publisher.put_schema()
    await publisher.progress()
    meta = await publisher.snapshot([[{"id": 1, "body": None}]])
    told: list[str] = []

    async def answer(message: Any) -> None:
        told.append(message.subject)
        await message.respond(encode({"v": 1, "ok": True, "snapshot_id": "snap1"}))

    await publisher.client.subscribe(publisher.subjects.snapshot_request("users"), cb=answer)
    await publisher.js.publish(
        publisher.subjects.meta("users"), encode({**meta, "batch_count": batch_count})
    )
    async with asyncio.timeout(20):
        with pytest.raises((CorruptData, SnapshotFailed)):
            await _all_rows(client)
    assert told


async def test_what_a_stranger_answers_cannot_steer_the_terminal(
    publisher: Publisher,
    nats_server: NatsServer,
    prefix: str,
    run_command: Callable[..., CompletedProcess[str]],
) -> None:
    await publisher.put_schema()

    async def refuse(message: Any) -> None:
        reason = "\x1b[2J\x9b2J\n\u202e" + "x" * 100_000
        await message.respond(encode({"v": 1, "ok": False, "error": reason}))

    await publisher.client.subscribe(publisher.subjects.snapshot_request("users"), cb=refuse)
    environment = {"NATS_URL": nats_server.reader_url, "BRIDGE_PREFIX": prefix}
    result = await asyncio.to_thread(
        run_command, "cdc", "snapshot", "users", environment=environment
    )
    assert result.returncode == 3
    [line] = result.stderr.splitlines()
    assert "refused: \\u001b[2J\\u009b2J \\u202exxx" in line
    assert line.isprintable()
    assert len(line) < 2000
