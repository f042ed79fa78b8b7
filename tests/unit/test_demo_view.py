"""What the demonstration shows and how it compares, without servers."""

from __future__ import annotations

import io
from collections import Counter

import pytest

from bridge.demo import command
from bridge.demo.checks import TableSummary, count_table, differences, disagreements
from bridge.demo.view import Console, cut, event_line, pad, short, sparkline, width
from bridge.demo.workload import CommittedChanges
from bridge.errors import BridgeError
from consumer_sdk.wire import Event

RED = "\x1b[31mred\x1b[0m"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def event(**data: object) -> Event:
    return Event(
        "shop",
        1,
        "invoices",
        "sales",
        "UPDATE",
        16,
        0,
        7,
        1_700_000_000_123_456,
        1,
        9,
        "",
        "",
        data,
    )


def plain(_colour: str, text: str) -> str:
    return text


def test_width_does_not_count_colours():
    assert width(RED) == 3
    assert pad(RED, 5) == RED + "  "
    assert pad("7", 3, right=True) == "  7"


def test_a_line_is_cut_to_the_terminal_with_its_colours_closed():
    assert cut("short", 10) == "short"
    assert cut("abcdef", 4) == "abc…"
    assert cut(f"{RED} and more", 2) == "\x1b[31mr…\x1b[0m"
    assert width(cut(f"{RED} and more", 6)) == 6


def test_a_pipe_gets_neither_colours_nor_cursor_movements():
    stream = io.StringIO()
    console = Console(stream)
    with console.step("working") as step:
        step.show()
        step.done(console.paint("green", "done"))
    console.keep()
    assert "\x1b" not in stream.getvalue()
    assert " ✓ done" in stream.getvalue()
    assert not console.live


def test_no_color_is_respected_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(Terminal())
    assert console.live
    assert console.paint("green", "plain") == "plain"
    monkeypatch.delenv("NO_COLOR")
    assert Console(Terminal()).paint("green", "x") == "\x1b[32mx\x1b[0m"


def test_a_block_is_drawn_over_the_one_before(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "4")
    stream = Terminal()
    console = Console(stream)
    console.draw(["one", "two", "three", "four", "five"])
    assert "four" not in stream.getvalue(), "more lines than the terminal has would scroll"
    console.draw(["x" * 40])
    assert "\x1b[3F" in stream.getvalue()
    assert "x" * 18 + "…" in stream.getvalue()
    assert "x" * 20 not in stream.getvalue()


def test_values_cannot_steer_the_terminal():
    line = event_line(event(id=1, note="a\x1b[2Jb\nc"), plain, 100)
    assert "\x1b" not in line
    assert "\n" not in line
    assert "sales.invoices" in line
    assert "UPDATE" in line
    assert "22:13:20.123" in line
    assert "id=1" in line
    assert short(None) == "null"
    assert short(b"\xff\x00") == "\\xff00"
    assert len(short("long " * 100)) == 24


def test_an_event_line_fits_its_columns():
    for columns in (10, 40, 79, 200):
        assert len(event_line(event(description="x" * 500), plain, columns)) <= max(columns, 44)


def test_the_highest_rate_is_a_full_bar():
    assert sparkline([0, 5, 10]) == "▁▅█"
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"


def test_differences_name_table_operation_and_both_counts():
    made = Counter({("orders", "insert"): 1200, ("items", "delete"): 3})
    assert differences(made, Counter(made)) == []
    stored = Counter(
        {("orders", "insert"): 1199, ("visits", "truncate"): 1, ("items", "delete"): 3}
    )
    assert differences(made, stored) == [
        "orders insert: 1,200 committed, 1,199 stored",
        "visits truncate: 0 committed, 1 stored",
    ]


def test_committed_changes_add_up():
    committed = CommittedChanges(
        Counter({("orders", "insert"): 5, ("orders", "delete"): 2, ("items", "insert"): 1})
    )
    assert committed.of_table("orders") == 7
    assert committed.total == 8
    row = next(
        line for line in count_table(committed.changes, committed.changes) if "orders" in line
    )
    assert row.split() == ["orders", "5", "0", "2", "0", "7", "7"]
    assert all(len(line) < 80 for line in count_table(committed.changes, committed.changes))


def test_a_table_that_differs_in_one_engine_is_named():
    same = {"orders": TableSummary(3, "1.50")}
    assert disagreements({"PostgreSQL": same, "Spark SQL": same, "DuckDB": same}) == []
    (said,) = disagreements({"PostgreSQL": same, "Spark SQL": {}, "DuckDB": same})
    assert said == (
        "the lake's orders is not the source's:"
        " PostgreSQL 3 / 1.50, Spark SQL None, DuckDB 3 / 1.50"
    )


@pytest.mark.parametrize(("spark", "extra"), [(True, "demo,spark"), (False, "demo")])
def test_missing_packages_are_one_line_with_the_remedy(monkeypatch, capsys, spark, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(BridgeError) as raised:
        command.run_demo(seconds=1, spark=spark, port=0)
    assert f"pip install 'tailrace[{extra}]'" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().out == "", "nothing was begun"
