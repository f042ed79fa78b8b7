"""Attacks on the HTTP port: silent and slow clients, strangers, guessed tokens, foreign pages."""

from __future__ import annotations

import asyncio
import base64
import logging
import shutil
import socket
import ssl
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bridge.errors import SettingsError
from bridge.telemetry import connections
from bridge.telemetry.access import Access
from bridge.telemetry.connections import MAX_CONNECTIONS, Certificate
from tests.fixtures.http_port import Served
from tests.fixtures.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

TLS = Path(__file__).resolve().parents[1] / "fixtures" / "tls"
OTHER_KEY = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIHumcDjQx2BatfvuzGqm5X7gHBu60fDiK14c7AQOb6Ys
-----END PRIVATE KEY-----
"""
PAGES = ("/", "/status", "/history", "/metrics", "/streams/info?stream=CDC")
ADMIN = {"Authorization": "Bearer admin-token"}
READER = {"Authorization": "Bearer read-token"}


@asynccontextmanager
async def serving(*arguments: Any, **options: Any) -> AsyncIterator[Served]:
    one = Served(*arguments, **options)
    await one.server.start()
    try:
        yield one
    finally:
        await one.server.stop()


@pytest.fixture
def silent_connections() -> Iterator[Callable[..., list[socket.socket]]]:
    """Open connections that send nothing, or only the bytes given."""
    opened: list[socket.socket] = []

    def start(port: int, count: int, data: bytes = b"", source: str = "") -> list[socket.socket]:
        fresh = []
        for _ in range(count):
            one = socket.create_connection(
                ("127.0.0.1", port), timeout=10, source_address=(source, 0) if source else None
            )
            if data:
                with suppress(ConnectionError):
                    one.sendall(data)
            one.setblocking(False)
            fresh.append(one)
        opened.extend(fresh)
        return fresh

    yield start
    for one in opened:
        one.close()


def still_open(sockets: list[socket.socket]) -> int:
    """How many connections the server has not closed."""
    count = 0
    for one in sockets:
        try:
            count += one.recv(65536, socket.MSG_PEEK) != b""
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def files_open(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_hundreds_of_silent_and_slow_clients_delay_neither_health_nor_changes(
    database: Database,
    bridge_process: Callable[..., BridgeProcess],
    silent_connections: Callable[..., list[socket.socket]],
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.publish()
    bridge = bridge_process()
    before, files = resident_bytes(bridge.pid), files_open(bridge.pid)
    slow = silent_connections(bridge.http_port, 300, b"GET /status HTTP/1.1\r\nX-Slow: ")
    slow += silent_connections(bridge.http_port, 300)
    unread = b"GET /history HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20
    slow += silent_connections(bridge.http_port, 100, unread)
    for number in range(10):
        for one in slow:
            with suppress(OSError):
                one.send(b"x")
        began = time.monotonic()
        assert bridge.http("/health").status == 200
        assert time.monotonic() - began < 1
        began = time.monotonic()
        database.execute("INSERT INTO t VALUES (%s)", (number,))
        wait_until(lambda: bridge.status()["cdc_events_published"] > number)  # noqa: B023
        assert time.monotonic() - began < 1
    assert files_open(bridge.pid) - files < MAX_CONNECTIONS + 40
    assert resident_bytes(bridge.pid) - before < 32 * 1024**2


async def test_clients_of_one_address_do_not_keep_out_those_of_another(
    silent_connections: Callable[..., list[socket.socket]],
) -> None:
    async with serving() as served:
        port = served.server.port

        async def closed(sockets: list[socket.socket], rest: int) -> None:
            await eventually(lambda: still_open(sockets) <= rest)

        few = await asyncio.to_thread(silent_connections, port, 5, b"", "127.0.0.2")
        many = await asyncio.to_thread(
            silent_connections, port, MAX_CONNECTIONS * 3, b"", "127.0.0.3"
        )
        await closed(many, MAX_CONNECTIONS - 5)
        assert still_open(few) == 5
        assert still_open(many) == MAX_CONNECTIONS - 5
        assert (await served.ask("/health"))[0] == 200


async def test_a_client_that_sends_requests_outlasts_those_that_send_none(
    silent_connections: Callable[..., list[socket.socket]],
) -> None:
    async with serving() as served:
        (reader,) = silent_connections(served.server.port, 1)
        for _ in range(3):
            reader.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            loop = asyncio.get_running_loop()
            assert b"200 OK" in await asyncio.wait_for(loop.sock_recv(reader, 65536), 10)
            await asyncio.to_thread(silent_connections, served.server.port, MAX_CONNECTIONS - 20)
            assert (await served.ask("/health"))[0] == 200
        assert still_open([reader]) == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nX-Slow: ",
        b"POST /shutdown HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nx",
    ],
    ids=["silent", "slow head", "slow body"],
)
@pytest.mark.parametrize("certificate", [None, TLS], ids=["plain", "tls"])
async def test_a_client_without_a_whole_request_is_closed_after_a_while(
    silent_connections: Callable[..., list[socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
    certificate: Path | None,
) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)
    files = certificate and Certificate(str(TLS / "server.pem"), str(TLS / "server.key"))
    async with serving(certificate=files) as served:
        held = silent_connections(served.server.port, 20, sent)
        await eventually(lambda: still_open(held) == 20 or served.shutdowns)
        for one in held:
            # What the server has answered is read, so that only its close is left.
            with suppress(OSError):
                one.recv(65536)

        def all_closed() -> bool:
            for one in held:
                with suppress(OSError):
                    one.send(b"x")
                with suppress(OSError):
                    one.recv(65536)
            return still_open(held) == 0

        await eventually(all_closed)
        assert served.server._connections is not None
        assert len(served.server._connections) == 0


async def test_a_client_that_never_reads_its_answers_is_closed_after_a_while(
    silent_connections: Callable[..., list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.5)
    async with serving() as served:
        for number in range(400):
            served.stats.table(f"table_{number}")
        request = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
        silent_connections(served.server.port, 3, request * 300)
        held = served.server._connections
        assert held is not None
        await eventually(lambda: len(held) == 3)
        await eventually(lambda: len(held) == 0)


async def test_silence_does_not_block_a_port_with_tls_either(
    silent_connections: Callable[..., list[socket.socket]],
) -> None:
    certificate = Certificate(str(TLS / "server.pem"), str(TLS / "server.key"))
    async with serving(certificate=certificate) as served:
        port = served.server.port
        await asyncio.to_thread(silent_connections, port, MAX_CONNECTIONS * 2)
        await asyncio.to_thread(silent_connections, port, MAX_CONNECTIONS, b"\x16\x03\x01\x02")
        await asyncio.to_thread(silent_connections, port, 50, b"GET / HTTP/1.1\r\n\r\n")
        began = time.monotonic()
        assert (await served.ask("/health", ssl=trusting()))[0] == 200
        assert time.monotonic() - began < 1


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(TLS / "server.pem"))


async def test_beyond_loopback_every_page_needs_a_token_and_probes_need_none() -> None:
    async with serving(Access("admin-token", "read-token"), host="0.0.0.0") as served:
        served.stats.source = "hidden_source"
        for path in (*PAGES, "/nothing", "/status/"):
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                status, text = await served.ask(path, method)
                assert (path, status) == (path, 401)
                assert "hidden_source" not in text
        for path in PAGES:
            for headers in (ADMIN, READER, basic("operator", "read-token")):
                assert (await served.ask(path, headers=headers))[0] == 200
        assert (await served.ask("/health"))[0] == 200
        assert (await served.ask("/ready"))[0] == 503


def basic(user: str, password: str) -> dict[str, str]:
    both = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {both}"}


async def test_a_browser_is_asked_for_the_token_as_a_password() -> None:
    async with (
        serving(Access("admin-token"), host="0.0.0.0") as served,
        aiohttp.ClientSession() as session,
    ):
        async with session.get(served.url + "/") as answer:
            assert answer.headers["WWW-Authenticate"] == 'Basic realm="tailrace"'
        async with session.post(served.url + "/shutdown") as answer:
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="tailrace"'
        login = basic("operator", "admin-token")
        async with session.get(served.url + "/", headers=login) as answer:
            assert "<title>tailrace</title>" in await answer.text()


async def test_without_a_token_only_probes_answer_beyond_loopback_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(host="0.0.0.0") as served:
        for path in PAGES:
            status, text = await served.ask(path)
            assert status == 403
            assert "BRIDGE_READ_TOKEN" in text
        assert (await served.ask("/health"))[0] == 200
        assert (await served.ask("/ready"))[0] == 503
    assert "http pages closed" in [record.getMessage() for record in caplog.records]


async def test_an_operator_may_open_the_pages_to_everyone_but_not_the_shutdown() -> None:
    async with serving(Access("admin-token", open=True), host="0.0.0.0") as served:
        for path in PAGES:
            assert (await served.ask(path))[0] == 200
        assert (await served.ask("/shutdown", "POST"))[0] == 401
        assert served.shutdowns == 0


async def test_the_token_for_reading_and_a_password_login_stop_nothing() -> None:
    async with serving(Access("admin-token", "read-token"), host="0.0.0.0") as served:
        for headers in (READER, basic("operator", "admin-token"), basic("", "read-token")):
            assert (await served.ask("/shutdown", "POST", headers=headers))[0] == 401
        assert served.shutdowns == 0
        assert (await served.ask("/shutdown", "POST", headers=ADMIN))[0] == 202


async def test_guesses_are_answered_slowly_and_logged_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(Access("admin-token"), host="0.0.0.0") as served:
        began = time.monotonic()
        guesses = [{"Authorization": f"Bearer guess-{number}"} for number in range(20)]
        answers = await asyncio.gather(
            *(served.ask("/status", headers=headers) for headers in guesses)
        )
        assert {status for status, _ in answers} == {401}
        assert time.monotonic() - began >= 0.5
        assert (await served.ask("/status", headers=ADMIN))[0] == 200
    refused = [one for one in caplog.records if one.getMessage() == "request refused"]
    assert len(refused) == 1
    assert "guess" not in caplog.text
    assert "admin-token" not in caplog.text


async def test_no_page_of_another_origin_can_read_frame_or_embed_an_answer() -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        for path in (*PAGES, "/health", "/nothing"):
            headers = {"Origin": "http://evil.example"}
            async with session.get(served.url + path, headers=headers) as answer:
                assert not [one for one in answer.headers if one.startswith("Access-Control")]
                assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["X-Frame-Options"] == "DENY"
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "aiohttp" not in answer.headers["Server"]
            embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
            status, text = await served.ask(path, headers=embedded)
            assert path == "/health" or (status, "wal_lag" in text) == (403, False)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_https_is_served_with_tls_1_2_or_newer() -> None:
    certificate = Certificate(str(TLS / "server.pem"), str(TLS / "server.key"))
    async with serving(Access("admin-token"), "0.0.0.0", certificate) as served:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = trusting()
            context.minimum_version = context.maximum_version = version
            assert (await served.ask("/status", headers=ADMIN, ssl=context))[0] == 200
        assert (await served.ask("/status", ssl=trusting()))[0] == 401
        assert (await served.ask("/shutdown", "POST", headers=ADMIN, ssl=trusting()))[0] == 202
        assert certificate.context.minimum_version == ssl.TLSVersion.TLSv1_2
        old = trusting()
        # OpenSSL itself refuses TLS 1.1 at its usual level of security.
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(aiohttp.ClientError):
            await served.ask("/health", ssl=old)
        with pytest.raises(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session:
                await session.get(f"http://127.0.0.1:{served.server.port}/health")


async def test_large_answers_and_many_requests_pass_through_tls() -> None:
    certificate = Certificate(str(TLS / "server.pem"), str(TLS / "server.key"))
    async with serving(certificate=certificate) as served:
        for number in range(500):
            served.stats.table(f"table_{number}").events = number
        answers = await asyncio.gather(*(served.ask("/status", ssl=trusting()) for _ in range(40)))
        assert all(status == 200 and '"table_499"' in text for status, text in answers)


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    pair = [Path(shutil.copy(TLS / name, tmp_path)) for name in ("server.pem", "server.key")]
    certificate = Certificate(str(pair[0]), str(pair[1]))
    async with serving(certificate=certificate) as served:
        assert (await served.ask("/health", ssl=trusting()))[0] == 200
        first = certificate.context
        pair[0].write_text("half written")
        certificate.renew()
        assert certificate.context is first
        assert (await served.ask("/health", ssl=trusting()))[0] == 200
        shutil.copy(TLS / "server.pem", pair[0])
        await eventually(lambda: certificate.context is not first)
        assert (await served.ask("/health", ssl=trusting()))[0] == 200


@pytest.mark.parametrize(
    ("certificate", "key", "reason"),
    [
        ("none.pem", "server.key", "--http-cert: cannot read .*none.pem: No such file"),
        ("server.pem", "none.key", "--http-key: cannot read .*none.key: No such file"),
        ("server.key", "server.key", "not a PEM certificate and its own unencrypted key"),
        ("junk.pem", "junk.pem", "not a PEM certificate and its own unencrypted key"),
        ("server.pem", "other.key", "not a PEM certificate and its own unencrypted key"),
    ],
)
def test_a_bad_certificate_is_a_one_line_settings_error(
    tmp_path: Path, certificate: str, key: str, reason: str
) -> None:
    for name in ("server.pem", "server.key"):
        shutil.copy(TLS / name, tmp_path)
    (tmp_path / "junk.pem").write_bytes(b"\x00\xff junk")
    (tmp_path / "other.key").write_text(OTHER_KEY)
    with pytest.raises(SettingsError, match=reason) as caught:
        Certificate(str(tmp_path / certificate), str(tmp_path / key))
    assert "\n" not in str(caught.value)


async def test_localhost_is_local_only_if_it_is_bound_to_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(host="localhost") as served:
        assert served.server._local is True
    everywhere = Served(host="localhost")
    loop = asyncio.get_running_loop()
    create = loop.create_server
    monkeypatch.setattr(
        loop, "create_server", lambda factory, _host, port: create(factory, "0.0.0.0", port)
    )
    await everywhere.server.start()
    try:
        assert (await everywhere.ask("/status"))[0] == 403
    finally:
        await everywhere.server.stop()
