"""Logging in to NATS: never in the clear where TLS is asked for, and with any password."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from bridge.embedded import NatsServer

    Run = Callable[..., subprocess.CompletedProcess[str]]

PASSWORD = "s3cret-Word"
TLS = Path(__file__).parents[1] / "fixtures" / "tls"
CERTIFICATE = TLS / "server.pem"
BRIDGE = ("bridge", "--slot", "s", "--pub", "p", "--port", "0", "--log-level", "error")
DROP = ("bridge", "drop", "--slot", "s", "--yes")
CDC = ("cdc", "tables")
SPARK = ("spark-consumer", "--tables", "t", "--lake", "nowhere", "--once")
COMMANDS = pytest.mark.parametrize("command", [BRIDGE, CDC, SPARK], ids=lambda command: command[0])


class Eavesdropper:
    """Greets as a nats-server without TLS does and keeps what it is told."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.greeted = 0
        self.heard = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        info = {"server_id": "x", "version": "2.11.0", "auth_required": True, "headers": True,
                "max_payload": 1 << 20, "proto": 1}  # fmt: skip
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(f"INFO {json.dumps(info)}\r\n".encode())
                self.greeted += 1
                connection.settimeout(5)
                try:
                    while heard := connection.recv(65536):
                        self.heard += heard
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def eavesdropper() -> Iterator[Eavesdropper]:
    server = Eavesdropper()
    yield server
    server.close()


@COMMANDS
@pytest.mark.parametrize("asked", ["scheme", "file"])
def test_a_server_without_tls_never_gets_the_password(
    command: tuple[str, ...], asked: str, eavesdropper: Eavesdropper, database, run_command: Run
) -> None:
    scheme = "tls" if asked == "scheme" else "nats"
    address = f"127.0.0.1:{eavesdropper.port}"
    environment = {"NATS_URL": f"{scheme}://me:{PASSWORD}@{address}"}
    if asked == "file":
        environment["NATS_CA"] = str(CERTIFICATE)
    result = run_command(*command, environment=environment)
    assert eavesdropper.greeted
    assert eavesdropper.heard == b""
    assert result.returncode == 3, result.stderr
    assert result.stderr.startswith(f"{command[0]}: the server at {address} offers no TLS")
    assert len(result.stderr.splitlines()) == 1
    assert PASSWORD not in result.stderr


def test_plain_text_is_sent_where_nothing_else_is_asked_for(
    eavesdropper: Eavesdropper, run_command: Run
) -> None:
    """The server of the test above does hear what it is told."""
    address = f"nats://me:{PASSWORD}@127.0.0.1:{eavesdropper.port}"
    run_command("cdc", "tables", "--timeout", "1", environment={"NATS_URL": address})
    assert PASSWORD.encode() in eavesdropper.heard


@COMMANDS
def test_an_address_that_is_never_encrypted_is_refused_together_with_tls_files(
    command: tuple[str, ...], database, run_command: Run
) -> None:
    environment = {"NATS_URL": f"ws://me:{PASSWORD}@127.0.0.1:1", "NATS_CA": str(CERTIFICATE)}
    result = run_command(*command, environment=environment)
    assert result.returncode == 2, result.stderr
    assert "write wss://" in result.stderr
    assert PASSWORD not in result.stderr


@pytest.mark.parametrize("also_plain", [False, True])
def test_a_server_that_offers_tls_is_used_with_it(
    own_nats: Callable[..., NatsServer], database, run_command: Run, also_plain: bool
) -> None:
    server = own_nats(
        config=f"""
        tls {{ cert_file: "{CERTIFICATE}", key_file: "{TLS / "server.key"}" }}
        allow_non_tls: {str(also_plain).lower()}
        authorization {{ user: me, password: "{PASSWORD}" }}
        """
    )
    url = server.url_as("me", PASSWORD).replace("nats://", "tls://")
    environment = {"NATS_URL": url, "NATS_CA": str(CERTIFICATE)}
    # Let in, and so told that nothing has been published.
    tables = run_command("cdc", "tables", environment=environment)
    assert (tables.returncode, tables.stderr) == (
        3, "cdc: there is no bucket schemas on this NATS; has a bridge run?\n",
    )  # fmt: skip
    assert "no tables to release" in run_command(*DROP, environment=environment).stdout
    # A certificate nobody vouches for is as bad as none.
    strange = run_command("cdc", "tables", "--timeout", "2", environment={"NATS_URL": url})
    assert strange.returncode == 3
    assert "certificate" in strange.stderr


def test_user_and_password_may_be_percent_encoded(
    own_nats: Callable[..., NatsServer], database, run_command: Run
) -> None:
    server = own_nats(config='authorization { user: "u/1", password: "p@ss w0rd%41" }')
    environment = {"NATS_URL": server.url_as("u%2F1", "p%40ss%20w0rd%2541")}
    tables = run_command("cdc", "tables", environment=environment)
    assert "there is no bucket" in tables.stderr
    assert "no tables to release" in run_command(*DROP, environment=environment).stdout
    wrong = run_command("cdc", "tables", environment={"NATS_URL": server.url_as("u%2F1", "p%40ss")})
    assert "refuses the credentials" in wrong.stderr
