"""Who may read the pages of the HTTP port and stop the bridge."""

from __future__ import annotations

import base64

import pytest

from bridge.telemetry.access import Access, HttpRefusal, is_loopback, refuse_foreign_host

LOCAL = {"Host": "127.0.0.1:9090"}


def refuse_shutdown(headers: dict[str, str], peer: str | None, token: str) -> HttpRefusal | None:
    return Access(token).refuse_shutdown(headers, peer)


def basic(credentials: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


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
    assert refuse_shutdown(headers, "127.0.0.1", "") is None


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
    refusal = refuse_shutdown(headers, peer, "")
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
    without = refuse_shutdown(LOCAL, "127.0.0.1", "token")
    assert without is not None
    assert without[:2] == (401, refusal[1])


def test_the_token_works_from_anywhere_but_not_from_a_foreign_page() -> None:
    headers = {"Host": "bridge.example", "Authorization": "Bearer token"}
    assert refuse_shutdown(headers, "10.1.2.3", "token") is None
    foreign = {**headers, "Origin": "https://evil.example"}
    assert refuse_shutdown(foreign, "10.1.2.3", "token") is not None


def test_a_loopback_port_answers_only_to_loopback_names() -> None:
    assert refuse_foreign_host({"Host": "rebound.example"}, local=True) is not None
    assert refuse_foreign_host(LOCAL, local=True) is None
    assert refuse_foreign_host({"Host": "bridge.example"}, local=False) is None


def test_everyone_on_the_machine_reads_a_loopback_port() -> None:
    assert Access().refuse_read(LOCAL, local=True) is None
    assert Access("token").refuse_read(LOCAL, local=True) is None


@pytest.mark.parametrize("headers", [bearer("admin"), bearer("read"), basic("any:admin"),
                                     basic(":read")])  # fmt: skip
def test_either_token_opens_the_pages_of_any_other_address(headers: dict[str, str]) -> None:
    access = Access("admin", "read")
    assert access.refuse_read(headers, local=False) is None


@pytest.mark.parametrize("headers", [bearer("wrong"), bearer(""), basic("admin:wrong"),
                                     basic("admin"), {"Authorization": "Basic %%%"},
                                     {"Authorization": "Basic admin"}, bearer("reader"),
                                     {"Authorization": "Bearer \udcff"}, {}])  # fmt: skip
def test_nothing_else_opens_the_pages_of_any_other_address(headers: dict[str, str]) -> None:
    refusal = Access("admin", "read").refuse_read(headers, local=False)
    assert refusal is not None
    assert refusal.status == 401
    assert refusal.scheme == "Basic"


def test_without_a_token_the_pages_of_any_other_address_are_closed_unless_said_otherwise() -> None:
    for headers in ({}, bearer(""), basic(":")):
        refusal = Access().refuse_read(headers, local=False)
        assert refusal is not None
        assert refusal.status == 403
        assert "BRIDGE_ADMIN_TOKEN" in refusal.reason
    assert Access(open=True).refuse_read({}, local=False) is None
    assert Access("token", open=True).refuse_read({}, local=False) is None


def test_a_foreign_page_reads_nothing_but_a_link_to_the_page_works() -> None:
    foreign = {**LOCAL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    for access, local in ((Access(), True), (Access(open=True), False)):
        assert access.refuse_read(foreign, local=local) is not None
        link = {**foreign, "Sec-Fetch-Mode": "navigate"}
        assert access.refuse_read(link, local=local) is None


def test_a_login_that_browsers_repeat_by_themselves_stops_nothing() -> None:
    refusal = Access("token").refuse_shutdown({**LOCAL, **basic("any:token")}, "127.0.0.1")
    assert refusal is not None
    assert refusal[0::2] == (401, "Bearer")


def test_the_token_for_reading_stops_nothing() -> None:
    refusal = Access("admin", "read").refuse_shutdown({**LOCAL, **bearer("read")}, "127.0.0.1")
    assert refusal is not None
    assert refusal.status == 401
    remote = Access("", "read").refuse_shutdown({**LOCAL, **bearer("read")}, "10.1.2.3")
    assert remote is not None
    assert remote.status == 403


def test_tokens_are_not_in_the_representation() -> None:
    assert "secret" not in repr(Access("secret", "secret"))
