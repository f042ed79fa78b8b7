"""The live view: one frame of what flows, as a block for a terminal or as a line for a pipe."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from bridge.demo import shop
from bridge.demo.console import Console, pad
from bridge.demo.survey import Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.demo.ledger import Ledger
    from bridge.demo.stream_watch import StreamWatch
    from consumer_sdk.wire import Event

    Paint = Callable[[str, str], str]

_COLOURS: Final = {"INSERT": "green", "UPDATE": "yellow", "DELETE": "red", "TRUNCATE": "magenta"}
_BARS: Final = "▁▂▃▄▅▆▇█"
_RATE_WINDOW_SECONDS: Final = 2.0
_HISTORY: Final = 40
_NAME_WIDTH: Final = 16


@dataclass
class View:
    """Everything the view shows; the parts are updated by others while it is drawn."""

    ledger: Ledger
    stream: StreamWatch
    dashboard: str
    nats_url: str
    seconds: float | None
    survey: Survey = field(default_factory=Survey)
    mirror_ended: bool = False
    begun: float = field(default_factory=time.monotonic)
    _samples: deque[tuple[float, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=60))
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    @property
    def elapsed(self) -> float:
        """Seconds since the shop opened."""
        return time.monotonic() - self.begun

    def sample(self) -> None:
        """Note the counts for the rates; to be called a few times a second."""
        now = time.monotonic()
        self._samples.append((now, dict(self.stream.stored)))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _RATE_WINDOW_SECONDS:
            self._samples.popleft()
        self._rates.append(self.rate())

    def rate(self, token: str | None = None) -> float:
        """Events stored per second lately, of one table or of all."""
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
            f" look in    {paint('cyan', f'NATS_URL={self.nats_url} cdc tail orders')}",
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
            f"{self.elapsed:5.0f} s  {self.ledger.total:,} changes committed"
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
        state = str(self.survey.bridge_status.get("status", "starting"))
        versions = self.survey.bridge_status.get("versions") or {}
        postgres = str(versions.get("postgres") or "").split(" ")[0]
        stations = [
            (f"PostgreSQL {postgres}".rstrip(), f"{self.ledger.total:,} changes"),
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
                self.ledger.of_table(token),
                self.stream.stored[token],
                round(self.rate(token)),
                self.survey.source_rows.get(token),
                self.survey.mirror_rows.get(token),
            )
            lines.append(" " + pad(token, _NAME_WIDTH) + _numbers(cells, widths))
        totals = (
            self.ledger.total,
            self.stream.stored.total(),
            round(self.rate()),
            sum(self.survey.source_rows.values()),
            sum(self.survey.mirror_rows.values()),
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
        if not self.survey.mirror_rows:
            return f"copying, {self.survey.mirror_loaded} of {len(shop.TABLES)} tables"
        behind = self.survey.stream_sequence - self.survey.mirror_sequence
        return "up to date" if behind <= 0 else f"{behind:,} behind"


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
    """A value in a few characters that cannot steer the terminal."""
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
