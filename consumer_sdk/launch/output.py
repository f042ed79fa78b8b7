"""Standard output that may be a full disk, a closed pipe, or not there at all."""

from __future__ import annotations

import io
import os
import sys


class OutputLost(Exception):
    """What was printed cannot be written.

    Not an OSError, because argparse goes on after those as if it had printed its help.
    """

    def __init__(self, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        super().__init__(
            f"standard output cannot be written: {reason}; make room, or send it elsewhere"
        )


class Output(io.TextIOWrapper):
    """Standard output; a reader that has left shows as BrokenPipeError, all else as OutputLost."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(error) from error


def open_output() -> None:
    """Have streams that exist; standard output writes what its encoding lacks as escapes."""
    if sys.stdout is None:
        sys.stdout = open(_nowhere(1), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    elif isinstance(stream := sys.stdout, io.TextIOWrapper):
        # The stream that Python has made stays in sys.__stdout__, and so the buffer stays open.
        sys.stdout = Output(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
    if sys.stderr is None:
        sys.stderr = open(_nowhere(2), "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _nowhere(number: int) -> int:
    """Give a descriptor that is closed to nobody, before a file or a socket gets its number."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    return number


def close_output() -> None:
    """Write what is still to be written; nothing is left for the interpreter's exit to fail at."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()
    except OutputLost:
        _silence()
        raise


def _silence() -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)
