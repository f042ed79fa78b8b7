"""Log lines: a lowercase event and its fields, as logfmt or JSON; no row values, no secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TextIO

from consumer_sdk.wire.lsn import format_lsn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bridge.telemetry.stats import BridgeStats

LogFormat = Literal["logfmt", "json"]

_BARE = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+\Z")
_KEY_UNSAFE = re.compile(r"[^\w.$-]")
_URL_PASSWORD = re.compile(r"(\w[\w+.-]*://[^\s:/@]*):[^\s/]*@")
# A sentence that asks for a bearer token is not a header that holds one.
_PASSWORD_FIELD = re.compile(
    r"(?i)(password|passwd|secret)(\s*[=:]\s*)('[^']*'|\S+)"
    r"|(bearer)(\s+)(?!tokens?(?:[\s.,;)]|\Z))\S+"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0080-\u009f\u2028\u2029]")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event with fields, in the order given."""
    if logger.isEnabledFor(level):
        logger.log(level, name, extra={"fields": fields})


def mask_secrets(text: str) -> str:
    """Blank out passwords in URLs and connection strings that slipped into a text."""
    without_urls = _URL_PASSWORD.sub(r"\1:***@", text)
    return _PASSWORD_FIELD.sub(r"\1\4\2\5***", without_urls)


def quote_logfmt(value: object) -> str:
    """Write a value so that any logfmt reader gets it back and one event stays one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    text = str(value)
    if _BARE.match(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = _CONTROL.sub(lambda m: _ESCAPES.get(m[0], f"\\u{ord(m[0]):04x}"), escaped)
    return f'"{escaped}"'


class _EventFormatter(logging.Formatter):
    """Common part: the record as (key, value) pairs, secrets masked."""

    def pairs(self, record: logging.LogRecord) -> Iterator[tuple[str, object]]:
        moment = datetime.fromtimestamp(record.created, UTC)
        yield "ts", moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        yield "level", record.levelname.lower()
        yield "logger", record.name
        yield "event", mask_secrets(record.getMessage())
        fields: dict[str, object] = getattr(record, "fields", {})
        for key, value in fields.items():
            yield key, mask_secrets(value) if isinstance(value, str) else value
        if record.exc_info:
            yield "traceback", mask_secrets(self.formatException(record.exc_info))


class LogfmtFormatter(_EventFormatter):
    """`ts=… level=info logger=bridge.service event=connected slot=main`."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(
            f"{_KEY_UNSAFE.sub('_', key)}={quote_logfmt(value)}"
            for key, value in self.pairs(record)
        )


class JsonFormatter(_EventFormatter):
    """One JSON object a line, same keys as logfmt."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(dict(self.pairs(record)), default=str, ensure_ascii=False)


def configure_logging(
    level: str | int = "info", fmt: LogFormat = "logfmt", stream: TextIO | None = None
) -> None:
    """Send all logging of the process to one stream, standard error by default."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if fmt == "json" else LogfmtFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper() if isinstance(level, str) else level)
    logging.captureWarnings(capture=True)
    if root.level > logging.DEBUG:
        # Libraries report every reconnect themselves; the bridge says it once, with a remedy.
        for noisy in ("nats", "aiohttp.access", "asyncio"):
            logging.getLogger(noisy).setLevel(logging.ERROR)


class MetricsLine:
    """The METRICS log line: the state of the bridge in one grep."""

    def __init__(self) -> None:
        self._events_before = 0
        self._uptime_before = 0.0

    def fields(self, stats: BridgeStats) -> dict[str, Any]:
        """The line's fields in order; `rate` is events per second since the last call."""
        uptime = stats.uptime_seconds
        elapsed = max(uptime - self._uptime_before, 1e-3)
        rate = (stats.cdc_events_published - self._events_before) / elapsed
        self._events_before, self._uptime_before = stats.cdc_events_published, uptime
        return {
            "uptime": int(uptime),
            "wal_messages": stats.wal_messages_received,
            "cdc_events": stats.cdc_events_published,
            "lsn": format_lsn(stats.current_lsn),
            "connected": int(stats.is_connected),
            "reconnects": stats.reconnect_count,
            "nats_reconnects": stats.nats_reconnect_count,
            "lag_bytes": stats.wal_lag_bytes,
            "slot_active": int(stats.slot_active),
            "confirmed_lsn": format_lsn(stats.confirmed_lsn),
            "state": stats.state,
            "rate": round(rate, 1),
            "ring": stats.ring_depth,
            "warnings": len(stats.warnings),
        }

    def format(self, stats: BridgeStats) -> str:
        """The line as text, without time and level."""
        return "METRICS " + " ".join(
            f"{key}={quote_logfmt(value)}" for key, value in self.fields(stats).items()
        )

    async def run(self, stats: BridgeStats, interval: float = 15.0) -> None:
        """Log the line every interval until cancelled."""
        logger = logging.getLogger("bridge.metrics")
        while True:
            await asyncio.sleep(interval)
            event(logger, "METRICS", **self.fields(stats))
