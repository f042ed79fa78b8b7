"""Output for terminals: colours and a progress line."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time
from typing import TYPE_CHECKING, Final, TextIO

from consumer_sdk.wire.escaping import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_CODES: Final = {
    "green": "32",
    "yellow": "33",
    "red": "31",
    "magenta": "35",
    "cyan": "36",
    "dim": "2",
    "bold": "1",
}
_REDRAW_SECONDS: Final = 0.1
_CHECK_SECONDS: Final = 0.25


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


async def reader_closed(stream: TextIO) -> None:
    """Wait until the reading end of the stream's pipe is closed.

    A write would fail then, but without changes nothing is written.
    """
    # The help of every command imports this module.
    import asyncio

    while not _is_closed(stream):  # noqa: ASYNC110
        await asyncio.sleep(_CHECK_SECONDS)


def _is_closed(stream: TextIO) -> bool:
    if sys.platform == "win32":
        return False
    try:
        watch = select.poll()
        watch.register(stream.fileno(), 0)
        return bool(watch.poll(0))
    except (OSError, ValueError):  # the stream has no descriptor
        return False


def wants_colour(stream: TextIO) -> bool:
    """Whether to use colours: on a terminal that is not dumb, if NO_COLOR is unset or empty."""
    return (
        is_terminal(stream)
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "") != "dumb"
    )


class Paint:
    """Colours text if the stream supports it."""

    def __init__(self, stream: TextIO) -> None:
        self._on = wants_colour(stream)

    def __call__(self, colour: str, text: str) -> str:
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._on else text


def columns(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """The rows as lines, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


class ProgressLine:
    """A progress line on a terminal; prints nothing elsewhere."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._label = printable(label)
        self._shown = is_terminal(self._stream)
        self._drawn_at = 0.0

    def show(self, done: int, total: int | None, note: str = "") -> None:
        """Draw the state, at most ten times a second."""
        now = time.monotonic()
        finished = total is not None and done >= total
        if not self._shown or (now - self._drawn_at < _REDRAW_SECONDS and not finished):
            return
        self._drawn_at = now
        room = max(20, self._columns() - 1)
        line = f"{self._label} {_bar(done, total)} {done:,}"
        if total:
            line += f" of {total:,}"
        if note:
            line += f"  {printable(note)}"
        self._stream.write("\r\x1b[K" + line[:room])
        self._stream.flush()

    def _columns(self) -> int:
        # Use this stream's terminal, because standard output may be a file.
        try:
            return os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            return shutil.get_terminal_size().columns

    def clear(self) -> None:
        """Erase the line."""
        if self._shown and self._drawn_at:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _bar(done: int, total: int | None, width: int = 24) -> str:
    if not total:
        return "[" + "·" * width + "]"
    filled = min(width, done * width // total)
    return "[" + "█" * filled + "·" * (width - filled) + "]"
