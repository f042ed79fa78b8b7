"""Log lines: a lowercase event and its fields, as logfmt or JSON; no row values, no secrets."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from consumer_sdk.wire.escaping import json_escape, printable_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_BARE = re.compile(r"[^\s\"=\\]+\Z")
_KEY_UNSAFE = re.compile(r"[^\w.$-]")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

_SCHEME = r"[A-Za-z][\w+.-]*://"
_URL = re.compile(rf"({_SCHEME})((?:(?!{_SCHEME})\S)*)")
_LOGIN = re.compile(r"(?<![\w/@:.%])([\w.%+~-]+):(?!//)(\S+)@(?=[\w\[])")
# In addresses of these, a name before @ is a user; elsewhere it is a token.
_NAMED_USERS = ("postgresql://", "postgres://")
_EXAMPLE = "user:password"
# The value as libpq, JSON or a shell writes it, also if its end is cut off.
_VALUE = r"""('(?:[^'\\]|\\.)*(?:'|\Z)|"(?:[^"\\]|\\.)*(?:"|\Z)|(?:\\.|[^\s\\])+)"""
# The words `bearer token` in a sentence are not a secret.
_FIELD = re.compile(
    rf"""(?is)(pass(?:word|wd|phrase)|secret)(["']?\s*[=:]\s*){_VALUE}"""
    rf"""|((?:\b|_)(?:pass|pwd|token|jwt|nkey|seed))(["']?\s*=\s*){_VALUE}"""
    r"""|(authorization)(["']?\s*[=:]\s*["']?)((?:(?:basic|bearer)\s+)?\S+)"""
    r"|(bearer)(\s+)(?!tokens?(?:[\s.,;)]|\Z))(\S+)"
)
# A seed of an nkey, and a JSON web token.
_KEY = re.compile(r"\bS[UAONCPX][A-Z2-7]{40,}|\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?")


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one event with fields, in the order given."""
    if logger.isEnabledFor(level):
        logger.log(level, name, extra={"fields": fields})


def mask_secrets(text: str) -> str:
    """Replace passwords, tokens and keys in addresses, settings and headers by asterisks."""
    if "://" in text:
        text = _URL.sub(_mask_url, text)
    if "@" in text:
        text = _LOGIN.sub(r"\1:***@", text)
    return _KEY.sub("***", _FIELD.sub(_mask_field, text))


def _mask_url(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    # A password may contain @, / and other characters that should have been escaped.
    login, is_login, host = rest.rpartition("@")
    user, is_pair, _ = login.partition(":")
    if not is_login or login == _EXAMPLE:
        return match[0]
    if is_pair:
        return f"{scheme}{user}:***@{host}"
    if scheme in _NAMED_USERS or ("/" in login and scheme.startswith("http")):
        return match[0]
    return f"{scheme}***@{host}"


def _mask_field(match: re.Match[str]) -> str:
    name, between, _ = (group for group in match.groups() if group is not None)
    return f"{name}{between}***"


def quote_logfmt(value: object) -> str:
    """Write a value so that logfmt readers restore it and the event stays on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    text = str(value)
    if _BARE.match(text) and text.isprintable():
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if not escaped.isprintable():
        escaped = "".join(
            char if char.isprintable() else _ESCAPES.get(char) or json_escape(char)
            for char in escaped
        )
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
        line = json.dumps(dict(self.pairs(record)), default=str, ensure_ascii=False)
        return printable_json(line)
