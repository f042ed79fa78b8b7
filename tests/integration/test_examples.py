"""The examples, run as their docstrings say, against a real bridge."""

from __future__ import annotations

import ast
import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import nats
import pytest

import consumer_sdk.examples
from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.nats import READER_ENVIRONMENT
from tests.fixtures.waiting import wait_until, whole_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

EXAMPLES = Path(consumer_sdk.examples.__file__).parent


class Example:
    """A running example and what it has printed so far."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], out: Path):
        self._out = out
        with out.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"consumer_sdk.examples.{name}", *arguments],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def lines(self) -> list[str]:
        return whole_lines(self._out)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    nats_server: NatsServer,
    prefix: str,
    tmp_path: Path,
) -> Iterator[Callable[..., Example]]:
    """Starts examples against a bridge that publishes `users`."""
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text, bio text)")
    database.execute("INSERT INTO users SELECT n, 'user', NULL FROM generate_series(1, 3) n")
    database.publish("users")
    bridge_process()
    environment = clean_environment(
        NATS_URL=nats_server.reader_url, **READER_ENVIRONMENT, BRIDGE_PREFIX=prefix
    )
    started: list[Example] = []

    def run(name: str, *arguments: str) -> Example:
        out = tmp_path / f"{name}-{len(started)}.out"
        started.append(Example(name, list(arguments), environment, out))
        return started[-1]

    yield run
    for example in started:
        example.stop()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[a-z]*.py")), ids=lambda path: path.name)
def test_every_example_is_under_40_lines_and_documented(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 40
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("name", ["cache_in_a_dict", "mirror_to_sqlite", "outbox_handler"])
def test_an_example_without_its_arguments_tells_its_usage(name: str) -> None:
    module = f"consumer_sdk.examples.{name}"
    done = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"usage: python -m {module} ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cache_in_a_dict", ["users"]),
        ("mirror_to_sqlite", ["shop.db", "users"]),
        ("outbox_handler", ["http://127.0.0.1:1", "place"]),
        ("print_changes", []),
    ],
)
def test_an_example_ends_quietly_when_interrupted(
    name: str,
    arguments: list[str],
    start: Callable[..., Example],
    nats_server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = consumers(nats_server)
    example = start(name, *arguments)
    wait_until(lambda: consumers(nats_server) > before, what=lambda: "\n".join(example.lines()))
    example.process.send_signal(signal.SIGINT)
    assert example.process.wait(20) == 0
    assert example.lines() == []


def consumers(server: NatsServer) -> int:
    """How many readers the server knows."""

    async def count() -> int:
        client = await nats.connect(server.url)
        try:
            return (await client.jetstream().account_info()).consumers
        finally:
            await client.close()

    return asyncio.run(count())


def test_print_changes_shows_each_transaction(
    start: Callable[..., Example], database: Database
) -> None:
    example = start("print_changes", "users")
    number = 100

    def printed() -> list[str]:
        nonlocal number
        number += 1
        database.execute("INSERT INTO users VALUES (%s, 'new')", (number,))
        return [line for line in example.lines() if "INSERT public.users" in line]

    lines = wait_until(printed, what=lambda: "\n".join(example.lines()))
    assert "'name': 'new'" in lines[0]
    assert any(line.startswith("transaction ") for line in example.lines())


def test_a_cache_follows_the_table(start: Callable[..., Example], database: Database) -> None:
    example = start("cache_in_a_dict", "users")
    number = 100

    def follows() -> bool:
        nonlocal number
        number += 1
        database.execute("INSERT INTO users VALUES (%s, 'new')", (number,))
        return bool(example.lines())

    wait_until(follows, what=lambda: "\n".join(example.lines()))
    # Key changes, a large value that is left alone, and the end of all rows.
    database.execute("UPDATE users SET id = -id WHERE id = 1")
    database.execute("UPDATE users SET bio = repeat(md5(id::text), 1000) WHERE id = 2")
    database.execute("UPDATE users SET name = 'x', id = 1000 WHERE id = 2")
    database.execute("DELETE FROM users WHERE id > 99 AND id < 1000")
    wait_until(lambda: example.lines()[-1] == "3 rows", what=lambda: "\n".join(example.lines()))
    database.execute("TRUNCATE users")
    wait_until(lambda: example.lines()[-1] == "0 rows", what=lambda: "\n".join(example.lines()))


def test_a_mirror_follows_the_table(
    start: Callable[..., Example], database: Database, tmp_path: Path
) -> None:
    path = tmp_path / "shop.db"
    example = start("mirror_to_sqlite", str(path), "users")

    def rows() -> list[tuple[int, str]]:
        if not path.exists():
            return []
        with closing(sqlite3.connect(path)) as replica:
            try:
                return replica.execute("SELECT id, name FROM users ORDER BY id").fetchall()
            except sqlite3.OperationalError:
                return []

    wait_until(lambda: len(rows()) == 3, what=lambda: "\n".join(example.lines()))
    database.execute("UPDATE users SET id = 7, name = 'x' WHERE id = 1")
    wait_until(
        lambda: rows() == [(2, "user"), (3, "user"), (7, "x")],
        what=lambda: "\n".join([*map(str, rows()), *example.lines()]),
    )


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """An HTTP endpoint that refuses the first two deliveries of everything."""
    taken: list[tuple[str, str]] = []
    tries: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            key = self.headers["Idempotency-Key"]
            tries[key] = tries.get(key, 0) + 1
            if tries[key] < 3:
                self.send_error(503)
                return
            taken.append((key, body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", taken
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_outbox_is_delivered_in_order_across_refusals_and_restarts(
    start: Callable[..., Example],
    database: Database,
    receiver: tuple[str, list[tuple[str, str]]],
    tmp_path: Path,
) -> None:
    url, taken = receiver
    place = tmp_path / "outbox.position"
    for text in ("one", "two"):
        database.execute("SELECT pg_logical_emit_message(true, 'outbox', %s)", (text,))
    database.execute("SELECT pg_logical_emit_message(true, 'other', 'not for us')")
    example = start("outbox_handler", url, str(place))
    wait_until(lambda: len(taken) == 2, what=lambda: "\n".join(example.lines()))
    wait_until(lambda: place.exists() and int(place.read_text()) > 1)
    example.stop()
    database.execute("SELECT pg_logical_emit_message(true, 'outbox', 'three')")
    example = start("outbox_handler", url, str(place))

    def bodies() -> list[str]:
        return list(dict.fromkeys(body for _, body in taken))

    # Stopped before it noted that the second was taken, it delivers that one once more.
    wait_until(lambda: len(bodies()) == 3, what=lambda: "\n".join(example.lines()))
    assert bodies() == ["one", "two", "three"]
    assert any("attempt 1" in line for line in example.lines())
