"""`cdc verify`: compare a replica with its source, row by row."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from consumer_sdk.commands.options import (
    CREDENTIALS_ADVICE,
    add_shared_options,
    open_client,
    seconds,
)
from consumer_sdk.wire.escaping import printable, printable_json
from consumer_sdk.wire.subjects import format_table_name

if TYPE_CHECKING:
    import argparse

    from consumer_sdk.verify.verify import TableReport

SHOWN_KEYS = 20


def add_arguments(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "verify",
        description="Compare tables row by row at one position, while source and replica "
        "continue to change; if they differ, print the differing keys and exit with 1. TABLE is "
        "written as in SQL.",
    )
    parser.add_argument("tables", metavar="TABLE", nargs="+")
    parser.add_argument(
        "--source",
        metavar="DSN",
        required=True,
        help=f"the source; needs a role with REPLICATION; {CREDENTIALS_ADVICE}",
    )
    parser.add_argument(
        "--replica", metavar="URL", required=True, help="sqlite:///PATH or postgresql://…"
    )
    parser.add_argument(
        "--wait",
        metavar="TIME",
        type=seconds,
        default=60.0,
        help="how long to wait for open transactions and for the bridge, default 60",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_shared_options(parser)
    parser.set_defaults(run=run_verify)


async def run_verify(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from consumer_sdk.targets.target_url import split_url
    from consumer_sdk.verify.table_side import require_conninfo
    from consumer_sdk.verify.verify import verify

    def waiting(reason: str) -> None:
        print(f"cdc: {printable(reason)}", file=sys.stderr)

    require_conninfo(arguments.source)
    split_url(arguments.replica)
    async with open_client(arguments) as client:
        reports = await verify(
            client,
            arguments.tables,
            source=arguments.source,
            replica=arguments.replica,
            timeout=arguments.wait,
            on_wait=waiting,
        )
    if arguments.json:
        documents = [_document(report) for report in reports]
        lines = [printable_json(json.dumps(documents, ensure_ascii=False))]
    else:
        lines = [line for report in reports for line in _lines(report)]
    # The exit code must be right even if the reader closes the pipe early.
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
    return 0 if all(report.equal for report in reports) else 1


def _document(report: TableReport) -> dict[str, Any]:
    schema, table = report.table
    return {
        "schema": schema,
        "table": table,
        "equal": report.equal,
        "rows": report.rows,
        "changes_folded": report.changes_folded,
        "differences": report.differences,
        "missing": [json.loads(key) for key in report.missing],
        "extra": [json.loads(key) for key in report.extra],
        "different": [json.loads(key) for key in report.different],
    }


def _lines(report: TableReport) -> list[str]:
    table = printable(format_table_name(*report.table))
    folded = f"{report.changes_folded:,} changes folded in"
    if report.equal:
        return [f"{table}: equal, {report.rows:,} rows, {folded}"]
    lines = [f"{table}: {report.differences:,} of {report.rows:,} rows differ, {folded}"]
    for kind, keys in (
        ("missing", report.missing),
        ("extra", report.extra),
        ("different", report.different),
    ):
        lines += [f"  {kind} {printable(key)}" for key in keys[:SHOWN_KEYS]]
        if len(keys) > SHOWN_KEYS:
            lines.append(f"  {kind} … and more")
    return lines
