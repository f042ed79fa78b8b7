"""What every measurement stands on: real servers, and how much CPU time a process has used."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from bridge.embedded import PostgresServer
from tests.fixtures.nats import SharedNats, accounts

if TYPE_CHECKING:
    from collections.abc import Iterator

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Rig:
    """One PostgreSQL and one NATS, alone on the machine as far as we can tell."""

    postgres: PostgresServer
    nats: SharedNats
    directory: Path

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.postgres.dsn(), autocommit=True)

    def execute(self, query: str, parameters: Any = None) -> list[Any]:
        with self.connect() as connection:
            cursor = connection.execute(query, parameters)
            return cursor.fetchall() if cursor.description else []

    def value(self, query: str, parameters: Any = None) -> Any:
        return self.execute(query, parameters)[0][0]


@contextmanager
def started() -> Iterator[Rig]:
    """Both servers, with the durability settings of a development machine."""
    settings = {"max_wal_size": "8GB", "shared_buffers": "512MB", "checkpoint_timeout": "1h"}
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory,
        PostgresServer(settings=settings) as postgres,
        SharedNats(config=accounts("")) as nats,
    ):
        yield Rig(postgres, nats, Path(directory))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def peak_rss_mb(pid: int) -> float:
    """Largest resident size of a process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    line = next((line for line in text.splitlines() if line.startswith("VmHWM")), "VmHWM: 0 kB")
    return int(line.split()[1]) / 1024


def fresh_name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(4)}"


def tool(rig: Rig, name: str) -> str:
    """Path of one of PostgreSQL's own programs, of the server's version."""
    return str(Path(rig.postgres.bin_directory) / name)


def run(command: list[str], **options: Any) -> None:
    subprocess.run(command, check=True, capture_output=True, **options)
