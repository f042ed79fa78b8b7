"""Where the demonstration writes: colours and redrawing on a terminal, plain lines in a pipe."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


class Console:
    """Writes lines; on a terminal it can also redraw a block of them in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.live = self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self._colours = self.live and not os.environ.get("NO_COLOR")
        self._drawn = 0
        if hasattr(self._stream, "reconfigure"):
            # A terminal that cannot show a tick must not end the demonstration.
            self._stream.reconfigure(errors="replace")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        columns, lines = shutil.get_terminal_size()
        return columns, lines

    def paint(self, colour: str, text: str) -> str:
        """The text in a colour, where there are colours."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._colours else text

    def line(self, text: str = "") -> None:
        """Write a line below everything else."""
        self._write(text + "\n")

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
        """Leave what is drawn where it is and go on below it."""
        if self.live:
            self._drawn = 0
            self._write("\r" + _CLEAR_BELOW + _SHOW_CURSOR)

    @contextmanager
    def step(self, doing: str) -> Iterator[Step]:
        """Announce a step on a terminal; when it is done, one line says what came of it."""
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
    """Something under way."""

    def __init__(self, doing: str, console: Console) -> None:
        self.begun = time.monotonic()
        self.succeeded = True
        self.result = ""
        self._doing = doing
        self._announced = False
        self._console = console

    def show(self) -> None:
        """Redraw its line with how long it takes already; a pipe hears of it when it is long."""
        seconds = int(time.monotonic() - self.begun)
        if self._console.live:
            waiting = self._console.paint("dim", f"{seconds} s" if seconds else "")
            self._console.draw([f" … {self._doing}  {waiting}"])
        elif seconds >= _LONG_SECONDS and not self._announced:
            self._announced = True
            self._console.line(f" … {self._doing}")

    def done(self, result: str) -> None:
        """Say what came of it."""
        self.result = result

    def failed(self, result: str) -> None:
        """Say what went wrong, where going on makes sense."""
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
