"""The live view: drawn in place with colours on a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import os
import re
import shutil
import statistics
import sys
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from bridge.demo import shop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bridge.demo.observer import Observer, StreamReader
    from bridge.demo.workload import CommittedChanges
    from consumer_sdk.wire import Event

    Paint = Callable[[str, str], str]

_CODES: Final = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
_LONG_SECONDS: Final = 5
_HIDE_CURSOR: Final = "\x1b[?25l"
_SHOW_CURSOR: Final = "\x1b[?25h"
_CLEAR_BELOW: Final = "\x1b[J"
_CLEAR_LINE: Final = "\x1b[K"
_COLOURS: Final = {"INSERT": "green", "UPDATE": "yellow", "DELETE": "red", "TRUNCATE": "magenta"}
_BARS: Final = "▁▂▃▄▅▆▇█"
_RATE_WINDOW_SECONDS: Final = 2.0
_HISTORY: Final = 40
_NAME_WIDTH: Final = 16


class Console:
    """Writes lines; on a terminal it can also redraw a block of them in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.live = self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._colours = self.live and not os.environ.get("NO_COLOR")
        self._drawn = 0
        if isinstance(self._stream, io.TextIOWrapper):
            # A terminal that cannot show a tick must not end the demonstration.
            self._stream.reconfigure(errors="replace")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        columns, lines = shutil.get_terminal_size()
        return columns, lines

    def paint(self, colour: str, text: str) -> str:
        """The text in a colour, if the terminal has colours."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._colours else text

    def line(self, text: str = "") -> None:
        """Write a line below everything else."""
        self._write(text + "\n")

    def block(self, lines: Sequence[str]) -> None:
        """Write lines with a blank one before and after them."""
        for line in ("", *lines, ""):
            self.line(line)

    def draw(self, lines: Sequence[str]) -> None:
        """Put these lines in the place of the ones drawn before."""
        columns, height = self.size
        shown = [cut(line, columns - 1) for line in lines[: height - 1]]
        self._write(
            _HIDE_CURSOR
            + self._to_top()
            + "".join(f"{line}{_CLEAR_LINE}\n" for line in shown)
            + _CLEAR_BELOW
        )
        self._drawn = len(shown)

    def keep(self) -> None:
        """Leave what is drawn where it is; the next line goes below it."""
        if self.live:
            self._drawn = 0
            self._write("\r" + _CLEAR_BELOW + _SHOW_CURSOR)

    @contextmanager
    def step(self, doing: str) -> Iterator[Step]:
        """Show a step while it runs; one line with its result replaces it at the end."""
        step = Step(doing, self)
        step.show()
        try:
            yield step
        except BaseException:
            self.keep()
            raise
        if self.live:
            self._write(self._to_top() + _CLEAR_BELOW)
        self.keep()
        mark = self.paint("green", "✓") if step.succeeded else self.paint("red", "✗")
        took = self.paint("dim", f"{time.monotonic() - step.begun:.1f} s")
        self.line(f" {mark} {step.result or doing}  {took}")

    def _to_top(self) -> str:
        return f"\x1b[{self._drawn}F" if self._drawn else "\r"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class Step:
    """A step of the demonstration that is under way."""

    def __init__(self, doing: str, console: Console) -> None:
        self.begun = time.monotonic()
        self.succeeded = True
        self.result = ""
        self._doing = doing
        self._announced = False
        self._console = console

    def show(self) -> None:
        """Redraw its line with the seconds it has taken; in a pipe, one line if it takes long."""
        seconds = int(time.monotonic() - self.begun)
        if self._console.live:
            waiting = self._console.paint("dim", f"{seconds} s" if seconds else "")
            self._console.draw([f" … {self._doing}  {waiting}"])
        elif seconds >= _LONG_SECONDS and not self._announced:
            self._announced = True
            self._console.line(f" … {self._doing}")

    def done(self, result: str) -> None:
        """Set the line that is shown at the end."""
        self.result = result

    def failed(self, result: str) -> None:
        """Set the line that is shown at the end, marked as a failure."""
        self.result = result
        self.succeeded = False


def width(text: str) -> int:
    """How many columns a text takes."""
    return len(_ESCAPE.sub("", text))


def cut(text: str, columns: int) -> str:
    """As much of a text as fits, colours intact."""
    if width(text) <= columns:
        return text
    kept: list[str] = []
    room = max(0, columns - 1)
    position = 0
    coloured = False
    while position < len(text):
        escape = _ESCAPE.match(text, position)
        if escape:
            kept.append(escape[0])
            coloured = escape[0] != "\x1b[0m"
            position = escape.end()
        elif room:
            kept.append(text[position])
            room -= 1
            position += 1
        else:
            break
    return "".join(kept) + "…" + ("\x1b[0m" if coloured else "")


def pad(text: str, columns: int, *, right: bool = False) -> str:
    """The text with blanks to a width; to the right edge for numbers."""
    blanks = " " * max(0, columns - width(text))
    return blanks + text if right else text + blanks


@dataclass
class View:
    """The live view; its sources change while it is drawn."""

    committed: CommittedChanges
    stream: StreamReader
    observer: Observer
    dashboard: str
    nats_url: str
    seconds: float | None
    mirror_ended: bool = False
    begun: float = field(default_factory=time.monotonic)
    _samples: deque[tuple[float, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=60))
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    @property
    def elapsed(self) -> float:
        """Seconds since the workload began."""
        return time.monotonic() - self.begun

    def sample(self) -> None:
        """Save the counts, from which rates are computed; call it a few times a second."""
        now = time.monotonic()
        self._samples.append((now, dict(self.stream.stored)))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_WINDOW_SECONDS:
            self._samples.popleft()
        self._rates.append(self.rate())

    def rate(self, token: str | None = None) -> float:
        """Recent rate of stored events per second, of one table or of all."""
        if len(self._samples) < 2:
            return 0.0
        (then, before), (now, after) = self._samples[0], self._samples[-1]
        if token is not None:
            grown = after.get(token, 0) - before.get(token, 0)
        else:
            grown = sum(after.values()) - sum(before.values())
        return grown / max(now - then, 0.001)

    def block(self, console: Console) -> list[str]:
        """The frame for a terminal, as many events as fit below it."""
        paint = console.paint
        columns, height = console.size
        lines = [
            f" {paint('bold', 'tailrace demo')}  {paint('dim', self._clock())}",
            f" dashboard  {paint('cyan', self.dashboard)}",
            f" follow     {paint('cyan', f'NATS_URL={self.nats_url} cdc tail orders')}",
            "",
            *self._pipeline(paint),
            "",
            *self._tables(paint),
            "",
            self._pace(paint),
            "",
        ]
        room = min(height - 2 - len(lines), len(self.stream.newest))
        if room > 0:
            newest = list(self.stream.newest)[-room:]
            lines += [event_line(event, paint, columns - 2) for event in reversed(newest)]
        return lines

    def line(self) -> str:
        """The frame for a pipe."""
        newest = self.stream.newest[-1] if self.stream.newest else None
        last = f"  last: {newest.operation} {_token(newest)}" if newest else ""
        return (
            f"{self.elapsed:5.0f} s  {self.committed.total:,} changes committed"
            f"  {self.stream.stored.total():,} events stored  {self.rate():,.0f}/s"
            f"  {self._latency()}  mirror {self._mirror()}{last}"
        )

    def _clock(self) -> str:
        minutes, seconds = divmod(int(self.elapsed), 60)
        clock = f"{minutes}:{seconds:02d}"
        if self.seconds is None:
            return f"{clock}   Ctrl-C closes the shop and checks that everything arrived"
        left = max(0, round(self.seconds - self.elapsed))
        return f"{clock}   {left} s to go, then everything is checked (Ctrl-C: check now)"

    def _pipeline(self, paint: Paint) -> list[str]:
        state = str(self.observer.bridge_status.get("status", "starting"))
        versions = self.observer.bridge_status.get("versions") or {}
        postgres = str(versions.get("postgres") or "").split(" ")[0]
        stations = [
            (f"PostgreSQL {postgres}".rstrip(), f"{self.committed.total:,} changes"),
            ("bridge", state),
            ("JetStream", f"{self.stream.stored.total():,} events"),
            ("mirror (SQLite)", self._mirror()),
        ]
        widths = [max(len(name), len(text)) for name, text in stations]
        names = [paint("bold", pad(name, w)) for (name, _), w in zip(stations, widths, strict=True)]
        texts = [pad(text, w) for (_, text), w in zip(stations, widths, strict=True)]
        return [" " + paint("dim", " ──▶ ").join(names), " " + "     ".join(texts).rstrip()]

    def _tables(self, paint: Paint) -> list[str]:
        headings = ("committed", "stored", "events/s", "rows in shop", "in mirror")
        widths = [max(9, len(heading)) for heading in headings]
        lines = [
            paint(
                "dim",
                " "
                + pad("table", _NAME_WIDTH)
                + "".join(pad(h, w + 2, right=True) for h, w in zip(headings, widths, strict=True)),
            )
        ]
        for token in shop.tokens():
            cells = (
                self.committed.of_table(token),
                self.stream.stored[token],
                round(self.rate(token)),
                self.observer.source_rows.get(token),
                self.observer.mirror_rows.get(token),
            )
            lines.append(" " + pad(token, _NAME_WIDTH) + _numbers(cells, widths))
        totals = (
            self.committed.total,
            self.stream.stored.total(),
            round(self.rate()),
            sum(self.observer.source_rows.values()),
            sum(self.observer.mirror_rows.values()),
        )
        lines.append(paint("bold", " " + pad("all", _NAME_WIDTH) + _numbers(totals, widths)))
        return lines

    def _pace(self, paint: Paint) -> str:
        return f" {paint('cyan', sparkline(self._rates))}  {self.rate():,.0f}/s   {self._latency()}"

    def _latency(self) -> str:
        latencies = list(self.stream.latencies)
        if not latencies:
            return "nothing yet"
        worst = max(latencies)
        middle = statistics.median(latencies)
        return f"commit to reader {middle * 1000:.0f} ms (slowest {worst * 1000:.0f} ms)"

    def _mirror(self) -> str:
        if self.mirror_ended:
            return "ended"
        if not self.observer.mirror_rows:
            return f"copying, {self.observer.mirror_loaded} of {len(shop.TABLES)} tables"
        behind = self.observer.mirror_behind
        return f"{behind:,} behind" if behind else "up to date"


def sparkline(values: Sequence[float]) -> str:
    """Bars of the values, the highest one full."""
    top = max(values, default=0) or 1
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)


def event_line(event: Event, paint: Paint, columns: int) -> str:
    """One event: when it was committed, what it did, to which row."""
    when = datetime.fromtimestamp(event.ts / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3]
    head = f" {when}  {pad(_token(event), _NAME_WIDTH)}"
    operation = paint(_COLOURS.get(event.operation, "bold"), pad(event.operation, 8))
    data = event.data if isinstance(event.data, dict) else {}
    values = "  ".join(f"{name}={short(value)}" for name, value in data.items())
    room = max(0, columns - len(head) - 10)
    return f"{head}  {operation}  {paint('dim', values[:room])}"


def short(value: Any) -> str:
    """A value shortened and without control characters."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return f"\\x{value.hex()[:12]}"
    text = str(value)
    text = "".join(char if char.isprintable() else "·" for char in text[:40])
    return text if len(text) < 24 else text[:23] + "…"


def _token(event: Event) -> str:
    return event.table if event.schema == "public" else f"{event.schema}.{event.table}"


def _numbers(cells: Sequence[int | None], widths: Sequence[int]) -> str:
    return "".join(
        pad("-" if cell is None else f"{cell:,}", width + 2, right=True)
        for cell, width in zip(cells, widths, strict=True)
    )
