"""Errors of Spark in one line: from Java's stack traces, and from other Python processes.

Spark passes on only the text of an error that an executor or its reader process raised.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

from consumer_sdk.errors import CdcError
from spark_consumer.errors import SparkConsumerError

if TYPE_CHECKING:
    from collections.abc import Sequence

_THROWN: Final = re.compile(
    r"^(?:\s*Caused by: |Exception in thread \"[^\"]*\" |: )?"
    r"((?:[A-Za-z_$][\w$]*\.)+[A-Z][\w$]*)(?:: (.*))?$"
)
# Spark raises this without an error condition or a class of its own, so only the text shows it.
_SLOW_START: Final = "Python worker failed to connect back"
_PYTHON: Final = "Traceback (most recent call last)"
_NO_OUTPUT: Final = "it printed nothing"
_UNSPECIFIC: Final = re.compile(
    r"Error: (?:Could not create the Java Virtual Machine|A fatal exception has occurred)"
)


def root_cause(text: str) -> str | None:
    """The message of the last cause in a Java stack trace; None if the text has no stack trace.

    A message without blanks, such as a host name, is unclear alone: the exception's name is added.
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
    """The last line of a Python traceback that is the message of a Java exception."""
    last = ""
    for line in lines:
        if line.startswith("\tat "):
            break
        last = line.strip() or last
    return last


def start_failure(lines: Sequence[str]) -> str:
    """The reason why Java did not start, from its output."""
    cause = root_cause("\n".join(lines))
    if cause is not None:
        return cause
    printed = [line.strip() for line in lines if line.strip()]
    specific = [line for line in printed if _UNSPECIFIC.match(line) is None]
    return next(iter(specific or printed), _NO_OUTPUT)


_RAISED: Final = re.compile(
    r"^((?:consumer_sdk|spark_consumer)(?:\.\w+)+)\.(\w+): (.+)$", re.MULTILINE
)


def original_error(error: BaseException) -> BaseException:
    """The CdcError that an executor or Spark's reader process raised; otherwise the error given."""
    if isinstance(error, CdcError):
        return error
    found = _RAISED.findall(str(error))
    if not found:
        return error
    module, name, message = found[-1]
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, CdcError)):
        return error
    original = kind.__new__(kind)
    Exception.__init__(original, message.strip())
    return original


class SlowStartError(SparkConsumerError):
    """Spark's reader process did not start within ten seconds, as on a busy machine."""


def explain(error: BaseException) -> BaseException:
    """The error to report: the one originally raised, or Spark's cause in one line."""
    from py4j.protocol import Py4JNetworkError

    original = original_error(error)
    if isinstance(original, CdcError) or not isinstance(original, Exception):
        return original
    if isinstance(original, (Py4JNetworkError, ConnectionError)):
        return SparkConsumerError("Spark's Java process has ended; start the job again")
    text = str(original)
    if _SLOW_START in text:
        return SlowStartError("Spark's Python processes do not start in time; is the machine busy?")
    if isinstance(original, OSError):
        return SparkConsumerError(f"the lake cannot be read or written: {original}")
    lines = [line for line in text.strip().splitlines() if line.strip()]
    reason = root_cause(text) or (lines[-1] if lines else type(original).__name__)
    return SparkConsumerError(f"Spark failed: {reason}")
