"""What the commands load before they know what to do: their help and their refusals are quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fixtures.bridge_process import clean_environment

CODECS = {"msgpack", "msgspec", "zstandard"}
SERVERS = {"aiohttp.client", "asyncio", "nats", "psycopg", "prometheus_client"}
TABLES = {"deltalake", "pandas", "pyarrow", "pyspark", "sqlite3"}


def loaded_by(command: str, *arguments: str) -> tuple[int, set[str]]:
    """The exit code of a command and the modules that it has loaded."""
    program = (
        "import sys; sys.argv = sys.argv[1:]; from consumer_sdk.launch import commands\n"
        "try: getattr(commands, sys.argv[0].replace('-', '_'))()\n"
        "finally: print('loaded', *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, *arguments],
        env=clean_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("cdc --help", 0),
        ("cdc --version", 0),
        ("cdc tables --help", 0),
        ("cdc schema --help", 0),
        ("cdc mirror --help", 0),
        ("cdc verify --help", 0),
        ("cdc nonsense", 2),
        ("cdc tables --nonsense", 2),
        ("cdc mirror users", 2),
        ("cdc verify users", 2),
        ("bridge --help", 0),
        ("bridge --version", 0),
        ("bridge check --help", 0),
        ("bridge config", 0),
        ("bridge", 2),
        ("bridge check", 2),
        ("bridge drop --slot s", 2),
        ("bridge --nonsense", 2),
    ],
)
def test_help_and_refusals_load_neither_servers_nor_codecs(command: str, code: int) -> None:
    ended, loaded = loaded_by(*command.split())
    assert ended == code
    allowed = {"asyncio"} if "mirror" in command else set()
    assert not ((CODECS | SERVERS | TABLES) - allowed) & loaded


@pytest.mark.parametrize("command", ["cdc tail --help", "cdc snapshot --help"])
def test_help_of_commands_that_print_rows_loads_no_server(command: str) -> None:
    ended, loaded = loaded_by(*command.split())
    assert ended == 0
    assert not ((SERVERS | TABLES) - {"asyncio"}) & loaded


def test_help_of_spark_loads_no_spark() -> None:
    ended, loaded = loaded_by("spark-consumer", "--help")
    assert ended == 0
    assert not (CODECS | SERVERS | TABLES) & loaded


@pytest.mark.parametrize("command", ["cdc --help", "bridge --help", "bridge config"])
def test_only_the_version_flag_reads_the_metadata_of_the_distribution(command: str) -> None:
    assert "importlib.metadata" not in loaded_by(*command.split())[1]


def test_websockets_load_what_they_need_when_they_are_used() -> None:
    """nats-py imports aiohttp with itself; the commands let it wait for the first use."""
    program = """
import asyncio, sys
from consumer_sdk.launch.commands import _defer_rarely_used
_defer_rarely_used()
import nats
from nats.aio.transport import WebSocketTransport
assert "aiohttp.client" not in sys.modules

async def use():
    transport = WebSocketTransport()
    await transport._client.close()

asyncio.run(use())
import aiohttp
from aiohttp import web
import aiohttp.client
assert nats.aio.transport.aiohttp.ClientSession is aiohttp.ClientSession
assert sys.modules["aiohttp"].__file__ and web.Application
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
