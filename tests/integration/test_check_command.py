"""`bridge check` as operators run it: report, JSON, exit codes, the set-up SQL."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.fixtures.postgres import versions_since

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsServer, PostgresServer
    from tests.fixtures.postgres import Database


@pytest.fixture
def check(
    run_command: Callable[..., subprocess.CompletedProcess[str]],
    database: Database,
    nats_server: NatsServer,
    prefix: str,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        slot = f"slot_{database.name}"
        return run_command(
            "bridge", "check", "--slot", slot, "--pub", "pub", "--prefix", prefix, *flags,
            environment=environment,
        )  # fmt: skip

    return run


@pytest.fixture
def published(database: Database) -> Database:
    database.execute("CREATE TABLE users (id int PRIMARY KEY)")
    database.publish("users")
    return database


def test_a_sound_setup_exits_0_with_warnings_at_most(
    published: Database, check: Callable[..., Any]
) -> None:
    answer = check()
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "0 problems" in answer.stdout
    assert answer.stdout.rstrip().endswith("the bridge can run")
    assert answer.stderr == ""


def test_a_problem_exits_3_and_prints_what_why_and_fix(
    published: Database, check: Callable[..., Any]
) -> None:
    published.execute("CREATE TABLE bare (a int); ALTER PUBLICATION pub ADD TABLE bare")
    answer = check()
    assert answer.returncode == 3
    assert answer.stdout.startswith("PROBLEM  PostgreSQL: table bare has no replica identity")
    assert "why: PostgreSQL refuses every UPDATE and DELETE" in answer.stdout
    assert 'fix: ALTER TABLE "public"."bare" REPLICA IDENTITY FULL;' in answer.stdout


def test_json_holds_every_finding_with_its_parts(
    published: Database, check: Callable[..., Any]
) -> None:
    published.execute("DROP PUBLICATION pub")
    answer = check("--json")
    assert answer.returncode == 3
    document = json.loads(answer.stdout)
    assert document["ok"] is False
    by_code = {finding["code"]: finding for finding in document["findings"]}
    assert by_code["publication-missing"]["severity"] == "problem"
    assert set(by_code["publication-missing"]) == {
        "severity", "side", "code", "what", "why", "fix", "blocks",
    }  # fmt: skip
    assert {"postgres", "nats"} == {finding["side"] for finding in document["findings"]}


def test_counts_are_those_of_the_servers(
    published: Database, check: Callable[..., Any], bridge_process: Callable[..., Any]
) -> None:
    bridge_process()
    slots, senders = published.execute(
        "SELECT (SELECT count(*) FROM pg_replication_slots), "
        "(SELECT count(*) FROM pg_stat_replication)"
    )[0]
    answer = check()
    most = int(published.value("SHOW max_replication_slots"))
    assert f"{most - slots} of {most} replication slots free" in answer.stdout
    most = int(published.value("SHOW max_wal_senders"))
    assert f"{most - senders} of {most} WAL senders free" in answer.stdout


def test_one_is_not_written_as_many(published: Database, check: Callable[..., Any]) -> None:
    published.execute("CREATE TABLE bare (a int); ALTER PUBLICATION pub ADD TABLE bare")
    answer = check()
    assert answer.stdout.splitlines()[-1].startswith("1 problem, ")


def test_both_sides_being_away_are_two_findings_without_secrets(
    published: Database, check: Callable[..., Any]
) -> None:
    answer = check(
        DATABASE_URL="postgresql://someone:s3cret@127.0.0.1:1/app",
        NATS_URL="nats://someone:s3cret@127.0.0.1:1",
    )
    assert answer.returncode == 3
    assert "[pg-unreachable]" in answer.stdout
    assert "[nats-unreachable]" in answer.stdout
    assert "s3cret" not in answer.stdout + answer.stderr


def test_wrong_credentials_for_nats_are_told_apart(
    published: Database, check: Callable[..., Any], own_nats: Callable[..., NatsServer]
) -> None:
    server = own_nats(config="authorization { user: a, password: right }")
    answer = check(NATS_URL=server.url_as("a", "wrong"))
    assert answer.returncode == 3
    assert "refuses the credentials" in answer.stdout
    assert check(NATS_URL=server.url_as("a", "right")).returncode == 0


def test_a_check_changes_nothing_and_may_run_twice(
    published: Database, check: Callable[..., Any], nats_server: NatsServer
) -> None:
    streams = nats_server.monitor("/jsz")["streams"]
    first, second = check(), check()
    assert first.stdout == second.stdout
    assert published.slot(f"slot_{published.name}") is None
    assert nats_server.monitor("/jsz")["streams"] == streams


def test_missing_flags_exit_2(run_command: Callable[..., Any]) -> None:
    answer = run_command("bridge", "check")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "--slot is missing" in answer.stderr


@pytest.mark.parametrize("version", [18, 16])
def test_the_printed_setup_makes_a_role_that_passes_the_check_and_no_more(
    run_command: Callable[..., Any],
    own_postgres: Callable[..., PostgresServer],
    nats_server: NatsServer,
    prefix: str,
    version: int,
) -> None:
    server = own_postgres(version, settings={"wal_level": "replica"})
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE users (id int PRIMARY KEY)")
    name = 'odd "role'
    url = f"postgresql://odd%20%22role:s3cret@127.0.0.1:{server.port}/postgres"
    arguments = ["check", "--slot", "s", "--pub", "pub", "--prefix", prefix]
    environment = {"DATABASE_URL": url, "NATS_URL": nats_server.bridge_url}
    printed = run_command("bridge", *arguments, "--fix-sql", environment=environment)
    assert printed.returncode == 0, printed.stderr
    assert "s3cret" not in printed.stdout
    psql = [server.bin_directory / "psql", "-qX", "-v", "ON_ERROR_STOP=1", server.dsn()]
    for _ in range(2):
        subprocess.run(psql, input=printed.stdout, text=True, check=True)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(
            psycopg.sql.SQL("ALTER ROLE {} PASSWORD 's3cret'").format(psycopg.sql.Identifier(name))
        )
    server.restart()
    answer = run_command("bridge", *arguments, environment=environment)
    assert answer.returncode == 0, answer.stdout
    assert "[role-statistics]" in answer.stdout
    with psycopg.connect(url) as connection:
        connection.execute("SELECT * FROM users")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM users")


def test_the_printed_setup_names_the_tables_of_an_existing_publication(
    published: Database, check: Callable[..., Any]
) -> None:
    published.execute(
        'CREATE SCHEMA "S"; CREATE TABLE "S"."T t" (a int PRIMARY KEY);'
        'ALTER PUBLICATION pub ADD TABLE "S"."T t"'
    )
    printed = check("--fix-sql").stdout
    assert 'GRANT USAGE ON SCHEMA "S" TO "bridge";' in printed
    assert 'GRANT SELECT ON TABLE "S"."T t" TO "bridge";' in printed
    assert 'GRANT SELECT ON TABLE "public"."users" TO "bridge";' in printed
    assert "CREATE PUBLICATION" not in printed
    assert "ALL TABLES" not in printed


@versions_since(16)
def test_a_locked_table_is_named_instead_of_waited_for(
    published: Database, check: Callable[..., Any]
) -> None:
    with psycopg.connect(published.dsn) as holder:
        holder.execute("LOCK TABLE users IN ACCESS EXCLUSIVE MODE")
        pid = holder.info.backend_pid
        answer = check()
        assert (answer.returncode, answer.stderr) == (0, "")
        assert f"PostgreSQL: table users is locked by session {pid} (" in answer.stdout
        assert f"SELECT pg_catalog.pg_terminate_backend({pid});" in answer.stdout
        setup = check("--fix-sql")
    assert setup.returncode == 3
    assert len(setup.stderr.splitlines()) == 1


def test_a_query_that_is_cancelled_is_a_finding(
    published: Database, check: Callable[..., Any]
) -> None:
    published.execute(f"ALTER DATABASE {published.name} SET statement_timeout = '1s'")
    with psycopg.connect(published.dsn) as holder:
        holder.execute("LOCK TABLE users IN ACCESS EXCLUSIVE MODE")
        answer = check()
        assert (answer.returncode, answer.stderr) == (3, "")
        assert "statement timeout" in answer.stdout
        setup = check("--fix-sql")
    assert setup.returncode == 3
    assert len(setup.stderr.splitlines()) == 1


def test_plain_text_to_other_machines_and_example_passwords_are_warned_of(
    published: Database, check: Callable[..., Any]
) -> None:
    elsewhere = published.dsn.replace("127.0.0.1", "db.example") + "?hostaddr=127.0.0.1"
    answer = check("--json", DATABASE_URL=elsewhere, BRIDGE_ADMIN_TOKEN="change-me")
    found = json.loads(answer.stdout)
    assert found["ok"], answer.stdout
    warned = {one["code"] for one in found["findings"] if one["severity"] == "warning"}
    assert {"pg-tls", "example-password"} <= warned
    away = check("--json", NATS_URL="nats://me:s3cret@no-such-host.invalid:4222")
    codes = {one["code"] for one in json.loads(away.stdout)["findings"]}
    assert {"nats-tls", "nats-unreachable"} <= codes
    assert "s3cret" not in away.stdout
