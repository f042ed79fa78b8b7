"""Names on NATS: subjects, streams and buckets, and the three forms of table names.

A table is written as in SQL (`sales."Odd Table.1"`), as a pair (schema, table), or as a token of a
subject (`sales.Odd=20Table=2E1`).
"""

from __future__ import annotations

import hashlib
import re

from consumer_sdk.wire.errors import WireError
from consumer_sdk.wire.escaping import decode_unicode_identifier, sql_identifier

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")
_SAFE_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+\Z")
_SQL_PART = re.compile(r'\s*(?:([Uu]&)?"((?:[^"]|"")+)"|([^\W\d][\w$]*))\s*')
_PLAIN_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_$]*\Z")
# With encoding UTF-8, PostgreSQL changes only ASCII letters to lower case.
_FOLD = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
_EMPTY_NAME = "="
_PREFIX = re.compile(r"[A-Za-z0-9_-]+\Z")

LONGEST_TOKEN = 255
OPERATIONS = ("insert", "update", "delete", "truncate", "schema", "commit")


def escape_token(name: str) -> str:
    """Write every byte outside [A-Za-z0-9_-] as =XX; the empty name becomes a lone `=`."""
    if not name:
        return _EMPTY_NAME
    return _UNSAFE.sub(lambda m: b"=%02X" % m[0][0], name.encode()).decode("ascii")


def unescape_token(token: str) -> str:
    """Undo `escape_token`."""
    if token == _EMPTY_NAME:
        return ""
    if _SAFE_TOKEN.match(token) is None:
        raise WireError(f"not an escaped name: {token!r}")
    raw = _ESCAPE.sub(lambda m: bytes([int(m[1], 16)]), token.encode("ascii"))
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"not UTF-8 after unescaping: {token!r}") from error


def message_token(prefix: str) -> str:
    """The prefix of a logical message as a token; a long one becomes `==` and its sha256.

    PostgreSQL does not limit prefixes, but NATS limits subjects. No escaped name contains `==`.
    """
    token = escape_token(prefix)
    if len(token) > LONGEST_TOKEN:
        return f"=={hashlib.sha256(prefix.encode()).hexdigest()}"
    return token


def table_token(schema: str, table: str) -> str:
    """The table's part of a subject: one token in schema public, else two."""
    if schema == "public":
        return escape_token(table)
    return f"{escape_token(schema)}.{escape_token(table)}"


def parse_table_token(token: str) -> tuple[str, str]:
    """Undo `table_token`."""
    parts = token.split(".")
    if len(parts) == 1:
        return "public", unescape_token(parts[0])
    if len(parts) == 2:
        return unescape_token(parts[0]), unescape_token(parts[1])
    raise WireError(f"not a table token: {token!r}")


def parse_table_name(text: str) -> tuple[str, str]:
    """Parse a table name as in SQL: unquoted parts in lower case, default schema public."""
    parts: list[str] = []
    rest = 0
    while True:
        match = _SQL_PART.match(text, rest)
        if match is None or len(parts) == 2:
            raise WireError(
                f'not a table name: {text!r}; write it as in SQL: users, sales.orders, "Odd Table"'
            )
        is_escaped, quoted, plain = match.groups()
        name = plain.translate(_FOLD) if quoted is None else quoted.replace('""', '"')
        parts.append(decode_unicode_identifier(name) if is_escaped else name)
        rest = match.end()
        if rest == len(text):
            break
        if text[rest] != ".":
            raise WireError(
                f'not a table name: {text!r}; write it as in SQL: users, sales.orders, "Odd Table"'
            )
        rest += 1
    if len(parts) == 1:
        return "public", parts[0]
    return parts[0], parts[1]


def quote_identifier(name: str) -> str:
    """Quote a name for display if SQL requires it."""
    if _PLAIN_IDENTIFIER.match(name):
        return name
    return sql_identifier(name)


def format_table_name(schema: str, table: str) -> str:
    """The name of a table as in SQL, without the schema if it is public."""
    if schema == "public":
        return quote_identifier(table)
    return f"{quote_identifier(schema)}.{quote_identifier(table)}"


class Subjects:
    """All subjects, streams and buckets of one deployment, which share an optional prefix."""

    def __init__(self, prefix: str = "") -> None:
        if prefix and _PREFIX.match(prefix) is None:
            raise WireError(f"prefix {prefix!r} may hold only letters, digits, - and _")
        self.prefix = prefix
        dotted = f"{prefix}." if prefix else ""
        joined = f"{prefix}_" if prefix else ""
        self.cdc = f"{dotted}cdc"
        self.init = f"{dotted}init"
        self.snapshot = f"{dotted}snapshot"
        self.cdc_all = f"{self.cdc}.>"
        self.init_all = f"{self.init}.>"
        self.progress_all = f"{self.cdc}.$progress.>"
        self.message_all = f"{self.cdc}.$message.>"
        self.cdc_stream = f"{joined}CDC"
        self.init_stream = f"{joined}INIT"
        self.schemas_bucket = f"{joined}schemas"
        self.bridge_bucket = f"{joined}bridge"
        self.dicts_bucket = f"{joined}zstd_dicts"
        self.objects_bucket = f"{joined}cdc_objects"

    def change(self, token: str, operation: str) -> str:
        """Subject of a change, schema or commit message of a table; operation in lower case."""
        return f"{self.cdc}.{token}.{operation}"

    def table_filter(self, token: str) -> str:
        """Filter for everything about one table and nothing else."""
        return f"{self.cdc}.{token}.*"

    def progress(self, source: str) -> str:
        return f"{self.cdc}.$progress.{source}"

    def fence(self, source: str) -> str:
        return f"{self.cdc}.$fence.{source}"

    def message(self, prefix: str) -> str:
        """Subject of a logical message; the prefix is escaped here."""
        return f"{self.cdc}.$message.{message_token(prefix)}"

    def snapshot_request(self, token: str) -> str:
        return f"{self.snapshot}.request.{token}"

    def snapshot_progress(self, token: str, snapshot_id: str) -> str:
        return f"{self.snapshot}.progress.{token}.{snapshot_id}"

    def chunk(self, token: str, snapshot_id: str, number: int | str) -> str:
        """Subject of one chunk; `*` as the number gives the filter for all of them."""
        return f"{self.init}.snap.{token}.{snapshot_id}.{number}"

    def meta(self, token: str) -> str:
        return f"{self.init}.meta.{token}"

    def error(self, token: str) -> str:
        return f"{self.init}.error.{token}"

    def split_change(self, subject: str) -> tuple[str, str] | None:
        """Split `cdc.{table}.{operation}` into token and operation; None for other subjects."""
        head = self.cdc + "."
        if not subject.startswith(head):
            return None
        token, _, operation = subject[len(head) :].rpartition(".")
        if not token or token.startswith("$") or operation not in OPERATIONS:
            return None
        return token, operation
