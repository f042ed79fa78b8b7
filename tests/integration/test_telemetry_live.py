"""Telemetry of a running bridge: every promised number is there and moves when it should."""

from __future__ import annotations

import json
import re
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.waiting import wait_until
from tests.unit.test_metrics import PROMISED
from tests.unit.test_status import PROMISED as PROMISED_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database


@pytest.fixture
def bridge(database: Database, bridge_process: Callable[..., BridgeProcess]) -> BridgeProcess:
    database.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text);"
        'CREATE SCHEMA sales; CREATE TABLE sales."Odd.T" (id int PRIMARY KEY)'
    )
    database.publish()
    return bridge_process("--wal-check-interval", "200ms", "--metrics-interval", "200ms")


def metrics(bridge: BridgeProcess) -> dict[tuple[str, str], float]:
    """Samples by name and, where there is one, the value of their only label."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(bridge.http("/metrics").text)
        for sample in family.samples
    }


def metric(bridge: BridgeProcess, name: str, label: str = "") -> float:
    return metrics(bridge)[name, label]


def insert(database: Database, first: int, last: int) -> None:
    database.execute(
        "INSERT INTO users SELECT n, 'x' FROM generate_series(%s::int, %s::int) n", [first, last]
    )


def test_promised_metrics_and_fields_are_there_from_the_start(bridge: BridgeProcess) -> None:
    names = {name for name, _ in metrics(bridge)}
    assert set(PROMISED) <= names
    status = bridge.status()
    assert list(status)[: len(PROMISED_FIELDS)] == PROMISED_FIELDS
    assert status["status"] == "streaming"
    assert status["epoch"] > 1_700_000_000


def test_published_means_acknowledged_and_everything_counts_it_alike(
    database: Database, bridge: BridgeProcess
) -> None:
    before = metrics(bridge)
    insert(database, 1, 200)
    database.execute('INSERT INTO sales."Odd.T" VALUES (1)')
    published = "bridge_cdc_events_published_total"
    wait_until(lambda: metric(bridge, published) - before[published, ""] == 201)
    after = metrics(bridge)
    assert after["bridge_table_events_total", "users"] == 200
    assert after["bridge_table_events_total", "sales.Odd=2ET"] == 1
    assert after["bridge_commit_to_ack_seconds_count", ""] > 0
    assert after["bridge_commit_to_ack_seconds_sum", ""] > 0
    assert after["bridge_batch_events_count", ""] > 0
    assert after["bridge_last_processing_time_us", ""] > 0
    grown = ("bridge_wal_messages_received_total", "bridge_current_lsn", "bridge_uptime_seconds")
    for name in grown:
        assert after[name, ""] > before[name, ""], name
    status = bridge.status()
    assert status["cdc_events_published"] == after[published, ""]
    assert {one["table"]: one["events"] for one in status["tables"]} == {
        "users": 200,
        "sales.Odd=2ET": 1,
    }


def test_last_ack_lsn_is_what_postgresql_was_told(
    database: Database, bridge: BridgeProcess
) -> None:
    insert(database, 1, 10)
    end = database.value("SELECT (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint")
    wait_until(lambda: metric(bridge, "bridge_last_ack_lsn") >= end)

    def confirmed() -> int:
        return int(
            database.value(
                "SELECT (confirmed_flush_lsn - '0/0'::pg_lsn)::bigint"
                " FROM pg_replication_slots WHERE slot_name = %s",
                [f"slot_{database.name}"],
            )
        )

    assert end <= metric(bridge, "bridge_last_ack_lsn")
    wait_until(lambda: confirmed() >= end)


def test_connections_slot_and_ring_are_shown_as_they_are(
    database: Database, bridge: BridgeProcess
) -> None:
    wanted = {
        ("bridge_slot_active", ""): 1,
        ("bridge_connected", ""): 1,
        ("bridge_nats_connected", ""): 1,
        ("bridge_state", "streaming"): 1,
        ("bridge_wal_status", "reserved"): 1,
    }
    found: dict[tuple[str, str], float] = {}

    def all_shown() -> bool:
        # The slot is read by a session of its own, which says nothing of the moment before.
        nonlocal found
        found = metrics(bridge)
        return all(found.get(name) == value for name, value in wanted.items())

    wait_until(all_shown, 40, lambda: str({name: found.get(name) for name in wanted}))
    assert found["bridge_ring_capacity", ""] >= 65_535


def test_a_lost_replication_connection_is_counted(
    database: Database, bridge: BridgeProcess
) -> None:
    before = metric(bridge, "bridge_reconnects_total")
    database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s",
        [f"slot_{database.name}"],
    )
    wait_until(lambda: metric(bridge, "bridge_reconnects_total") > before)
    wait_until(bridge.ready)
    insert(database, 1, 5)
    wait_until(lambda: bridge.status()["cdc_events_published"] == 5)


def test_a_restart_of_nats_is_counted_and_lag_grows_meanwhile(
    database: Database, bridge: BridgeProcess, nats_server: NatsServer
) -> None:
    before = metrics(bridge)
    nats_server.stop()
    wait_until(lambda: metric(bridge, "bridge_nats_connected") == 0)
    insert(database, 1, 20_000)
    wait_until(lambda: metric(bridge, "bridge_wal_lag_bytes") > 1_000_000)
    assert bridge.http("/health").status == 200
    nats_server.start()
    name = "bridge_nats_reconnects_total"
    wait_until(lambda: metric(bridge, name) > before[name, ""])
    wait_until(lambda: bridge.status()["cdc_events_published"] == 20_000, 40)
    wait_until(lambda: metric(bridge, "bridge_wal_lag_bytes") < 1_000_000)


def test_the_metrics_line_is_logged_with_the_promised_fields(bridge: BridgeProcess) -> None:
    pattern = (
        r"METRICS uptime=\d+ wal_messages=\d+ cdc_events=\d+ lsn=[0-9A-F]+/[0-9A-F]+ connected=1 "
        r"reconnects=\d+ nats_reconnects=\d+ lag_bytes=\d+ slot_active=[01]"
    )
    wait_until(lambda: len(re.findall(pattern, bridge.log_text())) >= 2, what=bridge.log_text)


def test_a_second_bridge_says_that_it_stands_by(
    bridge: BridgeProcess, bridge_process: Callable[..., BridgeProcess]
) -> None:
    second = bridge_process(wait=False)

    def stands_by() -> bool:
        try:
            answer = second.http("/ready")
        except OSError:
            return False
        return answer.status == 503 and answer.json()["state"] == "standby"

    wait_until(stands_by, what=second.log_text)
    assert second.http("/health").status == 200


def test_junk_on_the_port_does_not_disturb_streaming(
    database: Database, bridge: BridgeProcess
) -> None:
    for junk in (
        b"\x00" * 70_000,
        b"GET / HTTP/1.1\r\n" * 3000,
        b"POST /shutdown HTTP/1.0\r\nHost: evil\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", bridge.http_port), timeout=5) as connection:
            try:
                connection.sendall(junk)
                connection.recv(1000)
            except OSError:
                pass
    insert(database, 1, 5)
    wait_until(lambda: bridge.status()["cdc_events_published"] == 5)
    assert bridge.running
    assert "Traceback" not in bridge.log_text()


def test_stream_info_tells_the_state_of_the_stream(
    database: Database, bridge: BridgeProcess, prefix: str
) -> None:
    insert(database, 1, 5)
    wait_until(lambda: bridge.status()["cdc_events_published"] == 5)
    document = bridge.http(f"/streams/info?stream={prefix}_CDC").json()
    assert f"{prefix}.cdc.>" in json.dumps(document)
    assert bridge.http("/streams/info?stream=NOPE").status == 404


def test_a_taken_port_ends_the_bridge_with_one_line_and_exit_2(
    bridge: BridgeProcess, bridge_process: Callable[..., BridgeProcess]
) -> None:
    second = bridge_process("--port", str(bridge.http_port), wait=False)
    assert second.wait() == 2
    lines = [line for line in second.log_text().splitlines() if "already in use" in line]
    assert len(lines) == 1
    assert "Traceback" not in second.log_text()


def test_secrets_appear_in_no_page_and_no_log_line(
    database: Database, bridge_process: Callable[..., BridgeProcess]
) -> None:
    database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")
    database.publish()
    bridge = bridge_process(
        "--log-level", "debug", environment={"BRIDGE_ADMIN_TOKEN": "t0ken-s3cret"}
    )
    database.execute("INSERT INTO users VALUES (1, 'row-value-s3cret')")
    wait_until(lambda: bridge.status()["cdc_events_published"] == 1)
    password = urlsplit(database.dsn).password
    assert password
    pages = [bridge.http(path).text for path in ("/", "/status", "/metrics", "/history")]
    for text in [*pages, bridge.log_text()]:
        assert password not in text
        assert "s3cret" not in text
    with open(f"/proc/{bridge.pid}/cmdline", "rb") as file:  # noqa: PTH123
        assert password.encode() not in file.read()


def test_shutdown_over_http_ends_the_bridge_in_order(
    database: Database, bridge: BridgeProcess
) -> None:
    insert(database, 1, 50)
    answer: Any = bridge.http("/shutdown", "POST", {"Host": "rebound.example"})
    assert answer.status == 403
    assert bridge.http("/shutdown", "POST").status == 202
    assert bridge.wait() == 0
    with psycopg.connect(database.dsn) as connection:
        row = connection.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s",
            [f"slot_{database.name}"],
        ).fetchone()
    assert row == (False,)
