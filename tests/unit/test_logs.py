"""Log lines: readable by any logfmt reader, one line each, without secrets."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import shlex
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.telemetry.logs import MetricsLine, configure_logging
from bridge.telemetry.stats import BridgeStats
from consumer_sdk.transport.logfmt import (
    JsonFormatter,
    LogfmtFormatter,
    event,
    mask_secrets,
    quote_logfmt,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("debug", "logfmt", stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_an_event_is_one_line_with_its_fields_in_order(written: io.StringIO) -> None:
    event(
        logging.getLogger("bridge.test"), "connected", slot="main", lsn="0/16", took=0.25, ok=True
    )
    line = written.getvalue()
    assert re.match(
        r"ts=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info logger=bridge\.test ", line
    )
    assert line.endswith("event=connected slot=main lsn=0/16 took=0.25 ok=true\n")


def test_values_with_spaces_quotes_and_newlines_are_quoted(written: io.StringIO) -> None:
    event(logging.getLogger("bridge.test"), "two words", text='a "b"\nc\\d', empty="")
    line = written.getvalue()
    assert line.count("\n") == 1
    assert 'event="two words" text="a \\"b\\"\\nc\\\\d" empty=""' in line


@given(st.text())
def test_a_quoted_value_never_breaks_the_line_and_reads_back(text: str) -> None:
    quoted = quote_logfmt(text)
    assert len(f"k={quoted}".splitlines()) == 1
    if quoted.startswith('"'):
        inner = json.loads(re.sub(r"[\ud800-\udfff]", "", quoted))
        assert inner == re.sub(r"[\ud800-\udfff]", "", text)
    else:
        assert quoted == text
        assert not re.search(r'[\s"=]', quoted)


def test_json_lines_hold_the_same_keys() -> None:
    record = logging.LogRecord("bridge.x", logging.WARNING, __file__, 1, "gap", None, None)
    record.fields = {"from_lsn": "0/1", "rows": 3}
    document = json.loads(JsonFormatter().format(record))
    assert (document["level"], document["event"], document["rows"]) == ("warning", "gap", 3)


def test_a_traceback_stays_on_the_line_of_its_event() -> None:
    try:
        raise ValueError("boom postgresql://u:hidden@h/d")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("bridge.x", logging.ERROR, __file__, 1, "failed", None, info)
    line = LogfmtFormatter().format(record)
    assert "\n" not in line
    assert "traceback=" in line
    assert "hidden" not in line


@pytest.mark.parametrize(
    "text",
    [
        "cannot connect to postgresql://bridge:s3cret@db:5432/app",
        "nats://bridge:s3cret@nats:4222, nats://b:s3cret@other",
        "host=db user=bridge password=s3cret dbname=app",
        "host=db password='s3cret' x",
        "NATS_BRIDGE_PASSWORD: s3cret",
        "Authorization: Bearer s3cret",
        "bearer token-s3cret",
        "bearer tokens3cret is wrong",
        "postgresql://bridge:s3@cret@db/app",
    ],
)
def test_secrets_that_slip_into_a_text_are_masked(text: str) -> None:
    masked = mask_secrets(text)
    assert "s3cret" not in masked
    assert "cret@" not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    "text",
    [
        "slot main at 0/16B3748; https://example.org/path, user@example.org",
        "a valid bearer token is needed",
        "needs a bearer token",
    ],
)
def test_text_without_secrets_is_left_alone(text: str) -> None:
    assert mask_secrets(text) == text


def test_the_metrics_line_has_the_promised_fields_in_order(written: io.StringIO) -> None:
    stats = BridgeStats()
    stats.wal_messages_received, stats.cdc_events_published = 7, 5
    stats.current_lsn, stats.wal_lag_bytes = 0x16_B374D848, 1024
    stats.is_connected = stats.slot_active = True
    stats.reconnect_count, stats.nats_reconnect_count = 1, 2
    event(logging.getLogger("bridge.metrics"), "METRICS", **MetricsLine().fields(stats))
    line = written.getvalue()
    assert (
        "event=METRICS uptime=0 wal_messages=7 cdc_events=5 lsn=16/B374D848 connected=1 "
        "reconnects=1 nats_reconnects=2 lag_bytes=1024 slot_active=1" in line
    )
    assert all("=" in part for part in shlex.split(line))


def test_the_metrics_rate_is_of_the_time_since_the_last_line() -> None:
    stats, line = BridgeStats(), MetricsLine()
    stats.started_monotonic -= 10
    stats.cdc_events_published = 1000
    assert line.fields(stats)["rate"] == pytest.approx(100, rel=0.05)
    stats.started_monotonic -= 10
    assert line.fields(stats)["rate"] == 0


async def test_the_metrics_line_is_logged_every_interval(written: io.StringIO) -> None:
    task = asyncio.create_task(MetricsLine().run(BridgeStats(), 0.01))
    async with asyncio.timeout(5):
        while written.getvalue().count("METRICS uptime=") < 3:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
