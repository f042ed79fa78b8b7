"""The HTTP port over real sockets: answers, refusals, junk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bridge.errors import SettingsError
from bridge.telemetry.access import Access
from bridge.telemetry.http import HttpServer
from bridge.telemetry.stats import BridgeStats
from tests.fixtures.http_port import Served
from tests.fixtures.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    one = Served()
    await one.server.start()
    yield one
    await one.server.stop()


@pytest.fixture
async def guarded() -> AsyncIterator[Served]:
    one = Served(Access("correct-token"))
    await one.server.start()
    yield one
    await one.server.stop()


async def test_health_fails_once_nothing_is_retrying(served: Served) -> None:
    for state, expected in (("streaming", 200), ("reconnecting", 200), ("failed", 503)):
        served.stats.state = state  # type: ignore[assignment]
        status, text = await served.ask("/health")
        assert (status, json.loads(text)["state"]) == (expected, state)


async def test_ready_only_while_streaming_and_a_standby_says_so(served: Served) -> None:
    served.stats.state = "streaming"
    served.stats.is_ready = True
    assert await served.ask("/ready") == (503, '{"ready": false, "state": "streaming"}\n')
    served.stats.nats_connected = True
    assert await served.ask("/ready") == (200, '{"ready": true, "state": "streaming"}\n')
    served.stats.state = "standby"
    assert await served.ask("/ready") == (503, '{"ready": false, "state": "standby"}\n')


async def test_status_follows_the_stats(served: Served) -> None:
    served.stats.cdc_events_published = 41
    served.stats.warn("wal-lag", "far behind", "wait")
    document = json.loads((await served.ask("/status"))[1])
    assert document["cdc_events_published"] == 41
    assert document["warnings"][0]["remedy"] == "wait"


async def test_history_grows_by_itself(served: Served) -> None:
    async def has_samples() -> bool:
        return len(json.loads((await served.ask("/history"))[1])["ts"]) >= 2

    await eventually(has_samples)


async def test_metrics_are_in_the_format_prometheus_reads(served: Served) -> None:
    served.stats.cdc_events_published = 3
    async with (
        aiohttp.ClientSession() as session,
        session.get(served.url + "/metrics") as answer,
    ):
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = {f.name: f for f in text_string_to_metric_families(await answer.text())}
    assert families["bridge_cdc_events_published"].samples[0].value == 3


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("?stream=CDC", 200),
        ("?stream=NONE", 404),
        ("", 400),
        ("?stream=a.b", 400),
        ("?stream=%3E", 400),
        ("?stream=SLOW", 504),
        ("?stream=BROKEN", 500),
    ],
)
async def test_stream_info_answers_for_any_name(served: Served, query: str, status: int) -> None:
    answered, text = await served.ask(f"/streams/info{query}")
    assert answered == status
    assert "hidden" not in text


async def test_shutdown_is_asked_for_once_by_a_local_post(served: Served) -> None:
    assert (await served.ask("/shutdown", "GET"))[0] == 405
    assert served.shutdowns == 0
    assert (await served.ask("/shutdown", "POST"))[0] == 202
    assert served.shutdowns == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "rebound.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null", "Content-Type": "application/x-www-form-urlencoded"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_shutdown_from_a_foreign_page_or_rebound_name_is_refused(
    served: Served, guarded: Served, headers: dict[str, str]
) -> None:
    assert (await served.ask("/shutdown", "POST", headers=headers))[0] == 403
    with_token = {**headers, "Authorization": "Bearer correct-token"}
    assert (await guarded.ask("/shutdown", "POST", headers=with_token))[0] == 403
    assert served.shutdowns == guarded.shutdowns == 0


async def test_a_configured_token_is_needed_and_enough(guarded: Served) -> None:
    assert (await guarded.ask("/shutdown", "POST"))[0] == 401
    wrong = {"Authorization": "Bearer wrong"}
    assert (await guarded.ask("/shutdown", "POST", headers=wrong))[0] == 401
    assert guarded.shutdowns == 0
    right = {"Authorization": "Bearer correct-token"}
    assert (await guarded.ask("/shutdown", "POST", headers=right))[0] == 202
    assert guarded.shutdowns == 1


async def test_the_token_is_nowhere_to_be_read(guarded: Served) -> None:
    for path in ("/", "/status", "/metrics", "/health", "/history"):
        assert "correct-token" not in (await guarded.ask(path))[1]


async def test_a_rebound_name_reads_nothing_from_a_loopback_port(served: Served) -> None:
    for path in ("/", "/status", "/metrics", "/history"):
        status, text = await served.ask(path, headers={"Host": "rebound.example"})
        assert status == 403
        assert "wal_lag" not in text


async def test_the_page_allows_only_its_own_script_and_no_other_host(served: Served) -> None:
    async with aiohttp.ClientSession() as session, session.get(served.url + "/") as answer:
        policy = answer.headers["Content-Security-Policy"]
        page = await answer.text()
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


JUNK = [
    b"\x00\xff\xfe" * 1000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200,
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    b"POST /shutdown HTTP/1.1\r\nHost: evil\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /shutdown HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /status HTTP/1.1\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /streams/info?stream=%00%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\r\n" * 5000,
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"",
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
async def test_junk_is_answered_or_dropped_and_harms_nothing(
    served: Served, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await served.raw(junk)
    assert not answer.startswith(b"HTTP/1.1 5")
    assert b"root:" not in answer
    assert served.shutdowns == 0
    assert (await served.ask("/health"))[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_taken_port_is_a_one_line_settings_error(served: Served) -> None:
    second = HttpServer(
        BridgeStats(),
        port=served.server.port,
        request_shutdown=lambda: None,
        stream_info=served._stream_info,
    )
    with pytest.raises(SettingsError, match="already in use; give another with --port") as caught:
        await second.start()
    assert "\n" not in str(caught.value)


async def test_an_address_of_another_machine_is_a_settings_error() -> None:
    one = Served(host="203.0.113.1")
    with pytest.raises(SettingsError, match="cannot listen on"):
        await one.server.start()
