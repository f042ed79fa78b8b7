"""Attacks of a reader and of a database user, neither of whom may do what they try."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from tests.fault.faults.registry import fault
from tests.fixtures.hostile_reader import (
    Reader,
    push_everywhere,
    reading_requests,
    request_everywhere,
    targets,
)

if TYPE_CHECKING:
    import random

    from tests.fault.world import World

SAMPLE = 6
REQUESTS = 5000
# With these argument types they are preferred to those of pg_catalog, wherever public is searched.
PLANTED = (
    "quote_ident(name)",
    "quote_literal(name)",
    "concat_ws(text, name, name)",
    "format(text, name, name)",
    "format_type(oid, smallint)",
    "array_agg(name)",
    "to_regclass(name)",
)


async def _reader(world: World) -> Reader:
    reader = Reader()
    await reader.connect(world.reader_url)
    return reader


async def _created(world: World) -> dict[str, Any]:
    subjects = world.scenario.subjects
    names = (subjects.cdc_stream, subjects.init_stream, f"KV_{subjects.schemas_bucket}")
    return {name: (await world.scenario.api(f"STREAM.INFO.{name}"))["created"] for name in names}


@fault("hostile: a reader lets answers be stored, or delete streams")
async def forge(world: World, rng: random.Random) -> None:
    subjects = world.scenario.subjects
    before = await _created(world)
    reader = await _reader(world)
    try:
        requests = reading_requests(subjects)
        sample = [requests[0], *rng.sample(requests, SAMPLE)]
        await request_everywhere(reader.client, sample, targets(subjects))
    finally:
        await reader.client.close()
    assert await _created(world) == before


@fault("hostile: a reader lets consumers deliver to the bridge's subjects", weight=2)
async def push(world: World, rng: random.Random) -> None:
    subjects = world.scenario.subjects
    before = await _created(world)
    reader = await _reader(world)
    try:
        await push_everywhere(reader, subjects, rng.sample(targets(subjects), SAMPLE))
    finally:
        await reader.client.close()
    assert await _created(world) == before


@fault("hostile: a reader publishes changes and deletes streams", weight=2)
async def publish(world: World, _: random.Random) -> None:
    subjects = world.scenario.subjects
    before = await _created(world)
    reader = await _reader(world)
    try:
        for subject in targets(subjects):
            await reader.client.publish(subject, b"")
            await reader.client.publish(subject, b"{}")
        await reader.client.flush()
    finally:
        await reader.client.close()
    assert await _created(world) == before


@fault("hostile: a reader floods the bridge with snapshot requests")
async def flood(world: World, rng: random.Random) -> None:
    subjects = world.scenario.subjects
    reader = await _reader(world)
    try:
        replies = [
            f"{reader.client.new_inbox()}.x",
            subjects.fence("shop"),
            subjects.progress("shop"),
        ]
        for _ in range(REQUESTS):
            table = rng.choice((*world.load.tables, f"none_{rng.getrandbits(32):x}"))
            await reader.client.publish(
                subjects.snapshot_request(table),
                rng.choice((b"", b"{}", b'{"fresh": true}', b"\xc1", rng.randbytes(200))),
                reply=rng.choice(replies),
            )
        await reader.client.flush()
    finally:
        await reader.client.close()


@fault("hostile: a database user plants functions in public", weight=2)
async def plant(world: World, _: random.Random) -> None:
    dsn = world.scenario.database.role("LOGIN")
    user = str(psycopg.conninfo.conninfo_to_dict(dsn)["user"])
    with psycopg.connect(world.postgres.dsn("shop"), autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS public.planted_calls (who text)")
        connection.execute("GRANT INSERT ON public.planted_calls TO PUBLIC")
        grant = sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(sql.Identifier(user))
        connection.execute(grant)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for signature in PLANTED:
            connection.execute(
                f"CREATE OR REPLACE FUNCTION public.{signature} RETURNS text LANGUAGE plpgsql AS "
                "$$ BEGIN INSERT INTO public.planted_calls VALUES (current_user); "
                "RETURN 'planted'; END $$"
            )
    try:
        world.terminate_sessions()
        await world.until_ready()
        await world.until_growing(10)
        with psycopg.connect(world.postgres.dsn("shop"), autocommit=True) as connection:
            assert not connection.execute("SELECT who FROM public.planted_calls").fetchall()
    finally:
        with psycopg.connect(world.postgres.dsn("shop"), autocommit=True) as connection:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(user)))
