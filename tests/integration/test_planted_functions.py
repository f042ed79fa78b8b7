"""A database user who may create in `public` runs no code as the bridge, the mirror or an operator.

The user plants functions, operators, types and tables with all names that our SQL uses; then every
program runs, as superuser. PostgreSQL's log shows what was called.
"""

from __future__ import annotations

import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.planted import called_names, plant, planted_calls, safe_connection
from tests.fixtures.postgres import both_versions
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import PostgresServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

TABLES = """
CREATE TYPE public.mood AS ENUM ('sad', 'ok');
CREATE TABLE public.users (id serial PRIMARY KEY, name text DEFAULT 'x', m public.mood, c regclass);
CREATE TABLE public.notes (body text, n numeric, at timestamptz);
ALTER TABLE public.notes REPLICA IDENTITY FULL;
CREATE TABLE public.parts (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE public.parts_1 PARTITION OF public.parts FOR VALUES FROM (0) TO (100);
CREATE UNLOGGED TABLE public.scratch (id int);
CREATE PUBLICATION pub FOR TABLE public.users, public.notes, public.parts;
INSERT INTO public.users (name, m, c) VALUES ('a', 'ok', 'public.notes'), ('b', 'sad', NULL);
INSERT INTO public.notes VALUES ('one', 1.50, now()), ('two', 2, NULL);
INSERT INTO public.parts VALUES (1);
"""
CHANGES = """
INSERT INTO public.users (name, m) VALUES ('c', 'ok');
UPDATE public.users SET name = 'd' WHERE id = 1;
DELETE FROM public.users WHERE id = 2;
UPDATE public.notes SET n = n + 1 WHERE body = 'one';
DELETE FROM public.notes WHERE body = 'two';
INSERT INTO public.parts VALUES (2);
ALTER TABLE public.users ADD COLUMN more text DEFAULT 'more';
UPDATE public.users SET m = 'sad';
"""
NAMES = ("users", "notes", "parts_1")
# The second one is what an administrator might set; there, even equal signatures are found first.
SEARCH_PATHS = {"default-path": None, "public-before-catalog": "public, pg_catalog"}


class Programs:
    """Runs our programs against databases in which everything is planted."""

    def __init__(self, run_command: Any, database: Database, prefix: str) -> None:
        self._run = run_command
        self._database = database
        self.prefix = prefix
        self.slot = f"slot_{database.name}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        ended: subprocess.CompletedProcess[str] = self._run(*arguments, "--prefix", self.prefix)
        return ended

    def calls(self) -> list[str]:
        return planted_calls(self._database.server, self._database.name)


@pytest.fixture
def programs(database: Database, run_command: Any, prefix: str, nats_server: Any) -> Programs:
    return Programs(run_command, database, prefix)


def set_up(database: Database, replica: str, search_path: str | None) -> None:
    role = make_role(database)
    with safe_connection(database.dsn) as connection:
        connection.execute(TABLES.encode())
    for dsn in (database.dsn, replica):
        if dsn == replica:
            with safe_connection(dsn) as connection:
                connection.execute("CREATE TYPE public.mood AS ENUM ('sad', 'ok')")
        assert plant(dsn, role) > 500
        if search_path is not None:
            name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
            with safe_connection(dsn) as connection:
                connection.execute(f'ALTER DATABASE "{name}" SET search_path = {search_path}')
    # The attack works where the search path is not pinned.
    with psycopg.connect(database.dsn) as connection, pytest.raises(psycopg.Error, match="planted"):
        connection.execute("SELECT quote_ident(n.nspname) FROM pg_catalog.pg_namespace n")
    assert planted_calls(database.server, database.name)


def make_role(database: Database) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(database.role())["user"])


@pytest.mark.quick_checks
@pytest.mark.parametrize("search_path", SEARCH_PATHS.values(), ids=SEARCH_PATHS)
def test_nothing_planted_in_public_is_called_by_any_program(
    database: Database,
    replica_database: str,
    bridge_process: Callable[..., BridgeProcess],
    programs: Programs,
    pg: PostgresServer,
    search_path: str | None,
) -> None:
    set_up(database, replica_database, search_path)
    before = len(programs.calls())
    check = ("bridge", "check", "--slot", programs.slot, "--pub", "pub")
    into = ("--into", replica_database, "--once")

    printed = programs.run(*check, "--fix-sql")
    run_in_psql(pg, database.dsn, printed.stdout)
    bridge = bridge_process()
    wait_until(lambda: "parts_1" in programs.run("cdc", "tables").stdout)
    mirrored = programs.run("cdc", "mirror", *NAMES, *into)
    assert mirrored.returncode == 0, mirrored.stderr
    with safe_connection(database.dsn) as connection:
        connection.execute(CHANGES.encode())
    mirrored = programs.run("cdc", "mirror", *NAMES, *into)
    assert mirrored.returncode == 0, mirrored.stderr
    verified = programs.run(
        "cdc", "verify", *NAMES, "--source", database.dsn, "--replica", replica_database
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    checked = programs.run(*check)
    assert "PROBLEM" not in checked.stdout, checked.stdout
    with safe_connection(database.dsn) as connection, connection.transaction():
        connection.execute("LOCK TABLE public.notes")
        checked = programs.run(*check)
    assert "notes is locked by session" in checked.stdout, checked.stdout
    # The monitor has read the slot and the transactions that hold it back.
    wait_until(lambda: bridge.status()["slot_active"])
    assert "cannot read" not in bridge.log_text()
    bridge.terminate()
    assert bridge.wait() == 0
    dropped = programs.run("bridge", "drop", "--slot", programs.slot, "--yes")
    assert dropped.returncode == 0, dropped.stderr
    assert programs.calls()[before:] == []


def run_in_psql(pg: PostgresServer, dsn: str, script: str) -> None:
    """Run SQL as an operator does, without the changes to the server's configuration."""
    lines = [line for line in script.splitlines() if not line.startswith("ALTER SYSTEM")]
    subprocess.run(
        [str(pg.bin_directory / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", dsn],
        input="\n".join(lines), text=True, check=True, capture_output=True,
    )  # fmt: skip


@both_versions
async def test_options_in_the_address_do_not_change_the_search_path(database: Database) -> None:
    from bridge.config import load
    from bridge.postgres.connection import ReplicationConnection, connect_catalog, conninfo_of
    from bridge.postgres.sessions import CopySession, connect_session
    from consumer_sdk.targets.postgres import PostgresTarget
    from consumer_sdk.verify.table_side import connect_postgres

    given = make_conninfo(database.dsn, options="-c search_path=public -c work_mem=5MB")
    conninfo = conninfo_of(load({}, {"DATABASE_URL": given}))
    show = "SELECT pg_catalog.current_setting('search_path'), current_setting('work_mem')"
    for address in (conninfo, given):
        replication = await ReplicationConnection.connect(address)
        assert await replication.command(show) == [("", "5MB")]
        await replication.close()
        for open_session in (connect_catalog, partial(connect_session, application="test")):
            async with await open_session(address) as connection:
                assert await (await connection.execute(show)).fetchall() == [("", "5MB")]
    holder = database.connect(autocommit=False)
    (snapshot,) = holder.execute("SELECT pg_export_snapshot()").fetchone() or ("",)
    with CopySession.open(given, snapshot) as copy:
        assert copy.connection.execute(show).fetchall() == [("", "5MB")]
    holder.close()
    with connect_postgres(given, "the source") as session:
        assert session.execute(show).fetchall() == [("", "5MB")]
    target = PostgresTarget(make_conninfo(database.dsn, options="-c search_path=public"))
    target.open()
    assert target._engine.query("SHOW search_path") == [("",)]
    target.close()


def test_every_function_in_our_sql_is_qualified() -> None:
    syntax = {"coalesce", "extract", "greatest", "least", "nullif"}
    aliases = {
        "base",
        "c",
        "element",
        "f",
        "k",
        "l",
        "o",
        "r",
        "t",
        "v",
        "w",
        "waiting",
        "varattno",
    }
    unqualified = {
        name: modules
        for name, modules in called_names().items()
        if not name.startswith("pg_catalog.") and name not in syntax | aliases
    }
    # That count is SQLite's.
    assert unqualified == {"count": {"table_side.py"}}


def test_a_domain_of_another_user_is_not_used_for_a_column(database: Database) -> None:
    """Its checks are code of that user, which every insert would run."""
    from consumer_sdk.targets.postgres import PostgresTarget
    from tests.mirror_model import column

    role = make_role(database)
    with safe_connection(database.dsn) as connection:
        connection.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
        connection.execute("CREATE DOMAIN public.trusted AS integer")
        connection.execute(f"SET ROLE {role}")
        connection.execute("CREATE DOMAIN public.mood AS text CHECK (VALUE <> 'planted')")
        connection.execute("CREATE TYPE public.pair AS (m public.mood)")
        connection.execute("CREATE TYPE public.colour AS ENUM ('red')")
    target = PostgresTarget(database.dsn)
    target.open()
    found = {
        name: target._type(column("c", 1, 90001, data_type=name, base_type_oid=90001))
        for name in (
            "mood", "public.mood", "mood[]", "pair", "trusted", "colour", "public.colour[]",
            "numeric(4,2)", "text -- ", "gone", "gone.gone",
        )
    }  # fmt: skip
    target.close()
    assert found == {
        "mood": "text", "public.mood": "text", "mood[]": "text", "pair": "text",
        "trusted": "public.trusted", "colour": "public.colour",
        "public.colour[]": "public.colour[]", "numeric(4,2)": "numeric", "text -- ": "text",
        "gone": "text", "gone.gone": "text",
    }  # fmt: skip


STATE_OF_ANOTHER = {
    "schema": "CREATE SCHEMA tailrace",
    "table": "CREATE SCHEMA tailrace; CREATE TABLE tailrace.copies (id int)",
    "view": "CREATE SCHEMA tailrace; CREATE VIEW tailrace.copies AS SELECT 1 AS id",
}


@pytest.mark.parametrize("planted", STATE_OF_ANOTHER.values(), ids=STATE_OF_ANOTHER)
@pytest.mark.parametrize("reached", ["open", "begin"])
def test_a_mirror_keeps_no_state_where_another_user_could_run_code(
    database: Database, planted: str, reached: str
) -> None:
    """The owner of a table gives it triggers, which would run as the mirror."""
    from consumer_sdk.errors import TargetError
    from consumer_sdk.targets.postgres import PostgresTarget

    role = make_role(database)
    with safe_connection(database.dsn) as connection:
        connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO {role}")
    target = PostgresTarget(database.dsn)

    def plant_state() -> None:
        with safe_connection(database.dsn) as connection:
            connection.execute(f"SET ROLE {role}")
            connection.execute(planted)

    if reached == "open":
        plant_state()
        with pytest.raises(TargetError, match=f"belongs to role {role}"):
            target.open()
        return
    target.open()
    plant_state()
    with pytest.raises(TargetError, match=f"belongs to role {role}"):
        target.begin()
    target.rollback()
    target.close()


def test_a_mirror_trusts_the_state_of_a_role_that_it_belongs_to(database: Database) -> None:
    from consumer_sdk.targets.postgres import PostgresTarget

    group = make_role(database)
    member = database.role()
    name = psycopg.conninfo.conninfo_to_dict(member)["user"]
    with safe_connection(database.dsn) as connection:
        connection.execute(f"GRANT {group} TO {name}")
        connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO {group}")
        connection.execute(f"CREATE SCHEMA tailrace AUTHORIZATION {group}")
    target = PostgresTarget(member)
    target.open()
    target.begin()
    target.commit()
    target.close()


@pytest.mark.parametrize(
    "planted",
    [
        STATE_OF_ANOTHER["view"],
        """CREATE SCHEMA tailrace; CREATE TABLE tailrace.copies ();
        ALTER TABLE tailrace.copies ENABLE ROW LEVEL SECURITY""",
    ],
    ids=["view", "policy"],
)
def test_a_verification_reads_no_state_that_runs_code(database: Database, planted: str) -> None:
    from consumer_sdk.errors import TargetError
    from consumer_sdk.targets.postgres import open_session, read_postgres_state

    database.execute(planted)
    with (
        open_session(database.dsn) as connection,
        pytest.raises(TargetError, match=r"tailrace\.copies is not a table"),
    ):
        read_postgres_state(database.dsn, connection)


CODE_TYPE = """
CREATE SCHEMA shop;
CREATE TYPE shop.code;
CREATE FUNCTION shop.code_in(cstring) RETURNS shop.code LANGUAGE internal IMMUTABLE AS 'int4in';
CREATE FUNCTION shop.code_out(shop.code) RETURNS cstring LANGUAGE internal IMMUTABLE AS 'int4out';
CREATE TYPE shop.code (INPUT = shop.code_in, OUTPUT = shop.code_out, LIKE = pg_catalog.int4);
CREATE FUNCTION shop.cmp(shop.code, shop.code) RETURNS int LANGUAGE internal IMMUTABLE
    AS 'btint4cmp';
{operators}
CREATE OPERATOR CLASS shop.code_ops DEFAULT FOR TYPE shop.code USING btree AS
    OPERATOR 1 shop.<, OPERATOR 2 shop.<=, OPERATOR 3 shop.=, OPERATOR 4 shop.>=,
    OPERATOR 5 shop.>, FUNCTION 1 shop.cmp(shop.code, shop.code);
CREATE DOMAIN shop.short_code AS shop.code;
CREATE TABLE public.t (id shop.short_code, n int, PRIMARY KEY (id, n));
INSERT INTO public.t SELECT i::text::shop.code, i FROM generate_series(1, 1000) i;
ANALYZE public.t;
"""
CODE_OPERATOR = """
CREATE FUNCTION shop.{name}(shop.code, shop.code) RETURNS bool LANGUAGE internal IMMUTABLE
    AS 'int4{name}';
CREATE OPERATOR shop.{sign} (LEFTARG = shop.code, RIGHTARG = shop.code, FUNCTION = shop.{name});
"""


def test_keys_of_a_type_with_its_own_operators_are_found_by_their_index(
    database: Database,
) -> None:
    """Such as citext; with an empty search path, its operators have no short names."""
    from consumer_sdk.targets.postgres import PostgresTarget

    signs = {"lt": "<", "le": "<=", "eq": "=", "ge": ">=", "gt": ">"}
    operators = "".join(CODE_OPERATOR.format(name=name, sign=signs[name]) for name in signs)
    with safe_connection(database.dsn) as connection:
        connection.execute(CODE_TYPE.format(operators=operators).encode())
    target = PostgresTarget(database.dsn)
    target.open()
    engine = target._engine
    found = engine.key_equals('"public"."t"', ("id", "n"))
    assert found == '"id" OPERATOR("shop".=) %s AND "n" = %s'
    plan = engine.query(f'EXPLAIN SELECT 1 FROM "public"."t" WHERE {found}', ("7", 7))
    assert "Index" in plan[0][0], plan
    assert engine.execute(f'DELETE FROM "public"."t" WHERE {found}', ("7", 7)) == 1
    target.close()
