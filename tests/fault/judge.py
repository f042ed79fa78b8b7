"""Checks the invariants of a campaign at a barrier: writers stopped, everything published."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from tests.fault.stream_oracle import (
    StreamHistory,
    check_confirmed,
    primary_key,
)
from tests.fault.stream_reader import load_dictionaries, read_stream
from tests.fault.workload import ACCOUNTS, OPENING_BALANCE, ledger_of
from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from consumer_sdk.wire import Event
    from tests.fault.world import World

CDC = Path(sys.executable).parent / "cdc"
TOTAL = ACCOUNTS * OPENING_BALANCE
# Long, because a busy machine is not a failure; other tests check what must be fast.
TIMEOUT_SECONDS = 300
MEMORY_LIMIT = 300 * 1024 * 1024

MIRROR_MEMORY_LIMIT = 300 * 1024 * 1024

INVARIANTS = (
    "order, ends, ids, schemas and progress of the stream",
    "stream folds to the source, row by row",
    "every ledger row once, in order",
    "accounts add up at every transaction boundary",
    "confirmed position never ahead of the stream",
    "SQLite mirror equals the source",
    "accounts add up for readers of the mirror",
    "Delta table equals the source",
    "accounts add up in every version of the Delta table",
    "memory bounded",
    "gaps announced, and no others",
)


class Judge:
    """Reads the stream from barrier to barrier and keeps the tables that its events produce."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._history = StreamHistory(world.scenario.subjects)
        self._next_sequence = 1
        self._folded = 0
        self._tables: dict[str, dict[Any, dict[str, Any]]] = {}
        self._ledgers: dict[str, int] = {}
        self.gaps_expected = 0
        self.memory_seen = 0

    async def barrier(self, *, replicas: bool = True) -> list[str]:
        """Stop the writers, wait until all is applied, check and return the invariants."""
        world = self._world
        world.load.stop()
        await world.until_ready()
        await world.scenario.drained(TIMEOUT_SECONDS)
        await self._read_on()
        self._check_gaps()
        self._fold()
        self._compare()
        source = self._history.sources[world.scenario.slot]
        check_confirmed(source, world.scenario.samples)
        world.scenario.samples.clear()
        self.check_memory()
        left_out = set()
        if replicas and "mirror" in world.features:
            await self._check_replica()
            assert world.accounts_seen <= {TOTAL}, world.accounts_seen
        else:
            left_out |= {name for name in INVARIANTS if "mirror" in name}
        if replicas and "spark" in world.features:
            await self._check_lake()
        else:
            left_out |= {name for name in INVARIANTS if "Delta" in name}
        return [name for name in INVARIANTS if name not in left_out]

    async def _read_on(self) -> None:
        world = self._world
        stream = world.scenario.subjects.cdc_stream
        messages = await read_stream(world.client, stream, self._next_sequence)
        self._history.dictionaries |= await load_dictionaries(
            world.client, world.scenario.subjects, messages
        )
        self._history.take(messages)
        if messages:
            self._next_sequence = messages[-1].sequence + 1
        foreign = [(message.sequence, message.subject) for message in self._history.foreign]
        assert not foreign, f"foreign messages in the stream: {foreign[:5]}"
        self._history.finish()

    def forget_stream(self) -> None:
        """Start over after the stream was deleted: the next messages are of a new stream."""
        self.reread()
        self.gaps_expected = 0

    def reread(self) -> None:
        """Start over because the stream may have lost its last messages."""
        self._history = StreamHistory(self._world.scenario.subjects)
        self._next_sequence = 1
        self._folded = 0
        self._world.scenario.samples.clear()

    async def catch_up(self) -> None:
        """Read the new messages without checking them."""
        await self._read_on()

    def rebase(self) -> None:
        """After a gap, take the tables of the source as they are now; the writers are stopped."""
        self._tables.clear()
        self._ledgers.clear()
        with psycopg.connect(
            self._world.scenario.database.dsn, row_factory=psycopg.rows.dict_row
        ) as connection:
            for table in self._world.load.tables:
                key = primary_key(connection, table)
                rows = connection.execute(
                    sql.SQL("SELECT * FROM {}").format(sql.Identifier(table))
                ).fetchall()
                self._tables[table] = {row[key]: row for row in rows}
                if key == "n":
                    self._ledgers[table] = max((row["n"] for row in rows), default=0)
        source = self._history.sources.get(self._world.scenario.slot)
        self._folded = len(source.events) if source is not None else 0

    def _check_gaps(self) -> None:
        source = self._history.sources[self._world.scenario.slot]
        assert len(source.gaps) == self.gaps_expected, source.gaps

    def _fold(self) -> None:
        source = self._history.sources[self._world.scenario.slot]
        with psycopg.connect(
            self._world.scenario.database.dsn, row_factory=psycopg.rows.dict_row
        ) as connection:
            keys = {table: primary_key(connection, table) for table in self._world.load.tables}
        transaction = 0
        for event in source.events[self._folded :]:
            if event.commit_lsn != transaction:
                self._check_accounts()
                transaction = event.commit_lsn
            self._apply(event, keys[event.table])
        self._check_accounts()
        self._folded = len(source.events)

    def _apply(self, event: Event, key: str) -> None:
        rows = self._tables.setdefault(event.table, {})
        if event.operation == "TRUNCATE":
            rows.clear()
            return
        assert event.data is not None, "no row of the workload is that large"
        if event.operation == "DELETE":
            del rows[event.data[key]]
        elif event.operation == "INSERT":
            assert event.data[key] not in rows, f"{event.table} {event.data[key]} twice"
            rows[event.data[key]] = dict(event.data)
            if event.table.startswith("ledger_"):
                before = self._ledgers.get(event.table, 0)
                assert event.data["n"] == before + 1, f"{event.table}: {event.data['n']}"
                self._ledgers[event.table] = event.data["n"]
        else:
            before_row = rows.pop((event.old or event.data)[key])
            kept = {name: before_row[name] for name in event.unchanged}
            rows[event.data[key]] = {**event.data, **kept}

    def _check_accounts(self) -> None:
        accounts = self._tables.get("accounts", {})
        if accounts:
            total = sum(row["balance"] for row in accounts.values())
            assert total == TOTAL, f"accounts add up to {total}"

    def _compare(self) -> None:
        world = self._world
        with psycopg.connect(
            world.scenario.database.dsn, row_factory=psycopg.rows.dict_row
        ) as connection:
            for table in world.load.tables:
                key = primary_key(connection, table)
                rows = connection.execute(
                    sql.SQL("SELECT * FROM {}").format(sql.Identifier(table))
                ).fetchall()
                source = {row[key]: row for row in rows}
                columns = list(rows[0]) if rows else []
                mine = {
                    number: {name: row.get(name) for name in columns}
                    for number, row in self._tables.get(table, {}).items()
                }
                assert mine == source, _difference(table, mine, source)
        for writer in range(world.load.writers):
            table = ledger_of(writer)
            assert len(self._tables.get(table, {})) == self._ledgers.get(table, 0)

    def check_memory(self) -> None:
        """Check the peak memory of bridge and mirror."""
        world = self._world
        processes = [(world.bridge.pid, MEMORY_LIMIT)]
        if world.mirror is not None:
            processes.append((world.mirror.pid, MIRROR_MEMORY_LIMIT))
        for pid, limit in processes:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM"):
                    most = int(line.split()[1]) * 1024
                    self.memory_seen = max(self.memory_seen, most)
                    assert most < limit, line

    async def _check_lake(self) -> None:
        world = self._world
        last = "nothing compared"

        def equal() -> bool:
            nonlocal last
            world.supervise()
            last = world.lake.differs(world.scenario.database.dsn)
            return not last

        await eventually(
            lambda: asyncio.to_thread(equal),
            TIMEOUT_SECONDS,
            lambda: f"lake = source\n{last}\n{world.lake.log_tail()}",
        )
        sums = await asyncio.to_thread(world.lake.sums)
        assert set(sums) <= {TOTAL}, sums

    async def _check_replica(self) -> None:
        world = self._world
        last = ""

        async def equal() -> bool:
            nonlocal last
            await asyncio.to_thread(world.supervise)
            done = await asyncio.to_thread(
                subprocess.run,
                [
                    CDC, "verify", *world.load.tables, "--prefix", world.scenario.prefix,
                    "--source", world.scenario.database.dsn,
                    "--replica", f"sqlite:///{world.replica}",
                ],
                env=clean_environment(NATS_URL=world.scenario.nats_url.split(",")[0]),
                capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS,
            )  # fmt: skip
            last = done.stdout + done.stderr
            return done.returncode == 0

        await eventually(
            equal,
            TIMEOUT_SECONDS,
            lambda: f"replica = source\n{last}\n{world.follower.describe()}",
        )


def _difference(table: str, mine: dict[Any, Any], source: dict[Any, Any]) -> str:
    missing = sorted(set(source) - set(mine))[:5]
    extra = sorted(set(mine) - set(source))[:5]
    wrong = [number for number in source if number in mine and mine[number] != source[number]][:5]
    return f"{table}: missing {missing}, too many {extra}, different {wrong}"
