"""The dashboard in a real browser, against a live bridge."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

    from bridge.embedded import NatsServer
    from tests.fixtures.bridge_process import BridgeProcess
    from tests.fixtures.postgres import Database

pytestmark = [pytest.mark.more, pytest.mark.timeout(180)]


@pytest.fixture
def bridge(database: Database, bridge_process: Callable[..., BridgeProcess]) -> BridgeProcess:
    database.execute(
        "CREATE TABLE users (id int PRIMARY KEY, name text); CREATE SCHEMA sales;"
        'CREATE TABLE sales."Odd Table.1" (id int PRIMARY KEY)'
    )
    database.publish()
    return bridge_process("--wal-check-interval", "1s", "--wal-warning", "2MB")


class Tab:
    """One page and everything that went wrong on it."""

    def __init__(self, browser: Browser, bridge: BridgeProcess, **options: Any) -> None:
        self._context = browser.new_context(**options)
        self.page: Page = self._context.new_page()
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        address = f"http://127.0.0.1:{bridge.http_port}"
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._note_request(address, request.url))
        self.page.goto(address + "/")

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _note_request(self, address: str, url: str) -> None:
        if not url.startswith((address, "data:")):
            self.foreign.append(url)

    def close(self) -> None:
        self._context.close()


@pytest.fixture
def open_tab(browser: Browser, bridge: BridgeProcess, expect: Any) -> Iterator[Callable[..., Tab]]:
    """Open the page and return when it shows that the bridge streams."""
    tabs: list[Tab] = []

    def start(**options: Any) -> Tab:
        tabs.append(Tab(browser, bridge, **options))
        expect(tabs[-1].page.locator("#state")).to_have_text("streaming")
        return tabs[-1]

    yield start
    for tab in tabs:
        tab.close()


def test_the_page_shows_what_the_bridge_publishes(
    open_tab: Callable[..., Tab], expect: Any, database: Database, bridge: BridgeProcess
) -> None:
    tab = open_tab()
    database.execute("INSERT INTO users SELECT n, 'x' FROM generate_series(1, 300) n")
    database.execute('INSERT INTO sales."Odd Table.1" VALUES (1)')
    page = tab.page
    rows = page.locator("#tables tr")
    expect(rows.nth(0)).to_contain_text("users")
    expect(rows.nth(0).locator("td").nth(2)).to_have_text("300")
    expect(page.locator("#tables")).to_contain_text('sales."Odd Table.1"')
    expect(page.locator("#source")).to_have_text(bridge.status()["source"])
    expect(page.locator("#connections")).to_contain_text("connected, ")
    expect(page.locator("#p50")).to_have_text(re.compile(r"\d (µs|ms|s)$"))
    path = page.locator("#throughput path.one")
    wait_until(lambda: (path.get_attribute("d") or "").count("L") >= 2, 20)
    assert "NaN" not in page.locator("svg#throughput").inner_html()
    assert tab.complaints == []
    assert tab.foreign == []


def test_a_slot_that_falls_behind_is_shown_with_its_remedy(
    open_tab: Callable[..., Tab], expect: Any, database: Database, nats_server: NatsServer
) -> None:
    tab = open_tab()
    warning = tab.page.locator(".warning")
    nats_server.freeze()
    try:
        database.execute(
            "INSERT INTO users SELECT n, repeat(md5(n::text), 20) FROM generate_series(1, 10000) n"
        )
        expect(warning.first).to_contain_text("not confirmed yet")
        expect(warning.first).to_contain_text("What to do: ")
        expect(tab.page.locator("#wal-limit")).to_contain_text("no limit is set")
    finally:
        nats_server.thaw()
    expect(warning).to_have_count(0)
    assert tab.complaints == []


def test_a_frozen_bridge_is_said_not_to_answer_and_comes_back(
    open_tab: Callable[..., Tab], expect: Any, bridge: BridgeProcess
) -> None:
    tab = open_tab()
    bridge.freeze()
    try:
        warning = tab.page.locator("#warnings")
        expect(warning).to_contain_text("the bridge does not answer")
        expect(tab.page.locator("#state")).to_have_text("no answer")
    finally:
        bridge.thaw()
    expect(tab.page.locator("#state")).to_have_text("streaming")
    expect(tab.page.locator("#warnings")).to_be_empty()


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(
    open_tab: Callable[..., Tab], expect: Any, database: Database, width: int
) -> None:
    long = "a_table_with_a_name_as_long_as_postgresql_allows_it_to_be_12345"
    database.execute(f"CREATE TABLE {long} (id int PRIMARY KEY); INSERT INTO {long} VALUES (1)")
    tab = open_tab(viewport={"width": width, "height": 800})
    expect(tab.page.locator("#tables")).to_contain_text(long)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two CSS rgb() colours, after WCAG."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_light_and_dark(open_tab: Callable[..., Tab], scheme: str) -> None:
    tab = open_tab(color_scheme=scheme)
    colour = "(n, p) => getComputedStyle(n)[p]"
    sheet = tab.page.locator(".sheet").first
    ground = sheet.evaluate(colour, "backgroundColor")
    for selector in (".figure b", ".figure h2", ".figure p", "#connections dt", "#tables td"):
        ink = tab.page.locator(selector).first.evaluate(colour, "color")
        assert contrast(ink, ground) >= 4.5, selector
    dark = contrast(ground, "rgb(0, 0, 0)") < 4
    assert dark is (scheme == "dark")


def test_everything_can_be_reached_and_used_by_keyboard(
    open_tab: Callable[..., Tab], expect: Any, database: Database
) -> None:
    database.execute("INSERT INTO users VALUES (1, 'a')")
    tab = open_tab()
    page = tab.page
    expect(page.locator("#tables")).to_contain_text("users")
    focused = []
    for _ in range(12):
        page.keyboard.press("Tab")
        focused.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.dataset.sort"
                " || document.activeElement.name || document.activeElement.className"
            )
        )
    assert focused[:2] == ["skip", "window"]
    for wanted in ("throughput", "latency", "wal", "depth", "name", "rate", "events", "last"):
        assert wanted in focused
    page.locator("#throughput").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("[data-reading=throughput]")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator("[data-reading=throughput]")).to_be_empty()
    page.locator("[data-sort=name]").focus()
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Table")
    page.locator("input[name=window]:checked").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#throughput")).to_contain_text("\N{MINUS SIGN}1 min")


def test_a_screen_reader_gets_names_for_charts_meters_and_tables(
    open_tab: Callable[..., Tab],
    expect: Any,
) -> None:
    tab = open_tab()
    page = tab.page
    for name in ("Throughput", "Latency", "WAL lag", "Ring depth"):
        chart = page.get_by_role("img", name=re.compile(f"^{name} over the last 5 min: now"))
        expect(chart).to_have_count(1)
    expect(page.get_by_role("meter")).to_have_count(2)
    expect(page.get_by_role("table", name="Tables")).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    expect(page.get_by_role("region", name="Warnings")).to_have_attribute("aria-live", "polite")
    assert page.locator("html").get_attribute("lang") == "en"


def test_a_snapshot_is_shown_with_its_rows(
    open_tab: Callable[..., Tab],
    expect: Any,
    database: Database,
    bridge: BridgeProcess,
    prefix: str,
    run_command: Callable[..., Any],
    nats_server: NatsServer,
) -> None:
    database.execute("INSERT INTO users SELECT n, 'x' FROM generate_series(1, 25000) n")
    database.execute("ANALYZE users")
    tab = open_tab()
    answer = run_command(
        "cdc", "snapshot", "users", "--out", f"{bridge.log_path}.jsonl",
        environment={"NATS_URL": nats_server.reader_url, "BRIDGE_PREFIX": prefix},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    job = tab.page.locator("#snapshots .job").first
    expect(job).to_contain_text("users")
    expect(job).to_contain_text("25,000 rows")
    expect(job).to_contain_text("done")
