"""Credentials that change under load: nothing is lost, and neither bridge nor mirror ends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any

import pytest

from consumer_sdk.transport.connection import open_connection
from consumer_sdk.transport.settings import NatsSettings
from tests.fixtures.certificates import Authority
from tests.fixtures.mirror import Workload, wait_equal
from tests.fixtures.nats_accounts import Operator, new_seed, public_key, replace_file
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bridge.embedded import NatsServer
    from tests.fixtures.certificates import Certificate
    from tests.fixtures.postgres import Database

LONG = bool(os.environ.get("TAILRACE_LONG"))
ROTATIONS, PERIOD_SECONDS = (12, 5.0) if LONG else (6, 1.0)


def first_or_second(rotation: int, one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Do both, in turns one or the other first, so that a login may come in between."""
    for step in (one, other) if rotation % 2 else (other, one):
        step()


class PostgresLogin:
    """A role whose password changes; its sessions are cut with each change."""

    def __init__(self, database: Database, path: Path) -> None:
        self._database = database
        self.path = path
        self.dsn = database.role("LOGIN REPLICATION")
        self.role = database.roles[-1]
        database.execute(
            f"GRANT USAGE ON SCHEMA sales TO {self.role};"
            f"GRANT SELECT ON {', '.join(Workload.TABLES)} TO {self.role}"
        )
        self.rotate(0)

    @property
    def url(self) -> str:
        """The address without password."""
        return f"postgresql://{self.role}@{self.dsn.rpartition('@')[2]}"

    def rotate(self, rotation: int) -> None:
        password = secrets.token_hex(8)
        first_or_second(
            rotation,
            lambda: self._database.execute(f"ALTER ROLE {self.role} PASSWORD '{password}'"),
            lambda: replace_file(self.path, f"{password}\n"),
        )
        self._database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [self.role]
        )


class PasswordLogin:
    """A NATS user whose password changes."""

    def __init__(self, servers: Callable[..., NatsServer], path: Path) -> None:
        self._path = path
        replace_file(path, "first")
        self.server = servers(config=self._config("first"))
        self.environment = {"NATS_BRIDGE_USER": "me", "NATS_PASSWORD_FILE": str(path)}

    def _config(self, password: str) -> str:
        return f'authorization {{ user: me, password: "{password}" }}'

    def rotate(self, rotation: int) -> None:
        password = secrets.token_hex(8)
        self.server.config = self._config(password)
        first_or_second(rotation, self.server.reload, lambda: replace_file(self._path, password))


class CredsLogin:
    """A NATS user of an account, revoked and replaced by another one."""

    def __init__(self, servers: Callable[..., NatsServer], path: Path) -> None:
        self._path = path
        self._operator = Operator()
        self._seed = self._operator.write_creds(path)
        self.server = servers(config=self._operator.config())
        self.environment = {"NATS_CREDS": str(path)}

    def rotate(self, rotation: int) -> None:
        self._operator.revoke(self._seed)
        self.server.config = self._operator.config()

        def issue() -> None:
            self._seed = self._operator.write_creds(self._path)

        first_or_second(rotation, self.server.reload, issue)


@pytest.mark.slow
@pytest.mark.timeout(180 + 2 * ROTATIONS * PERIOD_SECONDS)
@pytest.mark.parametrize("kind", ["files", "command and creds"])
def test_new_credentials_under_load_lose_nothing_and_end_nothing(
    kind: str,
    database: Any,
    own_nats: Callable[..., NatsServer],
    bridge_process: Any,
    mirror_process: Any,
    run_command: Any,
    prefix: str,
    tmp_path: Path,
) -> None:
    Workload.create(database.dsn)
    database.publish(*Workload.TABLES)
    postgres = PostgresLogin(database, tmp_path / "pg-password")
    login: Any = PasswordLogin if kind == "files" else CredsLogin
    nats = login(own_nats, tmp_path / "nats-login")
    source = {"POSTGRES_BRIDGE_PASSWORD_FILE": str(postgres.path)}
    if kind != "files":
        source = {"POSTGRES_BRIDGE_PASSWORD_COMMAND": f"cat {postgres.path}"}
    bridge = bridge_process(
        database_url=postgres.url, nats_url=nats.server.url, environment=source | nats.environment
    )
    path = tmp_path / "replica.db"
    environment = {"NATS_URL": nats.server.url, "BRIDGE_PREFIX": prefix, **nats.environment}
    # This starts a snapshot worker, which waits for the next snapshot.
    mirror = mirror_process(*Workload.TABLES, "--into", f"sqlite:///{path}",
                            environment=environment)  # fmt: skip
    mirror.wait_logged("event=following", 60)
    schedule = threading.Event()
    with Workload(database.dsn) as workload:
        for rotation in range(1, ROTATIONS + 1):
            postgres.rotate(rotation)
            nats.rotate(rotation)
            workload.wait_for(5)
            schedule.wait(PERIOD_SECONDS)
            if rotation % 3 == 0:
                # Now and then all are connected when the next change comes.
                bridge.wait_ready()
    wait_equal(database.dsn, path, *Workload.TABLES, timeout=90, mirror=mirror)
    bridge.wait_ready()
    status = bridge.status()
    assert status["reconnect_count"] >= 1
    assert status["nats_reconnect_count"] >= 1
    # The worker may still be the one that knew the first password.
    out = tmp_path / "accounts.jsonl"
    copied = run_command("cdc", "snapshot", "accounts", "--fresh", "--out", str(out),
                         environment=environment)  # fmt: skip
    assert copied.returncode == 0, copied.stderr + bridge.log_text()
    assert len(out.read_text().splitlines()) == database.value("SELECT count(*) FROM accounts")
    secrets_used = {postgres.path.read_text().strip()}
    assert not any(secret in bridge.log_text() for secret in secrets_used)


@pytest.mark.parametrize("variable", ["FILE", "COMMAND"])
def test_a_wrong_password_of_postgres_ends_the_first_start(
    variable: str,
    database: Any,
    own_nats: Callable[..., NatsServer],
    run_command: Any,
    tmp_path: Path,
) -> None:
    path = tmp_path / "password"
    path.write_text("wr0ng-Word\n")
    database.role()
    url = f"postgresql://{database.roles[-1]}@{database.dsn.rpartition('@')[2]}"
    value = str(path) if variable == "FILE" else f"cat {path}"
    nats_url = own_nats().url
    bridge = ("bridge", "--slot", "s", "--pub", "p", "--port", "0", "--log-level", "error")
    for given, said in (
        (value, "password authentication failed"),
        ("" if variable == "FILE" else "false", "ended with status 1"),
    ):
        if not given:
            continue
        source = {f"POSTGRES_BRIDGE_PASSWORD_{variable}": given}
        environment = {"DATABASE_URL": url, "NATS_URL": nats_url, **source}
        result = run_command(*bridge, environment=environment)
        assert result.returncode == 3, result.stderr
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert "wr0ng-Word" not in result.stderr


def test_while_nats_refuses_the_login_the_bridge_says_so_and_goes_on_afterwards(
    database: Any, own_nats: Callable[..., NatsServer], bridge_process: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish("t")
    file = tmp_path / "password"
    nats = PasswordLogin(own_nats, file)
    bridge = bridge_process(nats_url=nats.server.url, environment=nats.environment)
    nats.server.config = 'authorization { user: me, password: "second" }'
    nats.server.reload()
    wait_until(lambda: "nats-login" in {one["key"] for one in bridge.status()["warnings"]})
    assert not bridge.ready()
    assert bridge.http("/health").status == 200
    database.execute("INSERT INTO t VALUES (1)")
    attempts = nats.server.log_path.read_text().count("authentication error")
    wait_until(lambda: nats.server.log_path.read_text().count("authentication error") > attempts)
    assert bridge.log_text().count("nats refuses the login") == 1
    assert "refuses the credentials" in bridge.log_text()
    replace_file(file, "second")
    bridge.wait_ready()
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)
    assert not bridge.status()["warnings"]


class Nkey:
    """A user with an nkey, which is exchanged."""

    def __init__(self, servers: Callable[..., NatsServer], path: Path) -> None:
        self._path = path
        self.server = servers(config=self._exchange())
        self.environment = {"NATS_NKEY": str(path)}

    def _exchange(self) -> str:
        seed = new_seed()
        replace_file(self._path, seed)
        return f"authorization {{ users: [ {{ nkey: {public_key(seed)} }} ] }}"

    def rotate(self, _rotation: int) -> None:
        self.server.config = self._exchange()
        self.server.reload()


@pytest.mark.parametrize("kind", [PasswordLogin, CredsLogin, Nkey])
async def test_the_sdk_reads_new_credentials_for_a_new_connection(
    kind: Any, own_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    login = kind(own_nats, tmp_path / "login")
    environment = {"NATS_URL": login.server.url, **login.environment}
    connection = await open_connection(NatsSettings.resolve(environment=environment))
    connection.options["reconnect_time_wait"] = 0.1

    async def reconnect(rotation: int) -> None:
        before = connection.stats["reconnects"]
        login.rotate(rotation)
        await eventually(lambda: connection.stats["reconnects"] > before)
        await connection.api("INFO")

    await reconnect(0)
    await reconnect(1)
    await connection.close()


async def test_new_certificates_are_read_for_a_new_connection(
    own_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    def issue() -> tuple[Authority, Certificate, Certificate]:
        authority = Authority(tmp_path)
        return authority, authority.issue("server", "127.0.0.1"), authority.issue("client")

    authority, server, client = issue()
    nats = own_nats(
        config=f"""tls {{ cert_file: "{server.cert}", key_file: "{server.key}"
        ca_file: "{authority.ca}", verify: true }}"""
    )
    environment = {
        "NATS_URL": nats.url, "NATS_CA": str(authority.ca), "NATS_CERT": str(client.cert),
        "NATS_KEY": str(client.key),
    }  # fmt: skip
    connection = await open_connection(NatsSettings.resolve(environment=environment))
    connection.options["reconnect_time_wait"] = 0.1
    # All of another CA, under the names of the old ones.
    issue()
    await asyncio.to_thread(nats.restart)
    await eventually(lambda: connection.stats["reconnects"] == 1 and connection.is_connected)
    await connection.api("INFO")
    await connection.close()


async def test_a_refused_login_of_the_sdk_is_logged_once_and_tried_until_it_works(
    own_nats: Callable[..., NatsServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    login = CredsLogin(own_nats, tmp_path / "login")
    environment = {"NATS_URL": login.server.url, **login.environment}
    options = NatsSettings.resolve(environment=environment)
    connection = await open_connection(options)
    connection.options["reconnect_time_wait"] = 0.1

    def attempts() -> int:
        return sum(one.getMessage() == "nats error" for one in caplog.records)

    with caplog.at_level(logging.DEBUG, "consumer_sdk.transport"):
        login._operator.revoke(login._seed)
        login.server.config = login._operator.config()
        login.server.reload()
        await eventually(lambda: attempts() > 5)
        # Half a file, as an editor leaves it for a moment; nats-py would read it without end.
        half = (tmp_path / "login").read_text()[:200]
        replace_file(tmp_path / "login", half)
        seen = attempts()
        await eventually(lambda: attempts() > seen + 5)
    ours = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert len(ours) == 1
    assert "revoked" in ours[0]
    assert not connection.is_closed
    login._operator.write_creds(tmp_path / "login")
    await eventually(lambda: connection.is_connected)
    await connection.close()


async def test_an_expired_user_connects_again_with_new_credentials(
    own_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    operator, creds = Operator(), tmp_path / "user.creds"
    server = own_nats(config=operator.config())
    operator.write_creds(creds, lives=2)
    environment = {"NATS_URL": server.url, "NATS_CREDS": str(creds)}
    connection = await open_connection(NatsSettings.resolve(environment=environment))
    operator.write_creds(creds)
    await eventually(lambda: connection.stats["reconnects"] == 1 and connection.is_connected)
    assert "expired" in str(connection.latest_error).lower()
    await connection.close()
