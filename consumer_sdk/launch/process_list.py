"""Passwords given as arguments, taken out of what `ps` shows."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

# fs/proc/array.c: fields 48 and 49 of stat, counted from 1; the second ends at the last ")".
_ARG_START: Final = 48 - 3
_ARG_END: Final = 49 - 3
_SHOWN: Final = b"***"
# scheme://user:password@ or user:password@ at the beginning; the last @ of the authority counts.
_USER_INFO: Final = re.compile(rb"(?:\A(?:--?[\w-]+=)?|(?P<scheme>[\w+.-]*)://)([^/?#]*)@")
# As libpq takes it, in a connection string or in the query of an address.
_PASSWORD: Final = re.compile(rb"(?i)password\s*=\s*('(?:[^'\\]|\\.)*'|[^\s&']+)")


def hide_secrets() -> None:
    """Overwrite passwords in this process's own arguments, where the system lets it (Linux)."""
    with suppress(OSError, ValueError, IndexError):
        shown = Path("/proc/self/cmdline").read_bytes()
        hidden = without_secrets(shown)
        if hidden == shown:
            return
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if end - start == len(hidden):
            with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
                memory.seek(start)
                memory.write(hidden)


def without_secrets(command_line: bytes) -> bytes:
    """The arguments, each ended by a zero byte, in the same length without passwords."""
    return b"\0".join(map(_without_secrets, command_line.split(b"\0")))


def _without_secrets(argument: bytes) -> bytes:
    kept, position = b"", 0
    for start, end in sorted(_places(argument)):
        if start >= position:
            kept += argument[position:start] + _SHOWN[: end - start]
            position = end
    # Blanks at the end, so that it is still one argument and the password has no length.
    return (kept + argument[position:]).ljust(len(argument))


def _places(argument: bytes) -> list[tuple[int, int]]:
    places = [match.span(1) for match in _PASSWORD.finditer(argument)]
    for match in _USER_INFO.finditer(argument):
        start, end = match.span(2)
        colon = argument.find(b":", start, end)
        if colon >= 0:
            places.append((colon + 1, end))
        elif not (match["scheme"] or b"").startswith(b"postgres"):
            # A token of NATS.
            places.append((start, end))
    return places
