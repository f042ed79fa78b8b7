"""What bridge and SDK share of NATS, without a server."""

from __future__ import annotations

import pickle
import ssl
from typing import TYPE_CHECKING

import nats.errors
import pytest

from consumer_sdk.transport.api import message_of, parse_headers, parse_time_us
from consumer_sdk.transport.options import (
    BadOption,
    ConnectionOptions,
    TlsNotOffered,
    require_address,
)
from consumer_sdk.transport.refusals import is_forbidden, is_refused, one_line

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (nats.errors.AuthorizationError(), True),
        (TlsNotOffered("h:4222"), True),
        (nats.errors.Error("nats: 'Authorization Violation'"), True),
        (nats.errors.Error("nats: 'User Authentication Expired'"), True),
        (nats.errors.Error("nats: 'Authentication Timeout'"), False),
        (ConnectionRefusedError(111, "Connect call failed"), False),
        (nats.errors.NoServersError(), False),
        (None, False),
    ],
)
def test_a_refused_login_is_told_from_an_absent_server(
    error: Exception | None, refused: bool
) -> None:
    assert is_refused(error) == refused


def test_a_forbidden_subject_is_recognised_and_shown_in_one_line() -> None:
    error = nats.errors.Error("nats: Permissions Violation for\n Publish to 'a.b'")
    assert is_forbidden(error)
    assert one_line(error) == "Permissions Violation for Publish to 'a.b'"
    assert not is_forbidden(nats.errors.TimeoutError())


def test_options_show_hosts_and_no_secret() -> None:
    options = ConnectionOptions(
        servers=("nats://u:geheim@one:1", "two"), name="x", user="me", password="geheim"
    )
    assert options.hosts == "one:1, two:4222"
    assert "geheim" not in repr(options)
    assert (options.for_nats()["user"], options.for_nats()["password"]) == ("me", "geheim")


def test_tls_is_asked_for_by_scheme_or_file_and_never_over_plain_websocket(tmp_path: Path) -> None:
    for server, asked in (("tls://h", True), ("wss://h", True), ("nats://h", False), ("h", False)):
        options = ConnectionOptions(servers=(server,), name="x").for_nats()
        assert isinstance(options.get("tls"), ssl.SSLContext) == asked
    junk = tmp_path / "ca.pem"
    junk.write_text("nothing")
    with pytest.raises(BadOption, match="TLS files"):
        ConnectionOptions(servers=("h",), name="x", ca=str(junk)).for_nats()
    with pytest.raises(BadOption, match="write wss://"):
        ConnectionOptions(servers=("ws://h",), name="x", ca=str(junk)).for_nats()


def test_a_bad_option_travels_to_other_processes() -> None:
    with pytest.raises(BadOption) as caught:
        require_address("nats://u:12/34@h")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.option, str(copy)) == ("servers", str(caught.value))
    assert "12" not in str(copy)


def test_a_stored_message_is_read_with_and_without_headers() -> None:
    plain = message_of({"message": {"seq": 7, "subject": "a.b", "data": "eA=="}})
    assert plain == (7, b"a.b", None, b"x")
    assert parse_headers(plain.headers) is None
    answer = {"message": {"seq": 8, "subject": "a", "hdrs": "TkFUUy8xLjANCkE6IGINCg0K"}}
    assert parse_headers(message_of(answer).headers) == {"A": "b"}
    assert message_of(answer).payload == b""


def test_a_servers_time_is_cut_to_microseconds() -> None:
    assert parse_time_us("1970-01-01T00:00:01.123456789Z") == 1_123_456
    assert parse_time_us("1970-01-01T00:00:01Z") == 1_000_000
    assert parse_time_us("1970-01-01T00:00:01.5Z") == 1_500_000
    assert parse_time_us("1970-01-01T02:00:01.123456789+02:00") == 1_123_456
