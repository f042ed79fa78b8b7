"""Findings with their fixes, and the report: text with the worst first, or JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from bridge.errors import BrokerError, SourceError
from consumer_sdk.transport.logfmt import mask_secrets
from consumer_sdk.wire.escaping import printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Severity = Literal["ok", "warning", "problem"]
Side = Literal["postgres", "nats"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result; `fix` is SQL or a command, one statement a line, and empty if all is well.

    With a problem that `blocks`, the bridge cannot stream at all; other problems affect a part,
    such as the snapshot of one table.
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
    """Raise the first finding that prevents streaming, as a one-line error."""
    for finding in findings:
        if finding.blocks:
            kind = SourceError if finding.side == "postgres" else BrokerError
            fix = " ".join(line.removeprefix("-- ") for line in finding.fix.splitlines())
            raise kind(f"{finding.what}; {fix}")


EXIT_OK = 0
EXIT_NOT_USABLE = 3

_ORDER = {"problem": 0, "warning": 1, "ok": 2}
_MARKS = {"problem": "PROBLEM", "warning": "warning", "ok": "ok"}
_COLOURS = {"problem": "\x1b[31m", "warning": "\x1b[33m", "ok": "\x1b[32m"}
_PLAIN = "\x1b[0m"


def exit_code(findings: Sequence[Finding]) -> int:
    """0 if the bridge can run safely, even with warnings; else 3."""
    has_problem = any(finding.severity == "problem" for finding in findings)
    return EXIT_NOT_USABLE if has_problem else EXIT_OK


def format_text(findings: Sequence[Finding], *, colour: bool = False, width: int = 100) -> str:
    """The report for people."""
    lines: list[str] = []
    for finding in sorted(findings, key=lambda one: _ORDER[one.severity]):
        mark = f"{_MARKS[finding.severity]:<8}"
        if colour:
            mark = f"{_COLOURS[finding.severity]}{mark}{_PLAIN}"
        side = "PostgreSQL" if finding.side == "postgres" else "NATS"
        lines.append(f"{mark} {side}: {_shown(finding.what)}  [{finding.code}]")
        if finding.why:
            lines += textwrap.wrap(
                _shown(finding.why),
                width,
                initial_indent="         why: ",
                subsequent_indent=" " * 14,
            )
        for number, line in enumerate(finding.fix.split("\n") if finding.fix else ()):
            lines.append(f"         {'fix:' if number == 0 else '    '} {_shown(line)}")
        if finding.severity != "ok":
            lines.append("")
    counts = {key: sum(one.severity == key for one in findings) for key in _ORDER}
    lines.append(
        f"{_count(counts['problem'], 'problem')}, {_count(counts['warning'], 'warning')}, "
        f"{counts['ok']} fine: "
        + ("the bridge can run" if exit_code(findings) == EXIT_OK else "repair the problems first")
    )
    return "\n".join(lines)


def _shown(text: str) -> str:
    return printable(mask_secrets(text))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_json(findings: Sequence[Finding]) -> str:
    """The report for programs."""
    document = {
        "ok": exit_code(findings) == EXIT_OK,
        "findings": [
            {
                name: mask_secrets(value) if isinstance(value, str) else value
                for name, value in asdict(finding).items()
            }
            for finding in findings
        ],
    }
    return printable_json(json.dumps(document, indent=2, ensure_ascii=False))
