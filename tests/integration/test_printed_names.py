"""Names with quotes, newlines and escape sequences in printed SQL, run by psql, and on a terminal.

PostgreSQL allows every character in a name except NUL.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from psycopg import sql

from bridge.embedded.postgres import wheel_tree
from bridge.preflight.publication import check_publication
from bridge.preflight.setup_sql import setup_sql
from consumer_sdk.errors import NotAvailable, TargetError
from consumer_sdk.targets.postgres import PostgresTarget
from consumer_sdk.verify.table_side import connect_postgres
from tests.fixtures.postgres import EMBEDDED, both_versions
from tests.fixtures.waiting import wait_until
from tests.property.test_printing import facts, names, published

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bridge.embedded import PostgresServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Everything but line ends that a terminal would interpret."""
RESERVED = re.compile(r"pg_|public\Z|none\Z|postgres\Z|current_|session_user\Z|user\Z")


def psql(pg: PostgresServer, dsn: str, script: str, directory: Path) -> str:
    """Run a script as an operator does; returns what psql prints."""
    program = pg.bin_directory / "psql"
    if not program.exists():
        # The trees of some versions have no clients; a newer psql talks to their servers too.
        program = wheel_tree(EMBEDDED[0]) / "bin" / "psql"
    ended = subprocess.run(
        [str(program), "-X", "-q", "-v", "ON_ERROR_STOP=1", dsn],
        input=script, text=True, capture_output=True, check=False, cwd=directory,
        env={**os.environ, "PGCLIENTENCODING": "UTF8"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr + script
    return ended.stdout


def everything(connection: psycopg.Connection[Any]) -> dict[str, set[str]]:
    """All roles, schemas, publications, relations and functions of the database, by name."""
    queries = {
        "roles": "SELECT rolname FROM pg_roles",
        "schemas": "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_'",
        "publications": "SELECT pubname FROM pg_publication",
        "relations": "SELECT relname FROM pg_class WHERE oid > 16384 AND relkind = 'r'",
        "functions": "SELECT proname FROM pg_proc WHERE oid > 16384",
    }
    return {
        what: {name for (name,) in connection.execute(query).fetchall()}
        for what, query in queries.items()
    }


@both_versions
def test_the_printed_sql_does_only_what_it_says_for_any_name(
    database: Database, pg: PostgresServer, tmp_path: Path
) -> None:
    connection = database.connect()
    odd = "'\"$setup$\n\\! touch x\n;--"

    @settings(
        max_examples=25, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(names, names, names, names, names)
    @example(odd, odd, odd, odd, odd)
    @example('a"b', "a'b", "\x1b[31m", "$$", "%s\\")
    def run(role: str, schema: str, table: str, column: str, publication: str) -> None:
        assume(not RESERVED.match(role) and not RESERVED.match(schema))
        before = everything(connection)
        role = _unused(role, before["roles"])
        schema = _unused(schema, before["schemas"])
        quoted = sql.Identifier(schema, table)
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        try:
            connection.execute(
                sql.SQL("CREATE TABLE {} ({} int)").format(quoted, sql.Identifier(column))
            )
            script = setup_sql(
                role=role, database=database.name, publication=publication,
                tables=[(schema, table)],
            )  # fmt: skip
            lines = [line for line in script.split("\n") if not line.startswith("ALTER SYSTEM")]
            # Running it again changes nothing.
            for _ in range(2):
                assert psql(pg, database.dsn, "\n".join(lines), tmp_path) == ""
                after = everything(connection)
                assert after == {
                    **before,
                    "roles": before["roles"] | {role},
                    "schemas": before["schemas"] | {schema},
                    "relations": before["relations"] | {table},
                    "publications": before["publications"] | {publication},
                }
            assert not list(tmp_path.iterdir())
            _run_fixes(connection, pg, database, tmp_path, (role, schema, table, column))
            assert everything(connection) == after
        finally:
            for statement, name in (
                ("DROP SCHEMA {} CASCADE", schema),
                ("DROP PUBLICATION IF EXISTS {}", publication),
            ):
                connection.execute(sql.SQL(statement).format(sql.Identifier(name)))
            if role in everything(connection)["roles"]:
                for statement in ("DROP OWNED BY {}", "DROP ROLE {}"):
                    connection.execute(sql.SQL(statement).format(sql.Identifier(role)))

    run()
    connection.close()


def _run_fixes(
    connection: psycopg.Connection[Any],
    pg: PostgresServer,
    database: Database,
    directory: Path,
    chosen: tuple[str, str, str, str],
) -> None:
    """Run the fixes of findings about a table, and check what they changed."""
    from bridge.postgres.publication import Publication

    role, schema, table, column = chosen
    described = Publication("p", False, False, (), (), (published(schema, table, column),))
    found = check_publication(described, "p", facts(role, database.name))
    fixes = {finding.code: finding.fix for finding in found}
    wanted = ("select-missing", "row-security", "replica-identity")
    assert psql(pg, database.dsn, "\n".join(fixes[code] for code in wanted), directory) == ""
    assert connection.execute(
        "SELECT c.relreplident, r.rolbypassrls FROM pg_class c, pg_roles r WHERE r.rolname = %s "
        "AND c.relname = %s AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %s)",
        [role, table, schema],
    ).fetchall() == [("f", True)]


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name = secrets.token_hex(4) + name[:10]
    return name


def test_names_with_escape_sequences_reach_no_terminal(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    run_command: Callable[..., subprocess.CompletedProcess[str]],
    nats_server: Any,
    prefix: str,
    tmp_path: Path,
) -> None:
    odd = "a\x1b]0;owned\x07\nforged: line\r\u202eb\x9b2J"
    name, kind, publication = sql.Identifier(odd), sql.Identifier(odd + "t"), sql.Identifier(odd)
    for statement in (
        "CREATE TYPE {kind} AS ENUM ({label})",
        "CREATE TABLE {name} (id int PRIMARY KEY, {name} {kind} DEFAULT {label}, body text)",
        "CREATE TABLE {keyless} ({name} text)",
        "CREATE UNLOGGED TABLE {unlogged} ({name} text)",
        "INSERT INTO {name} VALUES (1, {label}, {label})",
        "CREATE PUBLICATION {publication} FOR ALL TABLES",
    ):
        database.execute(
            sql.SQL(statement).format(
                name=name, kind=kind, publication=publication, label=sql.Literal(odd),
                keyless=sql.Identifier(odd + "k"), unlogged=sql.Identifier(odd + "u"),
            )
        )  # fmt: skip
    said: dict[str, str] = {}

    def run(*arguments: str, code: int = 0) -> str:
        ended = run_command(*arguments, "--prefix", prefix)
        said[" ".join(arguments[:2]) + str(len(said))] = ended.stdout + ended.stderr
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout

    check = ("bridge", "check", "--slot", f"slot_{database.name}", "--pub", odd)
    run(*check, code=3)
    run(*check, "--json", code=3)
    run(*check, "--fix-sql")
    run("bridge", "check", "--slot", odd, "--pub", odd, code=2)
    run("bridge", "config", "--pub", odd)
    bridge = bridge_process("--log-level", "debug", pub=odd)
    table = 'U&"a\\001B]0;owned\\0007\\000Aforged: line\\000D\\202Eb\\009B2J"'
    wait_until(lambda: table in run_command("cdc", "tables", "--prefix", prefix).stdout)
    run("cdc", "tables", "--json")
    run("cdc", "schema", table)
    run("cdc", "schema", table, "--json")
    run("cdc", "snapshot", table)
    replica = f"sqlite:///{tmp_path}/replica.db"
    run("cdc", "mirror", table, "--into", replica, "--once")
    run("cdc", "verify", table, "--source", database.dsn, "--replica", replica)
    run("cdc", "schema", f"{table}.{table}", code=1)
    change = sql.SQL("INSERT INTO {} VALUES (2, {label}, {label})")
    database.execute(change.format(name, label=sql.Literal(odd)))
    for flags in ((), ("--json",)):
        run("cdc", "tail", table, "--from-start", "-n", "1", *flags)
    said["the log of the bridge"] = bridge.log_text()
    for program, text in said.items():
        assert not CONTROL.search(text), (program, text)
        assert "\nforged: line" not in text, (program, text)


def test_an_address_that_fails_shows_no_part_of_its_password(
    run_command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    for password in ("s3cret/a", "a?s3cret", "a#s3cret", "a@s3cret", "s3cret%40:"):
        address = f"postgresql://u:{password}@127.0.0.1:1/db?connect_timeout=1"
        for open_one in (PostgresTarget(address).open, partial(connect_postgres, address, "it")):
            with pytest.raises((TargetError, NotAvailable)) as raised:
                open_one()
            assert "s3cret" not in str(raised.value)
    for password in ("s3cret%2F", "a@s3cret"):
        ended = run_command(
            "bridge", "check", "--slot", "s", "--pub", "p",
            environment={
                "DATABASE_URL": f"postgresql://u:{password}@127.0.0.1:1/db",
                "NATS_URL": f"nats://{password}@127.0.0.1:1",
            },
        )  # fmt: skip
        assert ended.returncode in (2, 3)
        assert "s3cret" not in ended.stdout + ended.stderr
