"""`cdc verify`: equal replicas are called equal, others are not, while both sides move."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from consumer_sdk import connect
from consumer_sdk.reading.log import LogReader
from consumer_sdk.verify.verify import verify as compare
from tests.fixtures.mirror import Workload, wait_equal
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from consumer_sdk.verify.verify import TableReport

EVERY_TYPE = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy "x"');
CREATE DOMAIN posint AS integer CHECK (value > 0);
CREATE TABLE every_type (
    id bigint PRIMARY KEY, b boolean, i2 smallint, i4 integer, i8 bigint, o oid,
    f4 real, f8 double precision, n numeric, n2 numeric(12, 3), t text, v varchar(20),
    c char(5), by bytea, ts timestamp, tz timestamptz, d date, ti time, tt timetz,
    iv interval, j json, jb jsonb, u uuid, m mood, p posint, ip inet, r int4range,
    pt point, xs int[], ys text[], zs numeric[][], bs bytea[], jbs jsonb[], ms mood[],
    fs float8[], tzs timestamptz[], bits bit varying(9), mac macaddr, ts2 tsvector)
"""
ROWS = [
    r"""1, true, 1, 2, 9223372036854775807, 4294967295, 0.1, 0.1, 12345678901234567890.12345, 1.5,
    'text', 'v', 'c', '\xdeadbeef', '2024-02-29 12:34:56.789', '2024-02-29 12:34:56.7+02',
    '2024-02-29', '12:34:56.7', '12:34:56.7+02', '1 year 2 days 03:04:05', '{"b": 1,  "a": 2}',
    '{"b": 1.50, "a": [1, null, 1e-7]}', '6bd95e4f-0c4f-4a8e-8b4e-3a3a2d7b7f10', 'ok', 5,
    '10.0.0.1/8', '[1,5)', '(1,2)', '{1,NULL,3}', '{a,"b,c",NULL,"NULL",""}',
    '{{1.0,2.00},{3,4}}', '{"\\xdead",NULL}', '{"{\"a\": 1.0}",NULL}',
    '{sad,"happy \"x\""}', '{1.5,NaN,Infinity}', '{2024-02-29 12:34:56+00}', '101',
    '08:00:2b:01:02:03', 'a fat cat'""",
    r"""2, false, -32768, -2147483648, -9223372036854775808, 0, 'NaN', '-Infinity', 'NaN', -1.000,
    E'new\nline \\ "q" \t', '', '', '', 'infinity', '-infinity', '0044-03-15 BC', '24:00:00',
    '00:00:00-12', '-1 day', '[]', 'null', '00000000-0000-0000-0000-000000000000',
    'happy "x"', 1, '::1', 'empty', '(0,0)', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
    '', '00:00:00:00:00:00', ''""",
    r"""3, true, 0, 0, 0, 1, 1e-40, 5e-324, 0.000000000000000000001, 0.001, repeat('wide ', 3000),
    'ü', 'é', decode(repeat('ab', 5000), 'hex'), '0001-01-01 00:00:00 BC',
    '9999-12-31 23:59:59.999999Z', 'infinity', '00:00', '00:00+00', '1 mon -1 days', '"text"',
    '"text"', 'ffffffff-ffff-ffff-ffff-ffffffffffff', 'sad', 9, '1.2.3.4', '(,5)', '(1.5,-2)',
    '[2:3]={7,8}', '{{a},{b}}', '{-0.00}', '{"\\x"}', '{null,"\"x\""}', '{ok}', '{-0}',
    '{infinity}', '1', 'ff:ff:ff:ff:ff:ff', '''quoted'':3'""",
]


@pytest.fixture
def verify(database: Any, prefix: str, run_command: Any) -> Callable[..., tuple[int, str]]:
    def run(*tables: str, replica: str, flags: tuple[str, ...] = ()) -> tuple[int, str]:
        done = run_command(
            "cdc", "verify", *tables, "--source", database.dsn, "--replica", replica,
            "--prefix", prefix, *flags,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("mode", [(), ("--json",), ("--pack",)], ids=["msgpack", "json", "pack"])
def test_every_type_arrives_the_same_in_both_targets(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    verify: Any,
    replica_database: str,
    tmp_path: Path,
    mode: tuple[str, ...],
) -> None:
    for statement in EVERY_TYPE.split(";"):
        database.execute(statement)
    for row in ROWS[:2]:
        database.execute(f"INSERT INTO every_type VALUES ({row})")
    database.execute("INSERT INTO every_type (id) VALUES (99)")
    database.publish("every_type")
    bridge_process(*mode)
    sqlite, postgres = f"sqlite:///{tmp_path}/replica.db", replica_database
    for target in (sqlite, postgres):
        # From a snapshot first, then through the log.
        mirror = mirror_process("every_type", "--into", target, "--once")
        assert mirror.wait() == 0, mirror.describe()
        said = "every_type: equal, 3 rows, 0 changes folded in\n"
        assert verify("every_type", replica=target) == (0, said)
    database.execute(f"INSERT INTO every_type VALUES ({ROWS[2]})")
    for row in ROWS:
        number, rest = row.split(",", 1)
        database.execute(f"INSERT INTO every_type VALUES ({number}0, {rest})")
    database.execute("UPDATE every_type SET id = id + 1000, i4 = 7 WHERE id < 5")
    for target in (sqlite, postgres):
        code, said = verify("every_type", replica=target)
        assert code == 0, said
        mirror = mirror_process("every_type", "--into", target)
        wait_until(
            lambda target=target: " 0 changes" in verify("every_type", replica=target)[1],
            60,
            mirror.describe,
        )
        code, said = verify("every_type", replica=target)
        assert code == 0, said
        mirror.kill()


def test_names_of_things_are_equal_also_where_these_are_not(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    verify: Any,
    replica_database: str,
    tmp_path: Path,
) -> None:
    database.execute(
        "CREATE TABLE named (id regclass, number int, kinds regtype[], rights aclitem, "
        "PRIMARY KEY (id, number))"
    )
    database.execute("CREATE TABLE unpublished ()")
    insert = "INSERT INTO named SELECT 'unpublished', {}, '{{unpublished,int4}}', %s"
    rights = f"{database.value('SELECT current_user')}=r/{database.value('SELECT current_user')}"
    database.execute(insert.format(1), [rights])
    database.publish("named")
    bridge_process()
    for replica in (f"sqlite:///{tmp_path}/replica.db", replica_database):
        # From a snapshot first, then through the log.
        mirror = mirror_process("named", "--into", replica, "--once")
        assert mirror.wait() == 0, mirror.describe()
        database.execute(f"{insert.format(2)} ON CONFLICT DO NOTHING", [rights])
        database.execute("UPDATE named SET kinds = kinds || kinds WHERE number = 1")
        mirror = mirror_process("named", "--into", replica, "--once")
        assert mirror.wait() == 0, mirror.describe()
        said = "named: equal, 2 rows, 0 changes folded in\n"
        assert verify("named", replica=replica) == (0, said)


def test_differences_are_named_by_key(
    database: Any, bridge_process: Any, mirror_process: Any, verify: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE users (id int, part text, v text, PRIMARY KEY (id, part))")
    database.execute("INSERT INTO users SELECT i, 'a', 'v' FROM generate_series(1, 5000) i")
    database.execute("CREATE TABLE bag (v text)")
    database.execute("ALTER TABLE bag REPLICA IDENTITY FULL")
    database.execute("INSERT INTO bag VALUES ('x'), ('x'), ('y')")
    database.publish("users", "bag")
    bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("users", "bag", "--into", f"sqlite:///{path}", "--once")
    assert mirror.wait() == 0, mirror.describe()
    code, said = verify("users", "bag", replica=f"sqlite:///{path}")
    assert code == 0, said
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM users WHERE id = 17")
        connection.execute("UPDATE users SET v = 'wrong' WHERE id = 18")
        connection.execute("INSERT INTO users VALUES (9999, 'z', 'v')")
        connection.execute("DELETE FROM bag WHERE rowid = (SELECT min(rowid) FROM bag)")
        connection.commit()
    code, said = verify("users", "bag", replica=f"sqlite:///{path}", flags=("--json",))
    assert code == 1
    users, bag = json.loads(said)
    assert (users["missing"], users["different"], users["extra"]) == (
        [["17", "a"]], [["18", "a"]], [["9999", "z"]],
    )  # fmt: skip
    assert (bag["missing"], bag["extra"], bag["differences"]) == ([["x"]], [], 1)
    # What the log has changed since is folded in, and does not hide the differences.
    database.execute("UPDATE users SET v = 'later' WHERE id IN (17, 18, 19)")
    database.execute("DELETE FROM bag WHERE v = 'y'")
    code, said = verify("users", "bag", replica=f"sqlite:///{path}")
    assert code == 1
    assert 'missing ["17", "a"]' in said
    assert '["19", "a"]' not in said


def test_tables_are_compared_in_any_order_and_the_log_is_read_once(
    database: Any,
    bridge_process: Any,
    mirror_process: Any,
    nats_server: Any,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SQLite orders texts by their bytes, PostgreSQL these by their values: as 9, 10 and 10, 9."""
    for table in ("one", "two", "three"):
        database.execute(f"CREATE TABLE {table} (id numeric PRIMARY KEY, v text)")
        database.execute(
            f"INSERT INTO {table} SELECT g, 'v' || g FROM generate_series(1, 2500) AS g"
        )
    database.publish("one", "two", "three")
    bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process("--all", "--into", f"sqlite:///{path}", "--once")
    assert mirror.wait() == 0, mirror.describe()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM two WHERE id = '17'")
        connection.execute("UPDATE two SET v = 'wrong' WHERE id = '18'")
        connection.execute("INSERT INTO two VALUES ('9999', 'z')")
        connection.commit()
    for table in ("one", "two", "three"):
        database.execute(f"UPDATE {table} SET v = 'later' WHERE id IN (19, 2000)")
    reads: list[list[str]] = []
    read = LogReader.read

    def counted(self: LogReader, first: int, end: int, subjects: list[str], **options: Any) -> Any:
        reads.append(subjects)
        return read(self, first, end, subjects, **options)

    monkeypatch.setattr(LogReader, "read", counted)

    async def compared() -> list[TableReport]:
        async with connect(nats_server.url, prefix=prefix) as client:
            return await compare(
                client,
                ["three", "two", "one", "two"],
                source=database.dsn,
                replica=f"sqlite:///{path}",
            )

    def found() -> list[tuple[str, int, int, int]]:
        return [
            (report.table[1], report.rows, report.changes_folded, report.differences)
            for report in reports
        ]

    answers = []
    # With 100 rows at most that wait, the rows are looked up instead.
    for most_waiting in (200_000, 100):
        monkeypatch.setattr("consumer_sdk.verify.verify.MOST_WAITING", most_waiting)
        reads.clear()
        reports = asyncio.run(compared())
        assert [len(subjects) for subjects in reads] == [3]
        assert [name for name, *_ in found()] == ["three", "two", "one", "two"]
        assert [rest for name, *rest in found() if name != "two"] == [[2500, 2, 0]] * 2
        two = reports[1]
        assert two.changes_folded == 2
        answers.append((two.missing, two.different, two.extra))
    assert answers == [(['["17"]'], ['["18"]'], ['["9999"]'])] * 2


def test_replica_is_compared_while_both_sides_move(
    database: Any, bridge_process: Any, mirror_process: Any, verify: Any, tmp_path: Path
) -> None:
    Workload.create(database.dsn)
    database.publish(*Workload.TABLES)
    bridge_process()
    path = tmp_path / "replica.db"
    mirror = mirror_process(*Workload.TABLES, "--into", f"sqlite:///{path}")
    wait_equal(database.dsn, path, *Workload.TABLES, mirror=mirror)
    folded = 0
    with Workload(database.dsn) as workload:
        for _ in range(3):
            workload.wait_for(10)
            code, said = verify(*Workload.TABLES, replica=f"sqlite:///{path}", flags=("--json",))
            assert code == 0, said
            folded += sum(report["changes_folded"] for report in json.loads(said))
        mirror.kill()
        workload.wait_for(30)
        code, said = verify(*Workload.TABLES, replica=f"sqlite:///{path}", flags=("--json",))
        assert code == 0, said
        behind = sum(report["changes_folded"] for report in json.loads(said))
    assert behind > 50
    assert folded + behind > 0


def test_verify_refuses_what_it_cannot_compare(
    database: Any, bridge_process: Any, mirror_process: Any, verify: Any, run_command: Any,
    replica_database: str, prefix: str, tmp_path: Path,
) -> None:  # fmt: skip
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    bridge_process()
    path = tmp_path / "replica.db"
    code, said = verify("users", replica=f"sqlite:///{path}")
    assert (code, "there is no replica" in said) == (3, True), said
    mirror = mirror_process("users", "--into", f"sqlite:///{path}", "--once")
    assert mirror.wait() == 0, mirror.describe()
    code, said = verify("nobody", replica=f"sqlite:///{path}")
    assert (code, "not published" in said) == (1, True), said
    done = run_command(
        "cdc", "verify", "users", "--source", replica_database, "--prefix", prefix,
        "--replica", f"sqlite:///{path}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "is not the database" in done.stderr
    plain = database.role()
    password = urlsplit(plain).password
    assert password
    done = run_command(
        "cdc", "verify", "users", "--source", plain, "--prefix", prefix,
        "--replica", f"sqlite:///{path}",
    )  # fmt: skip
    assert done.returncode == 3
    assert "REPLICATION" in done.stderr
    assert password not in done.stderr
    # What cannot be read is no difference.
    done = run_command(
        "cdc", "verify", "users", "--source", database.role("LOGIN REPLICATION"),
        "--prefix", prefix, "--replica", f"sqlite:///{path}",
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "permission denied" in done.stderr


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_keys_of_a_fixed_length_are_compared_whole(
    database: Any, bridge_process: Any, mirror_process: Any, verify: Any, replica_database: str,
    tmp_path: Path, kind: str,
) -> None:  # fmt: skip
    database.execute("CREATE TABLE codes (code char(5), mask bit(5), PRIMARY KEY (code, mask))")
    database.execute("INSERT INTO codes VALUES ('abcde', '10101'), ('a', '10101'), ('b', '00000')")
    database.execute("CREATE TABLE paths (path int[] PRIMARY KEY)")
    database.publish("codes", "paths")
    bridge_process()
    into = f"sqlite:///{tmp_path}/replica.db" if kind == "sqlite" else replica_database
    mirror = mirror_process("codes", "paths", "--into", into, "--once")
    assert mirror.wait() == 0, mirror.describe()
    said = "codes: equal, 3 rows, 0 changes folded in\n"
    assert verify("codes", replica=into) == (0, said)
    code, said = verify("paths", replica=into)
    assert (code, "rows are not found by path" in said) == (2, True), said
