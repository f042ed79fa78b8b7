"""Where NATS is: arguments, environment, defaults, and secrets that stay hidden."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING

import nkeys
import pytest

from consumer_sdk.errors import UsageError
from consumer_sdk.transport.settings import NatsSettings

if TYPE_CHECKING:
    from pathlib import Path


def resolve(servers: str | list[str] | None = None, **environment: str) -> NatsSettings:
    return NatsSettings.resolve(servers, environment=environment)


def test_without_anything_it_is_the_local_server() -> None:
    settings = resolve()
    assert settings.servers == ("nats://127.0.0.1:4222",)
    assert settings.prefix == ""


def test_arguments_win_over_the_environment() -> None:
    settings = NatsSettings.resolve(
        "one", prefix="p", environment={"NATS_URL": "two", "BRIDGE_PREFIX": "q"}
    )
    assert (settings.servers, settings.prefix) == (("nats://one",), "p")
    assert resolve(NATS_URL="a:1, nats://b:2 ,").servers == ("nats://a:1", "nats://b:2")


def test_host_and_port_may_be_given_apart() -> None:
    assert resolve(NATS_HOST="db", NATS_PORT="5222").servers == ("nats://db:5222",)
    assert resolve(NATS_HOST="::1").servers == ("nats://[::1]:4222",)


def test_names_of_the_deployment_follow_the_settings() -> None:
    names = resolve(BRIDGE_PREFIX="x", BRIDGE_CDC_STREAM="CHANGES").subjects()
    assert (names.cdc_stream, names.init_stream, names.cdc_all) == ("CHANGES", "x_INIT", "x.cdc.>")


def test_secrets_are_in_the_options_and_nowhere_else() -> None:
    settings = resolve("nats://u:pa55@h", NATS_BRIDGE_USER="me", NATS_BRIDGE_PASSWORD="geheim")
    for text in (repr(settings), str(settings), settings.address):
        assert "geheim" not in text
        assert "pa55" not in text
    options = settings.for_nats()
    assert (options["user"], options["password"]) == ("me", "geheim")
    assert options["max_reconnect_attempts"] == -1


@pytest.mark.parametrize(
    "url", ["http://x", "nats://", "nats://h:notaport", "nats://u:geheim@:4222", "nats://[::1"]
)
def test_what_is_no_address_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(UsageError, match="not a NATS address") as caught:
        resolve(url)
    assert "geheim" not in str(caught.value)


def test_a_broken_prefix_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="prefix"):
        resolve(BRIDGE_PREFIX="a.b")
    for name in ("NATS_CREDS", "NATS_NKEY", "NATS_CA", "NATS_CERT", "NATS_KEY"):
        with pytest.raises(UsageError, match=name):
            resolve(**{name: str(tmp_path / "absent")})
    with pytest.raises(UsageError, match="no NATS server"):
        resolve([])


def test_a_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    with pytest.raises(UsageError, match="TLS"):
        resolve(NATS_CA=str(path)).for_nats()


def test_credentials_are_handed_over(tmp_path: Path) -> None:
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode()
    path = tmp_path / "user.creds"
    path.write_text(
        "-----BEGIN NATS USER JWT-----\neyJ0\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    assert resolve(NATS_CREDS=str(path)).for_nats()["user_credentials"] == str(path)
    path.write_text(seed + "\n")
    assert resolve(NATS_NKEY=str(path)).for_nats()["nkeys_seed"] == str(path)


@pytest.mark.parametrize("content", [b"junk", b"", b"\xff\xfe", b"SUAJUNK"])
@pytest.mark.parametrize("variable", ["NATS_CREDS", "NATS_NKEY"])
def test_a_file_without_a_key_is_refused_before_anybody_asks_for_it(
    tmp_path: Path, variable: str, content: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"{variable}: .* does not hold a NATS key; make one"):
        resolve(**{variable: str(path)}).for_nats()


def test_settings_travel_to_other_processes() -> None:
    settings = resolve(NATS_URL="nats://h", NATS_BRIDGE_USER="u")
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    "password", ["geh/eim", "geh?eim", "geh#eim", "12/eim", "g@eh/eim", "12#e@eim"]
)
def test_a_password_that_cuts_its_address_in_two_is_not_shown(password: str) -> None:
    with pytest.raises(UsageError, match="in a password write") as caught:
        resolve(f"nats://user:{password}@127.0.0.1:4222")
    assert not any(piece in str(caught.value) for piece in ("geh", "eim", "12"))
