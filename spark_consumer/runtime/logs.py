"""Log lines of the job: an event and its fields as logfmt; never row values, never secrets."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def note(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event."""
    logger.log(level, event, extra={"fields": fields})


class LogfmtFormatter(logging.Formatter):
    """`ts=… level=info event="batch applied" events=42`; debug lines may bring a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        pairs = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        line = " ".join(f"{key}={_quoted(value)}" for key, value in pairs.items())
        if record.exc_info and record.levelno <= logging.DEBUG:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _quoted(value: object) -> str:
    text = " ".join(str(value).split())
    if text and not any(char in text for char in ' "=\\'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def start_logging(level: str = "info") -> None:
    """Send the job's own lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogfmtFormatter())
    logger = logging.getLogger("spark_consumer")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.isEnabledFor(logging.DEBUG):
        # It logs what it raises as well, some of it in the root's name.
        logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
        logging.getLogger().addFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in Path(record.pathname).parts
