"""Every login to NATS works for bridge and SDK, and a refused one says why in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bridge.config import load
from bridge.errors import BrokerError
from bridge.jetstream.connection import probe
from consumer_sdk.errors import AccessDenied
from consumer_sdk.transport.connection import open_connection
from consumer_sdk.transport.settings import NatsSettings
from tests.fixtures.certificates import Authority
from tests.fixtures.nats_accounts import Operator, new_seed, public_key
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from bridge.embedded import NatsServer

    LogIn = Callable[[dict[str, str]], Awaitable[None]]
    Servers = Callable[..., NatsServer]

PASSWORD = "s3cret-Word"


async def as_bridge(environment: dict[str, str]) -> None:
    await probe(load({"slot": "s"}, environment))


async def as_sdk(environment: dict[str, str]) -> None:
    settings = NatsSettings.resolve(environment=environment)
    connection = await open_connection(settings, 3)
    await connection.close()


BOTH = pytest.mark.parametrize("log_in", [as_bridge, as_sdk], ids=["bridge", "sdk"])


async def refusal(log_in: LogIn, environment: dict[str, str]) -> str:
    """The one line with which a login is refused for good."""
    with pytest.raises((BrokerError, AccessDenied)) as caught:
        await log_in(environment)
    assert caught.value.exit_code == 3
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert PASSWORD not in line
    return line


class TlsFiles:
    """A CA, and certificates of servers and clients."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.other = Authority(directory, "other")
        self.server = self.authority.issue("server", "127.0.0.1", "localhost")
        self.client = self.authority.issue("client")
        self.directory = directory


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    return TlsFiles(tmp_path)


def tls_config(tls: TlsFiles, certificate: Any = None, more: str = "") -> str:
    files = certificate or tls.server
    return f'tls {{ cert_file: "{files.cert}", key_file: "{files.key}"\n{more} }}\n'


def environment_for(server: NatsServer, scheme: str = "tls", **variables: Any) -> dict[str, str]:
    url = server.url.replace("nats://", f"{scheme}://")
    return {"NATS_URL": url} | {name: str(value) for name, value in variables.items()}


@BOTH
async def test_tls_with_a_trusted_ca_lets_the_password_through(
    log_in: LogIn, own_nats: Servers, tls: TlsFiles
) -> None:
    user = f'authorization {{ user: me, password: "{PASSWORD}" }}'
    server = own_nats(config=tls_config(tls) + user)
    login = {"NATS_BRIDGE_USER": "me", "NATS_BRIDGE_PASSWORD": PASSWORD}
    for scheme in ("tls", "nats"):
        await log_in(environment_for(server, scheme, NATS_CA=tls.authority.ca, **login))
    by_name = environment_for(server, NATS_CA=tls.authority.ca, **login)
    by_name["NATS_URL"] = by_name["NATS_URL"].replace("127.0.0.1", "localhost")
    await log_in(by_name)


@BOTH
async def test_a_certificate_of_the_server_is_refused_with_the_reason(
    log_in: LogIn, own_nats: Servers, tls: TlsFiles
) -> None:
    right = {"NATS_CA": tls.authority.ca}
    server = own_nats(config=tls_config(tls))
    unknown = await refusal(log_in, environment_for(server, NATS_CA=tls.other.ca))
    assert "is refused: it is not signed by a trusted CA" in unknown
    assert str(server.port) in unknown
    expired = tls.authority.issue("server", "127.0.0.1", expired=True, file_name="expired")
    server = own_nats(config=tls_config(tls, expired))
    line = await refusal(log_in, environment_for(server, **right))
    assert "is refused: it has expired" in line
    elsewhere = tls.authority.issue("server", "nats.example", file_name="elsewhere")
    server = own_nats(config=tls_config(tls, elsewhere))
    line = await refusal(log_in, environment_for(server, **right))
    assert "is refused: it is for another host" in line


@BOTH
async def test_mutual_tls_wants_a_certificate_of_the_client(
    log_in: LogIn, own_nats: Servers, tls: TlsFiles
) -> None:
    verify = f'ca_file: "{tls.authority.ca}"\nverify: true'
    server = own_nats(config=tls_config(tls, more=verify))
    right = {"NATS_CA": tls.authority.ca}
    client = {"NATS_CERT": tls.client.cert, "NATS_KEY": tls.client.key}
    await log_in(environment_for(server, **right, **client))
    missing = await refusal(log_in, environment_for(server, **right))
    assert "refuses the client certificate: it demands one, and none was sent" in missing
    for certificate, said in (
        (tls.authority.issue("client", expired=True, file_name="old"), "it has expired"),
        (tls.other.issue("client", file_name="foreign"), "its CA is unknown there"),
    ):
        files = {"NATS_CERT": certificate.cert, "NATS_KEY": certificate.key}
        line = await refusal(log_in, environment_for(server, **right, **files))
        assert f"refuses the client certificate: {said}" in line


@BOTH
async def test_tls_may_begin_before_the_server_speaks(
    log_in: LogIn, own_nats: Servers, tls: TlsFiles
) -> None:
    server = own_nats(config=tls_config(tls, more="handshake_first: true"))
    right = {"NATS_CA": tls.authority.ca, "NATS_TLS_FIRST": "yes"}
    await log_in(environment_for(server, **right))
    # The option alone asks for TLS.
    await log_in(environment_for(server, "nats", **right))
    plain = own_nats()
    line = await refusal(log_in, environment_for(plain, **right))
    assert "TLS with NATS" in line
    assert "unset NATS_TLS_FIRST" in line


@BOTH
async def test_a_user_logs_in_with_an_nkey(
    log_in: LogIn, own_nats: Servers, tmp_path: Path
) -> None:
    seed, path = new_seed(), tmp_path / "user.nk"
    server = own_nats(config=f"authorization {{ users: [ {{ nkey: {public_key(seed)} }} ] }}")
    path.write_text(f"{seed}\n")
    await log_in({"NATS_URL": server.url, "NATS_NKEY": str(path)})
    path.write_text(new_seed())
    line = await refusal(log_in, {"NATS_URL": server.url, "NATS_NKEY": str(path)})
    assert "refuses the credentials" in line
    assert f"does not know the nkey in {path}" in line


@BOTH
async def test_a_user_of_an_account_logs_in_with_credentials(
    log_in: LogIn, own_nats: Servers, tmp_path: Path
) -> None:
    operator, creds = Operator(), tmp_path / "user.creds"
    server = own_nats(config=operator.config())
    environment = {"NATS_URL": server.url, "NATS_CREDS": str(creds)}
    seed = operator.write_creds(creds)
    await log_in(environment)
    operator.revoke(seed)
    server.config = operator.config()
    server.restart()
    line = await refusal(log_in, environment)
    assert f"the user in {creds} is revoked" in line
    operator.write_creds(creds, lives=-60)
    line = await refusal(log_in, environment)
    assert f"the user in {creds} has expired on " in line
    Operator().write_creds(creds)
    line = await refusal(log_in, environment)
    assert "of an unknown account" in line


@BOTH
async def test_a_wrong_password_is_refused_with_what_to_check(
    log_in: LogIn, own_nats: Servers, tmp_path: Path
) -> None:
    server = own_nats(config='authorization { user: me, password: "right" }')
    wrong = {"NATS_URL": server.url, "NATS_BRIDGE_USER": "me"}
    line = await refusal(log_in, {**wrong, "NATS_BRIDGE_PASSWORD": PASSWORD})
    assert "refuses the credentials" in line
    assert "NATS_BRIDGE_PASSWORD" in line
    line = await refusal(log_in, {**wrong, "NATS_PASSWORD_COMMAND": "/no/such/program"})
    assert "/no/such/program cannot be started" in line
    file = tmp_path / "password"
    file.write_text("right\n")
    await log_in({**wrong, "NATS_PASSWORD_FILE": str(file)})
    await log_in({**wrong, "NATS_PASSWORD_COMMAND": "printf right"})


def test_the_commands_exit_with_3_and_one_line(
    own_nats: Servers, tls: TlsFiles, database, run_command
) -> None:
    server = own_nats(config=tls_config(tls))
    environment = environment_for(server, NATS_CA=tls.other.ca)
    bridge = ("bridge", "--slot", "s", "--pub", "p", "--port", "0", "--log-level", "error")
    for command in (bridge, ("cdc", "tables")):
        result = run_command(*command, environment=environment)
        assert result.returncode == 3, result.stderr
        assert "it is not signed by a trusted CA" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_bridge_snapshot_and_mirror_work_over_mutual_tls_first_with_credentials(
    own_nats: Servers, tls: TlsFiles, database, bridge_process, run_command, tmp_path: Path
) -> None:
    operator, creds = Operator(), tmp_path / "user.creds"
    operator.write_creds(creds)
    verify = f'ca_file: "{tls.authority.ca}"\nverify: true\nhandshake_first: true'
    server = own_nats(config=tls_config(tls, more=verify) + operator.config())
    environment = environment_for(
        server, NATS_CA=tls.authority.ca, NATS_CERT=tls.client.cert, NATS_KEY=tls.client.key,
        NATS_TLS_FIRST="yes", NATS_CREDS=creds,
    )  # fmt: skip
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("INSERT INTO t SELECT n, 'v' || n FROM generate_series(1, 500) n")
    database.publish("t")
    bridge = bridge_process(nats_url=environment["NATS_URL"], prefix="e2e", environment={
        name: value for name, value in environment.items() if name != "NATS_URL"
    })  # fmt: skip
    database.execute("UPDATE t SET v = 'new' WHERE id < 10")
    replica = tmp_path / "replica.db"
    done = run_command(
        "cdc", "mirror", "t", "--into", f"sqlite:///{replica}", "--once", "--prefix", "e2e",
        environment=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wait_until(lambda: bridge.status()["cdc_events_published"] >= 9)
    compared = run_command(
        "cdc", "verify", "t", "--source", database.dsn, "--replica", f"sqlite:///{replica}",
        "--prefix", "e2e", environment=environment,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stdout + compared.stderr


@BOTH
async def test_a_server_that_wants_tls_first_is_not_waited_for_silently(
    log_in: LogIn, own_nats: Servers, tls: TlsFiles
) -> None:
    """Without the option the client waits for a greeting, and says what may be missing."""
    more = "handshake_first: true\ntimeout: 0.5"
    server = own_nats(config=tls_config(tls, more=more))
    with pytest.raises(Exception, match="NATS_TLS_FIRST"):
        await log_in(environment_for(server, NATS_CA=tls.authority.ca))
