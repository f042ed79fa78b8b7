"""Where a password comes from: a fixed text, a file, or a command that prints it."""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

COMMAND_SECONDS: Final = 10.0
LONGEST_BYTES: Final = 64 * 1024
# The tokens of cloud providers are valid for 15 minutes or longer.
KEPT_SECONDS: Final = 600.0


class PasswordUnavailable(Exception):
    """The file or the command gives no password; the message never contains a secret."""


@dataclass(frozen=True, slots=True)
class PasswordSource:
    """A password that is asked for anew for every connection; the repr hides it.

    A file is read each time. The output of a command is kept until a server refuses it, and for ten
    minutes at most. No shell is involved.
    """

    text: str = field(default="", repr=False)
    file: str = ""
    command: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether the password may be another one for the next connection."""
        return bool(self.file or self.command)

    def read(self) -> str:
        """The password of this moment; blocks; PasswordUnavailable if there is none."""
        if self.command:
            return _shared_command(self.command).output()
        return _read_file(self.file) if self.file else self.text

    def refuse(self, password: str) -> None:
        """A server refused this password: the next `read` runs the command again."""
        if self.command:
            _shared_command(self.command).forget(password)


def parse_command(text: str) -> tuple[str, ...]:
    """Split a command into its arguments as a shell does, but expand nothing."""
    return tuple(shlex.split(text))


class _Command:
    """A command and its last output."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._arguments = arguments
        self._lock = threading.Lock()
        self._password = ""
        self._read_at = 0.0

    def output(self) -> str:
        with self._lock:
            if not self._password or time.monotonic() - self._read_at > KEPT_SECONDS:
                self._password = self._run()
                self._read_at = time.monotonic()
            return self._password

    def forget(self, password: str) -> None:
        with self._lock:
            # Another connection may have got a newer one meanwhile.
            if self._password == password:
                self._password = ""

    def _run(self) -> str:
        program = self._arguments[0]
        try:
            done = subprocess.run(
                self._arguments,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PasswordUnavailable(
                f"the password command {program} did not end within {COMMAND_SECONDS:g} s"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise PasswordUnavailable(
                f"the password command {program} cannot be started: {reason}"
            ) from error
        # Its error output is not shown: it may contain a secret.
        if done.returncode:
            raise PasswordUnavailable(
                f"the password command {program} ended with status {done.returncode}; "
                "run it by hand to see why"
            )
        return _one_line(done.stdout, f"the output of the password command {program}")


@cache
def _shared_command(arguments: tuple[str, ...]) -> _Command:
    """One object for each command, so that all connections of the process share its output."""
    return _Command(arguments)


def _read_file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST_BYTES + 1)
    except OSError as error:
        raise PasswordUnavailable(
            f"the password file {path} cannot be read: {error.strerror}"
        ) from error
    return _one_line(content, f"the password file {path}")


def _one_line(content: bytes, origin: str) -> str:
    try:
        text = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise PasswordUnavailable(f"{origin} is not text in UTF-8") from None
    if not text:
        raise PasswordUnavailable(f"{origin} is empty")
    if "\0" in text or "\n" in text or len(content) > LONGEST_BYTES:
        raise PasswordUnavailable(f"{origin} is not one line of text")
    return text
