"""Errors of PostgreSQL, recognised by SQLSTATE and sorted by what the operator must do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import psycopg

from bridge.errors import BridgeError, Retryable, SourceError
from consumer_sdk.wire.server_messages import without_values

if TYPE_CHECKING:
    from collections.abc import Iterator

DriverError = psycopg.Error
"""The exceptions that a call of the driver may raise."""

INVALID_AUTHORIZATION: Final = "28000"
INVALID_PASSWORD: Final = "28P01"  # noqa: S105
UNDEFINED_DATABASE: Final = "3D000"
INSUFFICIENT_PRIVILEGE: Final = "42501"
UNDEFINED_OBJECT: Final = "42704"
FEATURE_NOT_SUPPORTED: Final = "0A000"
CONFIGURATION_LIMIT_EXCEEDED: Final = "53400"
OBJECT_NOT_IN_PREREQUISITE_STATE: Final = "55000"
OBJECT_IN_USE: Final = "55006"
TLS_REFUSED: Final = "tls"
"""Not an SQLSTATE: libpq itself refused the connection."""

_REMEDIES = {
    INVALID_AUTHORIZATION: "check user, database and pg_hba.conf",
    INVALID_PASSWORD: "check POSTGRES_BRIDGE_PASSWORD, its file or command, or DATABASE_URL",
    UNDEFINED_DATABASE: "create the database or correct PG_DB / DATABASE_URL",
    INSUFFICIENT_PRIVILEGE: "grant the role what it lacks; "
    "`bridge check --fix-sql` prints the statements",
    FEATURE_NOT_SUPPORTED: "see the server's message",
    TLS_REFUSED: "check PGSSLMODE, PGSSLROOTCERT, PGSSLCERT and PGSSLKEY, or DATABASE_URL",
}

# libpq has no SQLSTATE for a refused connection, only PQerrorMessage. For a message in another
# language, `refusal_code` finds it out.
_REFUSED_CONNECTIONS = (
    # Also `PAM authentication failed`, with which RDS refuses a token.
    (("authentication failed",), INVALID_PASSWORD),
    (("no password supplied",), INVALID_PASSWORD),
    (("no pg_hba.conf entry",), INVALID_AUTHORIZATION),
    (("is not permitted to log in",), INVALID_AUTHORIZATION),
    (("role", "does not exist"), INVALID_AUTHORIZATION),
    (("database", "does not exist"), UNDEFINED_DATABASE),
    (("must be superuser or replication role",), INSUFFICIENT_PRIVILEGE),
    (("permission denied",), INSUFFICIENT_PRIVILEGE),
    (("server does not support SSL",), TLS_REFUSED),
    (("invalid sslmode value",), TLS_REFUSED),
    (("certificate",), TLS_REFUSED),
    (("SSL error", "alert"), TLS_REFUSED),
    (("channel binding",), TLS_REFUSED),
)


def server_message(sqlstate: str, *lines: str | None) -> str:
    """Message, detail and hint of a server in one line, without values of rows."""
    try:
        kind = psycopg.errors.lookup(sqlstate).__name__
    except KeyError:
        kind = "error"
    message, *more = lines
    return without_values(kind, sqlstate, message, *more, text=message or "")


class ReplicationRefused(Exception):
    """The server answered a replication command with an error."""

    def __init__(self, doing: str, sqlstate: str, message: str) -> None:
        super().__init__(f"{doing}: {message}")
        self.sqlstate = sqlstate
        self.message = message


def one_line(error: Exception) -> str:
    """The text of an error without line breaks and without values of rows.

    Afterwards a traceback shows no more than that either.
    """
    # Errors that did not come from a server have no such message; their text is ours.
    if isinstance(error, psycopg.Error) and error.sqlstate and error.diag.message_primary:
        diag = error.diag
        lines = (diag.message_primary, diag.message_detail, diag.message_hint)
        error.args = (server_message(error.sqlstate, *lines),)
    return " ".join(str(error).split())


def sqlstate_of(error: DriverError) -> str:
    """The SQLSTATE of an error, derived from the text for a refused connection; '' if unknown."""
    if error.sqlstate:
        return error.sqlstate
    if error.pgconn is not None and error.pgconn.needs_password:
        return INVALID_PASSWORD
    text = " ".join(str(error).split())
    states = [state for words, state in _REFUSED_CONNECTIONS if all(word in text for word in words)]
    return states[-1] if states else ""


def explain(error: DriverError, doing: str) -> SourceError | Retryable:
    """Convert a driver error to SourceError with a remedy, or to Retryable."""
    text = one_line(error)
    remedy = _REMEDIES.get(sqlstate_of(error))
    if remedy is not None:
        return SourceError(f"{doing}: {text}; {remedy}")
    return Retryable(f"{doing}: {text}")


def connection_lost(error: DriverError) -> Retryable:
    """A replication connection that broke."""
    return Retryable(f"replication connection lost: {one_line(error)}")


class StatementFailed(BridgeError):
    """PostgreSQL refused a statement; the message is PostgreSQL's, without values of rows."""


class LockTimeout(StatementFailed):
    """Another session holds a lock longer than this session may wait."""


class ValueRefused(StatementFailed):
    """PostgreSQL does not read a value as one of its type."""


def primary_message(error: psycopg.Error) -> str:
    """PostgreSQL's message without its details and without values of rows."""
    if error.sqlstate and error.diag.message_primary:
        error.args = (server_message(error.sqlstate, error.diag.message_primary),)
    return str(error).partition("\n")[0] or type(error).__name__


@contextmanager
def statement_errors() -> Iterator[None]:
    """Convert driver errors in the body to StatementFailed, LockTimeout or ValueRefused."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise LockTimeout(primary_message(error)) from error
    except psycopg.DataError as error:
        raise ValueRefused(primary_message(error)) from error
    except psycopg.Error as error:
        raise StatementFailed(primary_message(error)) from error
