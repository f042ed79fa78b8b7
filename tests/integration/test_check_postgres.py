"""Each finding of `bridge check` on PostgreSQL: provoked, its printed fix applied, and gone."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from bridge.errors import SourceError
from bridge.postgres.publication import read_publication
from bridge.preflight import Finding, raise_if_blocked
from bridge.preflight.postgres import (
    check_postgres,
    check_replication_connection,
    connect_for_check,
)
from bridge.preflight.server import check_server, read_facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import PostgresServer
    from tests.fixtures.postgres import Database


@dataclass(frozen=True)
class Case:
    """SQL that provokes a finding, and a statement that only works once it is fixed."""

    code: str
    severity: str
    provoke: str
    proof: str = "SELECT 1"
    fails_before: bool = False
    versions: tuple[int, ...] = (16, 18)
    as_role: str | None = None


CASES = [
    Case(
        "unlogged-table",
        "warning",
        "CREATE TABLE root (a int PRIMARY KEY) PARTITION BY RANGE (a);"
        "CREATE UNLOGGED TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (9);"
        "ALTER PUBLICATION pub SET (publish_via_partition_root = true);"
        "ALTER PUBLICATION pub ADD TABLE root",
    ),
    Case("publication-missing", "problem", "DROP PUBLICATION pub"),
    Case(
        "publication-empty",
        "warning",
        "DROP PUBLICATION pub; CREATE PUBLICATION pub",
    ),
    Case("publication-operations", "warning", "ALTER PUBLICATION pub SET (publish = 'insert')"),
    Case(
        "replica-identity",
        "problem",
        "CREATE TABLE keyless (a int); INSERT INTO keyless VALUES (1);"
        "ALTER PUBLICATION pub ADD TABLE keyless",
        proof="UPDATE keyless SET a = 2",
        fails_before=True,
    ),
    Case(
        "replica-identity",
        "problem",
        "CREATE TABLE nothing (a int PRIMARY KEY); INSERT INTO nothing VALUES (1);"
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING; ALTER PUBLICATION pub ADD TABLE nothing",
        proof="DELETE FROM nothing",
        fails_before=True,
    ),
    Case(
        "replica-identity",
        "problem",
        "CREATE TABLE late (a int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED);"
        "INSERT INTO late VALUES (1); ALTER PUBLICATION pub ADD TABLE late",
        proof="DELETE FROM late",
        fails_before=True,
    ),
    Case(
        "replica-identity",
        "problem",
        "CREATE TABLE gone (a int NOT NULL); CREATE UNIQUE INDEX gone_a ON gone (a);"
        "ALTER TABLE gone REPLICA IDENTITY USING INDEX gone_a; DROP INDEX gone_a;"
        "INSERT INTO gone VALUES (1); ALTER PUBLICATION pub ADD TABLE gone",
        proof="DELETE FROM gone",
        fails_before=True,
    ),
    Case(
        "replica-identity",
        "problem",
        "CREATE TABLE measures (day date, value int) PARTITION BY RANGE (day);"
        "CREATE TABLE measures_all PARTITION OF measures DEFAULT;"
        "INSERT INTO measures VALUES ('2025-01-01', 1); ALTER PUBLICATION pub ADD TABLE measures;"
        "ALTER PUBLICATION pub SET (publish_via_partition_root = true)",
        proof="UPDATE measures SET value = 2",
        fails_before=True,
    ),
    Case(
        "row-filter-identity",
        "problem",
        "CREATE TABLE filtered (a int PRIMARY KEY, b int); INSERT INTO filtered VALUES (1, 1);"
        "ALTER PUBLICATION pub ADD TABLE filtered WHERE (b > 0)",
        proof="UPDATE filtered SET b = 2",
        fails_before=True,
    ),
    Case(
        "column-list-identity",
        "problem",
        'CREATE TABLE narrow (a int PRIMARY KEY, "B b" int, c int);'
        "INSERT INTO narrow VALUES (1, 1, 1);"
        'ALTER PUBLICATION pub ADD TABLE narrow ("B b") WHERE (a > 0)',
        proof="UPDATE narrow SET c = 2",
        fails_before=True,
    ),
    Case(
        "generated-columns",
        "warning",
        "CREATE TABLE made (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED);"
        "ALTER PUBLICATION pub ADD TABLE made",
        versions=(18,),
    ),
    Case(
        "partition-root",
        "warning",
        "CREATE TABLE parts (a int PRIMARY KEY) PARTITION BY RANGE (a);"
        "CREATE TABLE parts_all PARTITION OF parts DEFAULT;"
        "ALTER PUBLICATION pub ADD TABLE parts;"
        "ALTER PUBLICATION pub SET (publish_via_partition_root = true)",
    ),
    Case(
        "unlogged-table",
        "warning",
        'DROP PUBLICATION pub; CREATE UNLOGGED TABLE "Fast.One" (a int PRIMARY KEY);'
        "CREATE PUBLICATION pub FOR ALL TABLES",
    ),
]


def statements(finding: Finding) -> list[str]:
    """The fix without its comments."""
    return [line for line in finding.fix.splitlines() if not line.startswith("--")]


def apply_fix(dsn: str, finding: Finding) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements(finding):
            connection.execute(statement)  # type: ignore[call-overload]


async def findings(dsn: str, slot: str = "check_slot", **options: Any) -> list[Finding]:
    connection = await connect_for_check(dsn)
    assert not isinstance(connection, Finding), connection
    async with connection:
        return await check_postgres(connection, slot=slot, publication="pub", **options)


def only(found: list[Finding], code: str) -> Finding:
    matching = [finding for finding in found if finding.code == code and finding.severity != "ok"]
    assert matching, [finding.code for finding in found]
    return matching[0]


def assert_gone(found: list[Finding], code: str) -> None:
    left = [finding for finding in found if finding.code == code and finding.severity != "ok"]
    assert left == []


def fails(database: Database, statement: str) -> bool:
    try:
        with psycopg.connect(database.dsn) as connection:
            connection.execute(statement)  # type: ignore[call-overload]
            connection.rollback()
    except psycopg.Error:
        return True
    return False


@pytest.fixture
def published(database: Database) -> Database:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.publish("users")
    return database


@pytest.mark.parametrize(
    ("pg", "case"),
    [
        pytest.param(version, case, id=f"pg{version}-{case.code}-{number}")
        for number, case in enumerate(CASES)
        for version in case.versions
    ],
    indirect=["pg"],
)
async def test_publication_finding_is_seen_and_its_fix_removes_it(
    published: Database, case: Case
) -> None:
    assert_gone(await findings(published.dsn), case.code)
    published.execute(case.provoke)
    finding = only(await findings(published.dsn), case.code)
    assert finding.severity == case.severity
    assert finding.why
    assert fails(published, case.proof) is case.fails_before
    apply_fix(published.dsn, finding)
    assert_gone(await findings(published.dsn), case.code)
    assert not fails(published, case.proof)


async def test_a_sound_setup_has_no_finding_but_the_unlimited_wal(published: Database) -> None:
    found = await findings(published.dsn)
    assert {finding.code for finding in found if finding.severity != "ok"} <= {"wal-limit"}


@pytest.mark.parametrize("pg", [18, 16], indirect=True)
async def test_a_role_without_rights_gets_exactly_the_grants_it_lacks(published: Database) -> None:
    published.execute(
        'CREATE SCHEMA "Sales"; CREATE TABLE "Sales"."Odd.Table" (id int PRIMARY KEY);'
        'ALTER PUBLICATION pub ADD TABLE "Sales"."Odd.Table"'
    )
    dsn = published.role("LOGIN")
    found = await findings(dsn)
    with pytest.raises(SourceError, match="lacks the REPLICATION attribute; ALTER ROLE"):
        raise_if_blocked(found)
    unreadable = [finding for finding in found if finding.code == "select-missing"]
    assert [finding.severity for finding in unreadable] == ["problem", "problem"]
    for code in ("role-replication", "role-statistics"):
        apply_fix(published.dsn, only(found, code))
    for finding in unreadable:
        apply_fix(published.dsn, finding)
    found = await findings(dsn)
    assert {finding.code for finding in found if finding.severity != "ok"} <= {"wal-limit"}
    with psycopg.connect(dsn) as connection:
        connection.execute('SELECT * FROM users, "Sales"."Odd.Table"')


async def test_a_grant_on_the_published_columns_is_enough(published: Database) -> None:
    dsn = published.role("LOGIN REPLICATION")
    role = published.roles[0]
    published.execute(
        f"ALTER PUBLICATION pub SET TABLE users (id); GRANT SELECT (id) ON users TO {role};"
        f"GRANT USAGE ON SCHEMA public TO {role}"
    )
    assert_gone(await findings(dsn), "select-missing")
    # A row filter is evaluated with the reader's rights too.
    published.execute(
        "ALTER TABLE users REPLICA IDENTITY FULL;"
        "ALTER PUBLICATION pub SET TABLE users (id) WHERE (name <> '')"
    )
    apply_fix(published.dsn, only(await findings(dsn), "select-missing"))
    assert_gone(await findings(dsn), "select-missing")


async def test_row_security_that_would_hide_rows_is_a_problem(published: Database) -> None:
    dsn = published.role("LOGIN REPLICATION")
    role = published.roles[0]
    published.execute(
        f"GRANT SELECT ON users TO {role}; GRANT USAGE ON SCHEMA public TO {role};"
        "ALTER TABLE users ENABLE ROW LEVEL SECURITY; INSERT INTO users VALUES (1, 'a')"
    )
    finding = only(await findings(dsn), "row-security")
    apply_fix(published.dsn, finding)
    assert_gone(await findings(dsn), "row-security")
    with psycopg.connect(dsn) as connection:
        connection.execute("SET row_security = off")
        assert connection.execute("SELECT count(*) FROM users").fetchone() == (1,)


async def test_a_session_that_would_delay_a_snapshot_is_named(published: Database) -> None:
    with psycopg.connect(published.dsn) as connection:
        connection.execute("INSERT INTO users VALUES (1, 'open')")
        finding = only(
            await findings(published.dsn, open_transaction_seconds=0), "open-transaction"
        )
        assert f"session {connection.info.backend_pid}" in finding.what
        assert "idle in transaction" in finding.what
        apply_fix(published.dsn, finding)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert_gone(await findings(published.dsn, open_transaction_seconds=0), "open-transaction")


async def test_a_prepared_transaction_is_named_with_its_rollback(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres(settings={"max_prepared_transactions": 2})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE t")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'left''over'")
    found = await findings(server.dsn(), open_transaction_seconds=0)
    apply_fix(server.dsn(), only(found, "open-transaction"))
    assert_gone(await findings(server.dsn(), open_transaction_seconds=0), "open-transaction")


@pytest.mark.parametrize("pg", [18, 16], indirect=True)
async def test_a_slot_of_another_kind_or_database_is_refused(published: Database) -> None:
    slot = f"s_{published.name}"
    published.execute("SELECT pg_create_physical_replication_slot(%s)", [slot])
    finding = only(await findings(published.dsn, slot), "slot-plugin")
    assert finding.blocks
    apply_fix(published.dsn, finding)
    elsewhere = published.server.dsn("postgres")
    with psycopg.connect(elsewhere, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    finding = only(await findings(published.dsn, slot), "slot-database")
    assert finding.blocks
    apply_fix(published.dsn, finding)
    found = await findings(published.dsn, slot)
    assert all(finding.severity == "ok" for finding in found if finding.code.startswith("slot"))


@pytest.mark.parametrize("pg", [16], indirect=True)
async def test_a_publication_younger_than_the_slot_is_seen_before_it_stops_the_bridge(
    database: Database,
) -> None:
    slot = f"s_{database.name}"
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    database.execute("INSERT INTO users VALUES (1)")
    database.publish("users")
    finding = only(await findings(database.dsn, slot), "publication-after-slot")
    assert finding.blocks
    apply_fix(database.dsn, finding)
    found = await findings(database.dsn, slot)
    assert_gone(found, "publication-after-slot")
    assert "slot-decodes" in {finding.code for finding in found}


async def test_the_decoding_trial_does_not_move_the_slot(published: Database) -> None:
    slot = f"s_{published.name}"
    published.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    published.execute("INSERT INTO users VALUES (1, 'a')")
    before = published.slot(slot)
    found = await findings(published.dsn, slot)
    after = published.slot(slot)
    assert "slot-decodes" in {finding.code for finding in found}
    assert before is not None
    assert after is not None
    assert before["confirmed_flush_lsn"] == after["confirmed_flush_lsn"]


async def test_an_abandoned_slot_of_somebody_else_is_reported_with_its_drop(
    published: Database,
) -> None:
    orphan = f"orphan_{published.name}"
    published.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [orphan])
    published.execute(
        "INSERT INTO users SELECT n, repeat('x', 100) FROM generate_series(1, 1000) n"
    )
    found = await findings(published.dsn, warn_bytes=50_000)
    matching = [one for one in found if one.code == "orphan-slot" and orphan in one.what]
    assert len(matching) == 1
    apply_fix(published.dsn, matching[0])
    assert published.slot(orphan) is None


async def test_a_slot_far_behind_is_reported_until_it_has_caught_up(published: Database) -> None:
    slot = f"s_{published.name}"
    published.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    published.execute(
        "INSERT INTO users SELECT n, repeat('x', 100) FROM generate_series(1, 1000) n"
    )
    finding = only(await findings(published.dsn, slot, warn_bytes=50_000), "slot-lag")
    assert "start the bridge" in finding.fix
    published.execute(
        "SELECT count(*) FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')",
        [slot],
    )
    assert_gone(await findings(published.dsn, slot, warn_bytes=50_000), "slot-lag")


async def test_a_slot_that_would_not_survive_a_failover_is_reported(published: Database) -> None:
    slot, standby = f"s_{published.name}", f"standby_{published.name}"
    published.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    assert_gone(await findings(published.dsn, slot), "slot-failover")
    published.execute("SELECT pg_create_physical_replication_slot(%s)", [standby])
    finding = only(await findings(published.dsn, slot), "slot-failover")
    subprocess.run(
        ["sh", "-ec", statements(finding)[0]],
        check=True,
        env={
            **os.environ,
            "PATH": f"{published.server.bin_directory}:{os.environ['PATH']}",
            "DATABASE_URL": published.dsn,
        },
    )
    assert_gone(await findings(published.dsn, slot), "slot-failover")
    published.execute("SELECT pg_drop_replication_slot(%s)", [standby])


@pytest.mark.parametrize(
    ("version", "wal_level", "effective", "is_fine"),
    [
        (180000, "replica", "replica", False),
        (190000, "replica", "replica", True),
        (190000, "replica", "logical", True),
        (190000, "minimal", "minimal", False),
    ],
)
async def test_a_server_that_logs_logically_on_demand_needs_no_other_wal_level(
    published: Database, version: int, wal_level: str, effective: str, is_fine: bool
) -> None:
    connection = await connect_for_check(published.dsn)
    assert not isinstance(connection, Finding)
    async with connection:
        read = await read_facts(connection, "slot")
    assert (read.wal_level, read.effective_wal_level) == ("logical", "logical")
    facts = replace(read, version=version, wal_level=wal_level, effective_wal_level=effective)
    (finding,) = [one for one in check_server(facts) if one.code == "wal-level"]
    assert (finding.severity == "ok") is is_fine


@pytest.mark.parametrize("failover", [True, False], ids=["failover", "plain"])
async def test_a_slot_that_waits_for_itself_is_reported_until_it_is_no_longer_named(
    own_postgres: Callable[..., PostgresServer], failover: bool
) -> None:
    server = own_postgres(settings={"synchronized_standby_slots": "standby, own, nobody"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        connection.execute("SELECT pg_create_physical_replication_slot('standby')")
        connection.execute(
            "SELECT pg_create_logical_replication_slot('own', 'pgoutput', false, false, %s)",
            [failover],
        )
    # Decoding by SQL would wait for the standbys too.
    finding = only(
        await findings(server.dsn(), "own", try_decoding=False), "synchronized-standby-slots"
    )
    assert finding.severity == ("problem" if failover else "warning")
    assert "own (a logical slot), nobody (no slot)" in finding.what
    assert "= 'standby';" in finding.fix
    apply_fix(server.dsn(), finding)
    assert_gone(
        await findings(server.dsn(), "own", try_decoding=False), "synchronized-standby-slots"
    )


async def test_a_standby_that_cannot_synchronise_slots_is_reported(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    server.stop()
    (server.directory / "data" / "standby.signal").touch()
    server.settings |= {"sync_replication_slots": "on", "primary_conninfo": "port=1 password=abc"}
    server.start()

    async def missing() -> list[str]:
        found = await findings(server.dsn())
        return [one.what.rpartition("but ")[2] for one in found if one.code == "slot-sync"]

    found = await findings(server.dsn())
    assert "abc" not in "".join(one.what + one.fix for one in found)
    assert await missing() == [
        "hot_standby_feedback is off",
        "primary_slot_name is not set",
        "primary_conninfo has no dbname",
    ]
    for finding in [one for one in found if one.code == "slot-sync"][:2]:
        apply_fix(server.dsn(), finding)
    server.settings["primary_conninfo"] = "port=1 password=abc dbname=postgres"
    server.restart()
    assert await missing() == []


@pytest.mark.parametrize(
    ("setting", "value", "code", "severity"),
    [
        ("wal_level", "replica", "wal-level", "problem"),
        ("max_wal_senders", 0, "wal-senders", "problem"),
        ("max_wal_senders", 1, "wal-senders", "warning"),
        ("max_replication_slots", 0, "replication-slots", "problem"),
        ("max_replication_slots", 1, "replication-slots", "warning"),
        ("max_slot_wal_keep_size", "-1", "wal-limit", "warning"),
        ("idle_replication_slot_timeout", "1d", "idle-slot-timeout", "warning"),
    ],
)
async def test_a_server_setting_is_seen_and_its_fix_removes_it(
    own_postgres: Callable[..., PostgresServer],
    setting: str,
    value: object,
    code: str,
    severity: str,
) -> None:
    server = own_postgres(settings={setting: value})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    finding = only(await findings(server.dsn()), code)
    assert finding.severity == severity
    assert finding.blocks is (severity == "problem")
    if code == "wal-senders" and severity == "problem":
        refused = await check_replication_connection(server.dsn())
        assert [one.code for one in refused] == ["replication-connect"]
    apply_fix(server.dsn(), finding)
    if "restart" in finding.fix:
        server.restart()
    assert_gone(await findings(server.dsn()), code)
    assert await check_replication_connection(server.dsn()) == []


@pytest.mark.parametrize("version", [18, 16])
async def test_a_lost_slot_is_seen_and_dropped_by_its_fix(
    own_postgres: Callable[..., PostgresServer], version: int
) -> None:
    server = own_postgres(version, settings={"max_slot_wal_keep_size": "1MB"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int PRIMARY KEY)")
        connection.execute("CREATE PUBLICATION pub FOR TABLE t")
        connection.execute("SELECT pg_create_logical_replication_slot('behind', 'pgoutput')")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")
    finding = only(await findings(server.dsn(), "behind"), "slot-lost")
    assert finding.blocks
    apply_fix(server.dsn(), finding)
    found = await findings(server.dsn(), "behind")
    assert_gone(found, "slot-lost")
    assert any("will be created" in one.what for one in found)


async def test_a_database_without_encoding_is_reported_until_restored_as_utf8(
    published: Database,
) -> None:
    server, plain = published.server, f"{published.name}_ascii"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {plain} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0"
        )
    try:
        with psycopg.connect(server.dsn(plain), autocommit=True) as connection:
            connection.execute("CREATE TABLE kept (a int PRIMARY KEY)")
            connection.execute("CREATE PUBLICATION pub FOR TABLE kept")
        assert "ENCODING 'UTF8'" in only(await findings(server.dsn(plain)), "encoding").fix
        published.execute("DROP PUBLICATION pub")
        bin_directory = server.bin_directory
        dump = subprocess.run(
            [bin_directory / "pg_dump", server.dsn(plain)], check=True, capture_output=True
        )
        subprocess.run(
            [bin_directory / "psql", "-qX", "-v", "ON_ERROR_STOP=1", published.dsn],
            check=True,
            input=dump.stdout,
            stdout=subprocess.DEVNULL,
        )
        assert_gone(await findings(published.dsn), "encoding")
    finally:
        server.drop_database(plain)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"port": "1"}, "start PostgreSQL"),
        ({"password": "wrong-secret"}, "POSTGRES_BRIDGE_PASSWORD"),
        ({"dbname": "no_such_database"}, "PG_DB"),
    ],
)
async def test_a_failed_connection_says_what_to_set_and_hides_the_password(
    database: Database, change: dict[str, str], hint: str
) -> None:
    dsn = psycopg.conninfo.make_conninfo(database.dsn, **change)
    finding = await connect_for_check(dsn)
    assert isinstance(finding, Finding)
    assert finding.blocks
    assert hint in finding.fix
    assert database.server.password not in finding.what
    assert "wrong-secret" not in finding.what


async def test_a_standby_is_reported_until_it_is_the_primary(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    server.stop()
    (server.directory / "data" / "standby.signal").touch()
    server.start()
    finding = only(await findings(server.dsn()), "standby")
    assert finding.severity == "warning"
    assert "connect to the primary" in finding.fix
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_promote()")
    assert_gone(await findings(server.dsn()), "standby")


@pytest.mark.parametrize("pg", [18, 16], indirect=True)
async def test_the_query_for_version_14_finds_the_same_plain_tables(published: Database) -> None:
    connection = await connect_for_check(published.dsn)
    assert not isinstance(connection, Finding)
    async with connection:
        new = await read_publication(connection, "pub", connection.info.server_version)
        old = await read_publication(connection, "pub", 140000)
    assert old == new
