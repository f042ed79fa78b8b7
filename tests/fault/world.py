"""The system under test: servers, proxies, supervised bridge and consumers, and a workload."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import nats
import psycopg

from bridge.embedded import NatsCluster, NatsServer, PostgresServer, free_port
from bridge.embedded.guardian import children
from bridge.preflight.permissions import BRIDGE_USER, READER_USER
from consumer_sdk.wire.envelope import decode_payload
from consumer_sdk.wire.errors import WireError
from tests.fault.judge import TIMEOUT_SECONDS, Judge
from tests.fault.lake_process import LakeProcess
from tests.fault.scenario import Scenario, ignore
from tests.fault.stream_reader import load_dictionaries, read_stream
from tests.fault.workload import ALL, Workload
from tests.fixtures.bridge_process import BridgeProcess, clean_environment
from tests.fixtures.mirror import MirrorProcess
from tests.fixtures.nats import PASSWORD, accounts
from tests.fixtures.nats_accounts import replace_file
from tests.fixtures.postgres import Database
from tests.fixtures.tcp_proxy import TcpProxy
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nats.aio.client import Client

PREFIX = "proof"
SETTINGS = {
    "wal_sender_timeout": "10s",
    "min_wal_size": "32MB",
    "max_wal_size": "64MB",
}
EVIDENCE_MESSAGES = 20_000
EVIDENCE = (
    "source", "epoch", "operation", "lsn", "seq", "last", "schema_version", "stream_seq",
    "instance", "before", "gap", "ts",
)  # fmt: skip
# Without `evolving`, whose schema changes would slow Spark down further.
LAKE_TABLES = ("accounts", "keyed", "bulk", "ledger_0", "ledger_1")


class World:
    """A small installation under load; faults act on it, and a judge checks it."""

    def __init__(
        self, seed: int, *, mirror: bool = True, spark: bool = False, cluster: bool = False
    ) -> None:
        rng = random.Random(f"world-{seed}")
        self.features = {"cluster" if cluster else "single"}
        self.features |= {name for name, on in (("mirror", mirror), ("spark", spark)) if on}
        self._stack = ExitStack()
        self.directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.postgres = self._stack.enter_context(
            PostgresServer(rng.choice((18, 16)), settings=SETTINGS)
        )
        self.cluster: NatsCluster | None = None
        if cluster:
            self.cluster = self._stack.enter_context(NatsCluster(3, config=accounts(PREFIX)))
            self.nats = self.cluster.servers[0]
        else:
            self.nats = self._stack.enter_context(NatsServer(config=accounts(PREFIX)))
        self.postgres_proxy = self._stack.enter_context(TcpProxy(self.postgres.port))
        self.nats_proxy = self._stack.enter_context(TcpProxy(self.nats.port))
        self.postgres.create_database("shop")
        database = Database(self.postgres, "shop")
        self.role_dsn = database.role("LOGIN REPLICATION")
        self.password_file = self.directory / "nats-password"
        replace_file(self.password_file, PASSWORD)
        self.holds = self.directory / "holds"
        self.holds.mkdir()
        self.flags = _draw_flags(rng, 3 if cluster else 1)
        self._launched = 0
        self._launched_at = 0.0
        self.client: Client
        self.bridge: BridgeProcess
        self.mirror: MirrorProcess | None = None
        self.replica = self.directory / "replica.db"
        self.load = Workload(
            database.dsn, seed, writers=2, pause=0.15 if spark else 0.03, kinds=ALL
        )
        self.scenario = Scenario(
            database,
            PREFIX,
            self._url("admin", "admin"),
            None,  # type: ignore[arg-type]
            lambda *_, **__: self.bridge,
            slot="shop",
            seed=seed,
        )
        self.lake = LakeProcess(self.directory, LAKE_TABLES, self.reader_url, PREFIX, self.holds)
        self.judge = Judge(self)
        self.accounts_seen: set[int] = set()

    def _url(self, user: str, password: str) -> str:
        servers = self.cluster.servers if self.cluster else [self.nats]
        return ",".join(server.url_as(user, password) for server in servers)

    def _login(self, user: str) -> dict[str, str]:
        """The NATS address and login of bridge or mirror, whose password is in a file."""
        servers = self.cluster.servers if self.cluster else [self.nats]
        return {
            "NATS_URL": self._through_proxy(",".join(server.url for server in servers)),
            "NATS_BRIDGE_USER": user,
            "NATS_PASSWORD_FILE": str(self.password_file),
        }

    @property
    def reader_url(self) -> str:
        """The NATS address and login of Spark and hostile readers."""
        return self._through_proxy(self._url(READER_USER, PASSWORD))

    def _through_proxy(self, url: str) -> str:
        return url if self.cluster else self.nats_proxy.through(url)

    @property
    def proxies(self) -> list[TcpProxy]:
        """The proxies in use; in a cluster, clients connect to the nodes directly."""
        return [self.postgres_proxy] if self.cluster else [self.postgres_proxy, self.nats_proxy]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        self.client = await nats.connect(
            self.scenario.nats_url.split(","),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,
            error_cb=ignore,
        )
        self.scenario.client = self.client
        self.load.create_tables()
        database = self.scenario.database
        database.publish(*self.load.tables)
        database.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {self.role_name}")
        database.execute(f"GRANT CREATE ON DATABASE shop TO {self.role_name}")
        self.launch_bridge()
        self.bridge.wait_ready(TIMEOUT_SECONDS)
        self.load.start()
        if "mirror" in self.features:
            self.launch_mirror()
        if "spark" in self.features:
            self.lake.launch()

    async def __aexit__(self, *_: object) -> None:
        if "spark" in self.features:
            self.lake.kill()
        if self.mirror is not None:
            self.mirror.kill()
        self.bridge.kill()
        self.load.problems.clear()
        self.load.stop()
        await self.client.close()
        self._stack.close()

    @property
    def role_name(self) -> str:
        """The role of the bridge."""
        return self.role_dsn.split("//")[1].split(":")[0]

    @property
    def follower(self) -> MirrorProcess:
        """The mirror; only for faults that need a world with one."""
        assert self.mirror is not None
        return self.mirror

    def launch_bridge(self, *extra: str) -> BridgeProcess:
        """Start another bridge, which becomes the supervised one."""
        self._launched += 1
        self._launched_at = time.monotonic()
        port = free_port()
        arguments = ["--slot", "shop", "--pub", "pub", "--port", str(port), "--prefix", PREFIX]
        environment = clean_environment(
            DATABASE_URL=self.postgres_proxy.through(self.role_dsn),
            TAILRACE_HOLD=str(self.holds),
            **self._login(BRIDGE_USER),
        )
        log = self.directory / f"bridge-{self._launched}.log"
        self.bridge = BridgeProcess([*arguments, *self.flags, *extra], environment, port, log)
        return self.bridge

    def launch_mirror(self) -> None:
        """Start the mirror."""
        self._launched_at = time.monotonic()
        self.mirror = MirrorProcess(
            "--all", "--into", f"sqlite:///{self.replica}",
            directory=self.directory, nats_url=self.reader_url, prefix=PREFIX,
            environment={"TAILRACE_HOLD": str(self.holds), **self._login(READER_USER)},
        )  # fmt: skip

    def kill_mirror(self) -> None:
        """Kill the mirror; it stays down until `launch_mirror`."""
        self.follower.kill()
        self.mirror = None

    def forget_replica(self) -> None:
        """Kill the mirror and delete its file, so that the next one starts from snapshots."""
        self.kill_mirror()
        for path in self.directory.glob("replica.db*"):
            path.unlink()

    def supervise(self) -> None:
        """Restart ended processes after a second, as a service manager does."""
        if not self.bridge.running:
            # 3 is expected while a server refuses its credentials.
            code = self.bridge.exit_code
            assert code in (0, 3, 128 + 9), f"the bridge ended with {code}:\n{self.bridge_log()}"
        if self.mirror is not None and not self.mirror.running:
            code = self.mirror.wait(1)
            # A mirror that starts before the schemas are restored finds no table.
            unknown = code == 1 and "is not published here" in self.mirror.log_text()
            assert unknown or code in (0, 3, 128 + 9), self.mirror.describe()
        if "spark" in self.features and not self.lake.running:
            # 1: Spark itself failed, as it does when its workers report too slowly.
            code = self.lake.exit_code
            assert code in (0, 1, 3, 128 + 9), f"Spark ended with {code}:\n{self.lake.log_tail()}"
        if time.monotonic() < self._launched_at + 1:
            return
        if not self.bridge.running:
            self.launch_bridge()
        if self.mirror is not None and not self.mirror.running:
            self.launch_mirror()
        if "spark" in self.features and not self.lake.running:
            self._launched_at = time.monotonic()
            self.lake.launch()

    async def keep_evidence(self, directory: Path) -> None:
        """Save what explains a failed round: logs, where the bridge waits, the end of the stream.

        Of each message only identity, position and schema version are saved.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if self.bridge.running:
            await asyncio.to_thread(print_tasks, self.bridge)
        servers = self.cluster.servers if self.cluster else [self.nats]
        logs = [*self.directory.glob("*.log"), self.postgres.log_path]
        for path in [*logs, *(server.log_path for server in servers)]:
            if path.exists():
                shutil.copy(path, directory / f"{path.parent.name}-{path.name}")
        stream = self.scenario.subjects.cdc_stream
        last = (await self.scenario.api(f"STREAM.INFO.{stream}"))["state"]["last_seq"]
        messages = await read_stream(self.client, stream, max(1, last - EVIDENCE_MESSAGES))
        dictionaries = await load_dictionaries(self.client, self.scenario.subjects, messages)
        with (directory / "stream.jsonl").open("w") as file:
            for one in messages:
                found = {"sequence": one.sequence, "subject": one.subject, **one.headers}
                with contextlib.suppress(WireError):
                    document = decode_payload(one.headers, one.data, dictionaries)
                    found |= {key: document[key] for key in EVIDENCE if key in document}
                file.write(json.dumps(found, default=str) + "\n")

    def bridge_log(self) -> str:
        """The end of the newest bridge's log."""
        return self.bridge.log_text()[-6000:]

    async def until_ready(self, timeout: float = TIMEOUT_SECONDS) -> None:
        """Wait until the bridge streams; restart ended processes meanwhile."""

        def ready() -> bool:
            self.supervise()
            return self.bridge.ready()

        await eventually(
            lambda: asyncio.to_thread(ready),
            timeout,
            lambda: f"the bridge streams again\n{self.bridge_log()}",
        )

    async def until_all_run(self) -> None:
        """Wait until every process that a previous fault ended runs again."""

        def all_run() -> bool:
            self.supervise()
            return self.bridge.running and (self.mirror is None or self.mirror.running)

        await eventually(lambda: asyncio.to_thread(all_run), TIMEOUT_SECONDS, "everything runs")

    async def until_growing(self, by: int = 20, timeout: float = TIMEOUT_SECONDS) -> None:
        """Wait until the stream grows again."""
        await self.scenario.grown(by, timeout)

    def watch_accounts(self) -> None:
        """Record the sum of the accounts that a reader of the replica sees now."""
        if not self.replica.exists():
            return
        uri = f"file:{self.replica}?mode=ro"
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1)) as connection,
        ):
            (total,) = connection.execute("SELECT sum(balance) FROM accounts").fetchone()
            if total is not None:
                self.accounts_seen.add(int(total))

    async def wait(self, seconds: float, *, watching: bool = True) -> None:
        """Wait during a fault, while readers read the replica."""
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0:
            if watching:
                await asyncio.to_thread(self.watch_accounts)
            await asyncio.sleep(min(0.1, left))

    def terminate_sessions(self) -> None:
        """Terminate the sessions of the bridge's role in PostgreSQL."""
        with psycopg.connect(self.postgres.dsn("shop"), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s",
                [self.role_name],
            )

    async def stop_bridge(self) -> None:
        """Stop the bridge gracefully."""
        self.bridge.terminate()
        await eventually(lambda: not self.bridge.running, TIMEOUT_SECONDS, self.bridge_log)
        assert self.bridge.exit_code == 0, self.bridge_log()

    async def set_stream(self, **changes: Any) -> None:
        """Change the CDC stream's configuration."""
        stream = self.scenario.subjects.cdc_stream
        config = (await self.scenario.api(f"STREAM.INFO.{stream}"))["config"]
        await self.scenario.api(f"STREAM.UPDATE.{stream}", {**config, **changes})

    async def stream_leader(self) -> NatsServer:
        """The member of the cluster that leads the CDC stream."""
        assert self.cluster is not None
        servers = {server.name: server for server in self.cluster.servers}
        stream = self.scenario.subjects.cdc_stream

        async def led() -> NatsServer | None:
            info = await self.scenario.api(f"STREAM.INFO.{stream}")
            return servers.get(info["cluster"].get("leader"))

        leader: NatsServer = await eventually(led, TIMEOUT_SECONDS, "the stream has a leader")
        return leader

    def admit_bridge(self, *, admitted: bool) -> None:
        """Grant or revoke the credentials of bridge and consumers; sessions end at once."""
        # With another password nobody who knows the old one is let in.
        self.load_accounts(PASSWORD, PASSWORD if admitted else f"not-{PASSWORD}")

    def load_accounts(self, text: str = "", instead: str = "") -> None:
        """Let the server load the printed accounts, with one text in place of another."""
        config = accounts(PREFIX)
        assert text in config
        self.nats.config = config.replace(text, instead) if text else config
        self.nats.reload()

    async def mirror_announces_gap(self) -> None:
        """Start the mirror, which must report a gap."""
        self.launch_mirror()
        mirror = self.follower
        await eventually(
            lambda: "event=gap" in mirror.log_text() or not mirror.running,
            TIMEOUT_SECONDS,
            mirror.describe,
        )
        assert "event=gap" in mirror.log_text(), mirror.describe()

    def hold(self, point: str) -> None:
        """Hold every process that reaches a named point."""
        (self.holds / f"{point}.reached").unlink(missing_ok=True)
        (self.holds / f"{point}.hold").touch()

    def release(self, point: str) -> None:
        """Let held processes continue."""
        (self.holds / f"{point}.hold").unlink(missing_ok=True)

    @contextmanager
    def dying_at(self, point: str) -> Iterator[None]:
        """Kill every process that reaches a named point."""
        mark = self.holds / f"{point}.kill"
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    def snapshot_workers_at_work(self) -> list[int]:
        """Process ids of the snapshot workers, once one of them is held at its first chunk."""
        self.supervise()
        if not (self.holds / "snapshot.chunk.0.reached").exists():
            return []
        return [pid for pid in children(self.bridge.pid) if _is_worker(pid)]


def print_tasks(bridge: BridgeProcess) -> str:
    """Let a running bridge print where each of its tasks waits; returns the end of its log."""
    before = bridge.log_text().count("tasks printed")
    os.kill(bridge.pid, signal.SIGUSR1)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: bridge.log_text().count("tasks printed") > before, 10)
    return bridge.log_text()[-20_000:]


def _is_worker(pid: int) -> bool:
    try:
        return b"bridge.snapshot.worker.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _draw_flags(rng: random.Random, replicas: int) -> list[str]:
    flags = ["--duplicate-window", "1s", "--nats-away-limit", "20s", "--replicas", str(replicas)]
    flags += [flag for flag in ("--pack", "--json", "--zstd-events") if rng.random() < 0.3]
    if rng.random() < 0.3:
        flags += ["--ring-slots", "64", "--ring-bytes", "65536", "--batch-events", "20"]
    return flags
