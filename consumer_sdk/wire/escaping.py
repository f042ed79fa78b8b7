r"""Texts that others chose, such as names, written for terminals, for SQL and for shells.

Neither a terminal nor psql nor a shell interprets any part of them. The result has no control
characters, line breaks or invisible characters, so that it also stays on its line: in SQL they are
written as `U&"\000A"` and `E'\u000A'`, elsewhere as `\u000a`.
"""

from __future__ import annotations

import re
import shlex
from typing import Final

from consumer_sdk.wire.errors import WireError

# Characters that JSON need not escape: DEL, C1, soft hyphen, those of no width, line separators,
# directions, lone surrogates, tags.
_JSON_CONTROLS: Final = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_UNICODE_ESCAPE: Final = re.compile(r"\\(?:(\\)|([0-9A-Fa-f]{4})|\+([0-9A-Fa-f]{6}))|(\\)")


def printable(text: str) -> str:
    """The text with every character that is not printable written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _text_escape(char) for char in text)


def printable_json(text: str) -> str:
    """The same JSON with control characters escaped; line ends stay."""
    return _JSON_CONTROLS.sub(lambda match: json_escape(match[0]), text)


def shell_word(text: str) -> str:
    """A text as one word of a shell command."""
    return shlex.quote(printable(text))


def sql_identifier(*names: str) -> str:
    """Names as SQL identifiers in quotes, joined by dots."""
    return ".".join(map(_identifier, names))


def _identifier(name: str) -> str:
    quoted = name.replace('"', '""')
    if name.isprintable():
        return f'"{quoted}"'
    escaped = "".join(
        "\\\\" if char == "\\" else char if char.isprintable() else _unicode_escape(char)
        for char in quoted
    )
    return f'U&"{escaped}"'


def sql_literal(text: str) -> str:
    """A text as an SQL literal, whatever standard_conforming_strings is."""
    quoted = text.replace("'", "''")
    if text.isprintable() and "\\" not in text:
        return f"'{quoted}'"
    escaped = "".join(
        "\\\\" if char == "\\" else char if char.isprintable() else _text_escape(char)
        for char in quoted
    )
    return f"E'{escaped}'"


def sql_block(lines: list[str]) -> list[str]:
    """A DO statement of these lines of PL/pgSQL, in a dollar quote that none of them ends."""
    text = "\n".join(lines)
    tag = "$setup$"
    number = 0
    while tag in text:
        number += 1
        tag = f"$setup{number}$"
    return [f"DO {tag} BEGIN", *lines, f"END {tag};"]


def decode_unicode_identifier(text: str) -> str:
    r"""The name in `U&"…"`, without its quotes; WireError for an invalid escape."""

    def decode(match: re.Match[str]) -> str:
        if match[1]:
            return "\\"
        try:
            return chr(int(match[2] or match[3] or "", 16))
        except (ValueError, OverflowError):
            raise WireError(f"not a Unicode escape in the name {text!r}") from None

    return _UNICODE_ESCAPE.sub(decode, text)


def _unicode_escape(char: str) -> str:
    code = ord(char)
    return f"\\{code:04X}" if code < 0x10000 else f"\\+{code:06X}"


def _text_escape(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def json_escape(char: str) -> str:
    """A character as JSON escapes it: as a surrogate pair beyond the first 65536."""
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
