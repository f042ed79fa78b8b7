"""Settings that can never work are refused in one line, by every command that needs them."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["run", "check"])
def refused(request, run_command):
    def run(text, *flags, **environment):
        command = ["check"] if request.param == "check" else []
        answer = run_command(
            "bridge", *command, "--slot", "shop", "--pub", "pub", "--port", "0", *flags,
            environment=environment, timeout=20,
        )  # fmt: skip
        assert answer.returncode == 2, answer.stderr
        assert answer.stderr.count("\n") == 1
        assert answer.stderr.startswith(f"bridge: {text}")
        assert answer.stdout == ""

    return run


def test_an_address_that_is_not_of_nats_is_refused(refused):
    refused("--nats-url is not a NATS address: it begins with http://", "--nats-url", "http://x")
    refused("NATS_URL is not a NATS address: it begins with foo://", NATS_URL="foo://x")


def test_a_port_that_is_none_is_refused(refused):
    refused("DATABASE_URL: its port is not", DATABASE_URL="postgresql://u@h:abc/db")


def test_a_password_cut_in_two_is_refused_unseen(refused):
    refused("DATABASE_URL: its host has an @", DATABASE_URL="postgresql://u:12@34@127.0.0.1/db")
    refused("NATS_URL is not a NATS address; write", NATS_URL="nats://u:12/34@127.0.0.1:4222")


def test_a_file_that_is_not_there_is_named_with_its_variable(refused):
    refused("NATS_CREDS: no file /nope", NATS_CREDS="/nope")


def test_an_argument_that_is_not_utf_8_is_refused(refused):
    refused("--pub: '\\udcff' is not a text in UTF-8", "--pub", "\udcff")
    refused("NATS_BRIDGE_USER: '\\udcff' is not a text", NATS_BRIDGE_USER="\udcff")
    refused("DATABASE_URL: *** is not a text", DATABASE_URL="\udcff")
    refused("unrecognized arguments: \\udcff", "\udcff")
