"""Who may stop the bridge over HTTP."""

from __future__ import annotations

import pytest

from bridge.telemetry.http import is_loopback, refuse_foreign_host, refuse_shutdown

LOCAL = {"Host": "127.0.0.1:9090"}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True),
        ("::ffff:127.0.0.1", True), ("bridge.localhost", True),
        ("10.0.0.1", False), ("::", False), ("0.0.0.0", False), ("evil.example", False),
        ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_only_loopback_names_and_addresses_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    "headers",
    [
        LOCAL,
        {"Host": "localhost"},
        {"Host": "LOCALHOST:9090"},
        {"Host": "[::1]:9090"},
        {**LOCAL, "Origin": "http://127.0.0.1:9090"},
        {**LOCAL, "Sec-Fetch-Site": "same-origin"},
        {**LOCAL, "Sec-Fetch-Site": "none"},
    ],
)
def test_a_local_client_may_shut_down_without_token(headers: dict[str, str]) -> None:
    assert refuse_shutdown(headers, "127.0.0.1", None) is None


@pytest.mark.parametrize(
    ("headers", "peer"),
    [
        (LOCAL, "10.1.2.3"),
        (LOCAL, None),
        ({"Host": "rebound.example:9090"}, "127.0.0.1"),
        ({"Host": "127.0.0.1.evil.example"}, "127.0.0.1"),
        ({}, "127.0.0.1"),
        ({"Host": "["}, "127.0.0.1"),
        ({**LOCAL, "Origin": "http://evil.example"}, "127.0.0.1"),
        ({**LOCAL, "Origin": "null"}, "127.0.0.1"),
        ({**LOCAL, "Origin": "http://["}, "127.0.0.1"),
        ({**LOCAL, "Origin": "http://127.0.0.1:8000"}, "127.0.0.1"),
        ({**LOCAL, "Sec-Fetch-Site": "cross-site"}, "127.0.0.1"),
        ({**LOCAL, "Sec-Fetch-Site": "same-site"}, "127.0.0.1"),
        ({**LOCAL, "X-Forwarded-For": "10.0.0.1"}, "127.0.0.1"),
        ({**LOCAL, "Forwarded": "for=10.0.0.1"}, "127.0.0.1"),
    ],
)
def test_nobody_else_may_shut_down_without_token(headers: dict[str, str], peer: str | None) -> None:
    refusal = refuse_shutdown(headers, peer, None)
    assert refusal is not None
    assert refusal[0] == 403


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic token",
        "token",
        "Bearer tokenx",
        "Bearer töken",
        "Bearer \udcff",
    ],
)
def test_with_a_token_configured_anything_else_is_refused_even_locally(authorization: str) -> None:
    refusal = refuse_shutdown({**LOCAL, "Authorization": authorization}, "127.0.0.1", "token")
    assert refusal is not None
    assert refusal[0] == 401
    assert refuse_shutdown(LOCAL, "127.0.0.1", "token") == (401, refusal[1])


def test_the_token_works_from_anywhere_but_not_from_a_foreign_page() -> None:
    headers = {"Host": "bridge.example", "Authorization": "Bearer token"}
    assert refuse_shutdown(headers, "10.1.2.3", "token") is None
    foreign = {**headers, "Origin": "https://evil.example"}
    assert refuse_shutdown(foreign, "10.1.2.3", "token") is not None


def test_a_loopback_port_answers_only_to_loopback_names() -> None:
    assert refuse_foreign_host("127.0.0.1", {"Host": "rebound.example"}) is not None
    assert refuse_foreign_host("127.0.0.1", LOCAL) is None
    assert refuse_foreign_host("0.0.0.0", {"Host": "bridge.example"}) is None
