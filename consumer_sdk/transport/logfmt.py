"""Log lines: a lowercase event and its fields, as logfmt or JSON; no row values, no secrets."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_BARE = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+\Z")
_KEY_UNSAFE = re.compile(r"[^\w.$-]")
_URL_PASSWORD = re.compile(r"(\w[\w+.-]*://[^\s:/@]*):[^\s/]*@")
# The words `bearer token` in a sentence are not a secret.
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
    """Replace passwords in URLs, connection strings and headers by asterisks."""
    without_urls = _URL_PASSWORD.sub(r"\1:***@", text)
    return _PASSWORD_FIELD.sub(r"\1\4\2\5***", without_urls)


def quote_logfmt(value: object) -> str:
    """Write a value so that logfmt readers restore it and the event stays on one line."""
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
    """Turns a record into (key, value) pairs with masked secrets."""

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
    """One JSON object for each line, with the same keys as logfmt."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(dict(self.pairs(record)), default=str, ensure_ascii=False)
