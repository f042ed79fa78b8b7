"""Faults of PostgreSQL and nats-server: crash, restart, freeze, revoked permissions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bridge.preflight.permissions import BRIDGE_USER, READER_USER
from tests.fault.faults.registry import fault
from tests.fault.nats_store import drop_last_messages, full_disk
from tests.fixtures.nats import PASSWORD
from tests.fixtures.nats_accounts import replace_file

if TYPE_CHECKING:
    import random

    from tests.fault.world import World


@fault("postgres: kill -9")
async def kill_postgres(world: World, rng: random.Random) -> None:
    world.postgres.kill()
    await world.wait(rng.random() * 2)
    await asyncio.to_thread(world.postgres.start)


@fault("postgres: fast restart", weight=2)
async def restart_postgres(world: World, _: random.Random) -> None:
    await asyncio.to_thread(world.postgres.stop, 60)
    await asyncio.to_thread(world.postgres.start)


@fault("postgres: frozen", weight=2)
async def freeze_postgres(world: World, rng: random.Random) -> None:
    world.postgres.freeze()
    await world.wait(rng.choice((1, 3, 13)), watching=False)
    world.postgres.thaw()


@fault("postgres: sessions terminated")
async def terminate_sessions(world: World, _: random.Random) -> None:
    world.terminate_sessions()


@fault("postgres: login revoked and restored", weight=2)
async def revoke_login(world: World, rng: random.Random) -> None:
    role = world.role_name
    database = world.scenario.database
    database.execute(f"ALTER ROLE {role} NOLOGIN")
    world.terminate_sessions()
    await world.wait(rng.choice((1, 3, 6)))
    database.execute(f"ALTER ROLE {role} LOGIN")


@fault("nats: kill -9", weight=5, needs="single")
async def kill_nats(world: World, rng: random.Random) -> None:
    world.nats.kill()
    await world.wait(rng.random() * 2)
    await asyncio.to_thread(world.nats.start)


@fault("nats: SIGTERM and restart", weight=2, needs="single")
async def restart_nats(world: World, _: random.Random) -> None:
    await asyncio.to_thread(world.nats.restart)


@fault("nats: frozen", weight=2, needs="single")
async def freeze_nats(world: World, rng: random.Random) -> None:
    world.nats.freeze()
    await world.wait(rng.choice((1, 4, 18)))
    world.nats.thaw()


@fault("nats: credentials revoked and restored", weight=2, needs="single")
async def revoke_credentials(world: World, rng: random.Random) -> None:
    world.admit_bridge(admitted=False)
    await world.wait(rng.choice((1, 4, 8)))
    world.admit_bridge(admitted=True)


@fault("nats: user revoked and restored", weight=2, needs="single")
async def revoke_user(world: World, rng: random.Random) -> None:
    user = rng.choice((BRIDGE_USER, READER_USER))
    world.load_accounts(f"user: {user}\n", f"user: not-{user}\n")
    await world.wait(rng.choice((1, 4, 8)))
    world.load_accounts()


@fault("nats: credentials expired and renewed", weight=2, needs="single")
async def renew_credentials(world: World, rng: random.Random) -> None:
    renewed = f"renewed-{PASSWORD}"
    world.load_accounts(PASSWORD, renewed)
    await world.wait(rng.choice((0, 3, 8)))
    replace_file(world.password_file, renewed)
    await world.until_ready()
    # Spark and hostile readers know only the first one.
    steps = [world.load_accounts, lambda: replace_file(world.password_file, PASSWORD)]
    for step in rng.sample(steps, 2):
        step()
        await world.wait(rng.random())


@fault("nats: permissions taken away and given back", weight=2, needs="single")
async def take_permissions(world: World, rng: random.Random) -> None:
    world.load_accounts("{ allow: [", '{ deny: ">", allow: [')
    await world.wait(rng.choice((1, 4, 12)))
    world.load_accounts()


@fault("nats: disk full under the stream, then a restart", weight=2, needs="single")
async def fill_disk(world: World, rng: random.Random) -> None:
    with full_disk(world.nats, world.scenario.subjects.cdc_stream, rng.choice((0, 500, 20_000))):
        await world.wait(rng.choice((2, 6, 15)))
    if rng.random() < 0.5:
        world.nats.kill()
        await asyncio.to_thread(world.nats.start)
    else:
        await asyncio.to_thread(world.nats.restart)


@fault("cluster: leader of the stream killed", weight=10, needs="cluster")
async def kill_leader(world: World, rng: random.Random) -> None:
    server = await world.stream_leader()
    server.kill()
    await world.wait(rng.uniform(0.5, 3))
    server.launch()
    await asyncio.to_thread(server.wait_until_ready, 90)


@fault("cluster: leader of the stream frozen", weight=3, needs="cluster")
async def freeze_leader(world: World, rng: random.Random) -> None:
    server = await world.stream_leader()
    server.freeze()
    await world.wait(rng.choice((2, 6, 15)))
    server.thaw()


@fault("cluster: a node frozen", weight=3, needs="cluster")
async def freeze_node(world: World, rng: random.Random) -> None:
    assert world.cluster is not None
    server = rng.choice(world.cluster.servers)
    server.freeze()
    await world.wait(rng.choice((2, 6, 15)))
    server.thaw()


@fault("cluster: a node restarted", weight=2, needs="cluster")
async def restart_node(world: World, rng: random.Random) -> None:
    assert world.cluster is not None
    server = rng.choice(world.cluster.servers)
    await asyncio.to_thread(server.stop)
    server.launch()
    await asyncio.to_thread(server.wait_until_ready, 90)


@fault("cluster: a node restarted without what it had not synced", weight=3, needs="cluster")
async def lose_unsynced(world: World, rng: random.Random) -> None:
    assert world.cluster is not None
    server = rng.choice(world.cluster.servers)
    server.kill()
    drop_last_messages(server, world.scenario.subjects.cdc_stream, rng.choice((1, 10, 100)))
    await world.wait(rng.random() * 2)
    server.launch()
    await asyncio.to_thread(server.wait_until_ready, 90)


@fault("cluster: majority lost and back", weight=1, needs="cluster")
async def lose_majority(world: World, rng: random.Random) -> None:
    assert world.cluster is not None
    servers = rng.sample(world.cluster.servers, 2)
    for server in servers:
        server.kill()
    await world.wait(rng.uniform(1, 4))
    for server in servers:
        server.launch()
    for server in servers:
        await asyncio.to_thread(server.wait_until_ready, 90)
