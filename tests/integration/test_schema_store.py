"""Schema documents in KV: only a later one of the same source replaces one."""

from __future__ import annotations

import pytest

from bridge.errors import SchemaOvertaken, TableTaken
from bridge.jetstream.buckets import ensure_bucket
from bridge.schemas.store import SchemaStore, read_document
from consumer_sdk.wire.envelope import encode


def document(version, *columns, epoch=1, source="shop"):
    return {
        "v": 1, "source": source, "epoch": epoch, "table": "t", "schema": "public",
        "schema_version": version, "replica_identity": "default",
        "columns": [
            {"name": name, "type_oid": 23, "type_modifier": -1, "is_key": name == "id"}
            for name in ("id", *columns)
        ],
    }  # fmt: skip


@pytest.fixture
async def bucket(nats_client, prefix):
    return await ensure_bucket(nats_client.jetstream(), f"{prefix}-schemas", history=10, replicas=1)


@pytest.fixture
def store(bucket):
    return lambda: SchemaStore(bucket, source="shop", as_json=False)


async def held(bucket):
    return read_document((await bucket.get("t")).value)


async def test_a_thawed_bridge_does_not_put_an_older_schema_over_a_newer_one(bucket, store):
    await store().put("t", document(1))
    stale, active = store(), store()
    for one in (stale, active):
        await one.load()
    for version in (2, 3):
        await active.put("t", document(version, *"ab"[: version - 1]))
    with pytest.raises(SchemaOvertaken, match=r"version 3 of the schema of t$"):
        await stale.put("t", document(2, "a"))
    assert await held(bucket) == document(3, "a", "b")


async def test_two_structures_never_share_a_version(bucket, store):
    early, late = store(), store()
    for one in (early, late):
        await one.load()
    await late.put("t", document(1, "a"))
    with pytest.raises(SchemaOvertaken):
        await early.put("t", document(1, "b"))
    assert await held(bucket) == document(1, "a")
    await early.load()
    await early.put("t", document(2, "b"))
    assert await held(bucket) == document(2, "b")


async def test_a_version_the_log_reaches_after_a_snapshot_met_the_next_leaves_that_in_place(
    bucket, store
):
    ours = store()
    await ours.put("t", document(3, "a"))
    await ours.put("t", document(2, "b"))
    await ours.put("t", document(3, "a"))
    assert await held(bucket) == document(3, "a")
    assert (await bucket.get("t")).revision == 1
    await ours.put("t", document(2, "b", epoch=2))
    assert await held(bucket) == document(2, "b", epoch=2)


async def test_a_table_of_another_source_stays_its_own_and_junk_is_replaced(bucket, store):
    await bucket.put("t", b"\x81\xa7columns\x91\x80")
    assert await store().load() == {}
    await store().put("t", document(1))
    assert await held(bucket) == document(1)
    other = SchemaStore(bucket, source="other", as_json=False)
    with pytest.raises(TableTaken, match="'shop'"):
        await other.put("t", document(2, source="other"))
    assert await held(bucket) == document(1)


async def test_thousands_of_documents_are_not_asked_for_one_by_one(nats_client, bucket, store):
    for number in range(300):
        await bucket.put(f"t{number}", encode(document(1, f"c{number}"), as_json=number % 2 == 0))
    await bucket.put("junk", b"junk")
    await bucket.delete("t7")
    before = nats_client.stats["out_msgs"]
    loaded = await store().load()
    assert nats_client.stats["out_msgs"] - before < 30
    assert loaded.keys() == {f"t{number}" for number in range(300) if number != 7}
    assert loaded["t299"] == document(1, "c299")


async def test_an_empty_bucket_is_read_at_once(store):
    assert await store().load() == {}
