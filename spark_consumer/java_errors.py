"""What went wrong in Java, in one line: the message of the deepest cause."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_THROWN: Final = re.compile(
    r"^(?:\s*Caused by: |Exception in thread \"[^\"]*\" |: )?"
    r"((?:[A-Za-z_$][\w$]*\.)+[A-Z][\w$]*)(?:: (.*))?$"
)
_PYTHON: Final = "Traceback (most recent call last)"
_UNSPOKEN: Final = "it says nothing"
_DULL: Final = re.compile(
    r"Error: (?:Could not create the Java Virtual Machine|A fatal exception has occurred)"
)


def root_cause(text: str) -> str | None:
    """The message of the last cause in a Java stack trace; None where there is no such trace.

    A message without blanks, such as a host's name, says little: its exception's name goes first.
    """
    found: tuple[str, str] | None = None
    lines = text.splitlines()
    for index, line in enumerate(lines):
        match = _THROWN.match(line)
        if match is None or (found is not None and not line.lstrip().startswith("Caused by: ")):
            continue
        message = (match[2] or "").strip()
        if message.startswith(_PYTHON):
            message = _python_error(lines[index + 1 :])
        found = match[1].rpartition(".")[2], message
    if found is None:
        return None
    name, message = found
    if not message:
        return name
    return message if " " in message else f"{name}: {message}"


def _python_error(lines: Sequence[str]) -> str:
    """The last line of a Python traceback that Java has taken for its message."""
    last = ""
    for line in lines:
        if line.startswith("\tat "):
            break
        last = line.strip() or last
    return last


def start_failure(lines: Sequence[str]) -> str:
    """Why a Java that ended at once did so, from what it printed."""
    cause = root_cause("\n".join(lines))
    if cause is not None:
        return cause
    spoken = [line.strip() for line in lines if line.strip()]
    telling = [line for line in spoken if _DULL.match(line) is None]
    return next(iter(telling or spoken), _UNSPOKEN)
