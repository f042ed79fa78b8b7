"""A finding of the preflight: what is so, why it matters and the exact fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bridge.errors import BrokerError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable

Severity = Literal["ok", "warning", "problem"]
Side = Literal["postgres", "nats"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result; `fix` is SQL or a command, one statement a line, and empty when all is well.

    `blocks` marks a problem with which the bridge cannot stream at all; other problems break a
    part, such as the snapshot of one table.
    """

    severity: Severity
    side: Side
    code: str
    what: str
    why: str = ""
    fix: str = ""
    blocks: bool = False


def ok(side: Side, code: str, what: str) -> Finding:
    return Finding("ok", side, code, what)


def warning(side: Side, code: str, what: str, why: str, fix: str) -> Finding:
    return Finding("warning", side, code, what, why, fix)


def problem(
    side: Side, code: str, what: str, why: str, fix: str, *, blocks: bool = False
) -> Finding:
    return Finding("problem", side, code, what, why, fix, blocks)


def raise_if_blocked(findings: Iterable[Finding]) -> None:
    """Raise the first finding that keeps the bridge from streaming, as a one-line error."""
    for finding in findings:
        if finding.blocks:
            kind = SourceError if finding.side == "postgres" else BrokerError
            fix = " ".join(line.removeprefix("-- ") for line in finding.fix.splitlines())
            raise kind(f"{finding.what}; {fix}")
