"""What a failed connection to NATS or a refused call means, and what to check."""

from __future__ import annotations

import base64
import binascii
import json
import ssl
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import nats.errors

from consumer_sdk.transport.options import (
    BadOption,
    TlsNotOffered,
    certificate_problem,
    client_certificate_problem,
    tls_error,
)
from consumer_sdk.transport.passwords import PasswordUnavailable

if TYPE_CHECKING:
    from consumer_sdk.transport.options import ConnectionOptions


def is_refused(error: Exception | None) -> bool:
    """Whether credentials or certificates are refused, so that waiting alone does not help.

    nats-py has an error class for only one of the refusals. For the others there is just the text
    of the server's -ERR line, because the protocol has no codes.
    """
    refusals = (nats.errors.AuthorizationError, TlsNotOffered, PasswordUnavailable, BadOption)
    if isinstance(error, refusals):
        return True
    failure = tls_error(error)
    if failure is not None:
        ended = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
        return not isinstance(failure, ended)
    text = str(error).lower()
    if "timeout" in text:
        return False
    return any(word in text for word in ("authorization", "authentication", "nkey"))


def explain_refusal(error: Exception, login: ConnectionOptions) -> str:
    """One line that says which part of a login is refused, by whom, and what to check."""
    if isinstance(error, (TlsNotOffered, PasswordUnavailable, BadOption)):
        return str(error)
    failure = tls_error(error)
    if isinstance(failure, ssl.SSLCertVerificationError):
        return (
            f"the certificate of NATS at {login.hosts} is refused: {certificate_problem(failure)}; "
            "check NATS_CA and the address"
        )
    if failure is not None:
        problem = client_certificate_problem(failure)
        if problem is not None:
            return (
                f"NATS at {login.hosts} refuses the client certificate: {problem}; "
                "check NATS_CERT and NATS_KEY"
            )
        hint = (
            "unset NATS_TLS_FIRST, if the server speaks first"
            if login.tls_first
            else "check NATS_CA"
        )
        reason = (failure.reason or one_line(failure)).lower().replace("_", " ")
        return f"TLS with NATS at {login.hosts} fails: {reason}; {hint}"
    said = one_line(error).strip("'")
    if login.creds:
        expiry = _creds_expiry(login)
        if expiry is not None and expiry <= time.time():
            ended = datetime.fromtimestamp(expiry, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            return (
                f"NATS at {login.hosts} refuses the credentials ({said}): the user in "
                f"{login.creds} has expired on {ended}; issue new ones there"
            )
        return (
            f"NATS at {login.hosts} refuses the credentials ({said}): the user in {login.creds} "
            "is revoked, or of an unknown account or an expired one; issue new ones there"
        )
    if login.nkey:
        return (
            f"NATS at {login.hosts} refuses the credentials ({said}): it does not know the nkey "
            f"in {login.nkey}; check NATS_NKEY"
        )
    return (
        f"NATS at {login.hosts} refuses the credentials ({said}); "
        "check NATS_BRIDGE_USER and NATS_BRIDGE_PASSWORD, NATS_CREDS or NATS_NKEY"
    )


def _creds_expiry(login: ConnectionOptions) -> float | None:
    """When the user JWT of the credentials file expires, in Unix seconds; None if never."""
    try:
        payload = login.read_creds()[0].split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return float(claims["exp"]) if claims.get("exp") else None
    except (BadOption, IndexError, AttributeError, binascii.Error, ValueError, TypeError):
        return None


def is_forbidden(error: Exception | None) -> bool:
    """Whether the account may not use a subject; only the text of the -ERR line shows this."""
    return "permissions violation" in str(error).lower()


def one_line(error: Exception | None) -> str:
    """The message of an error without nats-py's prefix, or its class if it has no message."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    text = " ".join((str(error) or type(error).__name__).split())
    return text.removeprefix("nats: ")
