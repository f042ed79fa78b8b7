"""Standard output that may be a full disk, a closed pipe, or missing."""

from __future__ import annotations

import io
import os
import sys


class OutputLost(Exception):
    """Standard output cannot be written.

    This is not an OSError, because argparse ignores an OSError while it prints its help.
    """

    def __init__(self, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        super().__init__(
            f"standard output cannot be written: {reason}; make room, or send it elsewhere"
        )


class Output(io.TextIOWrapper):
    """Standard output; raises BrokenPipeError if the reader closed it, else OutputLost."""

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
    """Open missing streams; characters that standard output cannot encode are escaped."""
    if sys.stdout is None:
        sys.stdout = open(_open_null(1), "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    elif isinstance(stream := sys.stdout, io.TextIOWrapper):
        # Python's own stream stays in sys.__stdout__, which keeps the buffer open.
        sys.stdout = Output(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
    if sys.stderr is None:
        sys.stderr = open(_open_null(2), "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _open_null(number: int) -> int:
    """Open a closed descriptor on the null device, before a file or socket gets its number."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
    return number


def close_output() -> None:
    """Flush standard output, so that the interpreter has nothing to write when it exits."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except OutputLost:
        _discard_output()
        raise


def _discard_output() -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)
