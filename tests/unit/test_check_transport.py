"""What `bridge check` says of the way to both servers, from the settings alone."""

from __future__ import annotations

import pytest

from bridge.config import load
from bridge.preflight.transport import check_transport

REMOTE = "postgresql://b:s3cret@db.example/app"


def findings(**environment: str) -> dict[str, str]:
    """Code and text of each finding; all are warnings with a fix, and none shows a secret."""
    found = check_transport(load({}, environment))
    for one in found:
        assert one.severity == "warning"
        assert one.why
        assert one.fix
        assert "s3cret" not in one.what + one.why + one.fix
    return {one.code: one.what for one in found}


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (REMOTE, "pg-tls"),
        (f"{REMOTE}?sslmode=disable", "pg-tls"),
        (f"{REMOTE}?sslmode=allow", "pg-tls"),
        (f"{REMOTE}?sslmode=prefer", "pg-tls"),
        (f"{REMOTE}?sslmode=require", "pg-sslmode"),
        (f"{REMOTE}?sslmode=verify-ca", "pg-sslmode"),
        (f"{REMOTE}?sslmode=verify-full", None),
        (f"{REMOTE}?sslrootcert=system", None),
        ("postgresql://b@10.0.0.7/app", "pg-tls"),
        ("postgresql://b@127.0.0.1,db.example/app", "pg-tls"),
        ("postgresql://b@localhost/app", None),
        ("postgresql://b@[::1]/app", None),
        ("postgresql:///app?host=/var/run/postgresql", None),
    ],
)
def test_postgres_on_another_machine_wants_a_verified_connection(
    url: str, code: str | None
) -> None:
    assert list(findings(DATABASE_URL=url)) == ([code] if code else [])


def test_sslmode_may_come_from_its_own_setting() -> None:
    assert "pg-sslmode" in findings(DATABASE_URL=REMOTE, PGSSLMODE="require")
    assert not findings(DATABASE_URL=REMOTE, PGSSLMODE="verify-full")


def test_nats_on_another_machine_wants_tls(tmp_path) -> None:
    plain = "in plain text"
    url = "nats://b:s3cret@nats.example:4222"
    assert findings(NATS_URL=url)["nats-tls"].startswith("the password and every row travel")
    assert plain in findings(NATS_URL="nats://nats.example", NATS_BRIDGE_USER="b")["nats-tls"]
    assert findings(NATS_URL="nats://nats.example")["nats-tls"].startswith("every row travels")
    assert "nats-tls" in findings(NATS_URL="ws://t0ken@nats.example")
    assert "nats-tls" in findings(NATS_URL="tls://one.example,nats://two.example")
    for fine in (url.replace("nats:", "tls:"), "wss://nats.example", "nats://b:s3cret@127.0.0.1"):
        assert not findings(NATS_URL=fine)
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    assert not findings(NATS_URL=url, NATS_CA=str(ca))
    assert not findings(NATS_URL=url, NATS_TLS_FIRST="yes")


@pytest.mark.parametrize(
    "environment",
    [
        {"DATABASE_URL": "postgresql://b:change-me@127.0.0.1/app"},
        {"POSTGRES_BRIDGE_PASSWORD": "change-me"},
        {"NATS_BRIDGE_USER": "b", "NATS_BRIDGE_PASSWORD": "change-me"},
        {"NATS_URL": "nats://b:change-me@127.0.0.1"},
        {"NATS_URL": "nats://change-me@127.0.0.1"},
        {"BRIDGE_ADMIN_TOKEN": "change-me"},
    ],
)
def test_the_password_of_the_examples_is_warned_of(environment: dict[str, str]) -> None:
    assert "change-me" in findings(**environment)["example-password"]
    fine = {name: value.replace("change-me", "s3cret") for name, value in environment.items()}
    assert not findings(**fine)


def test_the_password_of_the_examples_is_warned_of_in_a_file_or_command_too(tmp_path) -> None:
    path = tmp_path / "password"
    path.write_text("change-me\n")
    assert "example-password" in findings(POSTGRES_BRIDGE_PASSWORD_FILE=str(path))
    login = {"NATS_BRIDGE_USER": "b", "NATS_PASSWORD_COMMAND": "printf change-me"}
    assert "example-password" in findings(**login)
    assert not findings(POSTGRES_BRIDGE_PASSWORD_COMMAND="false")
