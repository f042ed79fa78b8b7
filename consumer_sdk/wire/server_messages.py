"""Errors of PostgreSQL in one line that quotes no value of a row.

PostgreSQL quotes values in the details of an error, and for some kinds of errors in its message:
`invalid input syntax for type integer: "…"`. The SQLSTATE tells these kinds apart.
"""

from __future__ import annotations

import re
from typing import Final

# https://www.postgresql.org/docs/current/errcodes-appendix.html: classes whose messages and details
# speak of names, settings and states. Not among them are data exceptions (22), errors that
# functions raise with any text (P0), and those of extensions and foreign tables.
_WITHOUT_VALUES: Final = frozenset(
    {"00", "01", "02", "03", "08", "09", "0A", "0B", "0L", "0P", "20", "21", "24", "25", "26", "27"}
    | {"28", "2B", "2D", "34", "3B", "3D", "3F", "40", "42", "53", "54", "55", "57", "58", "F0"}
    | {"XX"}
)
# Data exceptions with a fixed message: too long for its type, division by zero.
_FIXED: Final = frozenset({"22001", "22012"})
# The message names the constraint, the details quote the row.
_INTEGRITY: Final = "23"
# Input functions of jsonpath and tsquery report a bad value with it.
_SYNTAX_ERROR: Final = "42601"
_WORD: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")


def without_values(
    kind: str, sqlstate: str | None, message: str | None, *more: str | None, text: str = ""
) -> str:
    """The message of an error, followed by `more` lines of it if they quote no values.

    `kind` is the driver's name of the error, which replaces a message that may quote values. Errors
    of the driver itself have no SQLSTATE; of them, the first line of `text` is shown.
    """
    if not sqlstate or not message:
        return text.partition("\n")[0].strip() or kind
    group = sqlstate[:2]
    if group == _INTEGRITY or sqlstate in _FIXED:
        return _one_line(message)
    if group in _WITHOUT_VALUES and sqlstate != _SYNTAX_ERROR:
        return _one_line("; ".join([message, *filter(None, more)]))
    words = _WORD.sub(" ", kind).lower()
    return f"{words} (SQLSTATE {sqlstate}); the server's log has its message, which may quote a row"


def _one_line(text: str) -> str:
    return " ".join(text.split())
