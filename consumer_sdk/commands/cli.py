"""The command `cdc`."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from consumer_sdk.commands.options import Parser
from consumer_sdk.errors import CdcError
from consumer_sdk.launch.commands import INTERRUPTED, quiet_interrupts
from consumer_sdk.transport.version import ShowVersion

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

DESCRIPTION = "Read the change stream of a PostgreSQL database, and keep replicas of its tables."
EPILOG = """\
TABLE is written as in SQL: users, sales.orders, sales."Odd Table.1" (mind the shell's quotes).
NATS is found by --nats and --prefix, or by NATS_URL (or NATS_HOST, NATS_PORT, NATS_BRIDGE_USER,
NATS_BRIDGE_PASSWORD, NATS_PASSWORD_FILE or NATS_PASSWORD_COMMAND), NATS_CREDS, NATS_NKEY, NATS_CA,
NATS_CERT, NATS_KEY, NATS_TLS_FIRST and BRIDGE_PREFIX.
Exit codes: 0 fine, 1 the answer is no, 2 bad usage or settings, 3 NATS, bridge or target not
usable as configured, 4 data at risk.
"""
_COMMANDS = {
    "schema": ("schemas", "columns, key and version of a table"),
    "tables": ("schemas", "all published tables"),
    "tail": ("tail", "follow changes, one line each"),
    "snapshot": ("snapshot", "a whole table, consistent and verified"),
    "mirror": ("mirror", "keep a replica of tables"),
    "verify": ("verify", "compare a replica with its source"),
}
"""The module of this package that declares and runs each subcommand, and its help text."""
LONGEST_LINE = 1000


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The argument parser; only the modules of subcommands that are named are imported."""
    parser = Parser(
        prog="cdc",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, const="cdc")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    first = arguments[0] if arguments else ""
    named: list[str] = []
    if first in _COMMANDS:
        named = [first]
    elif not first.startswith(("-h", "--h")):
        named = [one for one in arguments if one in _COMMANDS]
    modules = dict.fromkeys(_COMMANDS[one][0] for one in named)
    for module in modules:
        import_module(f"consumer_sdk.commands.{module}").add_arguments(subparsers)
    for command, (module, summary) in _COMMANDS.items():
        if first not in _COMMANDS and module not in modules:
            subparsers.add_parser(command, help=summary)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; an error is one line on standard error."""
    follows = False
    try:
        parsed = build_parser(arguments).parse_args(arguments)
        # All commands need these, their help and wrong arguments do not.
        with quiet_interrupts():
            import asyncio
            import logging

            import consumer_sdk.client  # noqa: F401
        follows = parsed.command == "tail"
        signal.signal(signal.SIGTERM, _interrupt)
        # asyncio logs a warning for every TLS connection of nats-py.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        # psycopg logs errors that it also raises.
        logging.getLogger("psycopg").setLevel(logging.ERROR)
        code: int = asyncio.run(parsed.run(parsed))
        return code
    except CdcError as error:
        print(f"cdc: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # An interrupt is the normal end of `tail`.
        return 0 if follows else INTERRUPTED


def main() -> int:
    """Run the command given by the program's arguments and return its exit code."""
    return run(sys.argv[1:])


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _one_line(error: Exception) -> str:
    # --help needs neither of them.
    from consumer_sdk.transport.logfmt import mask_secrets
    from consumer_sdk.wire.escaping import printable

    # An error may quote a message of another program, of any length.
    line = mask_secrets(" ".join(str(error).split()))
    return printable(line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "…")
