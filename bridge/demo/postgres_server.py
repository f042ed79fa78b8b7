"""A real PostgreSQL of our own, from the binaries that come as a wheel."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psycopg
from psycopg import sql

from bridge.demo.guarded_process import (
    LOOPBACK,
    GuardedProcess,
    ServerError,
    free_port,
    poll_until,
)
from bridge.demo.postgres_cluster import (
    DEFAULT_SETTINGS,
    SUPERUSER,
    PostgresCluster,
    wheel_tree,
)
from bridge.demo.server_account import account_for, temporary_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

STOP_SIGNALS: Final = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class PostgresServer:
    """A PostgreSQL cluster on a free loopback port, with logical replication switched on.

    It survives `stop`, `kill` and `restart` on the same port with its data. A temporary directory
    is deleted by `close`; a given one is kept, and used again if it already holds a cluster.
    `settings` may be changed between starts.
    """

    def __init__(
        self,
        version: int = 18,
        directory: Path | str | None = None,
        settings: Mapping[str, object] | None = None,
        *,
        installation: Path | str | None = None,
    ) -> None:
        self.version = version
        self.host = LOOPBACK
        self.port = free_port()
        self.settings: dict[str, object] = {**DEFAULT_SETTINGS, **(settings or {})}
        tree = Path(installation) if installation else wheel_tree(version)
        self._temporary = directory is None
        given = None if directory is None else Path(directory).resolve()
        account = account_for(given)
        self.directory = given or temporary_directory(account)
        self._cluster = PostgresCluster(self.directory, tree, account, temporary=self._temporary)
        self.log_path = self._cluster.log_path
        self._process: GuardedProcess | None = None
        # Once clients know the port, taking another one would be no restart.
        self._port_is_known = False

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        if self._process is None or not self._process.running:
            raise ServerError("PostgreSQL is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the postmaster is alive."""
        return self._process is not None and self._process.running

    @property
    def password(self) -> str:
        """Password of the superuser, drawn when the cluster was made."""
        return self._cluster.password_path.read_text().strip()

    @property
    def bin_directory(self) -> Path:
        """Where psql, pg_recvlogical and pgbench of this version are."""
        return self._cluster.installation / "bin"

    def dsn(
        self, dbname: str = "postgres", user: str = SUPERUSER, password: str | None = None
    ) -> str:
        """Connection string; the superuser's password is filled in."""
        if password is None and user == SUPERUSER:
            password = self.password
        secret = f":{password}" if password is not None else ""
        return f"postgresql://{user}{secret}@{self.host}:{self.port}/{dbname}"

    def start(self, timeout: float = 60) -> None:
        """Start the server; return when it accepts connections."""
        if self.running:
            return
        cluster = self._cluster
        cluster.prepare()
        for _ in range(5):
            cluster.write_settings(
                {**self.settings, "listen_addresses": self.host, "port": self.port}
            )
            self._process = GuardedProcess(
                f"PostgreSQL {self.version}",
                [self.bin_directory / "postgres", "-D", cluster.data_directory],
                log_path=self.log_path,
                stop_signal=STOP_SIGNALS["immediate"],
                account=cluster.account,
                remove_if_orphaned=self.directory if self._temporary else None,
            )
            poll_until(self._settled, timeout)
            if self._accepts_connections():
                self._port_is_known = True
                return
            if self._process.running:
                self._process.kill()
                raise self._process.failure(f"did not become ready in {timeout:g} s")
            if self._port_is_known or not self._port_was_taken():
                raise self._process.failure("ended instead of becoming ready")
            self.port = free_port()
        raise ServerError("PostgreSQL found no free port in five attempts")

    def stop(self, mode: str = "fast", timeout: float = 30) -> None:
        """Shut down in the given mode (smart, fast or immediate); raise if it takes longer."""
        if self._process is None:
            return
        self._process.send_signal(STOP_SIGNALS[mode])
        if not self._process.wait(timeout):
            raise ServerError(f"PostgreSQL did not finish a {mode} shutdown in {timeout:g} s")

    def kill(self) -> None:
        """SIGKILL the postmaster and all its children, as a crash would."""
        if self._process is not None:
            self._process.kill()

    def restart(self, mode: str = "fast", timeout: float = 30) -> None:
        """Stop and start again on the same port, with the same data."""
        self.stop(mode, timeout)
        self.start()

    def freeze(self) -> None:
        """Suspend every process of the server, so that it is there but does not answer."""
        if self._process is not None:
            self._process.signal_tree(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        if self._process is not None:
            self._process.signal_tree(signal.SIGCONT)

    def close(self) -> None:
        """Stop at any price; delete a temporary directory."""
        if self._process is not None:
            self.thaw()
            mode = "immediate" if self._temporary else "fast"
            self._process.send_signal(STOP_SIGNALS[mode])
            if not self._process.wait(20):
                self._process.kill()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def create_database(self, name: str) -> str:
        """Create a database and return its connection string."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database with everything that holds it: sessions, walsenders and slots."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                " WHERE database = %s AND active",
                [name],
            )
            poll_until(lambda: _drop_idle_slots(connection, name), timeout=10)
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )

    def _accepts_connections(self) -> bool:
        process = self._process
        return (
            process is not None
            and process.running
            and self._cluster.postmaster_state(process.pid) == "ready"
        )

    def _settled(self) -> bool:
        return not self.running or self._accepts_connections()

    def _port_was_taken(self) -> bool:
        tail = self.log_path.read_text(errors="replace")[-2000:]
        return "could not create any TCP/IP sockets" in tail


def _drop_idle_slots(connection: psycopg.Connection, database: str) -> bool:
    # A terminated walsender gives its slot back a moment later.
    connection.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE database = %s AND NOT active",
        [database],
    )
    left = connection.execute(
        "SELECT 1 FROM pg_replication_slots WHERE database = %s", [database]
    ).fetchone()
    return left is None
