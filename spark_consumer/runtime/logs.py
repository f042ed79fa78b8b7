"""Where the job's log lines go."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from consumer_sdk.transport.logfmt import LogfmtFormatter


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
