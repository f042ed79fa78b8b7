"""`cdc` as users run it, against a real bridge."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

from consumer_sdk import connect
from consumer_sdk.snapshot.snapshot import decode_meta, newest_metas
from tests.fixtures.bridge_process import clean_environment
from tests.fixtures.nats import READER_ENVIRONMENT
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database
    from tests.fixtures.publisher import Publisher

Result = subprocess.CompletedProcess[str]
CDC = str(Path(sys.executable).parent / "cdc")


class Shop:
    """A published database with a bridge on it, and `cdc` pointed at both."""

    def __init__(
        self, database: Database, bridge: BridgeProcess, run: Callable[..., Result], prefix: str
    ) -> None:
        self.database = database
        self.bridge = bridge
        self._run = run
        self.prefix = prefix

    def cdc(self, *arguments: str, **options: Any) -> Result:
        environment = {"BRIDGE_PREFIX": self.prefix, **options.pop("environment", {})}
        return self._run("cdc", *arguments, environment=environment, **options)


@pytest.fixture
def shop(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    run_command: Callable[..., Result],
    prefix: str,
) -> Shop:
    database.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text NOT NULL, at timestamptz, "
        "price numeric(10,2), tags text[], doc jsonb, blob bytea, ratio float8)"
    )
    database.execute('CREATE SCHEMA sales; CREATE TABLE sales."Odd Table.1" (id int PRIMARY KEY)')
    database.execute(
        "INSERT INTO users VALUES (1, 'Ada', '2025-12-12 12:00:34.338547+00', 1.50, "
        "'{a,NULL}', '{\"k\": [1]}', '\\xff00', 0.5), (2, '', NULL, NULL, NULL, NULL, NULL, NULL)"
    )
    database.publish("users", 'sales."Odd Table.1"')
    return Shop(database, bridge_process(), run_command, prefix)


def test_tables_lists_what_is_published(shop: Shop) -> None:
    result = shop.cdc("tables")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["table", "version", "columns", "row", "key", "source"]
    assert [line.split("  ")[0] for line in lines[1:]] == ["users", 'sales."Odd Table.1"']
    documents = [json.loads(line) for line in shop.cdc("tables", "--json").stdout.splitlines()]
    assert [document["table"] for document in documents] == ["users", "Odd Table.1"]


def test_schema_shows_columns_and_key(shop: Shop) -> None:
    result = shop.cdc("schema", "USERS")
    assert result.returncode == 0, result.stderr
    assert "primary key id; replica identity default" in result.stdout
    assert "timestamp with time zone" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()[2:]]
    assert lines[0] == ["column", "type", "null", "default", "identity"]
    assert lines[1] == ["id", "integer", "no", "yes"]
    document = json.loads(shop.cdc("schema", 'sales."Odd Table.1"', "--json").stdout)
    assert document["primary_key"] == ["id"]


def test_an_unknown_table_is_answered_with_similar_names(shop: Shop) -> None:
    for command in ("schema", "tail", "snapshot"):
        result = shop.cdc(command, "user")
        assert result.returncode == 1
        assert result.stdout == ""
        assert result.stderr == ("cdc: table user is not published here; did you mean users?\n")


def test_tail_prints_one_line_for_each_change(shop: Shop) -> None:
    shop.database.execute("INSERT INTO users (id, name) VALUES (3, E'Eve\\x1b[31m\\n')")
    shop.database.execute("UPDATE users SET name = 'Eva' WHERE id = 3")
    shop.database.execute("DELETE FROM users WHERE id = 3")
    shop.database.execute("TRUNCATE users")
    result = shop.cdc("tail", "users", "--from-start", "-n", "5")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[2] for line in lines] == [
        "SCHEMA", "INSERT", "UPDATE", "DELETE", "TRUNCATE",
    ]  # fmt: skip
    assert "\x1b" not in result.stdout
    assert '"name": "Eve\\u001b[31m\\n"' in lines[1]
    documents = [
        json.loads(line)
        for line in shop.cdc("tail", "--from-start", "--json", "-n", "5").stdout.splitlines()
    ]
    changes = [one for one in documents if one["operation"] != "SCHEMA"]
    assert [one["operation"] for one in changes][:3] == ["INSERT", "UPDATE", "DELETE"]
    assert changes[0]["data"]["id"] == 3
    assert all(one["table"] == "users" for one in changes)


@pytest.fixture
def following(shop: Shop, nats_server: NatsServer) -> Iterator[subprocess.Popen[str]]:
    """A `cdc tail` that is following."""
    process = subprocess.Popen(
        [CDC, "tail", "users", "--json"],
        env=clean_environment(
            NATS_URL=nats_server.reader_url, **READER_ENVIRONMENT, BRIDGE_PREFIX=shop.prefix
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def wait_for_first_line(shop: Shop, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Write until a line comes: when it does, the command is following."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    number = 100

    def line() -> str:
        nonlocal number
        number += 1
        shop.database.execute("INSERT INTO users (id, name) VALUES (%s, 'x')", (number,))
        assert process.poll() is None, process.stderr
        return process.stdout.readline()  # type: ignore[union-attr]

    found: dict[str, Any] = json.loads(wait_until(line, what="a line"))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tail_follows_until_interrupted_and_ends_quietly(
    shop: Shop, following: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert wait_for_first_line(shop, following)["operation"] in ("INSERT", "SCHEMA")
    following.send_signal(number)
    assert following.wait(30) == 0
    assert following.stderr is not None
    assert following.stderr.read() == ""


def test_a_reader_that_leaves_ends_it_quietly(shop: Shop, following: subprocess.Popen[str]) -> None:
    wait_for_first_line(shop, following)
    assert following.stdout is not None
    following.stdout.close()
    number = 10_000

    def ended() -> bool:
        nonlocal number
        number += 1
        shop.database.execute("INSERT INTO users (id, name) VALUES (%s, 'y')", (number,))
        return following.poll() is not None

    wait_until(ended, what="the end of cdc tail")
    assert following.returncode == 0
    assert following.stderr is not None
    assert following.stderr.read() == ""
    following.stdout = None


def test_snapshot_writes_json_lines(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "users.jsonl"
    result = shop.cdc("snapshot", "users", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "2 rows" in result.stdout
    assert result.stdout.rstrip().endswith("new")
    rows = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: row["id"])
    assert rows[0] == {
        "id": 1,
        "name": "Ada",
        "at": "2025-12-12T12:00:34.338547Z",
        "price": "1.50",
        "tags": ["a", None],
        "doc": {"k": [1]},
        "blob": "/wA=",
        "ratio": 0.5,
    }
    assert list(tmp_path.glob(".*")) == []
    again = shop.cdc("snapshot", "users", "--json")
    assert json.loads(again.stdout)["reused"] is True
    fresh = shop.cdc("snapshot", "users", "--json", "--fresh")
    assert json.loads(fresh.stdout)["reused"] is False


def test_a_snapshot_that_waits_shows_on_a_terminal_whom_it_waits_for(
    shop: Shop, nats_server: NatsServer
) -> None:
    environment = clean_environment(
        NATS_URL=nats_server.reader_url, **READER_ENVIRONMENT, BRIDGE_PREFIX=shop.prefix
    )
    with shop.database.connect(autocommit=False, application_name="slow importer") as writer:
        writer.execute("UPDATE users SET name = name")
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        with subprocess.Popen(
            [CDC, "snapshot", "users", "--fresh"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
        ) as process:
            os.close(theirs)
            os.set_blocking(ours, False)
            shown = b""

            def drained() -> bytes:
                # Whoever draws would wait for a terminal that nobody reads.
                nonlocal shown
                with contextlib.suppress(OSError):
                    shown += os.read(ours, 4096)
                return shown

            try:
                wait_until(lambda: b"slow importer" in drained(), 60, lambda: repr(shown))
                assert f"waits for pid {writer.info.backend_pid} (".encode() in shown
                writer.rollback()
                wait_until(lambda: drained() and process.poll() is not None, 60)
                assert process.returncode == 0
            finally:
                process.kill()
                os.close(ours)


def test_snapshot_writes_csv_that_postgresql_reads_back(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "users.csv"
    result = shop.cdc("snapshot", "users", "--out", str(out), "--columns", "id,name,at,blob")
    assert result.returncode == 0, result.stderr
    shop.database.execute("CREATE TABLE copy (id int, name text, at timestamptz, blob bytea)")
    with shop.database.connect() as connection, connection.cursor() as cursor:
        with cursor.copy("COPY copy FROM STDIN (FORMAT csv, HEADER)") as copy:
            copy.write(out.read_bytes())
        connection.commit()
    both = "SELECT id, name, at, blob FROM {} ORDER BY id"
    assert shop.database.execute(both.format("copy")) == shop.database.execute(both.format("users"))
    with out.open(newline="") as file:
        assert next(csv.reader(file)) == ["id", "name", "at", "blob"]


@pytest.mark.parametrize("mode", [(), ("--json",)], ids=["msgpack", "json"])
def test_documents_and_arrays_are_the_same_in_every_file(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    run_command: Callable[..., Result],
    prefix: str,
    tmp_path: Path,
    mode: tuple[str, ...],
) -> None:
    database.execute(
        "CREATE TABLE docs (id int PRIMARY KEY, b jsonb, j json, bs jsonb[], ts text[], ys bytea[])"
    )
    documents = [
        '"text"', '"5"', "5", "null", '{"a": 1.10}', '{"a": 1}', '"{\\"a\\": 1.10}"', "[1, [2]]",
        "1.00", '"1.00"', '{"a": 0.0000001, "é": [1, null]}', '{"large": 9007199254740993}',
        '{\n "lines": "\\n"}', "true",
    ]  # fmt: skip
    with database.connect() as connection:
        for number, document in enumerate(documents):
            connection.execute(
                "INSERT INTO docs VALUES (%s, %s, %s, ARRAY[%s::jsonb, NULL], %s, %s)",
                (number, document, document, document, ["a,b", None, "NULL", ""], [b"\xff"]),
            )
        connection.execute("INSERT INTO docs (id, ts) VALUES (100, '[2:3]={a,b}')")
    database.publish("docs")
    bridge_process(*mode)
    for ending, columns in (("csv", ()), ("jsonl", ()), ("parquet", ("--columns", "id,b,j,bs"))):
        out = ("--out", str(tmp_path / f"docs.{ending}"))
        result = run_command("cdc", "snapshot", "docs", *out, *columns, "--prefix", prefix)
        assert result.returncode == 0, result.stderr
    database.execute("CREATE TABLE back (LIKE docs)")
    with (
        database.connect() as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY back FROM STDIN (FORMAT csv, HEADER)") as copy,
    ):
        copy.write((tmp_path / "docs.csv").read_bytes())
    printed = "SELECT t::text FROM {} t ORDER BY id"
    source = database.execute(printed.format("docs"))
    assert database.execute(printed.format("back")) == source
    lines = (tmp_path / "docs.jsonl").read_text().splitlines()
    table = pyarrow.parquet.read_table(tmp_path / "docs.parquet").to_pylist()
    for number, document in enumerate(documents):
        wanted = json.loads(document)
        line = next(row for row in map(json.loads, lines) if row["id"] == number)
        assert (line["b"], line["j"], line["bs"]) == (wanted, wanted, [wanted, None])
        cells = next(row for row in table if row["id"] == number)
        assert cells["j"] == document
        assert [json.loads(text) for text in (cells["b"], cells["bs"][0])] == [wanted, wanted]


def test_snapshot_writes_parquet_with_types(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "users.parquet"
    result = shop.cdc("snapshot", "users", "--out", str(out))
    assert result.returncode == 0, result.stderr
    table = pyarrow.parquet.read_table(out).sort_by("id")
    assert {field.name: str(field.type) for field in table.schema} == {
        "id": "int32",
        "name": "string",
        "at": "timestamp[us, tz=UTC]",
        "price": "decimal128(10, 2)",
        "tags": "list<element: string>",
        "doc": "string",
        "blob": "binary",
        "ratio": "double",
    }
    assert table.to_pylist()[0]["tags"] == ["a", None]


def test_parquet_is_the_same_from_arrow_chunks_as_from_rows(
    shop: Shop, nats_server: NatsServer, tmp_path: Path
) -> None:
    taken = json.loads(shop.cdc("snapshot", "users", "--fresh", "--json").stdout)
    files = []
    for flags in ((), ("--fresh",)):
        out = tmp_path / f"users{len(files)}.parquet"
        result = shop.cdc("snapshot", "users", "--json", "--out", str(out), *flags)
        assert result.returncode == 0, result.stderr
        files.append((json.loads(result.stdout), pyarrow.parquet.read_table(out).sort_by("id")))
    (reused, from_rows), (new, from_arrow) = files
    # A retained snapshot is used whatever its format; a new one is asked for in Arrow's.
    assert (reused["snapshot_id"], reused["reused"]) == (taken["snapshot_id"], True)
    assert new["reused"] is False
    assert asyncio.run(newest_format(nats_server.url, shop.prefix)) == "arrow"
    assert from_arrow.schema.equals(from_rows.schema)
    assert from_arrow.equals(from_rows)


async def newest_format(nats_url: str, prefix: str) -> str:
    async with connect(nats_url, prefix=prefix) as client:
        async for frame in newest_metas(client.deployment, "users"):
            return decode_meta(frame).format
    raise AssertionError("there is no meta")


def test_what_parquet_cannot_hold_is_said_and_nothing_is_left(shop: Shop, tmp_path: Path) -> None:
    shop.database.execute("UPDATE users SET at = 'infinity' WHERE id = 1")
    out = tmp_path / "users.parquet"
    result = shop.cdc("snapshot", "users", "--out", str(out), "--fresh")
    assert result.returncode == 2
    assert "column 'at' holds a value" in result.stderr
    assert list(tmp_path.glob("*users*")) == []


def test_snapshot_to_standard_output_leaves_only_rows_there(shop: Shop) -> None:
    result = shop.cdc("snapshot", "users", "--out", "-")
    assert sorted(json.loads(line)["id"] for line in result.stdout.splitlines()) == [1, 2]
    assert "2 rows" in result.stderr


def test_without_a_bridge_a_snapshot_is_not_available(shop: Shop) -> None:
    wait_until(lambda: "users" in shop.cdc("tables").stdout, what="the schema of users")
    shop.bridge.kill()
    result = shop.cdc("snapshot", "users")
    assert result.returncode == 3
    assert result.stderr.startswith("cdc: no bridge answers for table users")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tables", "--nats", "http://x"], 2, "not a NATS address"),
        (["tables", "--nats", "nats://u:geheim@127.0.0.1:1", "--timeout", "0.5"], 3, "no NATS"),
        (["tables", "--prefix", "a.b"], 2, "prefix"),
        (["schema", "a.b.c"], 2, "not a table name"),
        (["tables", "--timeout", "soon"], 2, "not a time"),
        (["tables", "--timeout", "0"], 2, "positive number"),
        (["tail", "-n", "0"], 2, "not a positive number"),
        (["snapshot", "users", "--out", "users.xml"], 2, "must end in"),
        (["snapshot", "users", "--out", "/nowhere/users.csv"], 2, "no such directory"),
        (["nonsense"], 2, "invalid choice"),
        (["schema"], 2, "required"),
        (["tables"], 3, "has a bridge run"),
        (["tail"], 3, "has a bridge run"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    nats_server: NatsServer,
    prefix: str,
    run_command: Callable[..., Result],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    result = run_command("cdc", *arguments, environment={"BRIDGE_PREFIX": prefix})
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    # A password in an address has a warning before the line that says what is wrong.
    lines = [line for line in result.stderr.splitlines() if "warning: a password" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("cdc: ")
    assert "geheim" not in result.stderr


async def test_tail_shows_a_time_beyond_the_calendar_as_it_came(
    publisher: Publisher, prefix: str, run_command: Callable[..., Result]
) -> None:
    event = publisher.event("users", "INSERT", lsn=0x2000, data={"id": 1}, last=True)
    await publisher.send({**event, "ts": 2**62})
    result = await asyncio.to_thread(
        run_command, "cdc", "tail", "--from-start", "-n", "1", "--prefix", prefix
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{2**62} 0/2000 INSERT")


def test_help_and_version_need_nothing(run_command: Callable[..., Result]) -> None:
    result = run_command("cdc", "--help")
    assert result.returncode == 0
    for command in ("schema", "tables", "tail", "snapshot", "mirror", "verify"):
        assert command in result.stdout
        assert run_command("cdc", command, "--help").returncode == 0
    assert run_command("cdc", "--version").stdout.startswith("cdc ")
