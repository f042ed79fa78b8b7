"""Errors that crossed a process on their way here: Spark keeps only the text of their traceback."""

from __future__ import annotations

import re
from typing import Final

import consumer_sdk.errors
import spark_consumer.errors
from consumer_sdk.errors import CdcError

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
