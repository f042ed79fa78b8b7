"""TLS with PostgreSQL: it is kept where asked for, and a refused certificate says why."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from bridge.config import load
from bridge.errors import SourceError
from bridge.postgres.connection import connect_catalog, conninfo_of
from tests.fixtures.certificates import Authority, Certificate
from tests.fixtures.tls_relay import TlsRelay
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fixtures.postgres import Database

WITH_TLS = [
    pytest.mark.more,
    pytest.mark.parametrize("pg", [17], indirect=True, ids=["pg17"]),
]
"""For tests of PostgreSQL's own TLS: the wheels are built without it."""


def with_tls(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test on a PostgreSQL that has TLS."""
    for mark in WITH_TLS:
        test = mark(test)
    return test


class TlsServer:
    """The server of the test's database, with TLS switched on until the test ends."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database = database
        self.authority = Authority(directory)
        self.other = Authority(directory, "other")
        self._data = database.server.directory / "data"
        self._hba = (self._data / "pg_hba.conf").read_text()
        self.present(self.authority.issue("server", "127.0.0.1", "localhost"))

    def present(self, certificate: Certificate) -> None:
        """Let the server show this certificate from now on."""
        owner = self._data.stat()
        files = {
            "ssl_cert_file": certificate.cert,
            "ssl_key_file": certificate.key,
            "ssl_ca_file": self.authority.ca,
        }
        before = self._loaded()
        with self.database.connect() as connection:
            for name, source in files.items():
                target = self._data / f"test-{name}"
                target.touch(mode=0o600)
                target.write_bytes(source.read_bytes())
                os.chown(target, owner.st_uid, owner.st_gid)
                connection.execute(f"ALTER SYSTEM SET {name} = '{target.name}'")
            connection.execute("ALTER SYSTEM SET ssl = on")
            connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: self._loaded() > before and self._offers_tls())

    def allow(self, line: str) -> None:
        """Put a line before all others of pg_hba.conf."""
        before = self._loaded()
        (self._data / "pg_hba.conf").write_text(f"{line}\n{self._hba}")
        self.database.execute("SELECT pg_reload_conf()")
        wait_until(lambda: self._loaded() > before)

    def close(self) -> None:
        (self._data / "pg_hba.conf").write_text(self._hba)
        with self.database.connect() as connection:
            connection.execute("ALTER SYSTEM RESET ALL")
            connection.execute("SELECT pg_reload_conf()")

    def url(self, dsn: str = "", **parameters: object) -> str:
        """A connection string, by default of the superuser, with parameters of libpq."""
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        return f"{dsn or self.database.dsn}?{query}"

    def _loaded(self) -> str:
        return str(self.database.value("SELECT pg_conf_load_time()"))

    def _offers_tls(self) -> bool:
        return bool(self.database.value("SHOW ssl") == "on")


@pytest.fixture
def tls(database: Database, tmp_path: Path) -> Iterator[TlsServer]:
    server = TlsServer(database, tmp_path)
    yield server
    server.close()


@pytest.fixture
def relay(database: Database) -> Iterator[Callable[..., TlsRelay]]:
    """Factory of relays to the test's server: `relay(certificate, client_ca)`."""
    with ExitStack() as stack:

        def start(certificate: Certificate, client_ca: Path | None = None) -> TlsRelay:
            relayed = TlsRelay(database.server.port, certificate, client_ca)
            stack.callback(relayed.close)
            return relayed

        yield start


async def session(url: str) -> dict[str, object]:
    """What PostgreSQL knows of the TLS of a connection with these settings."""
    connection = await connect_catalog(conninfo_of(load({}, {"DATABASE_URL": url})))
    async with connection:
        cursor = await connection.execute(
            "SELECT ssl, client_dn FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        )
        row = await cursor.fetchone()
        assert row is not None
        return {"encrypted": row[0], "client": row[1]}


async def test_through_a_relay_with_tls_each_refusal_says_why(
    database: Database, tmp_path: Path, relay: Callable[..., TlsRelay]
) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    valid = authority.issue("server", "127.0.0.1")
    expired = authority.issue("server", "127.0.0.1", expired=True, file_name="expired")
    elsewhere = authority.issue("server", "db.example", file_name="elsewhere")
    client, old = authority.issue("client"), authority.issue("old", expired=True)

    def url(relayed: TlsRelay, **parameters: object) -> str:
        dsn = database.dsn.replace(f":{database.server.port}/", f":{relayed.port}/")
        given = {"sslmode": "verify-full", "sslrootcert": authority.ca, **parameters}
        return f"{dsn}?" + "&".join(f"{name}={value}" for name, value in given.items())

    simple, mutual = relay(valid), relay(valid, authority.ca)
    files = {"sslcert": client.cert, "sslkey": client.key}
    for working in (url(simple), url(simple, sslmode="require"), url(mutual, **files)):
        connection = await connect_catalog(conninfo_of(load({}, {"DATABASE_URL": working})))
        async with connection:
            assert connection.pgconn.ssl_in_use
    for refused, said in (
        (url(simple, sslrootcert=other.ca), "refused: it is not signed by a trusted CA"),
        (url(relay(expired)), "refused: it has expired"),
        (url(relay(elsewhere)), 'does not match host name "127.0.0.1"'),
        (url(mutual), "alert certificate required"),
        (url(mutual, sslcert=old.cert, sslkey=old.key), "alert certificate expired"),
        (database.dsn + "?sslmode=require", "does not support SSL"),
    ):
        line = await refusal(refused)
        assert said in line
        assert "PGSSLROOTCERT" in line


async def refusal(url: str) -> str:
    """The one line with which the bridge would exit."""
    with pytest.raises(SourceError) as caught:
        await session(url)
    assert caught.value.exit_code == 3
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


@with_tls
async def test_a_connection_is_encrypted_and_the_server_verified(tls: TlsServer) -> None:
    assert (await session(tls.url(sslmode="require")))["encrypted"]
    verified = tls.url(sslmode="verify-full", sslrootcert=tls.authority.ca)
    assert (await session(verified))["encrypted"]
    assert not (await session(tls.url(sslmode="disable")))["encrypted"]


@with_tls
async def test_a_certificate_of_the_server_is_refused_with_the_reason(tls: TlsServer) -> None:
    wrong_ca = await refusal(tls.url(sslmode="verify-full", sslrootcert=tls.other.ca))
    assert "certificate is refused: it is not signed by a trusted CA" in wrong_ca
    right = {"sslmode": "verify-full", "sslrootcert": tls.authority.ca}
    elsewhere = tls.database.dsn.replace("127.0.0.1", "db.example")
    other_host = await refusal(tls.url(elsewhere, hostaddr="127.0.0.1", **right))
    assert 'does not match host name "db.example"' in other_host
    tls.present(tls.authority.issue("server", "127.0.0.1", expired=True, file_name="expired"))
    expired = await refusal(tls.url(**right))
    assert "certificate is refused: it has expired" in expired
    for line in (wrong_ca, other_host, expired):
        assert "PGSSLROOTCERT" in line


@with_tls
async def test_a_client_certificate_takes_the_place_of_a_password(tls: TlsServer) -> None:
    tls.database.execute("CREATE ROLE certified LOGIN")
    tls.database.roles.append("certified")
    tls.allow("hostssl all certified 127.0.0.1/32 cert")
    client = tls.authority.issue("certified")
    dsn = tls.database.server.dsn(tls.database.name, user="certified")
    right = {"sslmode": "verify-full", "sslrootcert": tls.authority.ca}
    files = {"sslcert": client.cert, "sslkey": client.key}
    assert await session(tls.url(dsn, **right, **files)) == {
        "encrypted": True, "client": "/CN=certified",
    }  # fmt: skip
    missing = await refusal(tls.url(dsn, **right))
    assert "requires a valid client certificate" in missing
    for certificate, said in (
        (tls.authority.issue("certified", expired=True, file_name="old"), "certificate expired"),
        (tls.other.issue("certified", file_name="foreign"), "unknown ca"),
        (tls.authority.issue("somebody", file_name="somebody"), "certificate authentication"),
    ):
        files = {"sslcert": certificate.cert, "sslkey": certificate.key}
        assert said in await refusal(tls.url(dsn, **right, **files))


@with_tls
async def test_channel_binding_ties_the_password_to_the_servers_certificate(
    tls: TlsServer,
) -> None:
    bound = {"sslmode": "require", "channel_binding": "require"}
    assert (await session(tls.url(**bound)))["encrypted"]
    # Without TLS there is nothing to bind to, and no password is sent.
    line = await refusal(tls.url(sslmode="disable", channel_binding="require"))
    assert "channel binding" in line


@with_tls
def test_the_bridge_streams_and_copies_with_verified_tls_and_a_client_certificate(
    tls: TlsServer, bridge_process, prefix: str, nats_server, run_command, tmp_path: Path
) -> None:
    database = tls.database
    database.execute("CREATE ROLE streamer LOGIN REPLICATION")
    database.roles.append("streamer")
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a');"
        "GRANT SELECT ON t TO streamer"
    )
    database.publish("t")
    tls.allow("hostssl all streamer 127.0.0.1/32 cert")
    client = tls.authority.issue("streamer")
    url = tls.url(
        database.server.dsn(database.name, user="streamer"),
        sslmode="verify-full", sslrootcert=tls.authority.ca, sslcert=client.cert,
        sslkey=client.key,
    )  # fmt: skip
    bridge = bridge_process(database_url=url)
    sessions = database.execute(
        "SELECT DISTINCT ssl, client_dn FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)"
        " WHERE usename = 'streamer'"
    )
    assert sessions == [(True, "/CN=streamer")]
    database.execute("INSERT INTO t VALUES (2, 'b')")
    replica = f"sqlite:///{tmp_path / 'replica.db'}"
    environment = {"BRIDGE_PREFIX": prefix}
    done = run_command("cdc", "mirror", "t", "--into", replica, "--once", environment=environment)
    assert done.returncode == 0, done.stderr + bridge.log_text()
    arguments = ("t", "--source", database.dsn, "--replica", replica)
    compared = run_command("cdc", "verify", *arguments, environment=environment)
    assert compared.returncode == 0, compared.stdout + compared.stderr
